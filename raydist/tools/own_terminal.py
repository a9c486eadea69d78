"""This terminal as that of a command elsewhere: what is typed, its size, raw mode. (driver)"""

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
from raydist.messages.wire import Message
from raydist.shared.errors import Stopped
from raydist.tools.running import Link
from raydist.watch.operate.connection import CommandLink

STDIN = 0
CHUNK = 1 << 14
"""Bytes of input in a message."""
WINDOW = 1 << 16
"""Bytes of input that are sent before the command takes the first of them."""
JOIN_S = 2.0
"""Limit on the wait for the thread at the end: the connection may have broken."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the command with a terminal. What a person types comes as bytes instead."""


class InputSender(AbstractContextManager["InputSender"]):
    """Sends what is typed, from a thread, until the end of the `with` block.

    With a terminal it sends its size, too; without one Ctrl-C: the second one kills the command.
    Signals arrive by a descriptor, so the main thread may be in a call of C meanwhile. Only this
    thread sends: the messages of two might mix.
    """

    def __init__(self, link: Link, terminal: bool) -> None:
        self._link, self._terminal = link, terminal
        self._wake, self._wakes = socket.socketpair()
        self._sent_bytes = self._taken_bytes = 0
        self._over = False
        self._ctrl_c = iter([signal.SIGINT])
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
        """Note that the command has taken so many bytes."""
        self._taken_bytes += size
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it wakes up without
            self._wakes.send(b"\0")  # no signal has this number

    def _run(self) -> None:
        open_input = True
        # The connection is closed, or Ray's actor has ended: the main thread sees it, too.
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
            # If the kernel has given the signal to this thread, the main thread still waits for the
            # connection, and would not run the handler.
            self._link.end()
            return
        message: Message
        if number == signal.SIGWINCH and self._terminal:
            message = TerminalSize(*terminal_size())
        elif number == signal.SIGINT and not self._terminal:
            message = SendSignal(next(self._ctrl_c, signal.SIGKILL))
        else:
            return
        self._link.send(message)

    def _pass_input(self) -> bool:
        """Send what there is of the input; return whether more may follow."""
        try:
            data = os.read(STDIN, CHUNK)
        except OSError:  # it is closed, or the terminal is gone
            data = b""
        if not data and self._terminal:
            os.kill(os.getpid(), signal.SIGHUP)
            return False
        self._sent_bytes += len(data)
        self._link.send(TypedInput(data.decode("utf-8", "surrogateescape"), last=not data))
        return bool(data)


def terminal_size() -> tuple[int, int]:
    """Return the rows and columns of this terminal."""
    columns, rows = os.get_terminal_size(STDIN)
    return rows, columns


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Have the terminal pass each key on as it is, and put it back after the block.

    A signal that would end this process raises Stopped inside the block; after `kill -STOP` and
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
    """Let a signal arrive by the wakeup descriptor only."""
