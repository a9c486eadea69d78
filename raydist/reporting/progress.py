"""Reports of rank 0 -> step, rate, time left. (pure)"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from raydist.shared import kinds
from raydist.shared.kinds import Event

PROGRESS_NAMES = ("steps", "epoch", "epochs", "samples")
"""Reported names that measure progress; all others are metrics."""
WINDOW_S = 30.0
"""Seconds over which the rate is averaged."""
MARK_S = 0.25
"""Minimum time between two points of that window."""


class Progress:
    """The progress of rank 0, from its reports and the beginnings of loops and attempts.

    It uses the events' time, not a clock.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.totals: dict[str, Any] = {}
        """The last values of PROGRESS_NAMES."""
        self.values: dict[str, Any] = {}
        """The last values of the metrics."""
        self.last_evaluation: Mapping[str, Any] = {}
        """The metrics of the newest evaluation."""
        self.hangs = False
        """Whether ranks were said to hang, and no rank has made a step since."""
        self._stood_at: dict[str, float] = {}
        """By rank, its newest step at the first `pace` since then."""
        self._evaluated_at = -2
        self._repeats = False
        """Whether the next report may repeat the step that was reported last."""
        self._marks: deque[tuple[float, int, float]] = deque()
        """(time, step, samples) in the window."""

    def read(self, event: Event) -> str:
        """Read an event; return the kind of a report: first, step, last or evaluation.

        Empty for any other event, and for a report of another rank.
        """
        match event:
            case kinds.StartsAttempt():
                self.hangs = False
                self._start_over()
            case kinds.Hang():
                self.hangs, self._stood_at = True, {}
            case kinds.Pace() if self.hangs:
                self._look(event)
            case kinds.Begin(rank=0):
                self._start_over()
                self._update_totals({"steps": event.steps, "epochs": event.epochs})
            case kinds.Report(rank=0):
                return self._report(event)
        return ""

    def _look(self, event: kinds.Pace) -> None:
        """Note whether a rank has gone on: a program may report no steps."""
        steps = {rank: newest for rank, (newest, *_) in event.ranks.items()}
        self.hangs = all(step <= self._stood_at.get(rank, step) for rank, step in steps.items())
        # Not the last one before the hang: in a large run that may be old.
        self._stood_at = self._stood_at or steps

    def _start_over(self) -> None:
        """Expect a loop to begin, which may repeat steps, also only the last one.

        A loop of one's own has no `begin`: then only the new attempt tells a repeated step from
        an evaluation.
        """
        self._marks.clear()
        self._repeats = True

    def _report(self, event: kinds.Report) -> str:
        step, values = event.step, event.values
        self.hangs = self.hangs and step is None
        metrics = {name: value for name, value in values.items() if name not in PROGRESS_NAMES}
        self._update_totals(values)
        if step is not None and step == self.step and not self._repeats:
            return self._second_report(step, metrics)
        self.values.update(metrics)
        if step is None:
            return "step"
        self._repeats = False
        if self.step is not None and step < self.step:
            self._marks.clear()
        self.step = step
        first = not self._marks
        self._mark(event.t, step)
        return "first" if first else "last" if step == self.totals.get("steps") else "step"

    def _update_totals(self, values: Mapping[str, Any]) -> None:
        """Keep PROGRESS_NAMES that are numbers: a job may report anything under any name."""
        totals = {name: values.get(name) for name in PROGRESS_NAMES}
        self.totals.update(
            {
                name: n
                for name, n in totals.items()
                if isinstance(n, int | float) and math.isfinite(n)
            }
        )

    def _second_report(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Return the kind of a second report of one step.

        It is an evaluation, unless the loop reports each step twice.
        """
        each_step = step - self._evaluated_at == 1
        self._evaluated_at = step
        if each_step:
            self.values.update(metrics)
            return "step"
        self.last_evaluation = metrics
        return "evaluation"

    def _mark(self, t: float, step: int) -> None:
        if not self._marks or t - self._marks[-1][0] >= MARK_S:
            self._marks.append((t, step, self.totals.get("samples", 0)))
        while len(self._marks) > 2 and t - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()

    def rates(self) -> tuple[float, float]:
        """Return (steps, samples) per second over the window; zeros for fewer than two points."""
        if len(self._marks) < 2:
            return 0.0, 0.0
        (t0, step0, samples0), (t1, step1, samples1) = self._marks[0], self._marks[-1]
        return (step1 - step0) / (t1 - t0), (samples1 - samples0) / (t1 - t0)

    def time_left(self) -> list[str]:
        """Return `0:42 left` at the current rate.

        Empty at the last step, or if the number of steps is unknown.
        """
        rate, _ = self.rates()
        steps = (self.totals.get("steps") or 0) - (self.step or 0)
        return [f"{duration(steps / rate)} left"] if steps > 0 and rate > 0 else []

    def position(self) -> list[str]:
        """Return `epoch 2/8`, `step 45/360`."""
        return [
            *filter(
                None, (_of("epoch", self.totals), _of("step", {**self.totals, "step": self.step}))
            )
        ]

    def health(self) -> list[str]:
        """Return `loss 0.1234`, `1,234 samples/s`.

        Without a loss it has the first two metrics.
        """
        names = ["loss"] if "loss" in self.values else list(self.values)[:2]
        steps_per_s, samples_per_s = self.rates()
        rate = rate_text(samples_per_s, "samples") or rate_text(steps_per_s, "steps")
        return [
            *(f"{name} {number_text(self.values[name])}" for name in names),
            *([rate] if rate else []),
        ]

    def evaluation(self) -> list[str]:
        """Return the metrics of the newest evaluation, such as `accuracy 0.98`."""
        return [f"{name} {number_text(value)}" for name, value in self.last_evaluation.items()]


def _of(name: str, totals: Mapping[str, Any]) -> str:
    """Return `step 45/360`, or `step 45` if the total is unknown."""
    if totals.get(name) is None:
        return ""
    return f"{name} {totals[name]}" + (f"/{totals[f'{name}s']}" if totals.get(f"{name}s") else "")


def rate_text(per_s: float, unit: str) -> str:
    """Format a rate as `1,234 samples/s`; empty for 0."""
    if per_s <= 0:
        return ""
    return f"{per_s:,.0f} {unit}/s" if per_s >= 100 else f"{per_s:.3g} {unit}/s"


def number_text(value: Any) -> str:
    """Format a reported value in at most 40 characters; a float with 4 digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def duration(seconds: float) -> str:
    """Format a duration as `0:07`, `12:05`, `3:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
