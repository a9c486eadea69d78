"""Uses this terminal for a command on another host: its input, its size, raw mode. (driver)"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from raydist.messages.operate import SendSignal, TerminalSize, TypedInput
from raydist.shared.errors import Stopped
from raydist.tools.running import Link
from raydist.watch.operate.connection import CommandLink

STDIN = 0
CHUNK = 1 << 14
"""Bytes of input in a message."""
WINDOW = 1 << 16
"""Limit on the bytes of input that are sent and that the command has not read yet."""
JOIN_S = 2.0
"""Limit on the wait for the thread at the end; with a broken connection it may block."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end `raydist exec -t`. Ctrl-C that is typed arrives as a byte, not as a signal."""


class InputSender(AbstractContextManager["InputSender"]):
    """Sends standard input from a thread, until the end of the `with` block.

    With a terminal it also sends changes of its size; without one it sends Ctrl-C, and the second
    Ctrl-C kills the command. Signals arrive through a descriptor, so that the main thread may block
    in C code meanwhile. Only this thread sends, because messages of two threads could mix.
    """

    def __init__(self, link: Link, terminal: bool) -> None:
        self._link, self._terminal = link, terminal
        self._wake, self._wakes = socket.socketpair()
        self._sent_bytes = self._taken_bytes = 0
        self._over = False
        self._ctrl_c = iter([signal.SIGINT])
        self._sent_size: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="raydist-input", daemon=True)
        self._before: dict[int, Any] = {}
        """By signal: its handler outside of the block."""
        self._wakeup_fd = -1

    def __enter__(self) -> InputSender:
        self._wake.setblocking(False)
        self._wakes.setblocking(False)
        for number in (signal.SIGWINCH,) if self._terminal else (signal.SIGINT,):
            self._before[number] = signal.signal(number, do_nothing)
        self._wakeup_fd = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._over = True
        self._ring()
        self._thread.join(JOIN_S)

    def note_taken(self, size: int) -> None:
        """Note that the command has read this many bytes."""
        self._taken_bytes += size
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full socket wakes the thread, too
            self._wakes.send(b"\0")  # no signal has this number

    def _run(self) -> None:
        open_input = True
        # The connection is closed, or Ray's actor has ended; the main thread notices it as well.
        with contextlib.suppress(Exception):
            while not self._over:
                poll = select.poll()
                poll.register(self._wake, select.POLLIN)
                if open_input and self._sent_bytes - self._taken_bytes < WINDOW:
                    poll.register(STDIN, select.POLLIN)
                ready = [fd for fd, _ in poll.poll()]
                if self._wake.fileno() in ready:
                    for number in self._wake.recv(1 << 12):
                        self._on_signal(number)
                if STDIN in ready and not self._over:
                    open_input = self._pass_input()

    def _on_signal(self, number: int) -> None:
        if self._terminal and number in ENDING and isinstance(self._link, CommandLink):
            # The kernel may have delivered the signal to this thread. The main thread then still
            # blocks on the connection, and would not run the handler.
            self._link.end()
            return
        if number == signal.SIGWINCH and self._terminal:
            self._send_size()
        elif number == signal.SIGINT and not self._terminal:
            self._link.send(SendSignal(next(self._ctrl_c, signal.SIGKILL)))

    def _send_size(self) -> None:
        """Send the size of the terminal if it has changed."""
        size = terminal_size()
        if size != self._sent_size:
            self._sent_size = size
            self._link.send(TerminalSize(*size))

    def _pass_input(self) -> bool:
        """Send the available input; return whether more may follow."""
        try:
            data = os.read(STDIN, CHUNK)
        except OSError:  # standard input is closed, or the terminal is gone
            data = b""
        if not data and self._terminal:
            os.kill(os.getpid(), signal.SIGHUP)
            return False
        if self._terminal:
            # SIGWINCH may arrive after what was typed into the new size: a signal waits for a
            # thread of this process to run, and typed bytes are read as soon as they are there.
            with contextlib.suppress(OSError):
                self._send_size()
        self._sent_bytes += len(data)
        self._link.send(TypedInput(data.decode("utf-8", "surrogateescape"), last=not data))
        return bool(data)


def terminal_size() -> tuple[int, int]:
    """Return the rows and columns of this terminal."""
    columns, rows = os.get_terminal_size(STDIN)
    return rows, columns


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Put the terminal into raw mode inside the block, and restore it afterwards.

    A signal that would end this process raises Stopped inside the block. After `kill -STOP` and
    `fg` the terminal is raw again.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for each in ENDING:  # one is enough
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    def again(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(termios.error):
            tty.setraw(STDIN, termios.TCSADRAIN)

    attributes = termios.tcgetattr(STDIN)
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGCONT)}
    try:
        for number in ENDING:
            signal.signal(number, end)
        signal.signal(signal.SIGCONT, again)
        tty.setraw(STDIN, termios.TCSADRAIN)
        yield
    finally:
        with contextlib.suppress(termios.error):  # it is gone
            termios.tcsetattr(STDIN, termios.TCSADRAIN, attributes)
        for number, handler in before.items():
            signal.signal(number, handler)


def do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing: it arrives through the wakeup descriptor."""
