"""The process that writes to one tracker what the events of a run say: main loop and trackers.
(driver)

track.py starts it. It belongs to no rank: it outlives them all, sees all attempts, and knows how
the run ended.

    child.py       The main loop: follows events.jsonl, retries, and tells the truth at the end
    kubeflow.py    Kubeflow Trainer: the Trainer Status that `kubectl describe trainjob` shows
    mlflow.py      MLflow: a server, or a database
    tensorboard.py TensorBoard: event files in the run folder
    trackio.py     Trackio: a database of the user, a server, or a Space of Hugging Face
    wandb.py       Weights & Biases: its cloud, a server, or a folder for `wandb sync`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

END_S = 30.0
"""Longest time that a tracker has after the end of a run."""


@dataclass(frozen=True)
class Task:
    """What the process is told on its first line of input."""

    name: str
    """One of config.TRACKERS."""
    folder: str
    """The run folder."""
    project: str
    """The name of the run: runs of one name are compared."""
    settings: Mapping[str, Any]
    """All settings, without the values of secrets."""
    repeats: bool
    """Whether a restart can repeat steps."""
    program: bool
    """script=: its own tracker may write to the same run, so this one opens it only when the
    program reports."""
    begin: int
    """Where the events of this run begin in events.jsonl, in bytes: an earlier one may have had the
    same folder."""
    sweep: str = ""
    """The name of the sweep's folder, if the run is one of its trials: trackers show them as a
    group."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """Of a trial the settings that differ from the other trials'."""

    @property
    def run(self) -> str:
        """The name of the run folder; that of a trial's is only a number."""
        return "-".join(filter(None, (self.sweep, Path(self.folder).name)))

    @property
    def trial(self) -> str:
        """The settings that differ, as a text."""
        return " ".join(f"{name}={value}" for name, value in self.differs.items())


@dataclass
class Ledger:
    """What one tracker has been told: track/NAME.json in the run folder. A run that resumes this
    one goes on there."""

    FOLDER: ClassVar[str] = "track"
    id: str = ""
    """The tracker's own name of the run; empty: it has none yet."""
    told: int = -1
    """The newest step that it has."""

    @classmethod
    def read(cls, folder: Path, name: str) -> Ledger:
        """The ledger in a run folder; an empty one if there is none."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads((folder / cls.FOLDER / f"{name}.json").read_text()))
        return cls()

    def write(self, folder: Path, name: str) -> None:
        """Replace the ledger in a run folder at once; a full disk does not matter now."""
        path = folder / self.FOLDER / f"{name}.json"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(json.dumps(asdict(self)))
            os.replace(path.with_suffix(".new"), path)


class Measured(NamedTuple):
    """Numbers of one moment."""

    t: float
    """Seconds since the epoch."""
    step: int | None
    """None: of the nodes, which know no steps."""
    values: Mapping[str, float]


class Ending(NamedTuple):
    """How the run ended."""

    status: str
    """finished, failed or killed."""
    text: str
    """The culprit, on one line."""


class Tracker(Protocol):
    """One tracker; whatever it raises is tried again. Its constructor takes a Task and the id of a
    run to go on in."""

    id: str
    link: str
    """Where a person finds the run: an address, or what to type."""
    variables: Mapping[str, str]
    """By which a program goes on in the same run."""

    def write(self, rows: Sequence[Measured]) -> None:
        """Write points and system metrics. No step comes twice, but for a call that raised."""

    def page(self, path: Path) -> None:
        """Keep the page of a failure."""

    def close(self, ending: Ending) -> None:
        """Say how the run ended, and wait until all is written."""


def by_full_name(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Settings by their full names, as `optim.lr`."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        inside = (
            by_full_name(value, f"{prefix}{name}.")
            if isinstance(value, Mapping) and value
            else None
        )
        found |= inside if inside is not None else {f"{prefix}{name}": value}
    return found
