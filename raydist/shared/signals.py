"""The first Ctrl-C or SIGTERM stops a run in order; the second one ends the process immediately. (driver)"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from raydist.shared.errors import Stopped


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM raise Stopped in the main thread; in another thread nothing changes."""
    before = take()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take() -> dict[signal.Signals, Any]:
    """Install the handlers and return the previous ones. Called again after ray.init, which installs its own."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python allows handlers in the main thread only
    return {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}


@contextlib.contextmanager
def passed_to(receive: Callable[[Stopped], None]) -> Iterator[None]:
    """Inside the block a signal calls `receive` and raises nothing: a loop over many sources loses no message."""
    global _receive
    before, _receive = _receive, receive
    try:
        yield
    finally:
        _receive = before


def _raise(stop: Stopped) -> None:
    raise stop


_receive: Callable[[Stopped], None] = _raise


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, _end_now)
    _receive(Stopped(number))


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Agents and fork servers end with this process, however it ends.
    os._exit(128 + number)
