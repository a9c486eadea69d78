"""What a hung rank reports: the stacks of its threads, and its last collectives. (rank side)"""

from __future__ import annotations

import faulthandler
import gc
import sys
import threading
import traceback
from types import FrameType
from typing import TextIO

from raydist.messages.rank import Collective
from raydist.worker.heartbeat import STACKS_SIGNAL
from raydist.worker.torch_private import flight_recorder

LAST = 8
"""Limit on the collectives of each backend in a report."""

_stack_files: list[TextIO] = []


def of_all_threads() -> str:
    """Return the stacks of all Python threads in faulthandler's format.

    The main thread comes last, as the current one. faulthandler's own signal handler is not used:
    it does not wait for the GIL, and crashes the process if another thread runs Python code
    meanwhile (github.com/python/cpython/issues/116008).
    """
    frames, main = _current_frames(), threading.main_thread().ident
    numbers = sorted(frames, key=lambda number: number == main)
    return "\n\n".join(_stack(number, frames[number], number == main) for number in numbers) + "\n"


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    Up to Python 3.11 the interpreter may collect garbage meanwhile, while it holds its lock of all
    threads. A finalizer that waits, as that of a socket does, then lets a thread run that starts
    another one, and both wait for each other for ever (github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _stack(thread: int, innermost: FrameType, current: bool) -> str:
    title = f"{'Current thread' if current else 'Thread'} 0x{thread:016x} (most recent call first):"
    walk = traceback.walk_stack(innermost)
    return "\n".join(
        [
            title,
            *(
                f'  File "{f.f_code.co_filename}", line {line} in {f.f_code.co_name}'
                for f, line in walk
            ),
        ]
    )


def answer_signal(path: str) -> None:
    """Register a handler of STACKS_SIGNAL that appends the stack of the main thread to a file.

    The handler is C code, so it also runs while native code keeps the GIL and `of_all_threads`
    can't be called. An exec removes it.
    """
    _stack_files.append(open(path, "a"))  # noqa: SIM115 - as long as the process
    faulthandler.register(STACKS_SIGNAL, file=_stack_files[-1], all_threads=False)


def collectives(since_ns: int = 0) -> tuple[list[Collective], str]:
    """Return the last collectives of this rank, oldest first, and why some are missing.

    `since_ns`: leave out those before this time, in nanoseconds since the epoch. The reason is
    that the backend's collectives are not recorded; it is empty otherwise.
    """
    if "torch.distributed" not in sys.modules:
        return [], ""
    import torch
    import torch.distributed as dist

    used = dist.get_backend() if dist.is_available() and dist.is_initialized() else ""
    last: list[Collective] = []
    gap = ""
    for backend in ("gloo", "nccl"):
        entries = flight_recorder(backend, since_ns)
        if entries is None and backend in used:
            gap = (
                f"torch {torch.__version__} keeps no record of {backend}'s collectives: a hang "
                "report names the ranks "
                "that wait, but not the collective, and ranks that wait in different collectives "
                "are ended only by "
                "hang.limit_s; use torch 2.8 or newer"
            )
        last += (entries or [])[-LAST:]
    return last, gap
