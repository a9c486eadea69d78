"""Checkpoints of a model in shards are written while it trains; what strikes meanwhile costs no
whole checkpoint."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.reporting.result import Result
from raydist.state import checkpoint_files
from raydist.worker import context
from tests import faults
from tests.faults import Fault, kill
from tests.leftovers import alive
from tests.programs import Program
from tests.records import read_events

WORDS = ("watch.progress=none", "train.epochs=3", "data.batch_size=8", "optim=adamw", "snapshot.every=1", "seed=5",
         "parallel=fsdp", "scale=1x3", "group=inline", "checkpoint.every=8", "data.global_batch=24")  # fmt: skip
STOPPED, GOES_ON = 4, 12
"""The steps after which the fork server is stopped, and continues: between them a checkpoint is
due."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in which runs are started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def children() -> set[int]:
    """Return the processes of this rank's fork server."""
    server = os.getppid()
    return {int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()}


class Checks:
    """What rank 0 does in the first attempt while its fork server is stopped, which forks the
    writers."""

    def __init__(self, writer: str) -> None:
        self.writer, self.before = writer, set[int]()

    def __call__(self, step: int) -> None:
        if context.rank().rank != 0 or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        if step == STOPPED:
            self.before = children()
            os.kill(os.getppid(), signal.SIGSTOP)
        if step == GOES_ON:
            folder = context.rank().run_dir / "checkpoints"
            assert not folder.exists(), (
                "no process could write for the ranks, which have made further steps"
            )
            os.kill(os.getppid(), signal.SIGCONT)
            if self.writer == "killed":
                while not (new := children() - self.before):
                    time.sleep(0)
                os.kill(new.pop(), signal.SIGKILL)


def training(config: Any, writer: str = "", struck: tuple[Fault, ...] = ()) -> dict[str, Any]:
    checks, strike = Checks(writer), faults.strike

    def struck_and_checked(step: int) -> None:
        checks(step)
        strike(step)

    faults.strike = struck_and_checked
    return faults.training(config, struck=struck)


def job(config: Any) -> dict[str, Any]:
    """For the command."""
    return training(config)


def train(*words: str, writer: str = "", struck: tuple[Fault, ...] = ()) -> Result[Any]:
    return raydist.run(training, *WORDS, *words, writer=writer, struck=struck)


@cache
def unbroken() -> Any:
    """Return the result of a run without a fault."""
    return raydist.run(faults.training, *WORDS, "checkpoint.every=30").values


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a run folder; fail if one is incomplete or a part is
    left."""
    checkpoints = sorted((folder / "checkpoints").iterdir())
    return [checkpoint_files.verify(path).step for path in checkpoints]


def test_the_steps_go_on_while_the_checkpoint_of_a_model_in_shards_is_written(folder: Path) -> None:
    (folder / "own.py").write_text("from tests.scenarios.test_shards_run import job\n")
    run = Program(folder, "job=own.py:job", *WORDS, "checkpoint.keep=9")
    assert run.wait() == 0, run.screen
    assert saved(run.run_dir) == [8, 16, 24, 30]
    assert [each["step"] for each in run.events("saved")] == [8, 16, 24, 30]
    assert run.result()["checkpoint"].endswith("step-00000030")
    first = checkpoint_files.verify(run.run_dir / "checkpoints" / "step-00000008")
    assert (first.sharded, first.meta.world_size, sorted(first.metrics)) == (True, 3, ["loss"])
    assert first.reported["epoch"] == 1


@pytest.mark.parametrize(
    ("writer", "struck"),
    [("", kill(0, GOES_ON)), ("killed", kill(2, 20))],
    ids=str,
)
def test_a_rank_or_a_writer_that_is_killed_meanwhile_leaves_whole_checkpoints_only(
    folder: Path, writer: str, struck: Fault
) -> None:
    done = train("checkpoint.keep=9", writer=writer, struck=(struck,))
    assert done.values == unbroken()
    (end,) = done.restarts
    assert (end.rank, end.how) == (struck.rank, "killed")
    if writer:  # the state was in memory, and the figures of the checkpoint at step 16 are older
        assert not [
            each for each in read_events(done.dir / "events.jsonl") if each["kind"] == "recalled"
        ]
    steps = saved(done.dir)
    assert steps == ([16, 24, 30] if writer else [8, 16, 24, 30])
    lost = [
        text
        for text in done.warnings
        if "the checkpoint of step 8 is not complete, and is dropped" in text
    ]
    assert len(lost) == bool(writer), done.warnings
    assert not [pid for pid in began(done) if alive(pid)]


def test_a_killed_writer_of_a_whole_state_is_a_warning(folder: Path) -> None:
    """Nobody learned that the checkpoint was missing."""
    words = [each for each in WORDS if each != "parallel=fsdp"]
    done = raydist.run(training, *words, "checkpoint.keep=9", writer="killed")
    assert saved(done.dir) == [16, 24, 30]
    (lost,) = [text for text in done.warnings if "a checkpoint was not written" in text]
    assert "killed" in lost


def began(done: Result[Any]) -> list[int]:
    return [each["pid"] for each in read_events(done.dir / "events.jsonl", kind="began")]


def test_without_snapshots_a_restart_continues_from_the_checkpoint_being_written(
    folder: Path,
) -> None:
    done = train("snapshot.every=0", struck=(kill(1, GOES_ON),))
    begun = read_events(done.dir / "events.jsonl", kind="begin")
    assert [each["resumed"] for each in begun if each["rank"] == 0] == [0, 8]
    assert done.values == unbroken()
