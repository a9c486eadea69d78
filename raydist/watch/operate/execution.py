"""Runs a command beside ranks, and passes its output, signals and end on. (driver)"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from raydist.launch.limits import ANSWER_S
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import CommandOutput, ReadCommand, RunCommand, SignalCommand
from raydist.messages.operate import CommandEnded, Printed, SendSignal, TextReply
from raydist.shared.errors import last_line
from raydist.shared.events import Events
from raydist.shared.rank_names import name_ranks
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.records import record

PATIENCE_S = 1.0
"""Seconds that an agent waits for output until it replies without any."""
LOOK_S = 0.05
"""Seconds between two looks for a message of the command."""


class Execution:
    """One command beside some ranks."""

    def __init__(self, group: WorkerGroup, connection: CommandLink) -> None:
        self._group, self._connection = group, connection
        self._pids: dict[int, int] = {}
        """By rank: the processes that have not ended."""
        self._reading: dict[Future[CommandOutput], int] = {}
        self.codes: dict[int, int] = {}

    def run(self, ranks: Sequence[int], argv: Sequence[str]) -> None:
        """Run the command to its end on each rank. OSError: the person has gone; it is killed."""
        calls = {rank: self._group.call(rank, RunCommand(tuple(argv))) for rank in ranks}
        wait(calls.values(), timeout=ANSWER_S)
        for rank, call in calls.items():
            try:
                self._pids[rank] = call.result(0)
            except Exception as error:
                self._end(rank, 126, last_line(error) or "its agent does not answer")
        try:
            for rank in list(self._pids):
                self._read(rank)
            while self._pids:
                self._look_for_signal()
                done, _ = wait(self._reading, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                for reply in done:
                    self._take(self._reading.pop(reply), reply)
        finally:
            for rank, pid in self._pids.items():
                self._group.call(rank, SignalCommand(pid, signal.SIGKILL))

    def _read(self, rank: int) -> None:
        self._reading[self._group.call(rank, ReadCommand(self._pids[rank], PATIENCE_S))] = rank

    def _look_for_signal(self) -> None:
        with contextlib.suppress(TimeoutError):
            message = self._connection.receive(0.0)
            if message is None:
                raise ConnectionResetError
            if isinstance(message, SendSignal):
                for rank, pid in self._pids.items():
                    self._group.call(rank, SignalCommand(pid, message.number))

    def _take(self, rank: int, call: Future[CommandOutput]) -> None:
        try:
            output = call.result()
        except Exception as error:  # the agent is gone, or the rank was started again
            del self._pids[rank]
            self._end(rank, 126, last_line(error))
            return
        for stream, data in ((1, output.out), (2, output.err)):
            if data:
                text = data.decode("utf-8", "surrogateescape")
                self._connection.send(Printed(rank, stream, text))
        if output.end is None:
            self._read(rank)
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
    argv: Sequence[str],
    connection: CommandLink,
) -> None:
    """Run a command beside these ranks, and record its name and its exit codes.

    Neither its arguments nor its output are recorded: they may contain secrets.
    """
    execution = Execution(group, connection)
    try:
        execution.run(ranks, argv)
    finally:
        codes = ", ".join(map(str, sorted(set(execution.codes.values())))) or "none"
        text = f"{os.path.basename(argv[0])} on {name_ranks(ranks)}, exit code {codes}"
        record(events, "exec", text, ranks)
    connection.send(TextReply([text]))
