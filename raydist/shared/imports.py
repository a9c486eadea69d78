"""Imports without garbage collection. (either side)"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """In this block nothing is collected, and what there is at its end never will be: for imports in a process of ours.

    Nearly all objects that an import makes stay. Python would look through all of them again and again, for a seventh
    of the time of `import torch`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
