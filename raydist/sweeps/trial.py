"""A trial of a sweep: its settings, progress, end, and its record as JSON. (pure)"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raydist.reporting.progress import PROGRESS_NAMES
from raydist.reporting.result import strict_json
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, nearest
from raydist.shared.kinds import Event

State = Literal["waiting", "running", "stopped", "paused", "finished", "failed", "ended"]
"""`paused`: worse than others at a milestone, but may still continue. `ended`: permanently, for the
same reason. `stopped`: by a person, or with the sweep."""
OPEN: tuple[State, ...] = ("waiting", "running", "stopped")
"""The states of a trial that is still to be run, or to be continued."""


@dataclass(frozen=True)
class Objective:
    """A reported number that should become small or large."""

    name: str
    sign: int
    """1: small is good. -1: large is good."""

    @property
    def direction(self) -> str:
        """minimize or maximize, in Optuna's words."""
        return "minimize" if self.sign > 0 else "maximize"

    @property
    def text(self) -> str:
        """The objective as it is typed in `sweep.objective`."""
        return f"{'min' if self.sign > 0 else 'max'}:{self.name}"

    def cost(self, value: float | None) -> float:
        """Return the value as a cost: small is good, and a missing number is the worst."""
        return math.inf if value is None or math.isnan(value) else self.sign * value


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Return the objectives of `sweep.objective=min:test_loss,max:accuracy`."""
    parts = [each.strip().partition(":") for each in text.split(",") if each.strip()]
    return tuple(Objective(name, 1 if mode == "min" else -1) for mode, _, name in parts)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep; `trial.json` in its folder has all of it."""

    number: int
    settings: Mapping[str, str]
    """What differs among the trials, as in overrides: {"optim.lr": "0.01"}."""
    state: State = "waiting"
    passed: int = 0
    """Number of milestones that the trial may pass: it continued after this many."""
    curve: Sequence[tuple[int, float]] = ()
    """(step, objective) at each milestone that the trial has reached."""
    step: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    """The last value of each objective."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last value of each name that rank 0 reported."""
    failures: int = 0
    why: str = ""
    """Why the trial failed."""
    wall_s: float = 0.0
    """Seconds in which the trial ran."""
    dir: str = ""
    """The run folder, relative to the folder of the sweep."""
    added: str = ""
    """The request of a person that the trial comes from; empty if the sampler proposed it."""

    def to_json(self) -> Mapping[str, Any]:
        """Return the record as plain JSON; numbers that JSON lacks become text."""
        plain: Mapping[str, Any] = strict_json(dataclasses.asdict(self))
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Trial:
        """Return the trial of such a record."""
        curve = tuple((int(step), float(value)) for step, value in plain["curve"])
        # A NaN is text in the record.
        values = {name: float(value) for name, value in plain["values"].items()}
        metrics = {**plain["metrics"], **values}
        return cls(**{**plain, "curve": curve, "values": values, "metrics": metrics})

    def at_milestone(self, step: int, value: float) -> Trial:
        """Return the trial at its next milestone."""
        return dataclasses.replace(self, curve=(*self.curve, (step, value)))


class WatchedTrial:
    """A reader of a trial's events: its step, its values, the milestones that it reaches.

    It runs in the trial's thread.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self.step = 0
        self.metrics: dict[str, Any] = {}
        """The last value of each name that rank 0 reported."""
        self.settled = False
        """Whether all ranks have slots, and none is being restarted."""
        self.waiting = False
        """Whether the trial waits for resources."""
        self._objectives = objectives

    @property
    def values(self) -> dict[str, float]:
        """The last value of each objective."""
        return values_of(self._objectives, self.metrics)

    def add(self, happened: Event) -> bool:
        """Process an event; return whether it is a report of the first objective at a step."""
        self.waiting = isinstance(happened, kinds.Wait)
        match happened:
            case kinds.Plan() | kinds.Restarted() | kinds.Placed():
                self.settled = True
            case kinds.StartsAttempt():
                # Not at a Wait: with slots a trial may still wait, as for the packages of `pip=`.
                self.settled = False
            case kinds.Recalled():
                self.step = happened.step
                self.metrics.update(happened.values)
            case kinds.Report(rank=0):
                self.step = max(self.step, happened.step or 0)
                self.metrics.update(happened.values)
                reported = bool(values_of(self._objectives[:1], happened.values))
                return reported and happened.step is not None
        return False


def all_settings(trials: Iterable[Trial], keys: Iterable[str] = ()) -> list[str]:
    """Return `keys`, then the other settings of these trials: an added one may have more."""
    return [*dict.fromkeys([*keys, *(key for trial in trials for key in trial.settings)])]


def values_of(objectives: Sequence[Objective], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the objectives among these metrics that are numbers."""
    found = {each.name: metrics.get(each.name) for each in objectives}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def unreported_objective(
    trial: Trial, objectives: Sequence[Objective], others: Iterable[Trial] = ()
) -> ConfigError | None:
    """Return the error if a trial has finished without an objective that no other one has reported.

    It names what the job reports. `others`: all trials; those that have finished count.
    """
    reported = {name for other in others if other.state == "finished" for name in other.values}
    for each in objectives:
        if each.name not in {*trial.values, *reported}:
            known = sorted(trial.metrics.keys() - {*PROGRESS_NAMES})
            close = nearest(each.name, known)
            guess = (
                f"sweep.objective={dataclasses.replace(each, name=close).text}" if close else None
            )
            cause = f"the job reports no number {each.name}"
            return ConfigError.of("sweep.objective", each.text, cause, guess=guess, known=known)
    return None


def best_trials(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Return the best finished trial.

    With several objectives they are those that no other is better than in all (the Pareto
    front).
    """
    done = [
        trial
        for trial in trials
        if trial.state == "finished" and all(each.name in trial.values for each in objectives)
    ]
    costs = {
        trial.number: [each.cost(trial.values[each.name]) for each in objectives] for trial in done
    }
    if not objectives or not done:
        return []
    if len(objectives) == 1:
        return [min(done, key=lambda trial: (costs[trial.number], trial.number))]
    return [
        trial
        for trial in done
        if not any(_dominates(costs[other.number], costs[trial.number]) for other in done)
    ]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(
        a < b for a, b in zip(one, other, strict=True)
    )
