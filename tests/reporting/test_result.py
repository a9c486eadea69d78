"""Events and ends -> Result: figures, status, result.json. (driver)"""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.reporting.result import Result, make_result
from raydist.shared import kinds
from raydist.shared.errors import LaunchError, RaydistError, RunFailed, Stopped
from raydist.shared.events import Events, read_events
from raydist.shared.kinds import Event
from raydist.shared.outcome import Attempt, End, EndKind
from tests.records import event
from tests.reporting.folds import fold_figures

T0 = 1_000_000.0


def at(seconds: float, kind: str, **facts: Any) -> Event:
    """Return an event so many seconds after the run began."""
    return event(kind, t=T0 + seconds, **facts)


def report(seconds: float, step: int | None = None, rank: int = 0, **values: Any) -> Event:
    return at(
        seconds, "report", rank=rank, values=values, **({} if step is None else {"step": step})
    )


def a_run() -> list[Event]:
    """Return a run of fit: ten steps of 64 samples, half a second each, after 5 seconds of
    launch."""
    return [
        at(0, "run", name="digits", dir="runs/x"),
        at(1, "phase", name="connect", s=1.0),
        at(2, "phase", name="place", s=0.5),
        at(4, "plan", backend="gloo", world_size=2, slots=[]),
        at(4.5, "begin", rank=0, steps=10),
        *[
            report(5 + step / 2, step=step, loss=1 / step, steps=10, samples=64 * step)
            for step in range(1, 11)
        ],
        report(10.5, step=10, accuracy=0.98),
        at(10.6, "saved", rank=0, step=10, path="runs/x/checkpoints/10", s=0.1),
        at(11, "done", rank=0, spent={"step": 5.0, "evaluate": 0.4, "save": 0.1}, samples=650),
        at(12, "ended", rank=0, how="finished", code=0, signal=0, step=10),
    ]


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return write(tmp_path / "events.jsonl", a_run())


def write(path: Path, events: list[Event]) -> Path:
    with Events(path) as stream:
        for happened in events:
            stream.add(happened)
    return path


def ends(*hows: EndKind) -> list[End]:
    return [
        End(rank, f"host-{rank}", how, T0, type="ValueError" if how == "raised" else "")
        for rank, how in enumerate(hows)
    ]


def test_the_figures_of_a_run() -> None:
    figures = fold_figures(a_run(), now=T0 + 20)
    assert figures.world_size == 2
    assert figures.launch == {"connect": 1.0, "place": 0.5}
    assert figures.metrics == {"loss": 0.1, "steps": 10, "samples": 640, "accuracy": 0.98}
    assert figures.wall_s == 20
    assert figures.step_s == 5.0
    assert figures.goodput == 0.25
    assert figures.throughput == 130  # as the loop itself counted, not by the reports
    assert figures.checkpoint == "runs/x/checkpoints/10"


def test_without_a_clock_the_last_event_ends_the_run() -> None:
    assert fold_figures(a_run()).wall_s == 12


def test_a_loop_of_ones_own_is_measured_from_first_to_last_report() -> None:
    events = [at(0, "run"), *[report(10 + step, step=step, loss=1.0) for step in range(5)]]
    figures = fold_figures(events, now=T0 + 16)
    assert figures.step_s == 4
    assert figures.goodput == 0.25
    assert figures.throughput == 0


def test_throughput_of_a_loop_that_only_reports_samples_counts_the_difference() -> None:
    resumed = [report(step, step=step, samples=100_000 + 50 * step) for step in range(1, 6)]
    assert fold_figures(resumed).throughput == 50


def test_a_fit_that_was_cut_off_is_measured_by_its_reports() -> None:
    events = [
        happened for happened in a_run() if not isinstance(happened, kinds.Done | kinds.Ended)
    ]
    figures = fold_figures(events)
    assert figures.step_s == 4.5
    assert figures.throughput == pytest.approx(128)


def test_an_own_loop_that_counts_nothing_has_a_done_without_spent() -> None:
    events = [
        report(1, step=1),
        report(3, step=2),
        at(4, "done", rank=0),
        at(4, "done", rank=0, spent=None),
    ]
    assert fold_figures(events).step_s == 2


