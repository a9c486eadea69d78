"""The importance of each setting during a sweep, computed in a child process. (driver)

python -m raydist.sweeps.importance    reads a request as JSON, and prints the importance as JSON
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydist.sweeps import optuna_study
from raydist.sweeps.space import Choice, Interval
from raydist.sweeps.trial import Objective, Trial

GROWTH = 1.1
"""It is computed again once the number of finished trials has grown by this factor."""
MAX_TRIALS = 200
"""Maximum number of finished trials from which it is computed during the sweep.

fANOVA takes more than a second of a core for 200 trials; at the end of the sweep all are used.
"""


def next_count(done: int) -> int:
    """Return the number of finished trials at which to compute it next, after `done`."""
    return max(optuna_study.LEAST, math.ceil(done * GROWTH), done + 1)


def some(trials: Sequence[Trial]) -> list[Trial]:
    """Return at most MAX_TRIALS of these trials, spread evenly, with the last one."""
    every = math.ceil(len(trials) / MAX_TRIALS) or 1
    return [*trials[::-1][::every]][::-1]


class RunningImportance:
    """The newest importance of the settings: one computation at a time, during the sweep."""

    def __init__(
        self,
        parts: Mapping[str, Choice | Interval],
        objectives: Sequence[Objective],
        on_change: Callable[[], None],
    ) -> None:
        """Prepare. `on_change` is called in another thread when `shares` has changed."""
        self.shares: dict[str, float] = {}
        self._parts = parts
        self._objectives = objectives
        self._on_change = on_change
        self._due = next_count(0)
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None

    def update(self, trials: Sequence[Trial]) -> None:
        """Begin to compute it if enough trials have finished since the last time."""
        if self._thread is not None and self._thread.is_alive():
            return
        done = optuna_study.weighable(self._parts, self._objectives, trials)
        if len(done) < self._due:
            return
        self._due = next_count(len(done))
        request = {
            "parts": {key: dataclasses.asdict(part) for key, part in self._parts.items()},
            "objectives": [dataclasses.asdict(each) for each in self._objectives],
            "trials": [trial.to_json() for trial in some(done)],
        }
        self._child = subprocess.Popen(
            [sys.executable, "-m", "raydist.sweeps.importance"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the sweep
        )
        self._thread = threading.Thread(
            target=self._read, args=(self._child, json.dumps(request)), daemon=True
        )
        self._thread.start()

    def finish(self, trials: Sequence[Trial]) -> None:
        """Compute it from all trials, in this process."""
        self.close()
        self.shares = optuna_study.importance(self._parts, self._objectives, trials)

    def close(self) -> None:
        """End a computation in the child process."""
        if self._thread is not None and self._child is not None:
            self._child.kill()
            self._thread.join()

    def _read(self, child: subprocess.Popen[str], request: str) -> None:
        answer, _ = child.communicate(request)
        if child.returncode == 0:
            self.shares = json.loads(answer)
            self._on_change()


def main() -> None:
    """Compute it for the request on the standard input."""
    request = json.load(sys.stdin)
    found = optuna_study.importance(
        {key: _part(plain) for key, plain in request["parts"].items()},
        [Objective(**plain) for plain in request["objectives"]],
        [Trial.from_json(plain) for plain in request["trials"]],
    )
    print(json.dumps(found))


def _part(plain: Mapping[str, Any]) -> Choice | Interval:
    return Choice(tuple(plain["values"])) if "values" in plain else Interval(**plain)


if __name__ == "__main__":
    main()
