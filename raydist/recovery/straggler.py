"""Each rank's own work in a step, and its pauses -> the ranks that slow down the others. (pure)"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raydist.shared import kinds
from raydist.shared.outcome import Slow
from raydist.shared.rank_names import rank_ranges

CHECK_S = 5.0
"""Seconds between two checks."""
LEARN = 24
"""Steps that a rank must have timed before it is compared."""
LASTING = 3
"""Consecutive checks after which a slow rank is reported. In at least one of them all steps of the
median are new."""
LEAST_S = 0.001
"""Seconds of a step below which a difference is not reported, whatever its share."""

PAUSES = 0.05
"""Share of a rank's time in its garbage collector beyond which it is reported."""

Own = tuple[int, float, float]
"""(timed steps, seconds of own work in a step, seconds of a step), as
worker.heartbeat.read_compute_time returns it."""


@dataclass
class Stragglers:
    """The work times of all ranks of an attempt, and the ranks that were reported."""

    hosts: Sequence[str]
    """By rank."""
    percent: float
    """Share of a step beyond which a rank is slow, in percent; 0: none is."""
    times: dict[int, Own] = field(default_factory=dict)
    strikes: dict[int, int] = field(default_factory=dict)
    """Consecutive checks in which a rank was slow."""
    fine: dict[int, int] = field(default_factory=dict)
    """Consecutive checks in which a rank that was reported was not slow."""
    reported: dict[int, Slow] = field(default_factory=dict)
    _due: float = 0.0
    _compared_steps: dict[int, int] = field(default_factory=dict)

    def note(self, rank: int, own: Own, now: float) -> list[Slow]:
        """Record a rank's times, and return the stragglers if one is new.

        `now`: seconds of any clock.
        """
        if own[0]:
            self.times[rank] = own
        if now < self._due or not self.percent:
            return []
        self._due = now + CHECK_S
        return self._compare()

    def _compare(self) -> list[Slow]:
        """Compare all ranks, once each has timed new steps."""
        steps = {rank: own[0] for rank, own in self.times.items()}
        new = all(
            count >= max(LEARN, self._compared_steps.get(rank, 0) + 1)
            for rank, count in steps.items()
        )
        if len(steps) < len(self.hosts) or len(steps) < 2 or not new:
            return []
        self._compared_steps = steps
        slow = {each.rank: each for each in slower(self.times, self.hosts, self.percent)}
        self.strikes = {rank: self.strikes.get(rank, 0) + 1 for rank in slow}
        lasting = frozenset(rank for rank, count in self.strikes.items() if count >= LASTING)
        fine = [rank for rank in self.reported if rank not in slow]
        self.fine = {rank: self.fine.get(rank, 0) + 1 for rank in fine}
        if lasting <= self.reported.keys():
            return []
        self.reported |= {rank: slow[rank] for rank in lasting}
        return [slow[rank] for rank in sorted(lasting)]

    @property
    def slow_now(self) -> list[Slow]:
        """The ranks that were reported, as they were then, without those that have recovered."""
        return [
            each for rank, each in sorted(self.reported.items()) if self.fine.get(rank, 0) < LASTING
        ]


@dataclass
class Pauses:
    """The shares of time in which Python's garbage collector stops the ranks of an attempt."""

    hosts: Sequence[str]
    """By rank."""
    together: int = 0
    """train.gc: all ranks collect after so many steps; 0: each collects independently."""
    shares: dict[int, float] = field(default_factory=dict)
    strikes: dict[int, int] = field(default_factory=dict)
    """Consecutive checks in which a rank's share was too large."""
    reported_ranks: frozenset[int] = frozenset()
    _due: float = 0.0

    def note(self, rank: int, share: float, now: float) -> kinds.Slow | None:
        """Record a rank's share, at `now` seconds of any clock.

        Returns an event if a rank is newly slow.
        """
        self.shares[rank] = share
        if now < self._due:
            return None
        self._due = now + CHECK_S
        long = [rank for rank, share in self.shares.items() if share > PAUSES]
        self.strikes = {rank: self.strikes.get(rank, 0) + 1 for rank in long}
        lasting = sorted(rank for rank, count in self.strikes.items() if count >= LASTING)
        if self.reported_ranks.issuperset(lasting):
            return None
        self.reported_ranks |= set(lasting)
        ranks = [
            kinds.SlowRank(rank=rank, host=self.hosts[rank], pauses=self.shares[rank])
            for rank in lasting
        ]
        text = pauses_text(lasting, self.hosts, self.shares, self.together)
        return kinds.Slow(text=text, ranks=ranks)


