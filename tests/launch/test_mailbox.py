"""Requests and answers that travel together, between a mailbox and a node's actor in another
thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from raydist.launch import mailbox
from raydist.launch.inline import loop_in_thread
from raydist.launch.mailbox import Mail, Mailbox
from raydist.messages.agent import Close, Examine, GetNews, IsOpen, RankEnd, RankNews, StopRank
from raydist.messages.request import Answer, NodeRequest, Request
from raydist.node import actor
from raydist.node.actor import AgentHost
from raydist.shared.errors import CallLost, ConfigError, LaunchError
from tests.waiting import wait_until

PATIENCE_S = 20.0
RANKS, ROUNDS = 8, 8


def news(end: RankEnd | None = None) -> RankNews:
    return RankNews((), b"", b"", (0, "", 0.0), 0.0, (0, 0.0, 0.0), 0.0, end)


class FakeAgent:
    """Answers GetNews when its rank ends, StopRank never; Examine fails."""

    def __init__(self) -> None:
        self.got: list[Request[Any]] = []
        self.ended, self.now = asyncio.Event(), asyncio.Event()

    def tell_now(self) -> None:
        self.now.set()

    async def handle(self, request: Request[Any]) -> Any:
        self.got.append(request)
        match request:
            case GetNews():
                waits = [asyncio.ensure_future(each.wait()) for each in (self.ended, self.now)]
                await asyncio.wait(
                    waits, timeout=request.patience, return_when=asyncio.FIRST_COMPLETED
                )
                for each in waits:
                    each.cancel()
                self.now.clear()
                return news(RankEnd(0, 0, 0.0) if self.ended.is_set() else None)
            case StopRank():
                await asyncio.Event().wait()
            case Examine():
                raise ConfigError.of("job", 1, "no such thing", "job=2")
            case Close():
                raise Unpicklable("it went wrong")
        return True


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError


class NodeInThread:
    """A node's actor with fake agents, in a thread; its calls are counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.actor = AgentHost("gloo")
        self.calls: list[Sequence[NodeRequest]] = []

    def exchange(self, requests: Sequence[NodeRequest]) -> Future[Sequence[Answer]]:
        self.calls.append(requests)
        return asyncio.run_coroutine_threadsafe(self.actor.exchange(requests), self.loop)

    def agent(self, local_rank: int) -> FakeAgent:
        return self.actor._agents[local_rank]  # type: ignore[return-value]

    def end(self, local_rank: int) -> None:
        self.loop.call_soon_threadsafe(self.agent(local_rank).ended.set)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeInThread]:
    monkeypatch.setattr(actor, "make_agent", lambda backend: FakeAgent())
    with loop_in_thread() as loop:
        yield NodeInThread(loop)


