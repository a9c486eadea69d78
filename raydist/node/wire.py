"""What rank, fork server and seat agree on: heartbeat, first page of a snapshot memory, size of a packet. (either side)

Kept apart and small, because every seat is a Ray worker of its own and pays for each import.
"""

from __future__ import annotations

import signal
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable

PACKET = 1 << 17
"""Largest message to a fork server in bytes: below Linux's default socket buffer of 208 KiB."""

HERE = "<the folder of the rank's seat>"
"""In a variable of a rank: where its seat keeps the rank's files; each node has a place of its own for them."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Bytes from which glibc takes a block of its own from the kernel, and above which it gives the heap's end back: the
values where its own adaptation stops (mallopt(3)). Where that stops earlier, by chance, each step gives back what the
next asks for: up to 1900 page faults a step instead of 65, a tenth of the speed of a small CNN (bench/README.md)."""

PHASES = ("start", "data", "forward", "backward", "collective", "evaluate", "save", "end")
"""What a rank can be doing, as its heartbeat tells it: the index of one of these words."""

ASK, GOING = b"?", b"!"
"""What a seat says to its rank: tell your last collectives; your node is about to be taken away."""

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 5
"""Asks a rank for its stacks: one of the real-time signals, which programs leave alone (SIGUSR1 and 2 they do not)."""

BEAT = struct.Struct("<qqd")
"""The heartbeat page: step, index in PHASES, seconds since the epoch."""

OWN = struct.Struct("<qdd")
"""Behind it: steps that were timed, seconds of the rank's own work in one of them, seconds of one."""
BEAT_PAGE = BEAT.size + OWN.size
"""Bytes of both."""


def read_own(page: mmap.mmap) -> tuple[int, float, float]:
    """(steps timed, seconds of own work in one, seconds of one) as the rank last told; no steps where it told none."""
    steps, own, whole = OWN.unpack_from(page, BEAT.size)
    return steps, own, whole


def read_beat(page: mmap.mmap) -> tuple[int, str, float]:
    """(step, phase, seconds since the epoch) that the rank last noted; (0, "", 0.0) before its first."""
    step, phase, at = BEAT.unpack_from(page, 0)
    return step, PHASES[phase] if at else "", at


PAGE = 4096
"""Bytes of the first page of a rank's snapshot memory; slots begin at multiples of it."""
SLOTS = 3
"""Two for states that take turns, one for when another is on its way to the disk."""
ABOUT = SLOTS
"""The slot with what is the same for all states of an attempt."""
BESIDE = SLOTS + 1
"""The slot with what belongs into a checkpoint beside the state that is on its way to the disk."""
GUESTS = (BESIDE + 1, BESIDE + 2)
"""The slots for copies of what a rank of another node keeps; they take turns too."""
ASKED = GUESTS[-1] + 1
"""The slot for a checkpoint that a job asked for itself, on its way to the disk."""
LOCK = struct.Struct("<q")
"""First on the page: the slot that is on its way to the disk, or -1."""
SLOT = struct.Struct("<qqqqqq")
"""Then per slot: step (-1: not complete), where it begins, its bytes, those used by tensors, those used by their
description, and whether the state is a whole one (1) or only what is a rank's own (0)."""
STEP = struct.Struct("<q")


def at_slot(slot: int) -> int:
    """Where on the page a slot is described."""
    return LOCK.size + slot * SLOT.size


def blank_page() -> bytes:
    """The first page of a memory that holds nothing yet."""
    page = bytearray(PAGE)
    LOCK.pack_into(page, 0, -1)
    for slot in range(ASKED + 1):
        STEP.pack_into(page, at_slot(slot), -1)
    return bytes(page)


def complete_slots(page: bytes | mmap.mmap, slots: Iterable[int] = range(SLOTS)) -> dict[int, int]:
    """The slot of each step that is complete."""
    steps = {STEP.unpack_from(page, at_slot(slot))[0]: slot for slot in slots}
    return {step: slot for step, slot in steps.items() if step >= 0}


def whole_slots(page: bytes | mmap.mmap) -> dict[int, int]:
    """Those with a whole state, not only what is a rank's own."""
    complete = complete_slots(page).items()
    return {step: slot for step, slot in complete if SLOT.unpack_from(page, at_slot(slot))[-1]}
