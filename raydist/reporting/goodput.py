"""Events of a run -> seconds of steps, launch, failures, evaluation, saves, rest. (pure)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raydist.reporting.failures import Failures
from raydist.shared import kinds
from raydist.shared.kinds import Event

NAMES = {"evaluate": "evaluation", "save": "saves"}
"""The loop's name of an activity outside of steps -> its name in a Result."""


@dataclass
class Spent:
    """The time of a run by part, summed event by event. Only rank 0's events count."""

    failures: Failures = field(default_factory=Failures)
    launch_s: float = 0.0
    queued_s: float = 0.0
    """Seconds in the cluster's queue, at first and after the run made way for another."""
    has_paused: bool = False
    paused_at: float | None = None
    """When the run made way, while it is paused."""
    earlier_s: float = 0.0
    """Seconds in steps of earlier attempts, and of earlier loops of this one."""
    repeated_s: float = 0.0
    """The part of earlier_s in steps that a later attempt repeated."""
    counted_s: float | None = None
    """Seconds in steps of this attempt after the first, as counted by the loop.

    None if the loop has not reported them.
    """
    other_s: dict[str, float] = field(default_factory=dict)
    """Seconds outside of steps in earlier attempts, by activity."""
    steps: tuple[kinds.Report, ...] = ()
    """The first and the last report of a step in this attempt."""
    now: dict[str, float] = field(default_factory=dict)
    """Seconds outside of steps in this attempt, by activity."""
    between_s: float = 0.0
    """The part of `now` between the two reports in `steps`."""
    waiting_s: float = 0.0
    """The part of `now` since the last report."""
    step_mean_s: float = 0.0
    """Mean seconds of a step in the last attempt before this one that made steps."""

    def add(self, event: Event) -> None:
        """Process one event."""
        self.failures.add(event)
        match event:
            case kinds.Phase(name="queue") if self.launching:
                self.queued_s += event.s
            case kinds.Phase() if self.launching:
                self.launch_s += event.s
            case kinds.Report(rank=0) if event.step is not None:
                self._step(event)
            case kinds.Spent(rank=0):
                self.now[event.what] = self.now.get(event.what, 0.0) + event.s
                self.waiting_s += event.s if self.steps else 0.0
            case kinds.Begin(rank=0) if self.counted_s is not None:
                self._end_loop()  # another raydist.fit of the job
            case kinds.Done(rank=0) if event.spent and "step" in event.spent:
                self.counted_s = float(event.spent["step"])
                self.now = {what: s for what, s in event.spent.items() if what != "step"}
            case kinds.StartsAttempt():
                self._end_attempt()
                if isinstance(event, kinds.Pause):
                    self.has_paused = True
                    self.paused_at = event.t
            case kinds.Result():
                self._end_pause(event.t)
            case kinds.Restarted():
                self._end_pause(event.t)
                self.repeated_s += min(self.earlier_s, event.repeated * self.step_mean_s)

    @property
    def launching(self) -> bool:
        """Whether a phase is one of the launch: later ones are part of a restart, or of a pause."""
        return not self.failures.found and not self.has_paused

    def _end_pause(self, t: float) -> None:
        if self.paused_at is not None:
            self.queued_s += t - self.paused_at
        self.paused_at = None

    def _step(self, report: kinds.Report) -> None:
        # A second report of the same step is an evaluation, whose time does not belong to a step.
        if not self.steps or report.step != self.steps[-1].step:
            self.steps = (*self.steps[:1], report)
            self.between_s += self.waiting_s
            self.waiting_s = 0.0

    def _end_attempt(self) -> None:
        """Begin the times of another attempt."""
        done = (self.steps[-1].step or 0) - (self.steps[0].step or 0) if self.steps else 0
        if done > 0:
            self.step_mean_s = self._attempt_s() / done
        self._end_loop()

    def _end_loop(self) -> None:
        """Move the times of a loop that has ended to those of earlier attempts."""
        self.earlier_s += self._attempt_s()
        for what, s in self.now.items():
            self.other_s[what] = self.other_s.get(what, 0.0) + s
        self.steps = ()
        self.now = {}
        self.counted_s = None
        self.between_s = 0.0
        self.waiting_s = 0.0

    def _attempt_s(self) -> float:
        """Return the seconds in steps of this attempt, as counted by the loop.

        Without that count it is the time between reports.
        """
        return (
            max(0.0, apart(self.steps) - self.between_s)
            if self.counted_s is None
            else self.counted_s
        )

    @property
    def step_s(self) -> float:
        """The seconds in training steps, without steps that were repeated later."""
        return max(0.0, self.earlier_s - self.repeated_s) + self._attempt_s()

    def parts(self, wall_s: float, end: float) -> dict[str, float]:
        """Return the seconds of each part of a run; `rest` is the difference to the total.

        `wall_s`: seconds of the run. `end`: its end in seconds since the epoch.
        """
        other_s = {
            what: self.other_s.get(what, 0.0) + self.now.get(what, 0.0)
            for what in {**self.other_s, **self.now}
        }
        known = {
            "steps": min(wall_s, self.step_s),
            "launch": self.launch_s,
            **({"queue": self.queued_s} if self.queued_s else {}),
            "failures": sum(self.failure_times(end)),
            "repeated steps": self.repeated_s,
            **{NAMES.get(what, what): s for what, s in other_s.items()},
        }
        return {**known, "rest": max(0.0, wall_s - sum(known.values()))}

    def failure_times(self, end: float) -> list[float]:
        """Return the seconds of each failure.

        A failure lasts until the next step, the next failure, or the end of the run.
        """
        failures = self.failures.found
        ends = [*(failure.at for failure in failures), end][1:]
        return [
            max(0.0, at - each.at) if each.s is None else each.s
            for each, at in zip(failures, ends, strict=True)
        ]

    @property
    def recovery(self) -> dict[str, float]:
        """The seconds of each part of a recovery, summed over all failures.

        The parts are detect, kill, place, fork, ...
        """
        total: dict[str, float] = {}
        for failure in self.failures.found:
            for part, s in failure.parts.items():
                total[part] = total.get(part, 0.0) + s
        return total


def apart(events: Sequence[Event]) -> float:
    """Return the seconds between the first and the last of these events."""
    return max(0.0, events[-1].t - events[0].t) if events else 0.0
