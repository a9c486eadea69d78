"""Each rank's own work in a step -> the ranks that slow the others, step after step. (pure)"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.shared.outcome import Slow
from raydist.shared.rank_names import rank_ranges

CHECK_S = 5.0
"""Seconds between two checks."""
LEARN = 24
"""Steps that a rank must have timed before it is compared."""
LASTING = 3
"""Checks in a row after which a slow rank is reported. In one of them at least, all steps of the median are new."""
LEAST_S = 0.001
"""Seconds of a step below which a difference is not reported, whatever its share."""

Own = tuple[int, float, float]
"""(steps timed, seconds of own work in one, seconds of one), as worker.heartbeat.read_compute_time returns it."""


@dataclass
class Stragglers:
    """The work times of all ranks of an attempt, and the ranks that were reported."""

    hosts: Sequence[str]
    """By rank."""
    percent: float
    """Share of a step beyond which a rank is slow, in percent; 0: none is."""
    times: dict[int, Own] = field(default_factory=dict)
    strikes: dict[int, int] = field(default_factory=dict)
    """Checks in a row in which a rank was slow."""
    named: frozenset[int] = frozenset()
    _due: float = 0.0
    _seen: dict[int, int] = field(default_factory=dict)

    def note(self, rank: int, own: Own, now: float) -> list[Slow]:
        """Take in a rank's times, at `now` seconds of any clock; return the stragglers if there is a new one."""
        if own[0]:
            self.times[rank] = own
        if now < self._due or not self.percent:
            return []
        self._due = now + CHECK_S
        return self._compare()

    def _compare(self) -> list[Slow]:
        """Compare all ranks, once each has timed new steps."""
        steps = {rank: own[0] for rank, own in self.times.items()}
        new = all(count >= max(LEARN, self._seen.get(rank, 0) + 1) for rank, count in steps.items())
        if len(steps) < len(self.hosts) or len(steps) < 2 or not new:
            return []
        self._seen = steps
        slow = {each.rank: each for each in slower(self.times, self.hosts, self.percent)}
        self.strikes = {rank: self.strikes.get(rank, 0) + 1 for rank in slow}
        lasting = frozenset(rank for rank, count in self.strikes.items() if count >= LASTING)
        if lasting <= self.named:
            return []
        self.named |= lasting
        return [slow[rank] for rank in sorted(lasting)]


def slower(times: Mapping[int, Own], hosts: Sequence[str], percent: float) -> list[Slow]:
    """The ranks whose own work exceeds the median of the others by `percent` of a step, by rank."""
    found = []
    ordered = sorted(own for _, own, _ in times.values())
    for rank, (_, own, step) in sorted(times.items()):
        one = Slow(rank, hosts[rank], own, median_without(ordered, own), step)
        if one.own - one.others >= LEAST_S and one.share * 100 >= percent:
            found.append(one)
    return found


def median_without(ordered: Sequence[float], one: float) -> float:
    """The median of these sorted values without one of them."""
    at, left = bisect_left(ordered, one), len(ordered) - 1
    low, high = (index + (index >= at) for index in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2


def straggler_text(slow: Sequence[Slow]) -> str:
    """One line: `rank 3 on node-7 slows the others: its own work takes 62 ms of a step, the median …`."""
    worst = max(slow, key=lambda each: each.share)
    hosts = list(dict.fromkeys(each.host for each in slow))
    who = f"rank{'' if len(slow) == 1 else 's'} {rank_ranges(each.rank for each in slow)} on {', '.join(hosts[:4])}"
    who += f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
    slows, its = ("slows", "its") if len(slow) == 1 else ("slow", "their")
    return (
        f"{who} {slows} the others: {its} own work takes {worst.own * 1e3:.3g} ms of a step, the median of the others "
        f"{worst.others * 1e3:.3g} ms; at their pace a step would take {worst.share:.0%} less"
    )


def as_event(slow: Sequence[Slow]) -> dict[str, Any]:
    """The facts of the event `slow`."""
    ranks = [
        {"rank": each.rank, "host": each.host, "own_s": each.own, "others_s": each.others, "step_s": each.step,
         "share": each.share}
        for each in slow
    ]  # fmt: skip
    return {"text": straggler_text(slow), "ranks": ranks}
