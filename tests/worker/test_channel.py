from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from raydist.messages.rank import HoldRank, PrepareProfile, ReleaseRank
from raydist.messages.wire import encode
from raydist.shared import kinds
from raydist.shared.kinds import EventJson
from raydist.worker import context
from raydist.worker.channel import Channel
from raydist.worker.heartbeat import BEAT_PAGE, PHASES, read_beat, read_compute_time, read_pauses
from tests.records import event


class Line:
    """A channel, with the agent's end of its socket and heartbeat page."""

    def __init__(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path / "beat", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, BEAT_PAGE)
        self.page = mmap.mmap(descriptor, BEAT_PAGE)
        self.socket, its = socket.socketpair()
        self.socket.settimeout(10)
        self.lines = self.socket.makefile()
        self.channel = Channel(its, descriptor)

    def receive(self) -> EventJson:
        message: EventJson = json.loads(self.lines.readline())
        return message


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    result = Line(tmp_path)
    yield result
    result.channel.shut()


def test_the_heartbeat_page_is_empty_before_the_first_beat(line: Line) -> None:
    assert read_beat(line.page) == (0, "", 0.0)


def test_a_beat_is_in_the_page_at_once(line: Line) -> None:
    line.channel.beat(12, PHASES.index("backward"))
    step, phase, at = read_beat(line.page)
    assert (step, phase) == (12, "backward")
    assert at > 1.7e9


def test_the_page_has_the_pauses_beside_the_compute_time(line: Line) -> None:
    assert read_pauses(line.page) == 0
    line.channel.note_compute_time(24, 0.01, 0.02)
    line.channel.note_pauses(0.25)
    assert (read_compute_time(line.page), read_pauses(line.page)) == ((24, 0.01, 0.02), 0.25)


def test_reports_are_sent_in_order(line: Line) -> None:
    for step in range(100):
        line.channel.emit(event("report", step=step))
    assert [line.receive()["step"] for _ in range(100)] == list(range(100))


def test_other_events_are_sent_at_once_after_earlier_reports(line: Line) -> None:
    line.channel.emit(event("report", step=1))
    line.channel.emit(event("raised", type="ValueError"))
    line.socket.setblocking(False)  # both are in the socket already
    assert [line.receive()["kind"] for _ in range(2)] == ["report", "raised"]


def test_an_agent_that_is_gone_raises_no_error(line: Line) -> None:
    line.lines.close()
    line.socket.close()
    for _ in range(3):
        line.channel.emit(event("joined"))


def test_a_rank_that_holds_continues_when_it_is_released(line: Line) -> None:
    context.enter(None)  # a new one
    request = context.current().stop_request
    request.begin(4)
    line.socket.sendall(encode(HoldRank()) + b"\n")
    assert line.receive()["step"] == 5
    steps: list[int] = []

    def train() -> None:
        for step in range(5, 10):
            assert not request.due(step)
            steps.append(step)

    rank = threading.Thread(target=train, daemon=True)
    rank.start()
    line.socket.sendall(encode(ReleaseRank()) + b"\n")
    rank.join(10)
    assert steps == [*range(5, 10)]


def note(line: Line) -> int:
    line.channel.emit(kinds.Warning(text="x" * 60_000))
    return 1


def test_a_report_never_waits_for_the_agent(line: Line) -> None:
    full = threading.Thread(target=lambda: [note(line) for _ in range(40)])
    full.daemon = True
    full.start()  # fills the socket, which is not read, and blocks
    full.join(timeout=0.5)
    assert full.is_alive()
    for step in range(1000):
        line.channel.emit(event("report", step=step))


class BrokenProfiler:
    def prepare(self, *_: object) -> None:
        raise OSError("the disk is full")


def test_a_message_that_fails_does_not_end_the_channel(line: Line) -> None:
    line.channel.profiler = cast("Any", BrokenProfiler())
    line.socket.sendall(encode(PrepareProfile("one", False)) + b"\n")
    assert line.receive() | {"t": 0} == {
        "t": 0,
        "kind": "warning",
        "text": "rank 0 could not handle a message of its agent: OSError: the disk is full",
    }
    line.channel.profiler = None
    line.socket.sendall(encode(PrepareProfile("two", False)) + b"\n")
    assert "the rank has not imported torch" in line.lines.readline()


def test_a_report_that_json_can_not_hold_is_a_warning_and_the_next_one_arrives(
    line: Line,
) -> None:
    for step, values in ((1, {"confusion": {(0, 1): 5}}), (2, {"loss": 1.0})):
        line.channel.emit(kinds.Report(rank=1, step=step, values=values))
    first, second = line.receive(), line.receive()
    assert (first["kind"], first["rank"]) == ("warning", 1)
    assert first["text"].startswith("an event of the kind report was not sent: keys must be str")
    assert (second["kind"], second["step"]) == ("report", 2)


def test_a_forked_child_sends_nothing(line: Line) -> None:
    pid = os.fork()
    if pid == 0:
        line.channel.emit(kinds.Joined(rank=0, pid=1))
        os._exit(0)
    os.waitpid(pid, 0)
    line.channel.emit(kinds.Joined(rank=0, pid=2))
    assert line.receive()["pid"] == 2
