"""The heartbeat page and the signal that a rank and its agent share. (either side)"""

from __future__ import annotations

import os
import signal
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "collective",
    "evaluate",
    "save",
    "end",
    "finalize",
    "debugger",
)
"""The activities of a rank; its heartbeat holds the index of one of them. `end`: of a step;
`finalize`: the program has ended, and the rank leaves MPI."""

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 5
"""Requests the stacks of a rank: a real-time signal, because programs use SIGUSR1 and SIGUSR2
themselves."""

BEAT_PAGE = 56
"""Bytes of the heartbeat page: step, index in PHASES (64-bit integers), seconds since the epoch
(double); then the number of steps that were timed (integer), compute seconds of one step,
seconds of one step (doubles); then the fraction of the rank's time that Python's garbage
collector takes (double). Each is written by one store of the processor: struct.pack_into sets
all bytes to 0 first, which a reader could see."""


def write_beat(page: mmap.mmap, step: int, phase: int, at: float) -> None:
    """Write the heartbeat."""
    view = memoryview(page)
    integers, doubles = view.cast("q"), view.cast("d")
    integers[0] = step
    integers[1] = phase
    doubles[2] = at


def write_compute_time(page: mmap.mmap, steps: int, compute_s: float, step_s: float) -> None:
    """Write the compute time and the whole time of one step next to the heartbeat."""
    view = memoryview(page)
    doubles = view.cast("d")
    doubles[4] = compute_s
    doubles[5] = step_s
    view.cast("q")[3] = steps


def read_compute_time(page: mmap.mmap) -> tuple[int, float, float]:
    """Return (steps timed, compute seconds of one step, seconds of one step).

    All are 0 before the first note.
    """
    view = memoryview(page)
    doubles = view.cast("d")
    return view.cast("q")[3], doubles[4], doubles[5]


def write_pauses(page: mmap.mmap, share: float) -> None:
    """Write the fraction of time in which the garbage collector pauses the rank."""
    memoryview(page).cast("d")[6] = share


def read_pauses(page: mmap.mmap) -> float:
    """Return the fraction of time in pauses; 0 before the first note."""
    return memoryview(page).cast("d")[6]


def read_beat(page: mmap.mmap) -> tuple[int, str, float]:
    """Return (step, phase, seconds since the epoch) of the last heartbeat.

    (0, "", 0.0) before the first.
    """
    view = memoryview(page)
    integers, at = view.cast("q"), view.cast("d")[2]
    return integers[0], PHASES[integers[1]] if at else "", at


def heartbeat_page() -> int:
    """Return the descriptor of a page for a rank's heartbeat.

    It is in memory: on a full disk a store would raise SIGBUS.
    """
    if hasattr(os, "memfd_create"):
        page = os.memfd_create("raydist-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            page = os.dup(file.fileno())
    os.ftruncate(page, BEAT_PAGE)
    return page
