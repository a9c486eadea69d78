"""Trials that a person adds to a sweep, as files in its folder. (driver)

    RUNS/NAME/DATE_sweep/added/2026-11-26_18-22-31-k2x7.json   [{"optim.lr": "0.02"}, …]

A request stays there, and each of its trials names it: a driver that was killed between a request
and its trials creates those that are missing, and none twice. The settings can name any program,
so a folder that another user can write to is not read.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from raydist.shared.own_path import own_folder
from raydist.sweeps.trial import Trial

FOLDER = "added"
"""The folder of the requests, in that of the sweep."""
ENDING = ".json"


def write_request(sweep: Path, trials: Sequence[Mapping[str, str]]) -> str:
    """Write a request as a whole; return its name. `trials`: the settings of each.

    OSError: it cannot be written; PermissionError if other users can write to its folder.
    """
    folder = sweep / FOLDER
    if not own_folder(folder):
        raise PermissionError(0, "other users can write to it", str(folder))
    prefix = time.strftime("%Y-%m-%d_%H-%M-%S-")
    descriptor, new = tempfile.mkstemp(prefix=f".{prefix}", dir=folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(trials, file, indent=1)
    name = Path(new).name[1:]
    os.rename(new, folder / f"{name}{ENDING}")
    return name


class Requests:
    """The requests for a sweep, which its driver reads."""

    def __init__(self, sweep: Path, warn: Callable[[str], None]) -> None:
        self._folder = sweep / FOLDER
        self._warn = warn
        self._names: set[str] = set()

    def new_trials(self, trials: Iterable[Trial]) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield (request, settings) of each trial that was added since the last call.

        `trials`: those of the sweep; what is among them is left out.
        """
        try:
            names = sorted(set(os.listdir(self._folder)) - self._names)
        except OSError:
            return
        created = Counter(trial.added for trial in trials)
        for file in names:
            if file.startswith(".") or not file.endswith(ENDING):
                continue
            self._names.add(file)
            name = file.removesuffix(ENDING)
            yield from ((name, settings) for settings in self._read(file)[created[name] :])

    def _read(self, file: str) -> Sequence[Mapping[str, str]]:
        path = self._folder / file
        try:
            if not own_folder(self._folder, make=False):
                raise PermissionError(0, "other users can write to its folder")
            found = json.loads(path.read_text(encoding="utf-8"))
            return [{str(key): str(value) for key, value in each.items()} for each in found]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not a request"
            self._warn(f"{path} is left out: {cause}")
            return []
