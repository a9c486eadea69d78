"""The input and output of a command alongside a rank: pipes, or a terminal. (actor)"""

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
"""Limit on the bytes of a stream that wait for the driver. Beyond it nothing more is read, so the
command blocks when its pipe is full."""


@dataclass
class CommandStreams:
    """The descriptors of a new command: our ends and its ends."""

    outputs: list[int] = field(default_factory=list)
    """Our ends of its output and its errors; a terminal has one for both."""
    input: int = -1
    """Our end of its input; -1: it has none."""
    its: list[int] = field(default_factory=list)
    """The ends of the command, as in CommandSpec."""

    def add_pipe(self, reads: bool = False) -> None:
        """Add a pipe for output of the command, or for its input (`reads`)."""
        here, there = os.pipe()
        if reads:
            here, there = there, here
            self.input = here
        else:
            self.outputs.append(here)
        self.its.append(there)

    def close_ours(self) -> None:
        """Close our ends: the command could not be started."""
        for fd in (*self.outputs, self.input):
            if fd >= 0:
                os.close(fd)

    def close_its(self) -> None:
        """Close the command's ends in this process; the command has its own copies."""
        for fd in self.its:
            os.close(fd)


def open_streams(request: RunCommand) -> CommandStreams:
    """Return new descriptors for a command. OSError: too many are open, or no terminal is left."""
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
    """Set the size of a terminal."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


class KeptOutput:
    """The output of one stream of a command that the driver has not taken yet.

    It does not use a transport of asyncio: those of uvloop, which Ray uses, log an error when a
    terminal ends.
    """

    def __init__(self, fd: int, news: asyncio.Event) -> None:
        """`fd`: closed at its end. `news`: set when there is output to take, and at the end."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = bytearray()
        self._news = news
        self.full = False
        """Whether reading pauses until `take` because the buffer is full."""
        self.settled = asyncio.Event()
        """Set while nothing can arrive before the next `take`: the buffer is full, or no process
        has the other end open."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO: on Linux, no process has the terminal open any more
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
        """Return the output since the last call, and continue reading."""
        taken = bytes(self._buffer)
        self._buffer.clear()
        if self.full:
            self.full = False
            if self._fd >= 0:
                self.settled.clear()
                self._loop.add_reader(self._fd, self._read)
        return taken

    def close(self) -> None:
        """Stop reading, and close the descriptor."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self.settled.set()


class CommandInput:
    """Writes a command's input as fast as the command reads it."""

    def __init__(self, fd: int) -> None:
        """`fd`: closed by `close`."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._waiting_write: asyncio.Future[None] | None = None
        """The write that waits until the command has read something."""

    async def write(self, data: bytes) -> None:
        """Write all of it; return early if the command has closed its input."""
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
        """Close the command's input: it reads the end of the file."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._wake()
