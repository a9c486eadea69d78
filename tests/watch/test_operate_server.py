"""The driver's side of a command's connection: when it ends, and what is said of an error."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest

from raydist.launch.changes import Changes
from raydist.messages.operate import ListRanks, Refused, StopRun, TextReply
from raydist.shared import kinds
from raydist.shared.errors import LaunchError, Stopped
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
    monkeypatch.setattr(server, "AGAIN_S", 0.05)
    with server.OperateServer(run):
        command = connected(run.folder)
        command.send(StopRun(False))
        assert isinstance(command.receive(10), TextReply)
        with pytest.raises(TimeoutError):
            command.receive(0.5)
    with command:
        assert command.receive(20) is None
    assert len(run.stopper.stops) == 1  # type: ignore[union-attr]


def test_a_command_may_be_suspended_between_two_requests(
    run: OperatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`raydist ranks --follow` said that the run had ended, after Ctrl-Z and fg."""
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    monkeypatch.setattr(server, "answer", lambda run, request, link: link.send(TextReply(["here"])))
    with server.OperateServer(run), connected(run.folder) as command:
        for _ in range(2):
            command.send(ListRanks())
            assert isinstance(command.receive(10), TextReply)
            time.sleep(0.3)


NOT_WRITTEN = [
    "a checkpoint could not be written: OSError: [Errno 28] No space left on device",
    "a checkpoint was not written: its process was killed, or could not be started (see …)",
    "host1: a checkpoint could not be written: [Errno 28] No space left on device",
    "the checkpoint of step 7 could not be written: OSError: [Errno 30] Read-only file system",
]
ELSEWHERE = [
    "no more snapshots: 3 GiB do not fit; a restart continues from a checkpoint",
    "the checkpoint of step 7 could not be written to s3://b (no answer): it is in /run on host1",
    "old checkpoints in s3://b could not be removed: access denied",
]


@pytest.mark.parametrize("text", NOT_WRITTEN + ELSEWHERE)
def test_save_fails_only_if_its_checkpoint_is_not_written(text: str, run: OperatedRun) -> None:
    run.events.add(kinds.Warning(text=text))
    run.events.add(kinds.Saved(rank=0, step=7, path="/run/step-00000007", s=0.1))
    if text in NOT_WRITTEN:
        with pytest.raises(LaunchError, match="written: "):
            answers.wait_for_saved(run, 7, 0)
    else:
        assert answers.wait_for_saved(run, 7, 0).path == "/run/step-00000007"


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
