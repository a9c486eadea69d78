"""Commands that a person runs beside a rank: in its environment, folder and cgroup. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Mapping
from typing import Any

from raydist.messages.agent import ProcessEnd
from raydist.messages.command import (
    CommandOutput,
    CommandRequest,
    LeaveCommand,
    ReadCommand,
    ResizeCommand,
    RunCommand,
    SignalCommand,
    WriteCommand,
)
from raydist.messages.server import CommandSpec, SignalProcess
from raydist.node.command_streams import (
    CommandInput,
    CommandStreams,
    KeptOutput,
    open_streams,
    resize,
)
from raydist.node.fork_client import ForkClient
from raydist.shared.errors import LaunchError

LAST_S = 0.5
"""Seconds after the end of a command in which its output is read: a process that it has left in the
background may hold its streams open."""
HANG_UP_S = 2.0
"""Seconds that a command has after its terminal has gone, until it is killed."""


class Commands:
    """The commands beside one start of a rank. The fork server of the node forks them."""

    def __init__(self, server: ForkClient, env: Mapping[str, str], cwd: str) -> None:
        """`env`, `cwd`: of the rank. They stay in the memory of this process."""
        self._server, self.env, self._cwd = server, dict(env), cwd
        self._commands: dict[int, BesideRank] = {}
        """By pid: those whose end was not reported."""

    async def handle(self, request: CommandRequest[Any]) -> Any:
        """Answer a request. LaunchError: the command to be read has ended with the rank."""
        match request:
            case RunCommand():
                return await self._start(request)
            case ReadCommand(pid, patience):
                return await self._read(pid, patience)
            case WriteCommand(pid, data, last):
                if (command := self._commands.get(pid)) is not None:
                    await command.write(data, last)
            case ResizeCommand(pid, rows, columns):
                if (command := self._commands.get(pid)) is not None:
                    command.resize(rows, columns)
            case SignalCommand(pid, number):
                if pid in self._commands:
                    self._server.send(SignalProcess(pid, number))
            case LeaveCommand(pid):
                await self._leave(pid)
        return None

    async def _start(self, request: RunCommand) -> int:
        """Start a command, and return its pid. Raises OSError if the server can't fork."""
        terminal = bool(request.term)
        env = {**self.env, "TERM": request.term} if terminal else self.env
        argv = request.argv or (choose_shell(env),)
        streams = open_streams(request)
        try:
            spec = CommandSpec(argv, env, self._cwd, terminal)
            pid, ended = await self._server.fork(spec, streams.its)
        except BaseException:
            streams.close_ours()
            raise
        finally:
            streams.close_its()
        self._commands[pid] = BesideRank(streams, ended, terminal)
        return pid

    async def _read(self, pid: int, patience: float) -> CommandOutput:
        """Return the new output of a command, and its end after the last of it."""
        if pid not in self._commands:
            raise LaunchError("the rank has been started again: the command has ended")
        output = await self._commands[pid].read(patience)
        if output.end is not None:
            self._commands.pop(pid, None)
        return output

    async def _leave(self, pid: int) -> None:
        """End a command: the person has gone."""
        if (command := self._commands.get(pid)) is None:
            return
        command.release()  # without its terminal it gets SIGHUP from the kernel
        if not await command.ends_by_itself():
            with contextlib.suppress(OSError):  # the server has ended, and all with it
                self._server.send(SignalProcess(pid, signal.SIGKILL))
        self._commands.pop(pid, None)

    def end(self) -> None:
        """Kill all: the rank is about to be started again."""
        for pid, command in self._commands.items():
            with contextlib.suppress(OSError):  # the server has ended, and all with it
                self._server.send(SignalProcess(pid, signal.SIGKILL))
            command.release()
        self._commands.clear()


class BesideRank:
    """One command: what it has printed, what it reads, and its end."""

    def __init__(
        self, streams: CommandStreams, ended: asyncio.Future[ProcessEnd], terminal: bool
    ) -> None:
        """`streams`: this side's descriptors are closed."""
        self._news = asyncio.Event()
        self._end, self._terminal = ended, terminal
        self._input = CommandInput(streams.input) if streams.input >= 0 else None
        self._outputs = [KeptOutput(fd, self._news) for fd in streams.outputs]
        ended.add_done_callback(lambda _: self._news.set())

    async def read(self, patience: float) -> CommandOutput:
        """Return the new output, and the end after the last of it."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        end = self._end.result() if self._end.done() else None
        if end is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                rest = asyncio.gather(*(kept.settled.wait() for kept in self._outputs))
                await asyncio.wait_for(rest, LAST_S)
            if any(kept.full for kept in self._outputs):
                end = None  # more may be in the pipe
                self._news.set()
        out, *err = (kept.take() for kept in self._outputs)
        if end is not None:
            self.release()
        return CommandOutput(out, b"".join(err), end)

    async def write(self, data: bytes, last: bool) -> None:
        """Give the command input; return once it has room for it, or reads no more."""
        if self._input is not None:
            await self._input.write(data)
            if last and not self._terminal:
                self._input.close()

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal; the kernel sends SIGWINCH."""
        if self._terminal and self._input is not None:
            self._input.with_descriptor(lambda fd: resize(fd, rows, columns))

    async def ends_by_itself(self) -> bool:
        """Report whether it ends because its terminal has gone. One without a terminal does not."""
        if self._terminal:
            await asyncio.wait({self._end}, timeout=HANG_UP_S)
        return self._end.done()

    def release(self) -> None:
        """Stop to read and to write; its terminal is gone."""
        for kept in self._outputs:
            kept.close()
        if self._input is not None:
            self._input.close()


def choose_shell(env: Mapping[str, str]) -> str:
    """Return the person's shell, or another one that this node has."""
    for shell in (env.get("SHELL", ""), "bash"):
        if shell and shutil.which(shell, path=env.get("PATH")):
            return shell
    return "/bin/sh"
