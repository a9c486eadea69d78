"""The first Ctrl-C or SIGTERM stops a run in order; the second one ends the process immediately.
(driver)"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from raydist.shared.errors import Stopped


class Halt:
    """Stops one of several runs of this process, each in a thread of its own, as a signal stops the
    only run."""

    def __init__(self) -> None:
        self.stopped: Stopped | None = None
        self._lock = threading.Lock()
        self._receive: Callable[[Stopped], None] | None = None

    def stop(self, stopped: Stopped) -> None:
        """Stop the run at the next place where a signal would stop it; the first call counts."""
        with self._lock:
            if self.stopped is None:
                self.stopped = stopped
                if self._receive is not None:
                    self._receive(stopped)

    @contextlib.contextmanager
    def passed_to(self, receive: Callable[[Stopped], None]) -> Iterator[None]:
        """As the function `passed_to`, of this run."""
        with self._lock:
            self._receive = receive
            if self.stopped is not None:
                receive(self.stopped)
        try:
            yield
        finally:
            with self._lock:
                self._receive = None


_thread = threading.local()
"""`halt`: of the run in this thread, if it has one."""


@contextlib.contextmanager
def stoppable(halt: Halt | None = None) -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM raise Stopped in the main thread; in another thread
    nothing changes.

    `halt`: stops the run of this thread instead of a signal.
    """
    global _raised
    if halt is not None:
        _thread.halt = halt
        try:
            yield
        finally:
            del _thread.halt
        return
    _raised, before = None, take()
    try:
        yield
    finally:
        _raised = None
        for number, handler in before.items():
            signal.signal(number, handler)


def take() -> dict[signal.Signals, Any]:
    """Install the handlers and return the previous ones. Called again after ray.init, which
    installs its own."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python allows handlers in the main thread only
    return {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}


def raise_again() -> None:
    """Raise the Stopped that has been raised in this block, and was passed over: native modules do
    so at import."""
    halt: Halt | None = getattr(_thread, "halt", None)
    if (stopped := halt.stopped if halt else _raised) is not None:
        raise stopped


@contextlib.contextmanager
def passed_to(receive: Callable[[Stopped], None]) -> Iterator[None]:
    """Inside the block a signal calls `receive` and raises nothing: a loop over many sources loses
    no message."""
    global _receive
    if (halt := getattr(_thread, "halt", None)) is not None:
        with halt.passed_to(receive):
            yield
        return
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
    for each in (signal.SIGINT, signal.SIGTERM):  # a person presses Ctrl-C, then types kill
        signal.signal(each, _end_now)
    _receive(Stopped(number))


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Agents and fork servers end with this process, however it ends.
    os._exit(128 + number)
