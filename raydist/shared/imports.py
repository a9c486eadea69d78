"""Imports without garbage collection. (either side)"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

from raydist.shared.ending import flush_files


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off in this block, and freeze the objects that exist at its end.

    Frozen objects are never collected. For imports in a process of raydist. Nearly all objects that
    an import makes stay; Python would scan all of them repeatedly, which takes a seventh of the
    time of `import torch`.
    """
    atexit.unregister(flush_files)
    # The teardown does not reach the files of modules that are never collected.
    atexit.register(flush_files)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
