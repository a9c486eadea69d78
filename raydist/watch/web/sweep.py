"""The folder of a sweep -> what its page shows: trials, axes of their settings and results, curves. (driver)"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from raydist.watch.web.follow import FollowedRun, file_size
from raydist.watch.web.model import Section

SUMMARY, RECORD = "sweep.json", "trial.json"
"""The file that makes a folder that of a sweep, and the one that makes a run folder that of a trial."""
TRIALS = 100
"""Most trials whose curves a page gets: those under way, then the best."""
POINTS = 240
"""Most points of one of them."""
CHOICES = 12
"""Up to so many values of a list, numbers too, each have their own place on an axis."""
LOG = 30.0
"""A number that differs by more than this factor, without a sign, has a logarithmic axis."""


@dataclass(frozen=True)
class TrialShown:
    """What the page shows of one trial."""

    trial: int
    run: str
    """Its run folder, below the folder of the sweep."""
    state: str
    step: int
    settings: Mapping[str, str]
    values: Mapping[str, float | None]
    """The last value of each objective; None: none yet, or no finite number."""
    wall_s: float
    why: str = ""
    best: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis of the parallel coordinates: a setting that differs, or an objective."""

    name: str
    kind: Literal["choice", "linear", "log"]
    values: Sequence[str | float]
    """All choices in their order, or the least and the greatest number."""
    objective: bool = False


@dataclass
class FollowedSweep:
    """The folder of a sweep, and the runs of its trials as far as they were read."""

    folder: Path
    runs: dict[str, FollowedRun] = field(default_factory=dict)
    """By the trial's folder."""
    _read: tuple[float, int] = (0.0, 0)
    _summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> Mapping[str, Any]:
        """sweep.json, which is whole at any time; read again once it has changed."""
        path = self.folder / SUMMARY
        if (now := (path.stat().st_mtime, file_size(path))) != self._read:
            self._read, self._summary = now, json.loads(path.read_text(encoding="utf-8"))
        return self._summary

    async def section(self) -> Section:
        """All but the curves, the best trial first."""
        summary = self.summary
        objectives: Sequence[Mapping[str, str]] = summary["objectives"]
        names = [each["name"] for each in objectives]
        trials = [await self._with_news(trial, names) for trial in trials_shown(summary)]
        trials = best_first(trials, objectives)
        return {
            "name": self.folder.parent.name, "dir": self.folder.name, "state": summary["state"],
            "last": max([self._read[0], *(run.model.figures.ended for run in self.runs.values())]),
            "objectives": objectives, "sampler": summary["sampler"], "prune": summary["prune"],
            "importance": summary["importance"], "keys": [*summary["space"]],
            "trials": [vars(trial) for trial in trials], "axes": [vars(axis) for axis in axes(trials, summary)],
        }  # fmt: skip

    async def curves(self) -> Section:
        """By reported name and trial: [steps, values] of the trials that are shown."""
        section, found = await self.section(), dict[str, dict[int, tuple[object, object]]]()
        shown = sorted(section["trials"], key=lambda trial: trial["state"] != "running")[:TRIALS]
        for trial in shown:
            run = self._run(trial["run"])
            while await run.catch_up() < 1:
                pass
            for name, curve in run.model.curves.items():
                piece = curve.piece(most=POINTS)
                found.setdefault(name, {})[trial["trial"]] = (piece.steps, piece.values)
        return found

    def _run(self, name: str) -> FollowedRun:
        if name not in self.runs:
            self.runs[name] = FollowedRun(self.folder / name)
        return self.runs[name]

    async def _with_news(self, trial: TrialShown, names: Sequence[str]) -> TrialShown:
        """A trial under way as far as its own events say: sweep.json has it when it ends."""
        if trial.state != "running":
            return trial
        run = self._run(trial.run)
        await run.catch_up()
        metrics = run.model.figures.metrics
        values = {**trial.values, **{name: finite(metrics[name]) for name in names if name in metrics}}
        return replace(trial, step=max(trial.step, run.model.progress.step or 0), values=values)


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (folder / SUMMARY).is_file()


def trials_shown(summary: Mapping[str, Any]) -> list[TrialShown]:
    """The trials of sweep.json."""
    names, best = [each["name"] for each in summary["objectives"]], summary["best"]
    return [
        TrialShown(
            each["number"], each["dir"], each["state"], each["step"], each["settings"],
            {name: finite(each["values"].get(name)) for name in names}, round(each["wall_s"], 1), each["why"],
            each["number"] in best,
        )
        for each in summary["trials"]
    ]  # fmt: skip


def best_first(trials: Sequence[TrialShown], objectives: Sequence[Mapping[str, str]]) -> list[TrialShown]:
    """The best, then by the first objective, then those that have no value of it."""
    first = objectives[0] if objectives else {"name": "", "direction": "minimize"}
    name, sign = first["name"], 1 if first["direction"] == "minimize" else -1

    def order(trial: TrialShown) -> tuple[bool, bool, float, int]:
        value = trial.values.get(name)
        return not trial.best, value is None, sign * (value or 0.0), trial.trial

    return sorted(trials, key=order)


def axes(trials: Sequence[TrialShown], summary: Mapping[str, Any]) -> Iterator[Axis]:
    """An axis for each setting that differs, then one for each objective of which a trial has a value."""
    for key, typed in summary["space"].items():
        texts = list(dict.fromkeys(trial.settings[key] for trial in trials if key in trial.settings))
        numbers = [number_of(text) for text in texts]
        known = [number for number in numbers if number is not None]
        if len(known) < len(texts) or not known or (len(known) <= CHOICES and "interval(" not in typed):
            yield Axis(key, "choice", sorted(texts, key=float) if len(known) == len(texts) else texts)
        else:
            yield _axis(key, known, "tag(log" in typed.replace(" ", ""))
    for each in summary["objectives"]:
        values = [value for trial in trials if (value := trial.values[each["name"]]) is not None]
        if values:
            yield replace(_axis(each["name"], values), objective=True)


def _axis(name: str, numbers: Sequence[float], log: bool = False) -> Axis:
    low, high = min(numbers), max(numbers)
    return Axis(name, "log" if low > 0 and (log or high / low > LOG) else "linear", [low, high])


def number_of(text: str) -> float | None:
    """A setting's value as a finite number; None: it is none."""
    try:
        return finite(float(text))
    except ValueError:
        return None


def finite(value: object) -> float | None:
    """A reported value that a chart can show, else None: sweep.json has a NaN as text."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
