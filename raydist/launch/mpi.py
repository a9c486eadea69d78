"""backend=mpi: runs mpirun on rank 0's node, and its daemons on all nodes. (driver)

It passes the messages between mpirun and its daemons.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import ProcessEnd
from raydist.messages.mpirun import (
    DaemonRequest,
    EndLaunchAgent,
    MpirunEnded,
    NextDaemons,
    RunDaemon,
    RunMpirun,
)
from raydist.messages.request import Request
from raydist.network import mpi as network_mpi
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError, last_line

Reply = TypeVar("Reply")

LEAVE_S = 2.0
"""Limit on the wait for mpirun to end its daemons, before all are killed."""
NOISE = (
    "couldn't find that topic",
    "couldn't open the help",
    "You were supposed to get help about",
    "from the file:",
)
"""Lines of an Open MPI that was moved after its build: its help files are not at their old path."""


@contextlib.contextmanager
def launching(job: Job, group: WorkerGroup) -> Iterator[None]:
    """Run mpirun while the ranks start and run; with any other backend do nothing."""
    if job.backend.name != "mpi":
        yield
        return
    check_same_mpi(group)
    bridge = MpirunBridge(job, group)
    bridge.begin()
    try:
        yield
    finally:
        bridge.end(Path(job.dir) / "logs")


def check_same_mpi(group: WorkerGroup) -> None:
    """Raise ConfigError if hosts have different MPIs, whose daemons could not work together."""
    host, mpi = group.plan.slots[0].node.host, group.facts[0].mpi
    for slot, facts in zip(group.plan.slots, group.facts, strict=True):
        if (facts.mpi["kind"], facts.mpi["version"]) != (mpi["kind"], mpi["version"]):
            cause = f"{slot.node.host} has {mpi_text(facts.mpi)}, and {host} has {mpi_text(mpi)}"
            raise ConfigError.of(
                "backend", "mpi", cause, "backend.mpi.mpirun=/path/of/one/that/all/have"
            )


def mpi_text(mpi: Mapping[str, str]) -> str:
    """Return a text such as `openmpi 5.0.11 (/usr/bin/mpirun)`."""
    return f"{mpi['kind']} {mpi['version']} ({mpi['mpirun']})"


class MpirunBridge:
    """Starts the daemons that mpirun's launch agents request on their hosts.

    It reports the daemons' ends to the launch agents.
    """

    def __init__(self, job: Job, group: WorkerGroup) -> None:
        self._job = job
        self._group = group
        self._inbox: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        """The handlers of replies; each returns True once mpirun has ended. None ends the thread.
        """
        self._leads = {network_mpi.host(slot.node_rank): slot.rank for slot in group.plan.leads}
        self._first_error = ""
        self._output = ""
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start mpirun; the agents of the ranks wait for its processes."""
        facts = self._group.facts[0]
        ranks_of_nodes = [
            self._group.plan.slots[rank].local_world_size for rank in self._leads.values()
        ]
        args = self._job.backend.mpi.args
        argv = network_mpi.command(
            facts.mpi, ranks_of_nodes, facts.interface, os.getuid() == 0, args
        )
        self._send(0, RunMpirun(tuple(argv), self._job.env), self._end_mpirun)
        self._send(0, NextDaemons(), self._start_daemons)
        threading.Thread(target=self._handle_replies, name="raydist-mpi", daemon=True).start()

    def end(self, logs: Path) -> None:
        """Wait until mpirun has ended its daemons, and write its output to `logs` if possible."""
        self._ended.wait(LEAVE_S)
        self._inbox.put(None)
        if self._output:
            with contextlib.suppress(OSError):  # the disk may be full: no reason to end a run
                logs.mkdir(parents=True, exist_ok=True)
                (logs / "mpirun.log").write_text(self._output)

    def _send(
        self, rank: int, request: Request[Reply], handle: Callable[[Future[Reply]], bool]
    ) -> None:
        self._group.call(rank, request).add_done_callback(
            lambda done: self._inbox.put(partial(handle, done))
        )

    def _handle_replies(self) -> None:
        """Handle replies until mpirun has ended or the attempt is over."""
        while (handle := self._inbox.get()) is not None:
            if handle():
                return

    def _start_daemons(self, reply: Future[list[DaemonRequest]]) -> bool:
        daemons = [] if reply.exception() is not None else reply.result()
        for daemon in daemons:
            if daemon.host in self._leads:
                request = RunDaemon(daemon.argv, self._job.env)
                self._send(
                    self._leads[daemon.host], request, partial(self._end_daemon, daemon.agent)
                )
            else:
                text = (
                    f"mpirun requested a daemon on {daemon.host}, which is not a host of this job\n"
                )
                self._group.call(0, EndLaunchAgent(daemon.agent, failed_end(text)))
        if daemons:
            self._send(0, NextDaemons(), self._start_daemons)
        return False

    def _end_daemon(self, agent: int, reply: Future[ProcessEnd]) -> bool:
        if (error := reply.exception()) is not None:
            self._first_error = self._first_error or last_line(error)
            end = failed_end(f"{last_line(error)}\n")
        else:
            end = reply.result()
        self._group.call(0, EndLaunchAgent(agent, end))
        return False

    def _end_mpirun(self, reply: Future[ProcessEnd]) -> bool:
        if (error := reply.exception()) is not None:
            why = last_line(error)
        else:
            end = reply.result()
            self._output = end.output
            ended = (
                f"was killed by signal {end.signal}"
                if end.signal
                else f"ended with code {end.code}"
            )
            why = (
                f"mpirun {ended}: "
                f"{self._first_error or summarize(self._output) or 'it printed nothing'}"
            )
        calls = [self._group.call(slot.rank, MpirunEnded(why)) for slot in self._group.plan.slots]
        wait(calls, timeout=LEAVE_S)
        self._ended.set()
        return True


def failed_end(text: str) -> ProcessEnd:
    """Return the end of a daemon that could not be started."""
    return ProcessEnd(1, 0, time.time(), output=text)


def summarize(output: str) -> str:
    """Return the output of mpirun on one line, without rules and noise."""
    lines = [line.strip() for line in output.splitlines()]
    plain = [
        line for line in lines if line.strip("-=") and not any(noise in line for noise in NOISE)
    ]
    return " ".join(plain)[:500]