@pytest.fixture
def box(node: NodeInThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    monkeypatch.setattr(mailbox, "LINGER_S", 0.05)
    monkeypatch.setattr(mailbox, "NEWS_LINGER_S", 0.1)
    with Mail() as mail:
        yield mail.box(node.exchange)


def test_requests_to_the_ranks_of_a_node_are_one_call(
    node: NodeInThread, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "LINGER_S", 1.0)
    replies = []
    for rank in range(RANKS):
        replies.append(box.send(rank, IsOpen()))
        time.sleep(0.01)
    assert [reply.result(PATIENCE_S) for reply in replies] == [True] * RANKS
    assert [len(call) for call in node.calls] == [RANKS]


def test_the_end_of_one_rank_is_told_at_once_and_the_others_go_on(
    node: NodeInThread, box: Mailbox
) -> None:
    replies = [box.send(rank, GetNews(300.0)) for rank in range(RANKS)]
    box.send(0, IsOpen()).result(PATIENCE_S)
    node.end(3)
    assert replies[3].result(PATIENCE_S).end is not None
    assert [reply.done() for reply in replies] == [rank == 3 for rank in range(RANKS)]
    for rank in range(RANKS):
        node.end(rank)
    assert all(reply.result(PATIENCE_S).end for reply in replies)


def test_an_answer_that_never_comes_delays_no_other(node: NodeInThread, box: Mailbox) -> None:
    stop = box.send(0, StopRank(0.0))
    first = box.send(1, IsOpen())
    assert first.result(PATIENCE_S)
    assert box.send(0, IsOpen()).result(PATIENCE_S)
    assert not stop.done()


def test_the_ranks_of_a_node_come_to_answer_together(node: NodeInThread, box: Mailbox) -> None:
    """However their first requests were spread, a round of all is a call or two: of each rank it
    was one."""

    def ask(rank: int, rounds: int) -> None:
        if rounds:
            box.send(rank, GetNews(0.5)).add_done_callback(lambda _: ask(rank, rounds - 1))
        else:
            done.release()

    done = threading.Semaphore(0)
    for rank in range(RANKS):
        ask(rank, ROUNDS)
        time.sleep(0.03)  # each joins the process group at another time
    for _ in range(RANKS):
        assert done.acquire(timeout=PATIENCE_S)
    news_calls = [call for call in node.calls if call]
    assert sum(map(len, news_calls)) == ROUNDS * RANKS
    assert len(news_calls) < RANKS + 2 * ROUNDS


def test_an_error_is_that_of_one_request(node: NodeInThread, box: Mailbox) -> None:
    examined, closed, opened = box.send(0, Examine()), box.send(1, Close()), box.send(2, IsOpen())
    error = examined.exception(PATIENCE_S)
    assert isinstance(error, ConfigError)
    assert error.suggestion == "job=2"
    unknown = closed.exception(PATIENCE_S)
    assert isinstance(unknown, LaunchError)
    assert "it went wrong" in str(unknown)
    assert opened.result(PATIENCE_S) is True


def test_requests_reach_an_agent_in_order(node: NodeInThread, box: Mailbox) -> None:
    box.send(0, GetNews(300.0))
    last = [box.send(0, request) for request in (StopRank(1.0), StopRank(0.0), IsOpen())][-1]
    last.result(PATIENCE_S)
    assert node.agent(0).got == [GetNews(300.0), StopRank(1.0), StopRank(0.0), IsOpen()]


def test_all_requests_to_a_node_that_is_gone_fail() -> None:
    call: Future[Sequence[Answer]] = Future()
    with Mail() as mail:
        box = mail.box(lambda requests: call)
        replies = [box.send(rank, GetNews(1.0)) for rank in range(RANKS)]
        call.set_exception(ConnectionError("actor died"))
        assert {type(reply.exception(PATIENCE_S)) for reply in replies} == {CallLost}
        error = box.send(0, IsOpen()).exception(PATIENCE_S)
        assert isinstance(error, CallLost)
        assert isinstance(error.cause, ConnectionError)


def test_a_late_answer_to_a_call_that_failed_takes_no_other_with_it() -> None:
    """Ray fails a call if a connection breaks, and the actor lives: it answers with the next
    call."""
    calls: queue.SimpleQueue[tuple[Sequence[NodeRequest], Future[Sequence[Answer]]]] = (
        queue.SimpleQueue()
    )

    def exchange(requests: Sequence[NodeRequest]) -> Future[Sequence[Answer]]:
        call: Future[Sequence[Answer]] = Future()
        calls.put((requests, call))
        return call

    with Mail() as mail:
        box = mail.box(exchange)
        failed = box.send(0, GetNews(1.0))
        (old,), call = calls.get(timeout=PATIENCE_S)
        call.set_exception(ConnectionError("unavailable"))
        assert isinstance(failed.exception(PATIENCE_S), CallLost)
        first = box.send(0, IsOpen())
        (new,), call = calls.get(timeout=PATIENCE_S)
        second = box.send(1, IsOpen())
        (last,), later = calls.get(timeout=PATIENCE_S)
        call.set_result([Answer(old.number, news()), Answer(new.number, True)])
        assert first.result(PATIENCE_S) is True
        later.set_result([])  # a call is open as long as a request has no answer
        _, later = calls.get(timeout=PATIENCE_S)
        later.set_result([Answer(last.number, True)])
        assert second.result(PATIENCE_S) is True


def test_a_call_that_cannot_be_made_fails_its_requests() -> None:
    def exchange(requests: Sequence[NodeRequest]) -> Future[Sequence[Answer]]:
        raise RuntimeError("Ray is gone")

    with Mail() as mail:
        error = mail.box(exchange).send(0, IsOpen()).exception(PATIENCE_S)
        assert isinstance(error, CallLost)
        assert isinstance(error.cause, RuntimeError)


def test_a_call_that_is_open_when_the_loop_ends_is_cancelled_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actor, "make_agent", lambda backend: FakeAgent())
    calls: list[Future[Sequence[Answer]]] = []

    def exchange(requests: Sequence[NodeRequest]) -> Future[Sequence[Answer]]:
        calls.append(there.exchange(requests))
        return calls[-1]

    with loop_in_thread() as loop, Mail() as mail:
        there = NodeInThread(loop)
        mail.box(exchange).send(0, StopRank(0.0))
        wait_until(lambda: calls, "the call")
        late = asyncio.run_coroutine_threadsafe(asyncio.sleep(1000), loop)  # it may not have begun
    assert (calls[0].cancelled(), late.cancelled()) == (True, True)
    assert not caplog.records
