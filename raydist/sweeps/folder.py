"""The folder of a sweep: a record per trial, and a summary; every file always complete. (driver)

    RUNS/NAME/DATE_sweep/sweep.json     the overrides, space, state, best, and all trials
                         sweep.csv      a line for each trial
                         sweep.jsonl    events of the sweep itself: the cluster, warnings
                         multirun.yaml  the settings, in Hydra's form
                         optuna.journal with one of Optuna's samplers
                         added/         what `raydist sweep add` requests (requests.py)
                         7/trial.json   the record of trial 7, in its run folder

A trial's record is written before it starts and at each change, so a sweep whose driver is killed
loses nothing.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from raydist.shared.errors import ConfigError
from raydist.shared.home import expand_home
from raydist.shared.whole_file import write_at_once
from raydist.sweeps.requests import Requests
from raydist.sweeps.trial import Trial, all_settings
from raydist.watch.web.sweep import RECORD, SUMMARY


class Folder:
    """The folder of a sweep, which only this process writes to, except for the requests."""

    def __init__(self, path: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        """Lock the folder. ConfigError: another process runs the sweep."""
        self.path = path
        self.warn = warn
        self.requests = Requests(path, warn)
        self._full = False
        self._lock = _locked(path)

    def close(self) -> None:
        """Allow another process to continue the sweep."""
        self._lock.close()

    def note(self, trial: Trial) -> None:
        """Write the record of a trial."""
        folder = self.path / str(trial.number)
        with suppress(OSError):  # a full disk: _write warns
            folder.mkdir(exist_ok=True)
        self._write(folder / RECORD, json.dumps(trial.to_json(), indent=1, default=str))

    def summarize(
        self, facts: Mapping[str, Any], trials: Sequence[Trial], keys: Sequence[str]
    ) -> None:
        """Write sweep.json and sweep.csv.

        `facts`: of the sweep. `keys`: the settings that differ.
        """
        records = [trial.to_json() for trial in trials]
        self._write(
            self.path / SUMMARY, json.dumps({**facts, "trials": records}, indent=1, default=str)
        )
        names = sorted({name for trial in trials for name in trial.metrics})
        text = io.StringIO()
        table = csv.writer(text)
        keys = all_settings(trials, keys)
        table.writerow(["trial", "state", "added", *keys, "step", "wall_s", *names])
        for trial in trials:
            own = [trial.settings.get(key, "") for key in keys]
            metrics = [trial.metrics.get(name, "") for name in names]
            state = (trial.state, "by hand" if trial.added else "")
            table.writerow(
                [trial.number, *state, *own, trial.step, round(trial.wall_s, 3), *metrics]
            )
        self._write(self.path / "sweep.csv", text.getvalue())

    def _write(self, path: Path, text: str) -> None:
        """Write a file as a whole, or leave it as it is. A full disk does not end the sweep."""
        try:
            write_at_once(path, text.encode())
        except OSError as error:
            if not self._full:
                self._full = True
                self.warn(
                    f"{path} cannot be written ({error.strerror}): the sweep continues without it"
                )
        else:
            self._full = False


def _locked(path: Path) -> IO[str]:
    lock = open(path / ".lock", "w")  # noqa: SIM115 - the process holds it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        cause = "another process runs this sweep"
        raise ConfigError.of("sweep.resume", str(path), cause) from None
    os.set_inheritable(lock.fileno(), False)
    return lock


def is_running(path: Path) -> bool:
    """Report whether a process runs this sweep now."""
    try:
        _locked(path).close()
    except ConfigError:
        return True
    return False


def read_summary(folder: str, key: str = "sweep.resume") -> Mapping[str, Any]:
    """Return sweep.json of a sweep; ConfigError if the folder has none.

    `key`: what the person typed the folder for.
    """
    path = expand_home(key, folder)
    try:
        summary: Mapping[str, Any] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        summaries = sorted(path.parent.glob(f"*/{SUMMARY}")) if path.parent.is_dir() else []
        guess = f"{key}={summaries[-1].parent}" if summaries else None
        raise ConfigError.of(key, folder, f"there is no {SUMMARY} in it", guess=guess) from error
    return summary


def wall_before(folder: Path) -> float:
    """Return the seconds that the earlier parts of a sweep took; 0 if it is new."""
    with suppress(OSError, ValueError):
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return float(summary.get("wall_s", 0.0))
    return 0.0


def read_trials(folder: Path) -> dict[int, Trial]:
    """Return the trials by their records.

    A trial whose folder was deleted is read from the summary of the sweep.
    """
    summary = (
        json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if (folder / SUMMARY).exists()
        else {}
    )
    records = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*/{RECORD}"))
    trials = {
        trial.number: trial
        for trial in map(Trial.from_json, (*summary.get("trials", ()), *records))
    }
    return dict(sorted(trials.items()))
