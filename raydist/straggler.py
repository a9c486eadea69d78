"""Each rank's own work in a step -> who holds up all others, step after step. (pure)"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.blame import compact

LOOK_S = 5.0
"""Seconds between two looks."""
LEARN = 24
"""Steps of which a rank must have told before it is compared."""
LASTING = 3
"""Looks in a row after which a rank is slow for good. One look at least finds all steps of its median to be new."""
LEAST_S = 0.001
"""Seconds of a step that are worth a word, whatever their share."""

Own = tuple[int, float, float]
"""(steps timed, seconds of own work in one, seconds of one), as node.wire.read_own tells it."""


@dataclass(frozen=True)
class Slow:
    """A rank whose own work takes longer than the others'. All in seconds of one step."""

    rank: int
    host: str
    own: float
    others: float
    """The median of all others."""
    step: float

    @property
    def share(self) -> float:
        """The part of each step that the others wait for it."""
        return (self.own - self.others) / self.step if self.step > 0 else 0.0


@dataclass
class Stragglers:
    """What is known of all ranks of an attempt, and who was named."""

    hosts: Sequence[str]
    """By rank."""
    percent: float
    """Of a step, beyond which a rank counts as slow; 0: nobody does."""
    told: dict[int, Own] = field(default_factory=dict)
    strikes: dict[int, int] = field(default_factory=dict)
    """Looks in a row in which a rank was slow."""
    named: frozenset[int] = frozenset()
    _due: float = 0.0
    _seen: dict[int, int] = field(default_factory=dict)

    def note(self, rank: int, own: Own, now: float) -> list[Slow]:
        """Take in what a rank tells, at `now` seconds of any clock; those who hold up the others, if that is new."""
        if own[0]:
            self.told[rank] = own
        if now < self._due or not self.percent:
            return []
        self._due = now + LOOK_S
        return self._look()

    def _look(self) -> list[Slow]:
        """One look at all, once each has told of steps that are new."""
        steps = {rank: own[0] for rank, own in self.told.items()}
        new = all(count >= max(LEARN, self._seen.get(rank, 0) + 1) for rank, count in steps.items())
        if len(steps) < len(self.hosts) or len(steps) < 2 or not new:
            return []
        self._seen = steps
        slow = {each.rank: each for each in slower(self.told, self.hosts, self.percent)}
        self.strikes = {rank: self.strikes.get(rank, 0) + 1 for rank in slow}
        lasting = frozenset(rank for rank, count in self.strikes.items() if count >= LASTING)
        if lasting <= self.named:
            return []
        self.named |= lasting
        return [slow[rank] for rank in sorted(lasting)]


def slower(told: Mapping[int, Own], hosts: Sequence[str], percent: float) -> list[Slow]:
    """Those whose own work takes `percent` of a step longer than the median of the others, by rank."""
    found = []
    ordered = sorted(own for _, own, _ in told.values())
    for rank, (_, own, step) in sorted(told.items()):
        one = Slow(rank, hosts[rank], own, median_without(ordered, own), step)
        if one.own - one.others >= LEAST_S and one.share * 100 >= percent:
            found.append(one)
    return found


def median_without(ordered: Sequence[float], one: float) -> float:
    """The median of all but one of these, which are in order."""
    at, left = bisect_left(ordered, one), len(ordered) - 1
    low, high = (index + (index >= at) for index in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2


def text(slow: Sequence[Slow]) -> str:
    """One line: `rank 3 on node-7 holds up the others: its own work takes 62 ms of a step, theirs 50 ms (15%)`."""
    worst = max(slow, key=lambda each: each.share)
    hosts = list(dict.fromkeys(each.host for each in slow))
    who = f"rank{'' if len(slow) == 1 else 's'} {compact(each.rank for each in slow)} on {', '.join(hosts[:4])}"
    who += f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
    holds, its = ("holds", "its") if len(slow) == 1 else ("hold", "their")
    return (
        f"{who} {holds} up the others: {its} own work takes {worst.own * 1e3:.3g} ms of a step, the others' "
        f"{worst.others * 1e3:.3g} ms; without that a step would take {worst.share:.0%} less"
    )


def as_event(slow: Sequence[Slow]) -> dict[str, Any]:
    """The facts of the event `slow`."""
    ranks = [
        {"rank": each.rank, "host": each.host, "own_s": each.own, "others_s": each.others, "step_s": each.step,
         "share": each.share}
        for each in slow
    ]  # fmt: skip
    return {"text": text(slow), "ranks": ranks}
