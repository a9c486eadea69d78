"""The storage of a run: where the events of the run lie that a checkpoint is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.launch.run_storage import events_of_checkpoint
from raydist.settings.config import Job
from raydist.state.object_store import parse_path
from tests.records import event, line

EVENTS = [event("wait", t=1, text="a"), event("wait", t=2, text="b")]
WRITTEN = "".join(map(line, EVENTS))


@pytest.mark.parametrize(
    "inside", ["checkpoints/step-00000004", "training-2/checkpoints/fit-3/step-00000004"]
)
def test_the_events_of_a_run_folder(tmp_path: Path, inside: str) -> None:
    (tmp_path / "events.jsonl").write_text(WRITTEN + '{"t": 3, "ki')
    assert list(events_of_checkpoint(str(tmp_path / inside), Job(dir="runs/other"))) == EVENTS


def test_the_events_in_a_store(tmp_path: Path) -> None:
    run = parse_path(f"memory://bucket/{tmp_path.name}/mine")
    (run / "events.jsonl").write_text(WRITTEN)
    assert (
        list(events_of_checkpoint(f"{run}/checkpoints/step-00000004", Job(dir="runs/other")))
        == EVENTS
    )


def test_the_records_of_this_very_run_are_not_in_its_storage_yet(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(WRITTEN)
    job = Job(dir=str(tmp_path), name="mine", storage=str(tmp_path / "store"))
    path = tmp_path / "store" / "mine" / tmp_path.name / "checkpoints" / "step-00000004"
    assert list(events_of_checkpoint(str(path), job)) == EVENTS


@pytest.mark.parametrize("path", ["checkpoints/step-00000004", "model"])
def test_a_folder_without_events(tmp_path: Path, path: str) -> None:
    assert list(events_of_checkpoint(str(tmp_path / path), Job(dir="runs/other"))) == []
