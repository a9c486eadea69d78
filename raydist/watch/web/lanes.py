"""Events `pace` -> a lane per rank over time: its own work as a share of each step. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COLUMNS = 240
"""Maximum number of columns of a lane: at twice as many, two become one."""
LANES = 64
"""Maximum number of lanes in a page: those of the ranks with the most own work."""

UNKNOWN = -1
"""In a column: nothing is known about this rank."""


@dataclass
class Lanes:
    """What was reported about all ranks, in columns of time."""

    times: list[float] = field(default_factory=list)
    """The time of each column, in seconds since the epoch."""
    shares: dict[int, list[int]] = field(default_factory=dict)
    """By rank, its own work as a percentage of the step in each column."""

    def add(self, t: float, ranks: Mapping[str, Sequence[float]]) -> None:
        """Add one event."""
        for rank in map(int, ranks):
            self.shares.setdefault(rank, [UNKNOWN] * len(self.times))
        self.times.append(t)
        for rank, lane in self.shares.items():
            _, own, whole = ranks.get(str(rank), (0, 0.0, 0.0))
            lane.append(min(100, round(100 * own / whole)) if whole else UNKNOWN)
        if len(self.times) >= 2 * COLUMNS:
            self.times = self.times[::2]
            self.shares = {rank: pairs(lane) for rank, lane in self.shares.items()}


def pairs(lane: Sequence[int]) -> list[int]:
    """Return half as many columns, each with the greater of two values."""
    return [max(two) for two in zip(lane[::2], [*lane[1::2], UNKNOWN], strict=False)]
