"""The driver's side of a command's connection: when it ends, and what is said of an error."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest

from raydist.launch.changes import Changes
from raydist.messages.operate import ListRanks, Refused, StopRun, TextReply
from raydist.shared.errors import Stopped
from raydist.shared.events import Events
from raydist.watch.operate import answers, server
from raydist.watch.operate.answers import OperatedRun
from raydist.watch.operate.connection import CommandLink, read_address


class Recorded:
    """A stopper that only counts."""

    ends_at_once = True

    def __init__(self) -> None:
        self.stops: list[Stopped] = []

    def stop(self, why: Stopped) -> None:
        self.stops.append(why)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OperatedRun]:
    with Events(tmp_path / "events.jsonl") as events:
        nothing: Any = None
        stopper: Any = Recorded()
        yield OperatedRun(tmp_path, nothing, events, "", stopper, Changes(), True)


def connected(folder: Path) -> CommandLink:
    address = read_address(folder)
    assert address is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{address.socket}")
    return CommandLink(sock)


def test_a_stop_lasts_until_the_run_has_written_its_last_state(
    run: OperatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that takes longer than a command may take for another request."""
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    with server.OperateServer(run):
        command = connected(run.folder)
        command.send(StopRun(False))
        assert isinstance(command.receive(10), TextReply)
        with pytest.raises(TimeoutError):
            command.receive(0.5)
    with command:
        assert command.receive(20) is None
    assert len(run.stopper.stops) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (FutureTimeoutError(), "an agent has not answered within 60 s"),
    ],
)
def test_an_error_of_the_answer_is_not_taken_for_the_end_of_the_run(
    run: OperatedRun, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(answers, "rank_rows", fail)
    with server.OperateServer(run), connected(run.folder) as command:
        command.send(ListRanks())
        reply = command.receive(10)
        assert isinstance(reply, Refused)
        assert text in reply.text
