"""The storage of a run: where the events of the run lie that a checkpoint is of."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from raydist.launch.run_storage import events_of_checkpoint, reserve_run, upload_records
from raydist.settings.config import Job, Sweep
from raydist.shared.errors import ConfigError
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from raydist.state.object_store import CLAIM, parse_path
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


def test_records_that_cannot_be_copied_are_a_warning_and_no_half_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "mine"
    job = Job(dir=str(run), name="mine", storage=str(tmp_path / "store"))
    warnings: list[Event] = []

    def full(file: Path, to: Path) -> None:
        to.write_bytes(file.read_bytes()[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Events(run / "events.jsonl", (warnings.append,)) as events:
        (run / "result.json").write_text("{}")
        monkeypatch.setattr(shutil, "copyfile", full)
        upload_records(job, events)
    assert [each.kind for each in warnings] == ["warning"]
    assert [each for each in (tmp_path / "store").rglob("*") if each.is_file()] == []


@pytest.mark.parametrize("path", ["checkpoints/step-00000004", "model"])
def test_a_folder_without_events(tmp_path: Path, path: str) -> None:
    assert list(events_of_checkpoint(str(tmp_path / path), Job(dir="runs/other"))) == []


@pytest.mark.parametrize("at_once", [False, True])
def test_two_runs_of_one_second_do_not_share_a_folder_of_the_storage(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines named their runs by the same second: each pruned and resumed from the
    checkpoints of the other."""
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    if at_once:  # each looks before the other has written
        there = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: path.name != CLAIM and there(path))

    def reserve(machine: str, run: str, **more: Any) -> None:
        folder = tmp_path / machine / "digits" / run
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "events.jsonl").open("a") as events:  # as a run does before
            events.write(line(event("run", name="digits", dir=str(folder))))
        reserve_run(Job(name="digits", dir=str(folder), storage=str(tmp_path / "store"), **more))

    reserve("one", now)
    with pytest.raises(ConfigError, match="in the same second") as refused:
        reserve("other", now)
    assert refused.value.key == "storage"
    assert refused.value.suggestion == f"hydra.run.dir={tmp_path}/other/digits/{now}-2"
    reserve("other", f"{now}-2")
    reserve("one", now)  # it failed at once, and is typed again with resume=auto
    # These are the folders of earlier runs, or of the trial that is run again.
    for _ in range(2):
        reserve("one", "mine")
        reserve("one", "2026-01-31_12-00-00")
        reserve("one", now, sweep=Sweep(dir=str(tmp_path / "sweep")))
