"""What a command beside a rank reads from and prints to: pipes, or a terminal. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass, field

from raydist.messages.command import RunCommand

CHUNK = 1 << 16
KEPT = 1 << 20
"""Bytes of each stream after which nothing more is read until the driver takes them: the command
then waits."""


@dataclass
class CommandStreams:
    """The descriptors of a new command, on both sides."""

    outputs: list[int] = field(default_factory=list)
    """Ours: what it prints, what it prints as errors; a terminal has one for both."""
    input: int = -1
    """Ours: where its input is written; -1: it has none."""
    its: list[int] = field(default_factory=list)
    """Those of the command, as in CommandSpec."""

    def add_pipe(self, reads: bool = False) -> None:
        """Add a pipe from the command, or to it."""
        here, there = os.pipe()
        if reads:
            here, there = there, here
            self.input = here
        else:
            self.outputs.append(here)
        self.its.append(there)

    def close_ours(self) -> None:
        """Close this side: there is no command."""
        for fd in (*self.outputs, self.input):
            if fd >= 0:
                os.close(fd)

    def close_its(self) -> None:
        """Close the command's side in this process."""
        for fd in self.its:
            os.close(fd)


def open_streams(request: RunCommand) -> CommandStreams:
    """Return new descriptors for a command. OSError: this node has no terminal, or too many."""
    streams = CommandStreams()
    if request.term:
        ours, its = os.openpty()
        resize(ours, request.rows, request.columns)
        return CommandStreams([ours], os.dup(ours), [its])
    streams.add_pipe()
    streams.add_pipe()
    if request.reads:
        streams.add_pipe(reads=True)
    return streams


def resize(terminal: int, rows: int, columns: int) -> None:
    """Change the size of a terminal."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


class KeptOutput:
    """What a command has printed to one of its streams and the driver has not taken yet.

    Without a transport of asyncio: those of uvloop, which Ray uses, log the end of a terminal as an
    error.
    """

    def __init__(self, fd: int, news: asyncio.Event) -> None:
        """`fd`: is closed at its end. `news`: set when there is something to take, or then."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = bytearray()
        self._news = news
        self.full = False
        """Whether nothing more is read until `take`."""
        self.settled = asyncio.Event()
        """Whether nothing arrives before the next `take`: it is full, or nobody has the other
        end."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # Linux says EIO once no process has the terminal any more
            data = b""
        self._buffer += data
        if not data:
            self.close()
        elif len(self._buffer) > KEPT:
            self._loop.remove_reader(self._fd)
            self.full = True
            self.settled.set()
        self._news.set()

    def take(self) -> bytes:
        """Return what was printed since the last call, and continue to read."""
        taken = bytes(self._buffer)
        self._buffer.clear()
        if self.full:
            self.full = False
            if self._fd >= 0:
                self.settled.clear()
                self._loop.add_reader(self._fd, self._read)
        return taken

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self.settled.set()


class CommandInput:
    """Where a command's input is written, as far as it has room."""

    def __init__(self, fd: int) -> None:
        """`fd`: it is closed."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._waiting_write: asyncio.Future[None] | None = None
        """The write that waits for room."""

    async def write(self, data: bytes) -> None:
        """Write all of it; return before if nobody reads it any more."""
        while data and self._fd >= 0:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                await self._wait_for_room()
            except OSError:  # the command has closed its input
                self.close()

    async def _wait_for_room(self) -> None:
        self._waiting_write = waiting = self._loop.create_future()
        self._loop.add_writer(self._fd, self._wake)
        try:
            await waiting
        finally:
            if self._fd >= 0:
                self._loop.remove_writer(self._fd)

    def _wake(self) -> None:
        if self._waiting_write is not None and not self._waiting_write.done():
            self._waiting_write.set_result(None)

    def with_descriptor(self, use: Callable[[int], None]) -> None:
        """Call a function with the descriptor, unless it is closed."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                use(self._fd)

    def close(self) -> None:
        """Close it: the command reads the end of its input."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._wake()
