"""A sweep's folder -> its page: trials, axes of their settings and results, curves. (driver)"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from raydist.reporting.curves import Curve
from raydist.shared.record_names import EVENTS, NOTE
from raydist.watch.web.follow import Fetch, FollowedRun, file_size, is_here
from raydist.watch.web.model import Section
from raydist.watch.web.run_note import read_note

SUMMARY, RECORD = "sweep.json", "trial.json"
"""The file that identifies the folder of a sweep, and the one that identifies a trial's."""
TRIALS = 100
"""Maximum number of trials whose curves a page gets: those under way, then the best."""
POINTS = 240
"""Maximum number of points of one of these curves."""
CHOICES = 12
"""Lists with at most this many values give each value, numbers too, its own position on an axis."""
FETCH_S = 2.0
"""Seconds between two requests for sweep.json if it is elsewhere."""
FOLLOWED = 32
"""Maximum number of trials under way whose events are followed if they are elsewhere.

Ray's log API refuses more than 100 requests at a time.
"""
NAME = re.compile(r"\w+")
"""What the run folder of a trial may be named: sweep.json may come from elsewhere."""
LOG = 30.0
"""A number that differs by more than this factor, without a sign, has a logarithmic axis."""


@dataclass(frozen=True)
class TrialShown:
    """What the page shows of one trial."""

    trial: int
    run: str
    """The trial's run folder, below the folder of the sweep."""
    state: str
    step: int
    settings: Mapping[str, str]
    values: Mapping[str, float | None]
    """The last value of each objective; None: none yet, or not a finite number."""
    wall_s: float
    why: str = ""
    best: bool = False
    added: bool = False
    """Whether a person added the trial; it may have other settings than those of the space."""


@dataclass(frozen=True)
class Axis:
    """One axis of the parallel coordinates: a setting that differs, or an objective."""

    name: str
    kind: Literal["choice", "linear", "log"]
    values: Sequence[str | float]
    """All choices in their order, or the smallest and the largest number."""
    objective: bool = False


