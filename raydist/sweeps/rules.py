"""(trials, rule) -> which trial continues, is paused or ended, and which one is next. (pure)

asha is Algorithm 2 of Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"
(arXiv:1810.05934): a trial is promoted from a rung if it is in the best 1/reduction of those that
have reached it. A rung is a milestone. With few trials there may be no such trial: once all are
paused, the best one of the highest rung continues, so that one trial finishes.

median is the rule of Golovin et al. 2017, "Google Vizier" (KDD, section 3.2.2), over all trials
that have come as far.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from raydist.settings.config import Sweep
from raydist.shared.errors import ConfigError
from raydist.shared.rank_names import counted
from raydist.sweeps.trial import Objective, Trial

HOUR_S = 3600.0
LEAST = 3
"""Number of other trials that must reach a milestone before their median can end one."""


@dataclass(frozen=True)
class Prune:
    """The rule that ends trials early."""

    kind: str = "none"
    """none, asha or median."""
    objective: Objective = field(default_factory=lambda: Objective("", 1))
    first: int = 100
    """Steps of the first milestone."""
    reduction: int = 3

    def milestone(self, number: int) -> int:
        """Return the steps of a milestone, counted from 0."""
        return self.first * (self.reduction**number if self.kind == "asha" else number + 1)


def verdict(
    trials: Sequence[Trial], number: int, rule: Prune, more: bool
) -> Literal["continue", "pause", "end"]:
    """Return what a running trial that has just reached a milestone does.

    `more`: trials may still be proposed.
    """
    trial = next(each for each in trials if each.number == number)
    rung = len(trial.curve) - 1
    if rule.kind == "median":
        return "end" if worse_than_median(trials, trial, rule) else "continue"
    if rule.kind != "asha" or trial.passed > rung or number in promotable(trials, rung, rule):
        return "continue"
    waits = [each if each.number != number else replace(each, state="paused") for each in trials]
    return "continue" if last_resort(waits, rule, more) == number else "pause"


def next_trial(trials: Sequence[Trial], rule: Prune, more: bool) -> int | None:
    """Return the number of the next trial to run: a promoted one, else one that waits.

    Of those that wait, one that a person has added comes first.
    None: propose one, or there is none.
    """
    if rule.kind == "asha":
        for rung in range(max((len(trial.curve) for trial in trials), default=0) - 1, -1, -1):
            if paused := [
                number
                for number in promotable(trials, rung, rule)
                if _state(trials, number) == "paused"
            ]:
                return paused[0]
    if waiting := [trial for trial in trials if trial.state == "waiting"]:
        return min(waiting, key=lambda trial: (not trial.added, trial.number)).number
    return last_resort(trials, rule, more) if rule.kind == "asha" else None


def failed_count(trials: Sequence[Trial]) -> int:
    """Return the number of trials that have finally failed."""
    return sum(trial.state == "failed" for trial in trials)


def raised_limits(trials: Sequence[Trial], sweep: Sweep, wall_s: float) -> list[str]:
    """Return the limits that a sweep has reached, each raised by its own size, as overrides.

    `wall_s`: the seconds that the sweep took, in all its parts.
    """
    raised, failed = [], failed_count(trials)
    if sweep.max_failures is not None and failed >= sweep.max_failures:
        raised.append(f"sweep.max_failures={failed + sweep.max_failures}")
    if sweep.hours is not None and wall_s >= sweep.hours * HOUR_S:
        times = wall_s // (sweep.hours * HOUR_S) + 1
        raised.append(f"sweep.hours={times * sweep.hours:.8g}")
    return raised


def check_below_limits(trials: Sequence[Trial], sweep: Sweep, wall_s: float) -> None:
    """Raise ConfigError if a sweep that is continued has reached a limit before."""
    for raised in raised_limits(trials, sweep, wall_s):
        key = raised.partition("=")[0]
        if key == "sweep.max_failures":
            cause = f"{counted(failed_count(trials), 'trial')} of the sweep failed before"
            again = f"{raised} or sweep.on_failure=retry"
            raise ConfigError.of(key, sweep.max_failures, cause, again)
        cause = f"the sweep has taken {wall_s / HOUR_S:.3g} hours before"
        raise ConfigError.of(key, f"{sweep.hours:g}", cause, raised)


def promotable(trials: Sequence[Trial], rung: int, rule: Prune) -> list[int]:
    """Return the trials in the best 1/reduction of a rung that were not yet promoted from it.

    The best comes first.
    """
    ranked = _ranked(trials, rung, rule)
    return [
        trial.number for trial in ranked[: len(ranked) // rule.reduction] if trial.passed <= rung
    ]


def last_resort(trials: Sequence[Trial], rule: Prune, more: bool) -> int | None:
    """Return the best trial of the highest rung if no other trial could finish.

    That is so if all trials are paused or over, none has finished, and none is to come. One that
    was stopped alone does not continue in this part of the sweep.
    """
    if more or any(trial.state in ("waiting", "running", "finished") for trial in trials):
        return None
    paused = [trial for trial in trials if trial.state == "paused"]
    rung = max((len(trial.curve) for trial in paused), default=0) - 1
    return next((trial.number for trial in _ranked(paused, rung, rule)), None)


def worse_than_median(trials: Sequence[Trial], trial: Trial, rule: Prune) -> bool:
    """Report whether a trial's best value so far is worse than the median of the others' means.

    The means are those up to the same milestone.
    """
    n, cost = len(trial.curve), rule.objective.cost
    others = [
        each.curve[:n] for each in trials if each.number != trial.number and len(each.curve) >= n
    ]
    if len(others) < LEAST:
        return False
    means = [statistics.fmean(cost(value) for _, value in curve) for curve in others]
    return min(cost(value) for _, value in trial.curve) > statistics.median(means)


def _ranked(trials: Sequence[Trial], rung: int, rule: Prune) -> list[Trial]:
    there = [trial for trial in trials if len(trial.curve) > rung >= 0]
    return sorted(
        there, key=lambda trial: (rule.objective.cost(trial.curve[rung][1]), trial.number)
    )


def _state(trials: Sequence[Trial], number: int) -> str:
    return next(trial.state for trial in trials if trial.number == number)
