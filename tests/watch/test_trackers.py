"""The process of a tracker: which run it continues, and that it learns how the run ended."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.reporting.points import Position
from raydist.settings.config import Job
from raydist.shared.events import Events
from raydist.watch import track
from raydist.watch.trackers import Ending, Ledger, Task
from raydist.watch.trackers.child import Follower
from tests.records import event, line

OLD = Ledger(id="1", newest=Position(2, 9), sent_kinds=["failed"])


def test_a_new_training_in_the_folder_of_a_finished_one_has_its_own_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `resume=auto`, where nothing is resumed. It lost its curves, and was never said to have
    failed."""
    ended = SimpleNamespace(stdout=io.StringIO(""), stdin=io.StringIO(), poll=lambda: 0)
    monkeypatch.setattr(track, "start", lambda task, job: ended)
    job = Job(dir=str(tmp_path), resume="auto")
    for before, found in ((None, Ledger()), (tmp_path, OLD)):
        OLD.write(tmp_path, "mlflow")
        with Events(tmp_path / "events.jsonl") as events:
            track.TrackerProcess("mlflow", job, events, before)
        assert Ledger.read(tmp_path, "mlflow") == found


class Refusing:
    """A tracker whose store takes no page."""

    def __init__(self) -> None:
        self.ends: list[Ending] = []

    def write(self, rows: object) -> None: ...

    def page(self, file: Path) -> None:
        raise PermissionError("no such bucket")

    def close(self, ending: Ending) -> None:
        self.ends.append(ending)


def test_a_tracker_that_refuses_a_page_learns_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = [event("plan", backend="gloo", world_size=1, slots=[]), event("result", status="failed", failure="x")]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(map(line, happened)))
    (tmp_path / "blame-1.txt").write_text("rank 0")
    life: Any = SimpleNamespace(over=threading.Event(), called_at=0.0)
    task = Task("mlflow", str(tmp_path), "digits", {}, False, False, 0)
    tracker, said = Refusing(), list[Any]()
    follower = Follower(task, lambda **facts: said.append(facts), life)
    monkeypatch.setattr(follower, "_open", lambda: tracker)
    follower.run()
    assert tracker.ends == [Ending("failed", "x")]
    assert "no such bucket" in said[0]["warning"]
