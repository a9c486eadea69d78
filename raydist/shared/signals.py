"""Stop a run in order on the first Ctrl-C, SIGTERM or SIGHUP, end at once on the next. (driver)"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from raydist.shared.ending import discard
from raydist.shared.errors import Stopped

END_AT_ONCE = (signal.SIGINT, signal.SIGTERM)
"""After a first signal, each of these ends the process at once: a person presses Ctrl-C, then types
kill. Not SIGHUP: when a terminal is closed, the kernel and the shell send one each."""


class Halt:
    """A stop for one of several runs in this process, each in its own thread.

    It acts as a signal does on the only run.
    """

    def __init__(self) -> None:
        self.stopped: Stopped | None = None
        self._lock = threading.Lock()
        self._receive: Callable[[Stopped], None] | None = None

    def stop(self, stopped: Stopped) -> None:
        """Stop the run at the next point where a signal would; only the first call counts."""
        with self._lock:
            if self.stopped is None:
                self.stopped = stopped
                if self._receive is not None:
                    self._receive(stopped)

    @contextlib.contextmanager
    def passed_to(self, receive: Callable[[Stopped], None]) -> Iterator[None]:
        """Do what the function `passed_to` does, for this run."""
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
"""`halt`: the Halt of the run in this thread, if it has one."""


@contextlib.contextmanager
def stoppable(halt: Halt | None = None) -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread while the block runs.

    In another thread nothing changes. `halt`: stops the run of this thread instead of a signal.
    """
    global _stopped
    if halt is not None:
        _thread.halt = halt
        try:
            yield
        finally:
            del _thread.halt
        return
    _stopped, before = None, take()
    try:
        yield
    finally:
        _stopped = None
        for number, handler in before.items():
            signal.signal(number, handler)


def take() -> dict[signal.Signals, Any]:
    """Install the handlers and return the previous ones.

    Called again after ray.init, which installs its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python allows handlers only in the main thread
    # nohup ignores SIGHUP for programs that are to outlive their terminal.
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = END_AT_ONCE if outlives else (*END_AT_ONCE, signal.SIGHUP)
    return {number: signal.signal(number, _stop) for number in numbers}


@dataclass(frozen=True)
class Stopper:
    """Stops a run from another thread."""

    stop: Callable[[Stopped], None]
    """Stops it as a signal does."""
    ends_at_once: bool
    """Whether the second call ends it at once, and this process with it."""


def stopper() -> Stopper | None:
    """Return the Stopper of the run of this thread.

    None: the run is in a thread that has no Halt, so nothing stops it alone.
    """
    if (halt := getattr(_thread, "halt", None)) is not None:
        return Stopper(halt.stop, ends_at_once=False)
    if threading.current_thread() is not threading.main_thread():
        return None
    return Stopper(lambda stopped: os.kill(os.getpid(), stopped.signum), ends_at_once=True)


def raise_again() -> None:
    """Raise the Stopped of this block that had no effect.

    Native modules swallow it at import; or it was passed to a loop that had just ended.
    """
    halt: Halt | None = getattr(_thread, "halt", None)
    if (stopped := halt.stopped if halt else _stopped) is not None:
        raise stopped


@contextlib.contextmanager
def passed_to(receive: Callable[[Stopped], None]) -> Iterator[None]:
    """Call `receive` on a signal and raise nothing while the block runs.

    A loop over many sources thus loses no message.
    """
    global _receive
    if (halt := getattr(_thread, "halt", None)) is not None:
        with halt.passed_to(receive):
            yield
        return
    before, _receive = _receive, receive
    try:
        if _stopped is not None:  # it had no effect, or this would not be reached
            receive(_stopped)
        yield
    finally:
        _receive = before


_stopped: Stopped | None = None
"""The Stopped of the signal that has come since the block of stoppable() began."""


def _raise(stop: Stopped) -> None:
    raise stop


_receive: Callable[[Stopped], None] = _raise


def _stop(number: int, _frame: FrameType | None) -> None:
    global _stopped
    for each in END_AT_ONCE:
        signal.signal(each, _end_now)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if number == signal.SIGHUP:
        _leave_closed_terminal()
    _stopped = Stopped(number)
    _receive(_stopped)


def _leave_closed_terminal() -> None:
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    for stream, flags in poll.poll(0):
        if flags & select.POLLHUP:
            discard(stream)


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Agents and fork servers end with this process, however it ends.
    os._exit(128 + number)
