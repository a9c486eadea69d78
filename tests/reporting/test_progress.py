"""Reports -> how far, how fast, how long. (driver)"""

from __future__ import annotations

from typing import Any

import pytest

from raydist.reporting.progress import Progress, duration, number_text, rate_text
from raydist.shared import kinds
from tests.records import event


def report(t: float, step: int | None = None, **values: Any) -> kinds.Report:
    return kinds.Report(t=t, rank=0, step=step, values=values)


def after(*reports: kinds.Report) -> Progress:
    progress = Progress()
    for one in reports:
        progress.read(one)
    return progress


def test_a_fit_tells_everything() -> None:
    lines = [
        report(t, step=t, steps=100, epoch=1, epochs=5, samples=64 * t, loss=1 / t, lr=0.1)
        for t in range(1, 11)
    ]
    progress = after(*lines)
    assert progress.position() == ["epoch 1/5", "step 10/100"]
    assert progress.health() == ["loss 0.1", "64 samples/s"]
    assert progress.time_left() == ["1:30 left"]


def test_a_loop_of_ones_own_tells_step_and_loss_so_no_end_is_known() -> None:
    progress = after(*[report(t / 10, step=t, loss=0.5) for t in range(21)])
    assert progress.position() == ["step 20"]
    assert progress.health() == ["loss 0.5", "10 steps/s"]
    assert progress.time_left() == []


def test_a_loop_without_a_loss_shows_what_it_reports() -> None:
    assert after(report(0, step=1, reward=1.5, length=200, more=1)).health() == [
        "reward 1.5",
        "length 200",
    ]


def test_a_report_without_a_step_is_shown_too() -> None:
    progress = after(report(0, loss=0.25))
    assert progress.position() == []
    assert progress.health() == ["loss 0.25"]


def test_begin_may_tell_the_end_that_reports_do_not() -> None:
    progress = Progress()
    progress.read(kinds.Begin(t=0, rank=0, steps=30, epochs=3, resumed=10))
    assert progress.read(report(0, step=11, loss=1.0)) == "first"
    progress.read(report(1, step=12, loss=1.0))
    assert progress.position() == ["step 12/30"]
    assert progress.time_left() == ["0:18 left"]


def test_at_the_end_no_time_is_left() -> None:
    assert after(report(1, step=1, steps=2), report(2, step=2, steps=2)).time_left() == []
    assert after(report(1, step=1, steps=2), report(2, step=3, steps=2)).time_left() == []


def test_the_moments_of_a_run() -> None:
    progress = Progress()
    reports = [report(t, step=t, steps=3, loss=1.0) for t in (1, 2, 3)]
    assert [progress.read(one) for one in reports] == ["first", "step", "last"]
    assert progress.read(report(4, step=3, accuracy=0.5)) == "evaluation"
    assert progress.evaluation() == ["accuracy 0.5"]
    assert progress.health()[0] == "loss 1"


def test_a_loop_that_speaks_twice_at_each_step_is_not_evaluating() -> None:
    progress = Progress()
    moments = [
        progress.read(report(t, step=t, **{name: 1.0}))
        for t in range(1, 6)
        for name in ("loss", "lr")
    ]
    assert moments.count("evaluation") == 1
    assert progress.values == {"loss": 1.0, "lr": 1.0}


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    slow = [report(t, step=t, loss=1.0) for t in range(60)]
    fast = [report(60 + t / 10, step=60 + t, loss=1.0) for t in range(400)]
    assert after(*slow, *fast).rates()[0] == pytest.approx(10, rel=0.02)


def test_a_run_that_goes_back_to_a_snapshot_forgets_its_rate() -> None:
    before = [report(t, step=t, loss=1.0) for t in range(50)]
    progress = after(*before, report(60, step=40, loss=1.0))
    assert progress.rates() == (0.0, 0.0)
    assert progress.position() == ["step 40"]


@pytest.mark.parametrize("again", ["restart", "regroup", "pause", "begin"])
def test_an_attempt_that_repeats_the_last_step_is_not_evaluating(again: str) -> None:
    progress = after(report(1, step=4, loss=1.0), report(2, step=5, loss=0.5))
    progress.read(event(again, t=3, rank=0) if again == "begin" else event(again, t=3))
    assert progress.read(report(4, step=5, loss=0.5)) == "first"
    assert progress.evaluation() == []
    assert progress.read(report(5, step=5, accuracy=0.5)) == "evaluation"


def test_a_clock_that_was_set_back_does_no_harm() -> None:
    progress = after(
        report(100, step=1, steps=9), report(101, step=2, steps=9), report(50, step=3, steps=9)
    )
    assert progress.position() == ["step 3/9"]
    assert all(rate >= 0 for rate in progress.rates())


def test_few_points_are_kept_however_many_reports_come() -> None:
    progress = after(*[report(t / 1000, step=t, loss=1.0) for t in range(50_000)])
    assert len(progress._marks) <= 130


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (725, "12:05"), (11045, "3:04:05")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, ""),
        (-1, ""),
        (0.0312, "0.0312 steps/s"),
        (12.34, "12.3 steps/s"),
        (1234.5, "1,234 steps/s"),
    ],
)
def test_rates(rate: float, text: str) -> None:
    assert rate_text(rate, "steps") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (3, "3"), (float("nan"), "nan"), ("x" * 99, "x" * 40), (None, "None")],
)
def test_values(value: Any, text: str) -> None:
    assert number_text(value) == text