def test_samples_that_are_no_number_are_only_a_metric() -> None:
    events = [
        report(1, step=1, samples="many"),
        report(2, step=2, samples=None),
        report(3, step=3, samples=[1]),
    ]
    assert fold_figures(events).throughput == 0
    assert fold_figures(events).metrics["samples"] == [1]


def test_other_ranks_do_not_count() -> None:
    events = [
        *a_run(),
        report(11, step=11, rank=1, loss=9.9),
        at(11, "done", rank=1, spent={"step": 99.0}, samples=1),
    ]
    assert fold_figures(events).metrics["loss"] == 0.1
    assert fold_figures(events).step_s == 5.0


def test_nothing_at_all_has_figures_too() -> None:
    figures = fold_figures([])
    assert (figures.wall_s, figures.goodput, figures.throughput, figures.metrics) == (
        0.0,
        0.0,
        0.0,
        {},
    )


def test_a_phase_that_comes_twice_is_added_up() -> None:
    assert fold_figures(
        [at(0, "phase", name="rendezvous", s=1.0), at(9, "phase", name="rendezvous", s=0.5)]
    ).launch == {"rendezvous": 1.5}


def test_a_long_stream_is_folded_in_small_memory() -> None:
    def endless() -> Iterator[Event]:
        for step in range(20_000):
            yield report(step, step=step, loss=0.5, samples=step)

    figures = fold_figures(endless())
    assert len(pickle.dumps(figures)) < 5_000
    assert figures.throughput == 1


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1e6))
def test_goodput_is_a_share(times: list[float], end: float) -> None:
    events = [report(seconds, step=step, samples=step) for step, seconds in enumerate(times)]
    figures = fold_figures(events, now=T0 + end)
    assert 0 <= figures.goodput <= 1
    assert figures.wall_s >= 0
    assert figures.throughput >= 0


def test_a_rank_whose_clock_runs_ahead_makes_no_goodput_above_one() -> None:
    assert (
        fold_figures([at(0, "run"), report(1, step=1), report(50, step=2)], now=T0 + 10).goodput
        == 1
    )


def test_a_warning_is_kept_once_with_its_ranks_or_its_number(tmp_path: Path) -> None:
    warnings = [at(1, "warning", text="slow disk", rank=rank) for rank in (2, 0, 1)]
    warnings += [
        at(1, "warning", text="rank 1 waits", rank=1),
        at(1, "warning", text="rank 2 waits", rank=1),
    ]
    events = [
        *warnings,
        at(2, "warning", text="old"),
        at(3, "warning", text="old"),
        at(4, "warning", text="once"),
    ]
    result = make_result(
        tmp_path,
        Attempt(ends=ends("finished")),
        fold_figures(read_events(write(tmp_path / "e", events))),
    )
    assert result.warnings == (
        "slow disk (ranks 0-2)", "rank 1 waits", "rank 2 waits (rank 1)", "old (2 times)", "once",
    )  # fmt: skip


def test_a_finished_run(tmp_path: Path, stream: Path) -> None:
    result = make_result(
        tmp_path,
        Attempt(ends=ends("finished", "finished"), values=(1, 2)),
        fold_figures(read_events(stream)),
        now=T0 + 20,
    )
    assert result.status == "finished"
    assert result.values == (1, 2)
    assert result.world_size == 2
    assert result.goodput == 0.25
    assert result.checkpoint == Path("runs/x/checkpoints/10")
    assert result.failure == ""
    assert result.cause is None
    assert result.exceptions == {}


def test_a_failed_run_has_the_exception_of_each_rank_that_failed(
    tmp_path: Path, stream: Path
) -> None:
    real = ValueError("loss is nan")
    killed = End(1, "host-1", "killed", T0 + 1, signal=9)
    attempt = Attempt(
        ends=[*ends("raised"), killed, End(2, "host-2", "stopped", T0)],
        exceptions={0: real},
        failure="rank 0 on host-0",
    )
    result = make_result(tmp_path, attempt, fold_figures(read_events(stream)))
    assert result.status == "failed"
    assert result.exceptions[0] is real
    assert isinstance(result.exceptions[1], RaydistError)
    assert "SIGKILL" in str(result.exceptions[1])
    assert 2 not in result.exceptions
    assert result.cause is not None
    assert result.cause.rank == 0
    assert result.failure == "rank 0 on host-0"


