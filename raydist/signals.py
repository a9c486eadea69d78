"""Ctrl-C and SIGTERM end a run in order, once; a second one ends it at once. (driver)"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from raydist.errors import Stopped


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise Stopped in the main thread; in another thread nothing changes."""
    before = take()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take() -> dict[signal.Signals, Any]:
    """Put our handlers in; what was there before. Called again after ray.init, which puts in one of its own."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python lets only the main thread have handlers
    return {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}


@contextlib.contextmanager
def told(hear: Callable[[Stopped], None]) -> Iterator[None]:
    """Inside, a signal is told to `hear`, and raises nothing: whoever listens to many things loses none of them."""
    global _hear
    before, _hear = _hear, hear
    try:
        yield
    finally:
        _hear = before


def _raise(stop: Stopped) -> None:
    raise stop


_hear: Callable[[Stopped], None] = _raise


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, _end_now)
    _hear(Stopped(number))


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Seats and fork servers end with this process, however it ends.
    os._exit(128 + number)


def reaper(leaders: Iterable[int]) -> subprocess.Popen[bytes]:
    """A process that waits for the end of this one, and then kills the process groups of `leaders`."""
    groups = [f"-{pid}" for pid in leaders]
    waits = ["sh", "-c", 'read -r _; kill -s KILL -- "$@"', "reaper", *groups]
    return subprocess.Popen(
        waits, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


@contextlib.contextmanager
def in_own_sessions() -> Iterator[None]:
    """Start Ray's processes apart from this one's group.

    `timeout`, a shell or a batch system sends its SIGTERM to the whole group. Without its GCS, Ray lets every call wait
    for a minute, and then aborts this process.
    """
    from ray._private import services

    plain = services.ConsolePopen
    services.ConsolePopen = functools.partial(plain, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = plain
