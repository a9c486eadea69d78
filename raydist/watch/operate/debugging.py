"""A session of pdb in a rank: passes lines between the person and the rank. (driver)"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, wait

from raydist.launch.limits import ANSWER_S
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import DebuggerNews, ReadDebugger
from raydist.messages.operate import DebuggerState, TypedLine
from raydist.messages.rank import AttachDebugger, DetachDebugger, TellDebugger
from raydist.shared.events import Events
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.records import record

PATIENCE_S = 1.0
"""Seconds that an agent waits for news until it replies without any."""
LOOK_S = 0.02
"""Seconds between two looks for a line of the person."""


def debug(group: WorkerGroup, events: Events, rank: int, connection: CommandLink) -> None:
    """Pass lines on until the session is over. The rank continues, however it ends.

    What is typed and shown is not recorded: it may contain secrets.
    """
    group.call(rank, ReadDebugger(0.0)).result(ANSWER_S)  # what an earlier session has left
    group.call(rank, AttachDebugger()).result(ANSWER_S)
    record(events, "debug", f"a session of pdb in rank {rank}", [rank])
    reading: Future[DebuggerNews] | None = None
    try:
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
    finally:
        group.call(rank, DetachDebugger())


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
