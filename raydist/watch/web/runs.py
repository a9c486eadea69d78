"""Find run and sweep folders: the one that a person names, the newest, its neighbours. (driver)"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypedDict

from raydist.shared import kinds
from raydist.shared.errors import ConfigError, nearest
from raydist.shared.events import parse_event
from raydist.shared.rank_names import counted
from raydist.watch.web.model import QUIET_S
from raydist.watch.web.sweep import SUMMARY, FollowedSweep, is_sweep, trials_shown

EVENTS = "events.jsonl"
TAIL = 1 << 16
"""Bytes at the end of a run's events in which its result is searched.

It is more if the last line is longer.
"""
MOST = 500
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
    """The run's metrics, or its failure."""
    sweep: bool
    """Whether this is a sweep: one line for all its trials."""


def runs_below(root: Path, file: str = EVENTS) -> dict[str, Path]:
    """Return the run folders at most three levels below `root`, the newest first.

    They include `root` itself; the keys are their paths below it. `file`: what identifies a folder
    of the wanted kind.
    """
    paths = [path for depth in ("", "*/", "*/*/", "*/*/*/") for path in root.glob(depth + file)]
    newest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:MOST]
    return {str(path.parent.relative_to(root)): path.parent for path in newest}


def sweeps_below(root: Path) -> dict[str, Path]:
    """Return the folders of sweeps below `root`, itself included as `.`."""
    return runs_below(root, SUMMARY)


def list_rows(root: Path) -> list[RunRow]:
    """Return the list of runs, the newest first.

    It has a line for each run, and one for each sweep below `root` with all its trials.
    """
    sweeps = {name: path for name, path in sweeps_below(root).items() if path != root}
    runs = {
        name: path for name, path in runs_below(root).items() if path.parent not in sweeps.values()
    }
    rows = [sweep_row(name, path) for name, path in sweeps.items()]
    rows += [run_row(name, path) for name, path in runs.items()]
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
    """Return one line of the list, from the end of the run's events."""
    path = folder / EVENTS
    # After a result, another run may have begun in the folder.
    wanted = [f'"kind": "{each.kind}"'.encode() for each in (kinds.Result, kinds.Run)]
    found = (line for line in reversed(last_lines(path)) if any(kind in line for kind in wanted))
    event = parse_event(next(found, b""))
    changed = path.stat().st_mtime
    status = "running" if time.time() - changed < QUIET_S else "no events"
    text = ""
    if isinstance(event, kinds.Result):
        status = event.status
        numbers = [each for each in event.metrics.items() if isinstance(each[1], float)]
        text = event.failure.partition("\n")[0]
        text = text or ", ".join(f"{name} {value:.4g}" for name, value in numbers[:6])
    return {"run": name, "changed": changed, "status": status, "text": text, "sweep": False}


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
        if value
    ]
    text = ", ".join([counted(len(trials), "trial"), *parts, *best[: len(summary["objectives"])]])
    changed = (folder / SUMMARY).stat().st_mtime
    return {
        "run": name,
        "changed": changed,
        "status": summary["state"],
        "text": text,
        "sweep": True,
    }
