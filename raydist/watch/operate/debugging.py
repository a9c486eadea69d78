"""A session of pdb in a rank: passes lines between the person and the rank. (driver)"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, wait

from raydist.launch.limits import ANSWER_S, longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import DebuggerNews, ReadDebugger
from raydist.messages.operate import DebuggerState, TypedLine
from raydist.messages.rank import (
    AttachDebugger,
    DetachDebugger,
    HoldTimeouts,
    LetGoTimeouts,
    TellDebugger,
)
from raydist.shared.events import Events
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.records import record

PATIENCE_S = 1.0
"""Seconds that an agent waits for news until it replies without any."""
RAISE_S = 2.0
"""Limit on the wait until all ranks have raised the timeouts of their groups."""
LOOK_S = 0.02
"""Seconds between two looks for a line of the person."""


def debug(group: WorkerGroup, events: Events, rank: int, connection: CommandLink) -> None:
    """Pass lines on until the session is over. The rank continues, however it ends.

    What is typed and shown is not recorded: it may contain secrets.
    """
    group.call(rank, ReadDebugger(0.0)).result(ANSWER_S)  # what an earlier session has left
    with timeouts_held(group) as begun:
        group.call(rank, AttachDebugger(begun)).result(ANSWER_S)
        record(events, "debug", f"a session of pdb in rank {rank}", [rank])
        try:
            pass_all(group, rank, connection)
        finally:
            group.call(rank, DetachDebugger())


def pass_all(group: WorkerGroup, rank: int, connection: CommandLink) -> None:
    """Pass lines on, both ways, until the session is over. OSError: the person has gone."""
    reading: Future[DebuggerNews] | None = None
    while True:
        while pass_line(group, rank, connection):
            pass
        reading = reading or group.call(rank, ReadDebugger(PATIENCE_S))
        if not wait([reading], timeout=LOOK_S).done:
            continue
        news, reading = reading.result(), None
        connection.send(DebuggerState(news.text, news.place, news.over))
        if news.over:
            return


@contextlib.contextmanager
def timeouts_held(group: WorkerGroup) -> Iterator[int]:
    """Have all ranks raise the timeouts of their process groups during the block.

    It gets the largest number of collectives that one has begun before, with the old timeout.
    """
    ranks, reason = range(group.plan.world_size), f"session {secrets.token_hex(4)}"
    calls = [group.call(rank, HoldTimeouts(reason)) for rank in ranks]
    wait(calls, timeout=longest(RAISE_S, len(calls)))  # a rank in C code may not answer
    begun = [call.result() for call in calls if call.done() and call.exception() is None]
    try:
        yield max(begun, default=0)
    finally:
        for rank in ranks:
            group.call(rank, LetGoTimeouts(reason))


def pass_line(group: WorkerGroup, rank: int, connection: CommandLink) -> bool:
    """Pass a line of the person on; return whether there was one. OSError: the person has gone."""
    with contextlib.suppress(TimeoutError):
        message = connection.receive(0.0)
        if message is None:
            raise ConnectionResetError
        if isinstance(message, TypedLine):
            group.call(rank, TellDebugger(message.line))
        return True
    return False
