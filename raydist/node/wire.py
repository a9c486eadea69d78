"""What rank, fork server and seat agree on: the heartbeat page and the size of a packet. (either side)

Kept apart and small, because every seat is a Ray worker of its own and pays for each import.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

PACKET = 1 << 17
"""Largest message to a fork server in bytes: below Linux's default socket buffer of 208 KiB."""

HERE = "<the folder of the rank's seat>"
"""In a variable of a rank: where its seat keeps the rank's files; each node has a place of its own for them."""

PHASES = ("start", "data", "forward", "backward", "collective", "evaluate", "save", "end")
"""What a rank can be doing, as its heartbeat tells it: the index of one of these words."""

BEAT = struct.Struct("<qqd")
"""The heartbeat page: step, index in PHASES, seconds since the epoch."""


def read_beat(page: mmap.mmap) -> tuple[int, str, float]:
    """(step, phase, seconds since the epoch) that the rank last noted; (0, "", 0.0) before its first."""
    step, phase, at = BEAT.unpack_from(page, 0)
    return step, PHASES[phase] if at else "", at
