"""`train.check_resume=true`, as a person types it: one line on the steps that were repeated."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from raydist.shared.kinds import EventJson
from tests.conftest import ROOT
from tests.programs import Program

WORDS = (
    f"job={ROOT}/tests/scripts/repeats.py",
    "name=repeats",
    "group=inline",
    "train.steps=14",
    "train.check_resume=true",
    "optim=sgd",
    "data.global_batch=16",
    "seed=5",
    "watch.progress=lines",
)


def start(folder: Path, *words: str) -> Program:
    size = () if any(word.startswith("scale=") for word in words) else ("scale=1x2",)
    return Program(folder, *WORDS, *size, *words)


def finished(program: Program) -> EventJson:
    """Return the only comparison of a run, once it has finished."""
    assert program.wait(300) == 0, program.screen
    (checked,) = program.events("checked")
    return checked


def reported(program: Program, step: int) -> bool:
    """Return whether rank 0's report of a step is recorded."""
    return any((each["rank"], each["step"]) == (0, step) for each in program.events("report"))


def warnings(program: Program) -> list[str]:
    return [text for text in program.result()["warnings"] if "did not resume exactly" in text]


def equal(program: Program, checked: EventJson) -> None:
    """Assert that the ninth and the tenth step were repeated, to the bit, and that it is shown."""
    assert checked["text"].endswith("to the bit, and the samples")
    assert (checked["resumed"], checked["steps"], checked.get("differs")) == (8, 2, None)
    assert f"check {checked['text']}\n" in program.screen
    assert warnings(program) == []


@pytest.mark.parametrize(
    "words",
    [("job.args.stream=true",), ("restart.in_place=auto",)],
    ids=["stream", "in place"],
)
def test_a_restart_repeats_steps_to_the_bit(tmp_path: Path, words: tuple[str, ...]) -> None:
    """And under each division of the model: test_all_together."""
    program = start(tmp_path, "job.args.end=kill", *words)
    equal(program, finished(program))
    (back,) = program.events("restarted")
    assert back["repeated"] == 2


def test_a_loss_that_depends_on_the_time_is_found(tmp_path: Path) -> None:
    program = start(tmp_path, "job.args.end=kill", "job.args.noise=true")
    checked = finished(program)
    assert (checked["resumed"], checked["differs"], checked["what"]) == (8, 9, "loss")
    assert len(warnings(program)) == 1
    assert "warning: the training did not resume exactly: the loss of step 9" in program.screen


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training in shards that Ctrl-C has stopped."""
    program = start(tmp_path_factory.mktemp("stopped"), "job.args.end=wait", "parallel=fsdp")
    program.wait_for_step(10, 300)
    # Rank 0's reports are those that are compared; rank 1's may come first.
    program.wait_until(lambda: reported(program, 10), "step 10 of rank 0", 300)
    program.signal(signal.SIGINT)
    assert program.wait(300) == 130
    assert program.events("checked") == []
    return program.run_dir


def test_a_resumed_run_repeats_steps_to_the_bit(tmp_path: Path, stopped: Path) -> None:
    program = start(tmp_path, f"resume={stopped}", "parallel=fsdp")
    equal(program, finished(program))


def test_another_order_of_the_samples_is_found(tmp_path: Path, stopped: Path) -> None:
    program = start(tmp_path, f"resume={stopped}", "parallel=fsdp", "seed=6")
    checked = finished(program)
    assert (checked["resumed"], checked["differs"], checked["what"]) == (8, 9, "samples")
    assert len(warnings(program)) == 1


def test_the_last_step_that_was_recorded_leaves_nothing_to_compare(tmp_path: Path) -> None:
    program = start(tmp_path, "job.args.end=kill", "snapshot.every=1")
    checked = finished(program)
    assert (checked["resumed"], checked["steps"], checked.get("differs")) == (10, 0, None)
    assert warnings(program) == []
