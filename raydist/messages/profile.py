"""What a rank notes in the trace of its profile. (either side)"""

from __future__ import annotations

from typing import NamedTuple

ARMED = "profile-from-start"
"""The name of the profile of watch.profile."""
MARKS = "raydist"
"""The key of the Marks in a trace."""


class Marks(NamedTuple):
    """The steps of a profile, on the clock of the rank's node."""

    pid: int
    first: int
    """The number of the first step; 0: the profile has no steps."""
    began_ns: int
    """When the first step began, in nanoseconds since the epoch."""
    ends_ns: list[int]
    """When each step ended; without steps, when the profile ended."""
