"""A rank does not depend on its agent: one that takes nothing, as a stopped one, holds up no step
and no handler."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from raydist.worker import channel
from raydist.worker.channel import Channel
from raydist.worker.heartbeat import BEAT_PAGE
from tests.records import event


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Channel, socket.socket]:
    monkeypatch.setattr(channel, "STALL_S", 0.2)
    agent, rank = socket.socketpair()
    page = os.memfd_create("beat")
    os.ftruncate(page, BEAT_PAGE)
    return Channel(rank, page), agent


def test_an_agent_that_takes_nothing_holds_up_no_rank_and_then_gets_all(
    ends: tuple[Channel, socket.socket],
) -> None:
    rank, agent = ends
    began = time.monotonic()
    for step in range(5000):
        rank.emit(event("report", rank=0, step=step, values={"x": "y" * 200}))
        if step % 100 == 0:
            rank.flush()
    rank.emit(event("saved", rank=0, step=5000))
    assert time.monotonic() - began < 30  # it would never end
    agent.settimeout(10)
    text = b""
    while b'"saved"' not in text[-500:]:
        text += agent.recv(1 << 20)
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(5001))


def test_a_signal_handler_may_report_while_its_thread_sends(
    ends: tuple[Channel, socket.socket],
) -> None:
    rank, agent = ends
    agent.setblocking(False)
    signal.signal(signal.SIGALRM, lambda *_: rank.emit(event("warning", text="from the handler")))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        for _ in range(4):
            rank.emit(
                event("raised", message="x" * 300_000)
            )  # more than the socket takes: it waits there
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    agent.settimeout(10)
    text = b""
    while text.count(b"\n") < 5:
        text += agent.recv(1 << 20)
    assert sorted(json.loads(line)["kind"] for line in text.splitlines()) == ["raised"] * 4 + [
        "warning"
    ]
