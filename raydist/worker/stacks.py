"""What a hung rank reports: Python's stacks by a signal, its last collectives from a thread. (rank side)"""

from __future__ import annotations

import faulthandler
import sys
from typing import TextIO

from raydist.worker.heartbeat import STACKS_SIGNAL
from raydist.worker.protocol import Collective
from raydist.worker.torch_private import flight_recorder

LAST = 8
"""Most collectives of each backend in a report."""

_stack_files: list[TextIO] = []


def answer_signal(path: str) -> None:
    """Register a handler of STACKS_SIGNAL that appends the stacks of all threads to a file.

    The handler is C code, so it also runs inside a collective. An exec removes it.
    """
    _stack_files.append(open(path, "a"))  # noqa: SIM115 - as long as the process
    faulthandler.register(STACKS_SIGNAL, file=_stack_files[-1], all_threads=True)


def collectives() -> tuple[list[Collective], str]:
    """The last collectives of this rank, the oldest first; and why those of its backend are missing, else empty."""
    if "torch.distributed" not in sys.modules:
        return [], ""
    import torch
    import torch.distributed as dist

    used = dist.get_backend() if dist.is_available() and dist.is_initialized() else ""
    last: list[Collective] = []
    gap = ""
    for backend in ("gloo", "nccl"):
        entries = flight_recorder(backend)
        if entries is None and backend in used:
            gap = (
                f"torch {torch.__version__} keeps no record of {backend}'s collectives: a hang report names the ranks "
                "that wait, but not the collective, and ranks that wait in different collectives are ended only by "
                "hang.limit_s; use torch 2.8 or newer"
            )
        last += (entries or [])[-LAST:]
    return last, gap
