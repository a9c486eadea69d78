"""Commands that a person runs alongside a rank, in its environment and cgroup. (actor)"""

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
"""Seconds after a command's end for which its output is still read. There is a limit because a
process that the command left in the background may keep its streams open."""
HANG_UP_S = 2.0
"""Seconds that a command may run on after its terminal is closed; then it is killed."""


class Commands:
    """The commands that run alongside one process of a rank.

    The fork server of the node forks them.
    """

    def __init__(self, server: ForkClient, env: Mapping[str, str], cwd: str) -> None:
        """`env`, `cwd`: those of the rank. `env` may have secrets: it stays in memory."""
        self._server, self.env, self._cwd = server, dict(env), cwd
        self._commands: dict[int, RunningCommand] = {}
        """By pid: the commands whose end has not been reported yet."""

    async def handle(self, request: CommandRequest[Any]) -> Any:
        """Answer a request.

        Raises LaunchError for the output of a command that ended because its rank was restarted.
        """
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
                if pid in self._commands:  # as a terminal would: also to what a shell has started
                    self._server.send(SignalProcess(pid, number, group=True))
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
        self._commands[pid] = RunningCommand(streams, ended, terminal)
        return pid

    async def _read(self, pid: int, patience: float) -> CommandOutput:
        """Return a command's new output; with the last of it, how the command ended."""
        if pid not in self._commands:
            raise LaunchError("the rank was restarted, so the command has ended")
        output = await self._commands[pid].read(patience)
        if output.end is not None:
            self._commands.pop(pid, None)
        return output

    async def _leave(self, pid: int) -> None:
        """End a command because nobody reads its output any more."""
        if (command := self._commands.get(pid)) is None:
            return
        command.release()  # closes its terminal, so the kernel sends it SIGHUP
        if not await command.ends_by_itself():
            with contextlib.suppress(OSError):  # the server has ended, and the command with it
                self._server.send(SignalProcess(pid, signal.SIGKILL))
        self._commands.pop(pid, None)

    def end(self) -> None:
        """Kill all commands, because the rank is about to be restarted."""
        for pid, command in self._commands.items():
            with contextlib.suppress(OSError):  # the server has ended, and the command with it
                self._server.send(SignalProcess(pid, signal.SIGKILL))
            command.release()
        self._commands.clear()


class RunningCommand:
    """One command: its output, its input, and how it ended."""

    def __init__(
        self, streams: CommandStreams, ended: asyncio.Future[ProcessEnd], terminal: bool
    ) -> None:
        """`streams`: our ends of them are closed here. `ended`: done when the command ends."""
        self._news = asyncio.Event()
        self._end, self._terminal = ended, terminal
        self._input = CommandInput(streams.input) if streams.input >= 0 else None
        self._outputs = [KeptOutput(fd, self._news) for fd in streams.outputs]
        ended.add_done_callback(lambda _: self._news.set())

    async def read(self, patience: float) -> CommandOutput:
        """Return the new output; with the last of it, how the command ended."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        end = self._end.result() if self._end.done() else None
        if end is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                rest = asyncio.gather(*(kept.settled.wait() for kept in self._outputs))
                await asyncio.wait_for(rest, LAST_S)
            if any(kept.full for kept in self._outputs):
                end = None  # the buffer is full, so the pipe may hold more
                self._news.set()
        out, *err = (kept.take() for kept in self._outputs)
        if end is not None:
            self.release()
        return CommandOutput(out, b"".join(err), end)

    async def write(self, data: bytes, last: bool) -> None:
        """Write to the command's input; return once it took all, or has closed its input."""
        if self._input is not None:
            await self._input.write(data)
            if last and not self._terminal:
                self._input.close()

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the command's terminal; the kernel sends it SIGWINCH."""
        if self._terminal and self._input is not None:
            self._input.with_descriptor(lambda fd: resize(fd, rows, columns))

    async def ends_by_itself(self) -> bool:
        """Return whether the command ends now that its terminal is closed.

        A command without a terminal does not notice, and continues.
        """
        if self._terminal:
            await asyncio.wait({self._end}, timeout=HANG_UP_S)
        return self._end.done()

    def release(self) -> None:
        """Stop reading and writing; this closes the command's terminal."""
        for kept in self._outputs:
            kept.close()
        if self._input is not None:
            self._input.close()


def choose_shell(env: Mapping[str, str]) -> str:
    """Return the user's shell if this node has it, else bash or sh."""
    for shell in (env.get("SHELL", ""), "bash"):
        if shell and shutil.which(shell, path=env.get("PATH")):
            return shell
    return "/bin/sh"
