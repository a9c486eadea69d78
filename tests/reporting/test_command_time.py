"""The parts of a command's wall time."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from raydist.reporting.command_time import process_began, split
from raydist.shared.kinds import Event
from tests.records import event


def at(t: float, kind: str, **facts: Any) -> Event:
    return event(kind, t=t, **facts)


RUN = [
    at(101.0, "run"),
    at(101.5, "phase", name="actors", s=0.4),
    at(102.0, "phase", name="warm-up", s=0.5),
    at(102.25, "phase", name="rendezvous", s=0.25),
    at(103.0, "ended", rank=1),
    at(103.5, "ended", rank=0),
    at(103.75, "result"),
]


@pytest.mark.parametrize(
    ("events", "parts"),
    [
        (RUN, {"python": 0.5, "settings": 0.5, "launch": 1.25, "ranks": 1.25, "records": 0.25, "exit": 0.25}),
        ([*RUN[:3], RUN[5]], {"python": 0.5, "settings": 0.5, "launch": 1.0, "ranks": 1.5, "exit": 0.5}),
        ([RUN[0], at(102.0, "result")], {"python": 0.5, "settings": 0.5, "records": 1.0, "exit": 2.0}),
        ([], {"python": 0.5, "exit": 3.5}),
    ],
    ids=["whole", "no rendezvous", "no launch", "no run"],
)  # fmt: skip
def test_the_parts_are_the_whole(events: list[Event], parts: dict[str, float]) -> None:
    shares = split(events, 100.0, 100.5, 104.0)
    assert dict(shares) == pytest.approx(parts)
    assert sum(seconds for _, seconds in shares) == pytest.approx(4.0)


def test_a_clock_that_went_back_makes_no_negative_part() -> None:
    parts = split([at(90.0, "run"), at(103.0, "result")], 100.0, 100.5, 104.0)
    assert dict(parts) == pytest.approx({"python": 0.5, "settings": 0, "records": 2.5, "exit": 1.0})


def test_when_a_process_was_started() -> None:
    code = f"from {process_began.__module__} import process_began; print(process_began())"
    for _ in range(3):  # the parts of a second differ
        before = time.time()
        started = float(
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
        )
        assert before - 0.02 <= started <= time.time()  # in hundredths
        time.sleep(0.3)