@dataclass
class FollowedSweep:
    """The folder of a sweep, and the runs of its trials as far as they were read."""

    folder: Path
    fetch: Fetch = is_here
    """Fetches files of the sweep and of its trials."""
    runs: dict[str, FollowedRun] = field(default_factory=dict)
    """By the trial's folder."""
    _read: tuple[float, int] = (0.0, 0)
    _summary: Mapping[str, Any] = field(default_factory=dict)
    _fetched_at: float = -math.inf
    """When sweep.json was last requested, in the seconds of time.monotonic."""
    _ended_states: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """By the trial's folder, what distinguishes its state from the same state later.

    Only of trials that are not under way.
    """
    _skipped: set[str] = field(default_factory=set)
    """The folders of the trials under way whose events are not followed."""
    _whole: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """By file of a trial that was fetched after the trial's end, the state of the trial then."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """sweep.json, which is complete at any time; it is read again once it has changed."""
        path = self.folder / SUMMARY
        if (now := (path.stat().st_mtime, file_size(path))) != self._read:
            self._summary = json.loads(path.read_text(encoding="utf-8"))
            self._read = now
            trials = self._summary["trials"]
            under_way = [each["dir"] for each in trials if each["state"] == "running"]
            self._skipped = set() if self.fetch is is_here else {*under_way[FOLLOWED:]}
            self._ended_states = {
                each["dir"]: (each["state"], each["step"], each["wall_s"])
                for each in trials
                if each["state"] != "running"
            }
        return self._summary

    async def section(self) -> Section:
        """Return everything except the curves, the best trial first."""
        if time.monotonic() - self._fetched_at > FETCH_S:
            self._fetched_at = time.monotonic()
            with contextlib.suppress(OSError):
                await asyncio.gather(*(self.fetch(name, whole=True) for name in (SUMMARY, NOTE)))
        summary = self.summary
        objectives: Sequence[Mapping[str, str]] = summary["objectives"]
        names = [each["name"] for each in objectives]
        trials = [await self._with_news(trial, names) for trial in trials_shown(summary)]
        trials = best_first(trials, objectives)
        return {
            "name": self.folder.parent.name,
            "dir": self.folder.name,
            "note": read_note(self.folder)._asdict(),
            "state": summary["state"],
            "objectives": objectives,
            "sampler": summary["sampler"],
            "prune": summary["prune"],
            "importance": summary["importance"],
            "keys": all_keys(summary),
            "trials": [vars(trial) for trial in trials],
            "axes": [vars(axis) for axis in axes(trials, summary)],
        }

    async def curves(self) -> Section:
        """Return by reported name and trial: [steps, values] of the trials that are shown."""
        section, found = await self.section(), dict[str, dict[int, tuple[object, object]]]()
        shown = with_curves(section["trials"])
        runs = [self.run(trial["run"]) for trial in shown]
        await asyncio.gather(*(run.fetch(EVENTS, whole=True) for run in runs))
        for trial, run in zip(shown, runs, strict=True):
            await run.read_all()
            for name, curve in run.model.curves.items():
                piece = curve.piece(most=POINTS)
                found.setdefault(name, {})[trial["trial"]] = (piece.steps, piece.values)
        return found

    def first_curve(self, names: Collection[str]) -> str:
        """Return the name whose curves are shown first.

        It is that of an objective, else the loss; empty without names.
        """
        wanted = [*(each["name"] for each in self.summary["objectives"]), "loss", *sorted(names)]
        return next((name for name in wanted if name in names), "")

    def silent_s(self) -> float:
        """Return the seconds without a change of sweep.json or a new event of a followed trial."""
        runs = (run.silent_s() for run in self.runs.values())
        return min([max(0.0, time.time() - self._read[0]), *runs])

    def run(self, name: str) -> FollowedRun:
        """Return the run of a trial, by its folder."""
        if name not in self.runs:
            self.runs[name] = FollowedRun(self.folder / name, partial(self._fetch_of_trial, name))
        return self.runs[name]

    def has_trial(self, name: str) -> bool:
        """Report whether a trial has this folder."""
        return any(trial.run == name for trial in trials_shown(self.summary))

    async def catch_up(self, trial: str) -> float:
        """Fold the new events of a trial, by its folder; return the folded share of them."""
        return 1.0 if trial in self._skipped else await self.run(trial).catch_up()

    async def _fetch_of_trial(self, trial: str, name: str, whole: bool = False) -> None:
        """Fetch a file of a trial. If the trial is not under way, that is done once.

        OSError: as for Mirror.fetch.
        """
        path, ended = f"{trial}/{name}", self._ended_states.get(trial)
        if ended is None:
            await self.fetch(path, whole)
            return
        if self._whole.get(path) == ended:
            return
        try:
            await self.fetch(path, whole=True)
            self._whole[path] = ended
        except OSError:
            if whole:
                raise

    async def _with_news(self, trial: TrialShown, names: Sequence[str]) -> TrialShown:
        """Return a trial under way with the state of its own events.

        sweep.json has it only when the trial ends.
        """
        if trial.state != "running":
            return trial
        await self.catch_up(trial.run)
        run = self.run(trial.run)
        metrics = run.model.figures.metrics
        values = {
            **trial.values,
            **{name: finite(metrics[name]) for name in names if name in metrics},
        }
        return replace(trial, step=max(trial.step, run.model.progress.step or 0), values=values)


@dataclass
class SweepViewer:
    """What was sent to one open page of the curves of one reported name."""

    sweep: FollowedSweep
    name: str = ""
    """Empty until the trials have reported something."""
    _sent_curves: dict[int, tuple[Curve, int, int]] = field(default_factory=dict)
    """By trial: the curve, how often points of it were replaced, and its number of points."""
    _head: Section = field(default_factory=dict)

    async def news(
        self, trials: Sequence[Mapping[str, Any]], turn_s: float
    ) -> tuple[float, Section]:
        """Return (share of the trials that were read, the curves that have changed).

        Reads for at most `turn_s` seconds.
        """
        shown = with_curves(trials)
        until = time.monotonic() + turn_s
        read = 0
        for trial in shown:
            if time.monotonic() > until or await self.sweep.catch_up(trial["run"]) < 1:
                break
            read += 1
        runs = {trial["trial"]: self.sweep.run(trial["run"]) for trial in shown}
        names = sorted({name for run in runs.values() for name in run.model.curves})
        self.name = self.name or self.sweep.first_curve(names)
        head = {"name": self.name, "names": names, "shown": [*runs]}
        curves = {
            number: curve
            for number, run in runs.items()
            if (curve := run.model.curves.get(self.name))
        }
        changed = {number: curve for number, curve in curves.items() if self._is_new(number, curve)}
        if not changed and head == self._head:
            return read / max(1, len(shown)), {}
        self._head = head
        pieces = {number: curve.piece(most=POINTS) for number, curve in changed.items()}
        return read / max(1, len(shown)), {
            **head,
            "trials": {number: (piece.steps, piece.values) for number, piece in pieces.items()},
        }

    def _is_new(self, number: int, curve: Curve) -> bool:
        """Report whether the curve of a trial differs from what the page has."""
        before, now = self._sent_curves.get(number), (curve, curve.cuts, len(curve.steps))
        self._sent_curves[number] = now
        return before is None or before[0] is not curve or before[1:] != now[1:]


def with_curves(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the trials whose curves are shown: those under way, then the best."""
    return sorted(trials, key=lambda trial: trial["state"] != "running")[:TRIALS]


