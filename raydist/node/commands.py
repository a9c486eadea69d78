"""Commands that a person runs beside a rank: in its environment, folder and cgroup. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

from raydist.messages.agent import CommandOutput, ProcessEnd
from raydist.messages.server import CommandSpec, SignalProcess
from raydist.node.fork_client import ForkClient
from raydist.shared.errors import LaunchError

KEPT = 1 << 20
"""Bytes of each stream that are kept until the driver takes them; then the command has to wait."""
LAST_S = 0.5
"""Seconds after the end of a command in which its output is read: a process that it has left in the
background may hold its streams open."""


class Commands:
    """The commands beside one start of a rank. The fork server of the node forks them."""

    def __init__(self, server: ForkClient, env: Mapping[str, str], cwd: str) -> None:
        """`env`, `cwd`: of the rank. They stay in the memory of this process."""
        self._server, self.env, self._cwd = server, dict(env), cwd
        self._running: dict[int, BesideRank] = {}
        """By pid: those whose end was not reported."""

    async def start(self, argv: tuple[str, ...]) -> int:
        """Start a command, and return its pid. Raises OSError if the server can't fork."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        try:
            spec = CommandSpec(argv, self.env, self._cwd)
            pid, ended = await self._server.fork(spec, [out_end, err_end])
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_end)
            os.close(err_end)
        self._running[pid] = BesideRank(out, err, ended)
        return pid

    async def read(self, pid: int, patience: float) -> CommandOutput:
        """Return the new output of a command, and its end after the last of it.

        Waits at most `patience` seconds. Raises LaunchError if there is no such command.
        """
        if pid not in self._running:
            raise LaunchError("the rank has been started again: the command has ended")
        output = await self._running[pid].read(patience)
        if output.end is not None:
            del self._running[pid]
        return output

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a command; SIGKILL also to the processes of its group."""
        if pid in self._running:
            self._server.send(SignalProcess(pid, number))

    def end(self) -> None:
        """Kill all: the rank is about to be started again."""
        for pid, command in self._running.items():
            with contextlib.suppress(OSError):  # the server has ended, and all with it
                self._server.send(SignalProcess(pid, signal.SIGKILL))
            command.release()
        self._running.clear()


class BesideRank:
    """One command: what it has printed, and its end."""

    def __init__(self, out: int, err: int, ended: asyncio.Future[ProcessEnd]) -> None:
        """`out`, `err`: the descriptors from which its output is read; they are closed."""
        self._printed = (bytearray(), bytearray())
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._ended = ended
        self._pumps = {
            asyncio.create_task(self._pump(fd, kept))
            for fd, kept in zip((out, err), self._printed, strict=True)
        }
        ended.add_done_callback(lambda _: self._news.set())

    async def _pump(self, fd: int, kept: bytearray) -> None:
        reader = asyncio.StreamReader(KEPT)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(fd, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while data := await reader.read(KEPT):
                kept += data
                self._news.set()
                while len(kept) > KEPT:
                    self._room.clear()
                    await self._room.wait()
        finally:
            transport.close()

    async def read(self, patience: float) -> CommandOutput:
        """Return the new output, and the end after the last of it."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        end = self._ended.result() if self._ended.done() else None
        if end is not None:
            self._room.set()
            await asyncio.wait(self._pumps, timeout=LAST_S)
            if any(len(kept) > KEPT for kept in self._printed):
                end = None  # more may be in the pipe
                self._news.set()
        out, err = (bytes(kept) for kept in self._printed)
        for kept in self._printed:
            kept.clear()
        self._room.set()
        if end is not None:
            self.release()
        return CommandOutput(out, err, end)

    def release(self) -> None:
        """Stop to read."""
        for pump in self._pumps:
            pump.cancel()
