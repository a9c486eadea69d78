"""The beginning of an attempt: all ranks meet, the first step; what a restart cost. (pure)"""

from __future__ import annotations

from dataclasses import dataclass, field

from raydist.recovery.policy import Retry
from raydist.shared import kinds
from raydist.shared.kinds import Event

OTHERS_S = 10.0
"""Seconds after all ranks have met until the actors that host no agent are started. Each is a
process of Ray that takes most of a second of CPU, when the ranks need it most. A short run never
starts them."""


@dataclass
class Arrival:
    """The last two parts of a launch: rendezvous of all ranks, then the first step of any."""

    world_size: int
    began: float
    """When the ranks were started, in seconds since the epoch."""
    met_at: float | None = None
    """When the last rank joined, once all have."""
    joined_at: dict[int, float] = field(default_factory=dict)
    """When each rank joined."""
    first_step_at: float | None = None
    """When a step was first reported. A loop without collectives may report it before all ranks
    have joined."""
    resumed_step: int = 0
    """The step from which the loop continued."""
    stepped: bool = False
    """Whether a later step was reported: one of the same step may be an evaluation."""
    fit: int = 0
    """The number of the last raydist.fit that began, from 1; 0: none."""

    def add(self, event: Event) -> list[kinds.Phase]:
        """Read one event; return the parts of the launch that it completes.

        Each has the time of its end: a driver that stalled reads the events of both at once.
        """
        before = self.met_at, self.first_step_at
        match event:
            case kinds.Joined():
                self.joined_at[event.rank] = event.t
            case kinds.Begin():
                self.fit = max(self.fit, event.fit or 1)
                if event.rank == 0:
                    self.resumed_step = event.resumed or 0
            case kinds.Report() if event.step is not None:
                self.stepped = self.stepped or event.step > self.resumed_step
                if self.first_step_at is None:
                    self.first_step_at = event.t
        if self.met_at is None and len(self.joined_at) == self.world_size:
            self.met_at = max(self.began, *self.joined_at.values())
        if self.met_at is None or (self.met_at, self.first_step_at) == before:
            return []
        spans = {} if before[0] else {"rendezvous": (self.began, self.met_at)}
        if self.first_step_at is not None:
            spans["first step"] = self.met_at, max(self.met_at, self.first_step_at)
        return [kinds.Phase(t=to, name=name, s=to - since) for name, (since, to) in spans.items()]


@dataclass
class RestartCost:
    """The first step after a restart, from the events of rank 0.

    A program that has never reported a step may report none now: it is back once all ranks run.
    """

    retry: Retry
    program: bool = False
    """Whether the ranks run a program (script=)."""
    resumed_step: int | None = None
    """The step from which the loop continued; None if it began anew."""
    stepped: bool = False
    """Whether the event `restarted` was returned."""

    def add(self, rank: int, event: Event) -> kinds.Restarted | None:
        """Record an event of a rank.

        Returns the event `restarted` once, at the first step.
        """
        if rank != 0 or self.stepped:
            return None
        if isinstance(event, kinds.Begin):
            self.resumed_step = event.resumed
        step = (event.step or 0) if isinstance(event, kinds.Report) else 0
        if step <= (self.resumed_step or 0):
            return None  # a report without a later step may be an evaluation
        return self._restarted(step, event.t)

    def note_met(self, at: float) -> kinds.Restarted | None:
        """Record that all ranks have met; return the same if no step of them can be expected.

        `at`: when they have, in seconds since the epoch.
        """
        if self.stepped or not self.program or self.retry.reached:
            return None
        return self._restarted(0, at)

    def _restarted(self, step: int, at: float) -> kinds.Restarted:
        self.stepped = True
        paused = self.retry.cause is None and self.retry.elsewhere
        before = max(0, step - 1) if self.resumed_step is None else self.resumed_step
        return kinds.Restarted(
            number=self.retry.failures,
            step=step,
            s=at - self.retry.since,
            repeated=max(0, self.retry.reached - before),
            resized=self.retry.cause is None and not paused,
            paused=paused,
        )


class Beginning:
    """The beginning of one attempt, from the events of its ranks. Times are since the epoch."""

    def __init__(
        self, world_size: int, now: float, retry: Retry | None, program: bool = False
    ) -> None:
        """`retry`: why there is this attempt, if it is not the first.

        `program`: whether the ranks run a program (script=).
        """
        self._arrival = Arrival(world_size, now)
        self._restart = RestartCost(retry, program) if retry else None
        self._settled = False

    def add(self, rank: int, event: Event) -> list[kinds.Phase | kinds.Restarted]:
        """Record an event of a rank; return the events that follow from it."""
        parts = self._arrival.add(event)
        if self._restart is None:
            return [*parts]
        cost = self._restart.add(rank, event)
        if cost is None and self._arrival.met_at is not None:
            cost = self._restart.note_met(self._arrival.met_at)
        return [cost] if cost else []

    @property
    def stepped(self) -> bool:
        """Whether a rank has made a step."""
        return self._arrival.stepped

    @property
    def fit(self) -> int:
        """The number of the last raydist.fit that began; 0: none."""
        return self._arrival.fit

    def running_s(self, now: float) -> float:
        """Return the seconds since all ranks have met, or since the attempt began."""
        return now - (self._arrival.met_at or self._arrival.began)

    def have_settled(self, now: float) -> bool:
        """Return True once, when the ranks have trained for a while."""
        met = self._arrival.met_at
        if self._settled or met is None or now - met <= OTHERS_S:
            return False
        self._settled = True
        return True
