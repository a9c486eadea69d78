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
    global _raised
    _raised, before = None, take()
    try:
        yield
    finally:
        _raised = None
        for number, handler in before.items():
            signal.signal(number, handler)


def take() -> dict[signal.Signals, Any]:
    """Install the handlers and return the previous ones. Called again after ray.init, which installs its own."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python allows handlers in the main thread only
    return {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}


def raise_again() -> None:
    """Raise the Stopped that has been raised in this block, and was passed over: native modules do so at import."""
    if _raised is not None:
        raise _raised


@contextlib.contextmanager
def passed_to(receive: Callable[[Stopped], None]) -> Iterator[None]:
    """Inside the block a signal calls `receive` and raises nothing: a loop over many sources loses no message."""
    global _receive
    before, _receive = _receive, receive
    try:
        if _raised is not None:  # it was passed over, or this would not be reached
            receive(_raised)
        yield
    finally:
        _receive = before


_raised: Stopped | None = None
"""What a signal has raised since the block of stoppable() began."""


def _raise(stop: Stopped) -> None:
    global _raised
    _raised = stop
    raise stop


_receive: Callable[[Stopped], None] = _raise


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, _end_now)
    _receive(Stopped(number))


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Agents and fork servers end with this process, however it ends.
    os._exit(128 + number)
