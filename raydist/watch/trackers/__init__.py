"""The process that writes a run's events to one tracker: main loop and trackers. (driver)

track.py starts it. It belongs to no rank: it outlives all ranks, sees all attempts, and knows how
the run ended.

    child.py       The main loop: follows events.jsonl, retries, and reports how the run ended
    kubeflow.py    Kubeflow Trainer: the Trainer Status that `kubectl describe trainjob` shows
    mlflow.py      MLflow: a server, or a database
    tensorboard.py TensorBoard: event files in the run folder
    trackio.py     Trackio: a database of the user, a server, or a Space of Hugging Face
    wandb.py       Weights & Biases: its cloud, a server, or a folder for `wandb sync`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from raydist.reporting.points import BEFORE_ALL, Position
from raydist.shared.whole_file import write_at_once

END_S = 30.0
"""Longest time that a tracker has after the end of a run, once it has tried to open its own run."""
OPEN_S = 60.0
"""Longest time for that: at the end of a short run, a busy machine still imports the tracker's
library."""


@dataclass(frozen=True)
class Task:
    """What the process receives on its first line of input."""

    name: str
    """One of config.TRACKERS; webhook or command, for messages."""
    folder: str
    """The run folder."""
    project: str
    """The name of the run: runs with the same name are compared."""
    settings: Mapping[str, Any]
    """All settings, without the values of secrets."""
    repeats: bool
    """Whether a restart can repeat steps."""
    program: bool
    """Whether a program (script=) runs.

    Its own tracker may write to the same run, so this process opens the run only when the program
    reports.
    """
    begin: int
    """Where the events of this run begin in events.jsonl, in bytes.

    An earlier run may have had the same folder.
    """
    sweep: str = ""
    """The name of the sweep's folder, if the run is one of its trials.

    Trackers show them as a group.
    """
    differs: Mapping[str, str] = field(default_factory=dict)
    """For a trial, the settings that differ from those of the other trials."""
    notify: Mapping[str, Any] = field(default_factory=dict)
    """The settings `notify.`, with their secrets; empty for a tracker."""

    @property
    def run(self) -> str:
        """The name of the run folder; for a trial, whose folder is a number, with the sweep."""
        return "-".join(filter(None, (self.sweep, Path(self.folder).name)))

    @property
    def trial(self) -> str:
        """The settings that differ, as text."""
        return " ".join(f"{name}={value}" for name, value in self.differs.items())


@dataclass
class Ledger:
    """What one tracker or receiver of messages has: track/NAME.json in the run folder.

    A run that resumes this one continues there.
    """

    FOLDER: ClassVar[str] = "track"
    id: str = ""
    """The tracker's own name of the run; empty if it has none yet.

    Of a receiver of messages a random word, by which a node knows that it sees this very folder.
    """
    newest: Position = BEFORE_ALL
    """The newest step that the tracker has."""
    sent_kinds: list[str] = field(default_factory=list)
    """The kinds of messages that were sent."""

    @classmethod
    def read(cls, folder: Path, name: str) -> Ledger:
        """Return the ledger in a run folder; an empty one if there is none."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            plain = json.loads((folder / cls.FOLDER / f"{name}.json").read_text())
            newest = Position.of(plain.get("newest_fit"), plain["newest_step"])
            return cls(plain["id"], newest, plain.get("told", []))
        return cls()

    def write(self, folder: Path, name: str) -> None:
        """Replace the ledger in a run folder atomically; a full disk is ignored here."""
        path = folder / self.FOLDER / f"{name}.json"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fit, step = self.newest
            plain = {"id": self.id, "newest_fit": fit, "newest_step": step, "told": self.sent_kinds}
            write_at_once(path, json.dumps(plain).encode())


class Measured(NamedTuple):
    """Numbers of one point in time."""

    t: float
    """Seconds since the epoch."""
    step: int | None
    """None for the nodes' numbers, which have no steps."""
    values: Mapping[str, float]
    """By the name of their curve: `fit2/loss` in the second raydist.fit of a job."""
    fit: int = 1
    """The raydist.fit to which the step belongs."""


class Ending(NamedTuple):
    """How the run ended."""

    status: str
    """finished, failed or killed."""
    text: str
    """The culprit, on one line."""


class Tracker(Protocol):
    """One tracker; a call that raises an exception is repeated later.

    Its constructor takes a Task and the id of a run to continue.
    """

    id: str
    link: str
    """Where a person finds the run: an address, or what to type."""
    variables: Mapping[str, str]
    """The variables with which a program continues the same run."""

    def write(self, rows: Sequence[Measured]) -> None:
        """Write points and system metrics. No step comes twice, except after a call that raised."""

    def page(self, path: Path) -> None:
        """Store the page of a failure."""

    def close(self, ending: Ending) -> None:
        """Report how the run ended, and wait until everything is written."""


def by_full_name(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return settings by their full names, such as `optim.lr`."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        inside = (
            by_full_name(value, f"{prefix}{name}.")
            if isinstance(value, Mapping) and value
            else None
        )
        found |= inside if inside is not None else {f"{prefix}{name}": value}
    return found
