"""Requests to a node's agents, and their answers, in one Ray call at a time. (driver)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from raydist.launch.limits import CLOSE_S
from raydist.messages.agent import GetNews
from raydist.messages.request import Answer, AnyReply, NodeRequest, Request
from raydist.shared.errors import CallLost

LINGER_S = 0.001
"""Seconds that a request waits for others to the same node: a Ray call costs both sides 1.5 to 3
ms."""
NEWS_LINGER_S = 0.02
"""The same for GetNews, whose reply nobody waits for. With it the ranks of a node come to answer
together.

Without both waits 16 ranks on one node cost their driver 2.5% of a core instead of 1.4%, and 1,024
ranks on 128 nodes 80 to 116 calls per second instead of 32 (bench/README.md, many ranks).
"""

Exchange = Callable[[Sequence[NodeRequest]], "Future[Sequence[Answer]]"]
"""Sends requests to a node; the future has answers to these or to earlier ones
(node.actor.AgentHost.exchange)."""


class Mail(AbstractContextManager["Mail"]):
    """The mailboxes of all nodes, and the thread that sends from them.

    After the `with` block nothing is sent.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        """Guards all boxes, too."""
        self._due: dict[Mailbox, float] = {}
        """By box: when its requests are due, on the monotonic clock."""
        self._next = 0.0
        """When the thread wakes up, on the monotonic clock."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="raydist-mail", daemon=True)
        self._thread.start()

    def box(self, exchange: Exchange) -> Mailbox:
        """Return a new mailbox for a node."""
        return Mailbox(self._wake, self._send_within, exchange)

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    def _send_within(self, box: Mailbox, seconds: float) -> None:
        """Send from this box within `seconds`. The caller holds the lock."""
        due = time.monotonic() + seconds
        self._due[box] = min(self._due.get(box, due), due)
        if due < self._next:
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._closed:
                    return
                now = time.monotonic()
                ready = [box for box, due in self._due.items() if due <= now]
                for box in ready:
                    del self._due[box]
                if not ready:
                    self._next = min(self._due.values(), default=float("inf"))
                    self._wake.wait(None if self._next == float("inf") else self._next - now)
                    self._next = 0.0
            for box in ready:
                box.send_all()


class Mailbox:
    """The requests to one node that have no answer yet.

    While there are any, one call to the node is open.
    """

    def __init__(
        self,
        lock: threading.Condition,
        send_within: Callable[[Mailbox, float], None],
        exchange: Exchange,
    ) -> None:
        self._lock = lock
        self._send_within = send_within
        self._exchange = exchange
        self._unsent: list[NodeRequest] = []
        self._replies: dict[int, Future[Any]] = {}
        """By number: the requests without an answer."""
        self._newest_number = 0
        self._calls = 0
        """The number of open calls."""

    def send(self, local_rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to an agent of the node."""
        reply: Future[AnyReply] = Future()
        with self._lock:
            self._newest_number += 1
            self._replies[self._newest_number] = reply
            self._unsent.append(NodeRequest(self._newest_number, local_rank, request))
            self._send_within(self, NEWS_LINGER_S if isinstance(request, GetNews) else LINGER_S)
        return reply

    def send_all(self) -> None:
        """Send the requests that wait in the box."""
        with self._lock:
            requests, self._unsent = self._unsent, []
            self._calls += 1
        try:
            call = self._exchange(requests)
        except Exception as error:  # Ray is gone, or an argument can't be pickled
            self._fail(error)
        else:
            call.add_done_callback(self._receive)

    def _receive(self, call: Future[Sequence[Answer]]) -> None:
        if call.cancelled():  # the agents' event loop has ended: nobody waits for an answer
            return
        if (error := call.exception()) is not None:
            self._fail(error)
            return
        answers = call.result()
        with self._lock:
            self._calls -= 1
            replies = [self._replies.pop(answer.number, None) for answer in answers]
            if not self._calls and len(self._replies) > len(self._unsent):
                self._send_within(self, 0.0)
        for reply, answer in zip(replies, answers, strict=True):
            if reply is None:  # its call failed before: a connection broke, but the actor lives
                continue
            if answer.error is not None:
                reply.set_exception(answer.error)
            else:
                reply.set_result(answer.reply)

    def _fail(self, error: BaseException) -> None:
        """Fail all requests that were sent, with CallLost: their answers will not come."""
        with self._lock:
            self._calls -= 1
            unsent = {request.number for request in self._unsent}
            lost = [
                self._replies.pop(number) for number in list(self._replies) if number not in unsent
            ]
        for reply in lost:
            reply.set_exception(CallLost(error))
