from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raydist
from raydist.shared.errors import RaydistError
from raydist.worker import context
from raydist.worker.context import Context, Rank
from raydist.worker.heartbeat import PHASES
from tests.records import Seen


@pytest.fixture
def events() -> Iterator[Seen]:
    """A context of rank 1 whose events land in a list."""
    events = Seen()
    beats: list[tuple[int, int]] = []
    here = Context(Rank(rank=1, world_size=2), emit=events, beat=lambda *beat: beats.append(beat))
    context.enter(here)
    seen_beats = beats
    here.beats = seen_beats  # type: ignore[attr-defined]
    yield events
    context.enter(None)


def test_of_a_long_exception_the_beginning_and_the_end_are_told(events: Seen) -> None:
    """One of 32 MB ended the connection to the agent: a failure without a type or a message."""
    facts = context.exception_facts(ValueError("first" + "x" * (1 << 20) + "last"))
    for text in (facts["message"], facts["traceback"]):
        assert len(text) < context.MAX_TEXT + 100
        assert text.rstrip().endswith("last")
    assert facts["message"].startswith("first")
    assert context.exception_facts(ValueError("short"))["message"] == "short"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(None, None), (0, None), (256, None), (3, 3), (-1, 255), (True, 1), ("no", 0), ("", 0)],
)
@pytest.mark.usefixtures("events")
def test_an_exit_is_read_as_by_python(code: Any, wanted: int | None) -> None:
    """0: a failure without a number."""
    event = context.exit_event(SystemExit(code))
    assert (event and event.code) == wanted


def test_a_rank_is_read_from_torchruns_variables() -> None:
    env = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
    }
    rank = Rank.from_env({**env, "RAYDIST_RUN_DIR": "/runs/x"})
    assert rank == Rank(5, 1, 2, 8, 2, Path("/runs/x"))


def test_without_variables_it_is_rank_0_of_1() -> None:
    assert Rank.from_env({}) == Rank(0, 0, 0, 1, 1, Path("runs/here"))


def test_the_device_of_a_job_without_gpus_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Rank().device == torch.device("cpu")


def test_a_rank_whose_gpus_torch_does_not_find_fails_rather_than_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert Rank().device == torch.device("cpu")  # under torchrun it is the user's own affair
    monkeypatch.setenv("RAYDIST_SCRATCH", "/tmp/node")
    with pytest.raises(
        RaydistError, match="finds no GPU, and this rank has CUDA_VISIBLE_DEVICES=2,3: install"
    ):
        _ = Rank().device


@pytest.mark.parametrize(
    ("local_rank", "ranks", "gpus", "index"),
    [(0, 2, 2, 0), (1, 2, 2, 1), (1, 2, 4, 1), (3, 4, 2, 1), (1, 2, 1, 0)],
)
def test_the_device_is_that_of_the_local_rank_as_torch_takes_it(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, ranks: int, gpus: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Rank(local_rank=local_rank, local_world_size=ranks).device == torch.device("cuda", index)


def test_report_emits_step_and_values_and_reads_tensors(events: Seen) -> None:
    raydist.report(step=7, loss=torch.tensor(0.5), note="x")
    (happened,) = events
    assert (happened["kind"], happened["rank"], happened["step"]) == ("report", 1, 7)
    assert happened["values"] == {"loss": 0.5, "note": "x"}
    assert context.current().step == 7
    assert context.current().beats == [(7, PHASES.index("end"))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_a_step_may_be_any_integer(events: Seen, step: Any) -> None:
    raydist.report(step=step, loss=1.0)
    assert json.loads(json.dumps(events))[0]["step"] == 3


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (3.5, TypeError, r"report\(step=3.5\): .* must be an integer; type step=int"),
        ("3", TypeError, r"report\(step='3'\)"),
        (np.float32(3), TypeError, "must be an integer"),
        (torch.tensor(3.0), TypeError, "must be an integer"),
        (-1, ValueError, r"report\(step=-1\)"),
        (2**70, ValueError, r"from 0 to 2\*\*63 - 1"),
    ],
)
def test_a_step_that_is_no_count_is_refused_where_it_is_reported(
    events: Seen, step: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        raydist.report(step=step, loss=1.0)
    assert events == []


def test_an_integer_that_no_float_holds_is_reported_as_infinite(events: Seen) -> None:
    raydist.report(step=1, huge=10**400, low=-(10**400), large=2**70, yes=True)
    assert events[0]["values"] == {"huge": math.inf, "low": -math.inf, "large": 2**70, "yes": True}


def test_a_loop_that_counts_its_steps_anew_is_told_once() -> None:
    seen = Seen()
    context.enter(Context(Rank(), emit=seen, beat=lambda step, phase: None))
    for step in [1, 2, 2, 3, 1, 2, 3, 1]:  # 2: an evaluation adds to a step
        raydist.report(step=step)
    context.enter(None)
    (warned,) = [happened for happened in seen if happened["kind"] == "warning"]
    assert "step 1 was reported after step 3" in warned["text"]


def test_report_without_a_step_keeps_the_step(events: Seen) -> None:
    raydist.report(step=7)
    raydist.report(accuracy=0.9)
    assert "step" not in events[-1]
    assert context.current().step == 7


def test_phase_beats_with_the_step_of_the_last_report(events: Seen) -> None:
    raydist.report(step=3)
    context.phase("backward")
    assert context.current().beats[-1] == (3, PHASES.index("backward"))  # type: ignore[attr-defined]


def test_outside_a_run_rank_0_prints_and_others_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, expected in (("0", "step 4 · loss 0.25\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        context.enter(None)
        raydist.report(step=4, loss=0.25)
        assert capsys.readouterr().out == expected
    context.enter(None)
