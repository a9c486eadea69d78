"""Find run and sweep folders: the one that a person names, the newest, its neighbours. (driver)"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict

from raydist.reporting.progress import PROGRESS_NAMES
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, nearest
from raydist.shared.events import parse_event
from raydist.shared.rank_names import counted
from raydist.shared.record_names import EVENTS
from raydist.watch.web.model import QUIET_S
from raydist.watch.web.run_note import read_note
from raydist.watch.web.saved_settings import CONFIG, differing, read_settings
from raydist.watch.web.sweep import SUMMARY, FollowedSweep, finite, is_sweep, trials_shown

TAIL = 1 << 16
"""Bytes at the end of a run's events in which its result is searched.

It is more if the last line is longer.
"""
ENDINGS = [f'"kind": "{each.kind}"'.encode() for each in (kinds.Result, kinds.Run, kinds.Report)]
MAX_RUNS = 500
"""Maximum number of runs in a list, the newest first."""


class RunRow(TypedDict):
    """One line in the list of runs."""

    run: str
    """The path of the run below the folder of the list."""
    changed: float
    """When the run's newest event was written, in seconds since the epoch."""
    status: str
    """finished, failed, stopped; without a result: running, or no events."""
    text: str
    """The run's failure; of a sweep, its trials by state and its best values."""
    values: dict[str, float]
    """The last value of each metric."""
    note: str
    tags: list[str]
    """What a person has written about the run (`raydist note`)."""
    settings: dict[str, str]
    """Those settings that differ between the runs of the list."""
    sweep: bool
    """Whether this is a sweep: one line for all its trials."""


def runs_below(
    root: Path, file: str = EVENTS, sweeps: Collection[Path] = (), most: int | None = MAX_RUNS
) -> dict[str, Path]:
    """Return the run folders at most three levels below `root`, the newest first.

    They include `root` itself; the keys are their paths below it. `file`: what identifies a folder
    of the wanted kind. `sweeps`: folders whose trials are left out. `most`: the maximum number, or
    None. Hidden folders are left out: the doctor has one while it runs.
    """
    paths = [
        path
        for depth in ("", "*/", "*/*/", "*/*/*/")
        for path in root.glob(depth + file)
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.parent.parent not in sweeps
    ]
    newest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:most]
    return {str(path.parent.relative_to(root)): path.parent for path in newest}


def sweeps_below(root: Path) -> dict[str, Path]:
    """Return the folders of sweeps below `root`, itself included as `.`."""
    return runs_below(root, SUMMARY)


def list_rows(root: Path) -> list[RunRow]:
    """Return the list of runs, the newest first.

    It has a line for each run, and one for each sweep below `root` with all its trials.
    """
    sweeps = {name: path for name, path in sweeps_below(root).items() if path != root}
    runs = runs_below(root, sweeps={*sweeps.values()})
    rows = [sweep_row(name, path) for name, path in sweeps.items()]
    rows += [run_row(name, path) for name, path in runs.items()]
    names = differing([row["settings"] for row in rows])
    for row in rows:
        row["settings"] = {key: row["settings"][key] for key in names if key in row["settings"]}
    return sorted(rows, key=lambda row: row["changed"], reverse=True)


def find_place(place: str, here: Path) -> tuple[Path, str]:
    """Return what a person's text refers to: a folder, or `newest`.

    The result is (the folder of a list of runs, the run in it or "" for the list). The folder of a
    sweep is the list of its trials. `here`: the folder in which `newest` is searched; if the newest
    run is a trial, its sweep is meant.
    """
    if place == "newest":
        runs = runs_below(here)
        if not runs:
            raise no_run(
                place, f"no run is below {here.absolute()}", "a run folder, or a folder of runs"
            )
        newest = next(iter(runs.values()))
        return newest.parent, "" if is_sweep(newest.parent) else newest.name
    folder = Path(place).absolute()
    if (folder / EVENTS).exists():
        return folder.parent, folder.name
    if not folder.is_dir() or not (is_sweep(folder) or runs_below(folder)):
        there = [path.name for path in folder.parent.glob("*")] if folder.parent.is_dir() else []
        guess = nearest(folder.name, there)
        why = "no run is in that folder" if folder.is_dir() else "there is no such folder"
        raise no_run(place, why, str(folder.parent / guess) if guess else "newest")
    return folder, ""


