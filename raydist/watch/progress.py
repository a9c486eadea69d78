"""How far the training is: reports of rank 0 -> step, rate, time left. (pure)"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from raydist.events import Event

BESIDES = ("steps", "epoch", "epochs", "samples")
"""Reported words that say how far, not how well."""
WINDOW_S = 30.0
"""The rate is that of the last so many seconds."""
MARK_S = 0.25
"""Seconds between two remembered points of the window."""


class Progress:
    """Takes in `begin` and `report` events of rank 0. Time is the events' own, so nothing here has a clock."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.totals: dict[str, Any] = {}
        """The last of BESIDES."""
        self.values: dict[str, Any] = {}
        """The last of everything else."""
        self.evaluated: Mapping[str, Any] = {}
        """What the newest evaluation found."""
        self._evaluated_at = -2
        self._marks: deque[tuple[float, int, float]] = deque()

    def begin(self, happened: Event) -> None:
        """A loop begins, maybe in the middle, maybe again."""
        self._marks.clear()
        self._count({name: happened.get(name) for name in ("steps", "epochs")})

    def report(self, happened: Event) -> str:
        """Take in a report; what moment it is: the first, a step, the last, or an evaluation."""
        step, values = happened.get("step"), happened["values"]
        told = {name: value for name, value in values.items() if name not in BESIDES}
        self._count(values)
        if step is not None and step == self.step:
            return self._again(step, told)
        self.values.update(told)
        if step is None:
            return "step"
        if self.step is not None and step < self.step:
            self._marks.clear()
        self.step = step
        first = not self._marks
        self._mark(happened["t"], step)
        return "first" if first else "last" if step == self.totals.get("steps") else "step"

    def _count(self, values: Mapping[str, Any]) -> None:
        """Note BESIDES as far as they are numbers: a job may report anything under any name."""
        told = {name: values.get(name) for name in BESIDES}
        self.totals.update({name: n for name, n in told.items() if isinstance(n, int | float) and math.isfinite(n)})

    def _again(self, step: int, told: Mapping[str, Any]) -> str:
        """A second report of one step is an evaluation; but a loop that speaks twice at each step is only talkative."""
        talkative = step - self._evaluated_at == 1
        self._evaluated_at = step
        if talkative:
            self.values.update(told)
            return "step"
        self.evaluated = told
        return "evaluation"

    def _mark(self, t: float, step: int) -> None:
        if not self._marks or t - self._marks[-1][0] >= MARK_S:
            self._marks.append((t, step, self.totals.get("samples", 0)))
        while len(self._marks) > 2 and t - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()

    def rates(self) -> tuple[float, float]:
        """(steps, samples) per second over the window; zeros before there are two points in it."""
        if len(self._marks) < 2:
            return 0.0, 0.0
        (before, step, samples), (after, newer_step, newer_samples) = self._marks[0], self._marks[-1]
        return (newer_step - step) / (after - before), (newer_samples - samples) / (after - before)

    def left(self) -> list[str]:
        """`0:42 left`, at the rate of now; nothing if no end is known, or if this is it."""
        rate, _ = self.rates()
        steps = (self.totals.get("steps") or 0) - (self.step or 0)
        return [f"{duration(steps / rate)} left"] if steps > 0 and rate > 0 else []

    def position(self) -> list[str]:
        """`epoch 2/8`, `step 45/360`."""
        epoch, step = _of("epoch", self.totals), _of("step", {**self.totals, "step": self.step})
        return [words for words in (epoch, step) if words]

    def health(self) -> list[str]:
        """`loss 0.1234`, `1,234 samples/s`: the loss, or the first two values of a loop that reports none."""
        names = ["loss"] if "loss" in self.values else list(self.values)[:2]
        steps_per_s, samples_per_s = self.rates()
        rate = rate_text(samples_per_s, "samples") or rate_text(steps_per_s, "steps")
        return [*(f"{name} {number(self.values[name])}" for name in names), *([rate] if rate else [])]

    def evaluation(self) -> list[str]:
        """`accuracy 0.98`: what the newest evaluation found."""
        return [f"{name} {number(value)}" for name, value in self.evaluated.items()]


def _of(name: str, totals: Mapping[str, Any]) -> str:
    """`step 45/360`, or `step 45` where no end is known."""
    if totals.get(name) is None:
        return ""
    return f"{name} {totals[name]}" + (f"/{totals[f'{name}s']}" if totals.get(f"{name}s") else "")


def rate_text(per_s: float, what: str) -> str:
    """`1,234 samples/s`; empty for none."""
    if per_s <= 0:
        return ""
    return f"{per_s:,.0f} {what}/s" if per_s >= 100 else f"{per_s:.3g} {what}/s"


def number(value: Any) -> str:
    """A reported value in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def duration(seconds: float) -> str:
    """`0:07`, `12:05`, `3:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
