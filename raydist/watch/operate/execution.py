"""Runs a command alongside ranks; relays its input, output, signals and exit codes. (driver)"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from raydist.launch.limits import ANSWER_S
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.command import (
    CommandOutput,
    LeaveCommand,
    ReadCommand,
    ResizeCommand,
    RunCommand,
    SignalCommand,
    WriteCommand,
)
from raydist.messages.operate import (
    CommandEnded,
    Execute,
    InputTaken,
    Printed,
    SendSignal,
    TerminalSize,
    TextReply,
    TypedInput,
)
from raydist.messages.wire import Message
from raydist.shared.errors import last_line
from raydist.shared.events import Events
from raydist.shared.rank_names import name_ranks
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.records import record

PATIENCE_S = 1.0
"""Seconds after which an agent replies even if the command has printed nothing."""


class Bell(AbstractContextManager["Bell"]):
    """Wakes the thread that waits for the connection when a call to an agent is done."""

    def __init__(self) -> None:
        self.sock, self._rings = socket.socketpair()
        for sock in (self.sock, self._rings):
            sock.setblocking(False)

    def ring(self, _: Future[Any]) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # the call was done only after the `with` block
            self._rings.send(b"\0")

    def quiet(self) -> None:
        """Discard the rings so far."""
        with contextlib.suppress(OSError):
            self.sock.recv(1 << 12)

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self._rings.close()


class Execution:
    """One command, run alongside one or several ranks."""

    def __init__(self, group: WorkerGroup, connection: CommandLink) -> None:
        self._group, self._connection = group, connection
        self._pids: dict[int, int] = {}
        """By rank: the command's process, until it has ended."""
        self._reads: dict[Future[CommandOutput], int] = {}
        """The open ReadCommand calls, each with its rank."""
        self._input: deque[TypedInput] = deque()
        """Input that no agent has got yet; little, because the sender waits for InputTaken."""
        self._write: tuple[Future[None], int] | None = None
        """The open WriteCommand call, and its number of bytes."""
        self.codes: dict[int, int] = {}
        """By rank: the exit code of the command."""

    def _leave_late(self, rank: int, call: Future[int]) -> None:
        """End a command that an agent has started after all, later than anybody waits for it."""
        if not call.cancelled() and call.exception() is None:
            self._group.call(rank, LeaveCommand(call.result()))

    def run(self, ranks: Sequence[int], request: RunCommand) -> None:
        """Run the command to its end alongside each rank.

        Raises OSError if the connection is closed; the command is then ended.
        """
        calls = {rank: self._group.call(rank, request) for rank in ranks}
        wait(calls.values(), timeout=ANSWER_S)
        failed = {}
        for rank, call in calls.items():
            try:
                self._pids[rank] = call.result(0)
            except Exception as error:
                failed[rank] = last_line(error) if call.done() else "its agent does not answer"
                call.add_done_callback(partial(self._leave_late, rank))
        try:
            for rank, why in failed.items():
                self._end(rank, 126, why)
            with Bell() as bell:
                for rank in list(self._pids):
                    self._read(rank, bell)
                while self._pids:
                    self._connection.wait(bell.sock)
                    bell.quiet()  # before the futures are examined: later rings wake it again
                    while self._take_message():
                        pass
                    self._pass_input(bell)
                    for reply in [each for each in self._reads if each.done()]:
                        self._take_output(self._reads.pop(reply), reply, bell)
        finally:
            for rank, pid in self._pids.items():
                self._group.call(rank, LeaveCommand(pid))

    def _read(self, rank: int, bell: Bell) -> None:
        call = self._group.call(rank, ReadCommand(self._pids[rank], PATIENCE_S))
        self._reads[call] = rank
        call.add_done_callback(bell.ring)

    def _take_message(self) -> bool:
        """Handle a message from the command line; return whether there was one."""
        try:
            message = self._connection.receive(0.0)
        except TimeoutError:
            return False
        if message is None:
            raise ConnectionResetError
        if isinstance(message, TypedInput):
            self._input.append(message)
        else:
            self._pass_on(message)
        return True

    def _pass_on(self, message: Message) -> None:
        for rank, pid in self._pids.items():
            match message:
                case SendSignal(number):
                    self._group.call(rank, SignalCommand(pid, number))
                case TerminalSize(rows, columns):
                    self._group.call(rank, ResizeCommand(pid, rows, columns))

    def _pass_input(self, bell: Bell) -> None:
        """Send the next input to the agent once the command has read the previous one."""
        if self._write is not None:
            call, size = self._write
            if not call.done():
                return
            self._write = None
            self._connection.send(InputTaken(size))
        if self._input and self._pids:
            message = self._input.popleft()
            data = message.text.encode("utf-8", "surrogateescape")
            ((rank, pid),) = self._pids.items()
            call = self._group.call(rank, WriteCommand(pid, data, message.last))
            self._write = (call, len(data))
            call.add_done_callback(bell.ring)

    def _take_output(self, rank: int, call: Future[CommandOutput], bell: Bell) -> None:
        try:
            output = call.result()
        except Exception as error:  # the agent is gone, or the rank was restarted
            del self._pids[rank]
            self._end(rank, 126, last_line(error))
            return
        for stream, data in ((1, output.out), (2, output.err)):
            if data:
                text = data.decode("utf-8", "surrogateescape")
                self._connection.send(Printed(rank, stream, text))
        if output.end is None:
            self._read(rank, bell)
            return
        del self._pids[rank]
        self._end(rank, output.end.code or (128 + output.end.signal if output.end.signal else 0))

    def _end(self, rank: int, code: int, error: str = "") -> None:
        self.codes[rank] = code
        self._connection.send(CommandEnded(rank, code, error))


def run_for_ranks(
    group: WorkerGroup,
    events: Events,
    ranks: Sequence[int],
    request: Execute,
    connection: CommandLink,
) -> None:
    """Run a command alongside these ranks, and record its name and its exit codes.

    Its arguments, input and output are not recorded, because they may contain secrets.
    """
    execution = Execution(group, connection)
    size = (request.rows, request.columns)
    command = RunCommand(tuple(request.argv), request.reads, request.term, *size)
    try:
        execution.run(ranks, command)
    finally:
        codes = ", ".join(map(str, sorted(set(execution.codes.values())))) or "none"
        name = os.path.basename(request.argv[0]) if request.argv else "a shell"
        text = f"{name} on {name_ranks(ranks)}, exit code {codes}"
        record(events, "exec", text, ranks)
    connection.send(TextReply([text]))
