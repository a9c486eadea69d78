"""Events `pace` -> a lane per rank over time: its own work as a share of each step. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COLUMNS = 240
"""Half the maximum number of columns of a lane: beyond it, two become one."""
LANES = 64
"""Maximum number of lanes in a page: those of the ranks with the most own work."""

UNKNOWN = -1
"""In a column: nothing is known about this rank."""


@dataclass
class Lanes:
    """What was reported about all ranks, in columns of time.

    All columns but the last, which is not full yet, stand for equally many events.
    """

    times: list[float] = field(default_factory=list)
    """The time of the first event of each column, in seconds since the epoch."""
    shares: dict[int, list[int]] = field(default_factory=dict)
    """By rank, the greatest of its own work in each column, as a percentage of the step."""
    every: int = 1
    """Number of events of a column."""
    _in_last: int = 0
    """Number of events in the newest column so far."""

    def add(self, t: float, ranks: Mapping[str, Sequence[float]]) -> None:
        """Add one event."""
        if not self.times or self._in_last == self.every:
            self._begin_column(t)
        self._in_last += 1
        for rank, (_, own, whole) in ranks.items():
            lane = self.shares.setdefault(int(rank), [UNKNOWN] * len(self.times))
            if whole:
                lane[-1] = max(lane[-1], min(100, round(100 * own / whole)))

    def _begin_column(self, t: float) -> None:
        if len(self.times) == 2 * COLUMNS:
            self.times = self.times[::2]
            self.shares = {rank: pairs(lane) for rank, lane in self.shares.items()}
            self.every *= 2
        self.times.append(t)
        for lane in self.shares.values():
            lane.append(UNKNOWN)
        self._in_last = 0


def pairs(lane: Sequence[int]) -> list[int]:
    """Return half as many columns, each with the greater of two values."""
    return [max(two) for two in zip(lane[::2], lane[1::2], strict=True)]
