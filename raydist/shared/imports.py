"""Imports without garbage collection. (either side)"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

from raydist.shared.ending import flush_files


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """In this block nothing is collected, and what there is at its end never will be: for imports
    in a process of ours.

    Nearly all objects that an import makes stay. Python would look through all of them again and
    again, for a seventh of the time of `import torch`.
    """
    atexit.unregister(flush_files)
    atexit.register(
        flush_files
    )  # the tear-down does not reach the files of modules that are never collected
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
