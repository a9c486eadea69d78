"""What ranks print, as lines on the screen."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from raydist.reporting.console import Console
from raydist.reporting.output import LONG, Output
from raydist.settings.config import Watch
from raydist.shared import kinds
from raydist.shared.events import Events
from tests.records import read_events


def test_lines_are_whole_however_they_come() -> None:
    output = Output("all")
    assert list(output.lines(0, b"one\ntw")) == ["[0] one"]
    assert list(output.lines(1, b"other\n")) == ["[1] other"]
    assert list(output.lines(0, b"o\n\nthree")) == ["[0] two", "[0] "]
    assert list(output.rest()) == ["[0] three"]
    assert list(output.rest()) == []


def test_letters_may_be_cut_in_two_and_bytes_be_none() -> None:
    output = Output("all")
    first, second = "é\n".encode()[:1], "é\n".encode()[1:]
    assert list(output.lines(0, first)) == []
    assert list(output.lines(0, second)) == ["[0] é"]
    assert list(output.lines(0, b"\xff\n")) == [r"[0] \xff"]


def test_of_a_bar_the_last_state_and_of_a_long_line_the_beginning() -> None:
    output = Output("all")
    assert list(output.lines(0, b" 10%\r 50%\r100%\r\n")) == ["[0] 100%"]
    assert list(output.lines(0, b"x" * 5000 + b"\n")) == ["[0] " + "x" * LONG + " …"]


def test_a_bar_that_writes_for_hours_costs_no_more_from_chunk_to_chunk() -> None:
    """All that it wrote was joined and split anew for each chunk: hours of a bar took all of the
    driver's time."""
    output = Output("all")
    for percent in range(20_000):
        assert list(output.lines(0, f"\r{percent:6} it".encode())) == []
    assert len(output._unfinished_lines[0]) < 20
    assert list(output.lines(0, b" done\r")) == []
    assert list(output.lines(0, b"\nnext")) == ["[0]  19999 it done"]
    assert list(output.lines(0, b"x" * 3000)) == []
    assert list(output.lines(0, b"y\n")) == ["[0] next" + "x" * (LONG - 4) + " …"]


@pytest.mark.parametrize(
    ("shown", "seen"), [("all", [0, 1, 2]), ("none", []), ("auto", []), ("0,2", [0, 2])]
)
def test_only_the_ranks_that_were_asked_for(shown: str, seen: list[int]) -> None:
    output = Output(shown)
    assert [rank for rank in range(3) if list(output.lines(rank, b"here\n"))] == seen


def test_the_console_shows_it_and_the_stream_of_events_has_it_not(tmp_path: Path) -> None:
    screen = io.StringIO()
    with Console(Watch(progress="none", output="all"), screen) as console:
        with Events(tmp_path / "events.jsonl", (console,)) as events:
            events.show(1, b"hello\nbye")
            events.show(0, b"")
            events.add(
                kinds.Result(
                    status="finished",
                    dir="there",
                    wall_s=1.0,
                    launch={},
                    metrics={},
                    world_size=2,
                )
            )
        assert [each["kind"] for each in read_events(tmp_path / "events.jsonl")] == ["result"]
    assert screen.getvalue().splitlines()[:2] == ["[1] hello", "[1] bye"]