def no_run(place: str, why: str, instead: str) -> ConfigError:
    """Return the refusal of a place that a person typed, with what to type instead."""
    return ConfigError(f"{place}: {why}; type {instead}", "RUN", place, instead)


def run_row(name: str, folder: Path) -> RunRow:
    """Return one line of the list, from the end of the run's events and its saved settings."""
    path, config = folder / EVENTS, folder / CONFIG
    stat = path.stat()
    end = last_of(path, stat.st_mtime_ns, stat.st_size)
    quiet = time.time() - stat.st_mtime >= QUIET_S
    note = read_note(folder)
    return {
        "run": name,
        "changed": stat.st_mtime,
        "status": end.status or ("no events" if quiet else "running"),
        "text": end.failure,
        "values": end.values,
        "note": note.text,
        "tags": list(note.tags),
        "settings": settings_of(folder, config.stat().st_mtime_ns) if config.exists() else {},
        "sweep": False,
    }


class RunEnd(NamedTuple):
    """What the end of a run's events tells."""

    status: str
    """Empty without a result."""
    failure: str
    values: dict[str, float]


@functools.lru_cache(maxsize=MAX_RUNS)
def settings_of(folder: Path, changed: int) -> dict[str, str]:
    """Return all settings of a run. `changed`: when the file was, so that it is read again then."""
    return read_settings(folder).values


@functools.lru_cache(maxsize=MAX_RUNS)
def last_of(path: Path, changed: int, size: int) -> RunEnd:
    """Return what the end of a run's events tells; it is read again after `changed` or `size`."""
    values: dict[str, float] = {}
    for line in reversed(last_lines(path)):
        if not any(kind in line for kind in ENDINGS):
            continue
        event = parse_event(line)
        if isinstance(event, kinds.Result):
            return RunEnd(
                event.status, event.failure.partition("\n")[0], finite_values(event.metrics)
            )
        if isinstance(event, kinds.Run):  # after a result, another run may have begun in the folder
            break
        if isinstance(event, kinds.Report) and event.rank == 0:
            values = {**finite_values(event.values), **values}
    return RunEnd("", "", values)


def finite_values(values: Mapping[str, object]) -> dict[str, float]:
    """Return the reported values that have a curve, in so far as they are finite."""
    return {
        name: value
        for name, each in values.items()
        if name not in PROGRESS_NAMES and (value := finite(each)) is not None
    }


def last_lines(path: Path) -> list[bytes]:
    """Return the lines at the end of a file, with at least the last line complete.

    The last line of a run with 2048 ranks has 75 kB.
    """
    size, wanted = path.stat().st_size, TAIL
    with path.open("rb") as file:
        while True:
            file.seek(max(0, size - wanted))
            lines = file.read().splitlines()
            if len(lines) > 1 or wanted >= size:
                return lines
            wanted *= 2


def sweep_row(name: str, folder: Path) -> RunRow:
    """Return one line of the list for a sweep."""
    sweep = FollowedSweep(folder)
    trials, summary = trials_shown(sweep.summary), sweep.summary
    states = dict.fromkeys(trial.state for trial in trials)
    parts = [f"{sum(trial.state == state for trial in trials)} {state}" for state in states]
    best = [
        f"{key} {value:.4g}"
        for trial in trials
        if trial.best
        for key, value in trial.values.items()
        if value is not None
    ]
    text = ", ".join([counted(len(trials), "trial"), *parts, *best[: len(summary["objectives"])]])
    changed = (folder / SUMMARY).stat().st_mtime
    note = read_note(folder)
    return {
        "run": name,
        "changed": changed,
        "status": summary["state"],
        "text": text,
        "values": {},
        "note": note.text,
        "tags": list(note.tags),
        "settings": {},
        "sweep": True,
    }
