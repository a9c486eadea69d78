"""A session of pdb or of an editor in a rank: passes text between person and rank. (driver)"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

from raydist.launch.limits import ANSWER_S, longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import DebuggerNews, ReadDebugger
from raydist.messages.operate import Debug, DebuggerState, TypedLine
from raydist.messages.rank import (
    AttachDebugger,
    DetachDebugger,
    HoldTimeouts,
    LetGoTimeouts,
    PrepareEditor,
    TellDebugger,
)
from raydist.shared.errors import ConfigError
from raydist.shared.events import Events
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.records import record

PATIENCE_S = 1.0
"""Seconds that an agent waits for news until it replies without any."""
RAISE_S = 2.0
"""Limit on the wait until all ranks have raised the timeouts of their groups."""
LOAD_S = 60.0
"""Limit on the wait until a rank has imported debugpy, maybe from a cold network file system."""
LOOK_S = 0.02
"""Seconds between two looks for a line of the person."""
_debugged = set[tuple[int, int]]()
"""The ranks that somebody debugs: two sessions would take each other's text."""
_guard = threading.Lock()


def debug(group: WorkerGroup, events: Events, request: Debug, connection: CommandLink) -> None:
    """Pass lines on until the session is over. The rank continues, however it ends.

    What is typed and shown is not recorded: it may contain secrets. ConfigError: no editor can
    debug the rank, or somebody debugs it already.
    """
    rank = request.rank
    with alone(group, rank):
        first = prepare_editor(group, rank, connection) if request.by_editor else None
        # What an earlier session has left.
        group.call(rank, ReadDebugger(0.0)).result(ANSWER_S)
        with timeouts_held(group) as begun:
            group.call(rank, AttachDebugger(begun, request.by_editor)).result(ANSWER_S)
            which = "an editor" if request.by_editor else "a session of pdb"
            record(events, "debug", f"{which} in rank {rank}", [rank])
            try:
                if first is not None:
                    group.call(rank, TellDebugger(first.line))
                pass_all(group, request, connection)
            finally:
                group.call(rank, DetachDebugger())


@contextlib.contextmanager
def alone(group: WorkerGroup, rank: int) -> Iterator[None]:
    """Let nobody else debug the rank during the block. ConfigError: somebody does."""
    key = (id(group), rank)
    with _guard:
        if key in _debugged:
            raise ConfigError(f"raydist debug: somebody debugs rank {rank} already", "rank", rank)
        _debugged.add(key)
    try:
        yield
    finally:
        with _guard:
            _debugged.discard(key)


def prepare_editor(group: WorkerGroup, rank: int, connection: CommandLink) -> TypedLine:
    """Have the rank load debugpy; return the editor's first text, once it has connected.

    ConfigError: no editor can debug it. OSError: the person has gone.
    """
    call = group.call(rank, PrepareEditor())
    silent = "it does not answer; raydist stacks says why"
    why_not = call.result() if wait([call], timeout=LOAD_S).done else silent
    if why_not:
        raise ConfigError(f"raydist debug --vscode: rank {rank}: {why_not}", "rank", rank)
    connection.send(DebuggerState("", "", False))
    message = connection.receive()
    if not isinstance(message, TypedLine):
        raise ConnectionResetError
    return message


def pass_all(group: WorkerGroup, request: Debug, connection: CommandLink) -> None:
    """Pass text on, both ways, until the session is over. OSError: the person has left pdb.

    If an editor has gone, it waits until debugpy has let the rank go on: another session could not
    begin before.
    """
    rank, until = request.rank, math.inf
    reading: Future[DebuggerNews] | None = None
    while time.monotonic() < until:
        reading = reading or group.call(rank, ReadDebugger(PATIENCE_S))
        news = reading.result() if wait([reading], timeout=LOOK_S).done else None
        try:
            while until == math.inf and pass_line(group, rank, connection):
                pass
            if news is not None and until == math.inf:
                connection.send(DebuggerState(news.text, news.place, news.over))
        except OSError:
            if not request.by_editor:
                raise
            group.call(rank, TellDebugger(""))
            until = time.monotonic() + ANSWER_S
        if news is not None:
            reading = None
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