class SlowRanks:
    """The ranks of an attempt that slow down the others: by their own work, or by long pauses."""

    def __init__(self, hosts: Sequence[str], percent: float, together: int) -> None:
        self._stragglers = Stragglers(hosts, percent)
        self._pauses = Pauses(hosts, together)

    @property
    def latest(self) -> list[Slow]:
        """The stragglers that were reported and have not recovered."""
        return self._stragglers.slow_now

    @property
    def times(self) -> Mapping[int, Own]:
        """The times of each rank that has timed steps."""
        return self._stragglers.times

    def note(self, rank: int, own: Own, pauses: float, now: float) -> list[kinds.Slow]:
        """Record a rank's times and its share of pauses; return the events that follow."""
        found = []
        if slow := self._stragglers.note(rank, own, now):
            found.append(as_event(slow))
        if long := self._pauses.note(rank, pauses, now):
            found.append(long)
        return found


def pauses_text(
    ranks: Sequence[int], hosts: Sequence[str], shares: Mapping[int, float], together: int
) -> str:
    """Return a line: `rank 3 on node-7: Python's garbage collector takes 9% of the time, and …`."""
    mend = "train.gc=100 collects on all ranks at the same step"
    if together:
        mend = f"a larger train.gc than {together} collects less often"
    up_to = "" if len(ranks) == 1 else "up to "
    return (
        f"{who(ranks, [hosts[rank] for rank in ranks])}: Python's garbage collector takes {up_to}"
        f"{max(shares[rank] for rank in ranks):.0%} of the time, and the other ranks wait for "
        f"it; {mend}"
    )


def who(ranks: Iterable[int], of_ranks: Iterable[str]) -> str:
    """Return a text such as `ranks 3 and 5 on node-7, node-8`. `of_ranks`: the host of each."""
    ranks, hosts = list(ranks), list(dict.fromkeys(of_ranks))
    text = f"rank{'' if len(ranks) == 1 else 's'} {rank_ranges(ranks)} on {', '.join(hosts[:4])}"
    return text + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")


def slower(times: Mapping[int, Own], hosts: Sequence[str], percent: float) -> list[Slow]:
    """Return the ranks, in order, that are slower than the others by `percent` of a step.

    Their own work is compared with the median of the others.
    """
    found = []
    ordered = sorted(own for _, own, _ in times.values())
    for rank, (_, own, step) in sorted(times.items()):
        one = Slow(rank, hosts[rank], own, median_without(ordered, own), step)
        if one.own - one.others >= LEAST_S and one.share * 100 >= percent:
            found.append(one)
    return found


def own_shares(times: Mapping[int, Own]) -> dict[int, float]:
    """Return by rank the share of a step in which the others wait for it.

    The share is 0 for a rank that is not slower than the others.
    """
    if len(times) < 2:
        return {}
    ordered = sorted(own for _, own, _ in times.values())
    slow = {
        rank: Slow(rank, "", own, median_without(ordered, own), step)
        for rank, (_, own, step) in times.items()
    }
    return {rank: max(0.0, each.share) for rank, each in slow.items()}


def median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of these sorted values without one of them."""
    at, left = bisect_left(ordered, one), len(ordered) - 1
    low, high = (index + (index >= at) for index in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2


def straggler_text(slow: Sequence[Slow]) -> str:
    """Return a line such as `rank 3 on node-7 slows the others: its own work takes 62 ms of …`."""
    worst = max(slow, key=lambda each: each.share)
    named = who((each.rank for each in slow), (each.host for each in slow))
    slows, its = ("slows", "its") if len(slow) == 1 else ("slow", "their")
    return (
        f"{named} {slows} the others: {its} own work takes {worst.own * 1e3:.3g} ms of a step, "
        "the median of the "
        f"others {worst.others * 1e3:.3g} ms; at their pace a step would take {worst.share:.0%} "
        "less"
    )


def as_event(slow: Sequence[Slow]) -> kinds.Slow:
    """Return the event of these ranks."""
    ranks = [
        kinds.SlowRank(
            rank=each.rank,
            host=each.host,
            own_s=each.own,
            others_s=each.others,
            step_s=each.step,
            share=each.share,
        )
        for each in slow
    ]
    return kinds.Slow(text=straggler_text(slow), ranks=ranks)