def is_sweep(folder: Path) -> bool:
    """Report whether a folder is that of a sweep."""
    return (folder / SUMMARY).is_file()


def all_keys(summary: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, then those that only trials added by hand have."""
    own = (key for trial in summary["trials"] for key in trial["settings"])
    return list(dict.fromkeys([*summary["space"], *own]))


def trials_shown(summary: Mapping[str, Any]) -> list[TrialShown]:
    """Return the trials of sweep.json."""
    names, best = [each["name"] for each in summary["objectives"]], summary["best"]
    return [
        TrialShown(
            each["number"],
            each["dir"],
            each["state"],
            each["step"],
            each["settings"],
            {name: finite(each["values"].get(name)) for name in names},
            round(each["wall_s"], 1),
            each["why"],
            each["number"] in best,
            bool(each.get("added")),
        )
        for each in summary["trials"]
        if NAME.fullmatch(each["dir"])
    ]


def best_first(
    trials: Sequence[TrialShown], objectives: Sequence[Mapping[str, str]]
) -> list[TrialShown]:
    """Return the best trials, then the others by the first objective, those without it last."""
    first = objectives[0] if objectives else {"name": "", "direction": "minimize"}
    name, sign = first["name"], 1 if first["direction"] == "minimize" else -1

    def order(trial: TrialShown) -> tuple[bool, bool, float, int]:
        value = trial.values.get(name)
        return not trial.best, value is None, sign * (value or 0.0), trial.trial

    return sorted(trials, key=order)


def axes(trials: Sequence[TrialShown], summary: Mapping[str, Any]) -> Iterator[Axis]:
    """Yield an axis for each setting that differs, then one for each objective with a value."""
    for key, choices in summary["space"].items():
        texts = list(
            dict.fromkeys(trial.settings[key] for trial in trials if key in trial.settings)
        )
        numbers = [number_of(text) for text in texts]
        known = [number for number in numbers if number is not None]
        if (
            len(known) < len(texts)
            or not known
            or (len(known) <= CHOICES and "interval(" not in choices)
        ):
            yield Axis(
                key, "choice", sorted(texts, key=float) if len(known) == len(texts) else texts
            )
        else:
            yield _axis(key, known, "tag(log" in choices.replace(" ", ""))
    for each in summary["objectives"]:
        values = [value for trial in trials if (value := trial.values[each["name"]]) is not None]
        if values:
            yield replace(_axis(each["name"], values), objective=True)


def _axis(name: str, numbers: Sequence[float], log: bool = False) -> Axis:
    low, high = min(numbers), max(numbers)
    return Axis(name, "log" if low > 0 and (log or high / low > LOG) else "linear", [low, high])


def number_of(text: str) -> float | None:
    """Return a setting's value as a finite number; None if it is not one."""
    try:
        return finite(float(text))
    except ValueError:
        return None


def finite(value: object) -> float | None:
    """Return a reported value that a chart can show, else None: sweep.json has NaN as text."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