def test_a_launch_that_failed_says_why(tmp_path: Path, stream: Path) -> None:
    result = make_result(
        tmp_path,
        Attempt(error=LaunchError("no Ray at 10.0.0.1")),
        fold_figures(read_events(stream)),
    )
    assert (result.status, result.failure) == ("failed", "no Ray at 10.0.0.1")
    assert result.world_size == 2  # as planned
    assert result.to_json()["error"] == "LaunchError"


def test_a_stopped_run_is_no_failure(tmp_path: Path, stream: Path) -> None:
    result = make_result(
        tmp_path,
        Attempt(ends=ends("stopped", "raised"), error=Stopped(15)),
        fold_figures(read_events(stream)),
    )
    assert (result.status, result.signal, result.failure) == ("stopped", 15, "")


def test_result_json_is_strict_json_and_says_it_all(tmp_path: Path) -> None:
    events = [
        *a_run(),
        report(12, step=11, loss=math.nan, worst=math.inf, nested=[math.nan], path=Path("x")),
    ]
    attempt = Attempt(
        ends=ends("finished", "raised"), values=(object(), None), failure="rank 1 on host-1"
    )
    folder = tmp_path / "new"
    make_result(
        folder,
        attempt,
        fold_figures(read_events(write(tmp_path / "events.jsonl", events))),
        now=T0 + 20,
    ).save()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    data = json.loads((folder / "result.json").read_text(), parse_constant=refuse)
    assert data["status"] == "failed"
    assert data["dir"] == str(folder)
    assert data["metrics"]["loss"] == "nan"
    assert data["metrics"]["worst"] == "inf"
    assert data["metrics"]["nested"] == ["nan"]
    assert data["metrics"]["path"] == "x"
    assert data["launch"] == {"connect": 1.0, "place": 0.5}
    assert data["goodput"] == 0.25
    assert data["throughput"] == 130
    assert data["checkpoint"] == "runs/x/checkpoints/10"
    assert data["failure"] == "rank 1 on host-1"
    assert data["cause"]["type"] == "ValueError"


def test_result_json_is_whole_or_the_one_before(
    tmp_path: Path, stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that was killed left half of one, which no program can read."""
    attempt = Attempt(ends=ends("finished", "finished"))
    folder = tmp_path / "run"
    result = make_result(folder, attempt, fold_figures(read_events(stream)), now=T0 + 20)
    result.save()
    before = (folder / "result.json").read_bytes()

    class Killed(BaseException):
        """The driver is killed while it writes."""

    def half(path: Path, data: str | bytes, *_: Any, **more: Any) -> None:
        with path.open("w" if isinstance(data, str) else "wb") as file:
            file.write(data[:10])
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        patched.setattr(Path, "write_bytes", half)
        with pytest.raises(Killed):
            result.save()
    assert (folder / "result.json").read_bytes() == before

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result.save()
    assert [*folder.iterdir()] == []


def test_the_json_can_be_the_last_event(tmp_path: Path, stream: Path) -> None:
    result = make_result(
        tmp_path, Attempt(ends=ends("finished")), fold_figures(read_events(stream))
    )
    with Events(stream) as events:
        events.add(kinds.Result(**result.to_json()))
    assert json.loads(stream.read_text().splitlines()[-1])["kind"] == "result"


def test_a_failed_result_travels(tmp_path: Path, stream: Path) -> None:
    result: Result[int] = make_result(
        tmp_path, Attempt(ends=ends("raised"), error=None), fold_figures(read_events(stream))
    )
    error = RunFailed(result.failure, result=result, exceptions=dict(result.exceptions))
    back = pickle.loads(pickle.dumps(error))
    assert back.result.failure == result.failure
    assert str(back.exceptions[0]) == str(result.exceptions[0])
