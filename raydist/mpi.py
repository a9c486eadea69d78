"""backend=mpi: mpirun on rank 0's node, its daemons on the nodes, and the words between them. (driver)"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from raydist import fabric_mpi
from raydist.config import Job
from raydist.errors import ConfigError, cause
from raydist.group import Gang

LEAVE_S = 2.0
"""Longest wait for mpirun to take leave of its daemons before they are all ended."""
NOISE = ("couldn't find that topic", "couldn't open the help", "You were supposed to get help about", "from the file:")
"""An Open MPI that was moved after it was built looks for its texts where they were, and says so at length."""


@contextlib.contextmanager
def launching(job: Job, gang: Gang) -> Iterator[None]:
    """Inside, mpirun is there for the ranks to begin and to end under; with another backend there is nothing to do."""
    if job.backend.name != "mpi":
        yield
        return
    check_alike(gang)
    errands = Errands(job, gang)
    errands.begin()
    try:
        yield
    finally:
        errands.end(Path(job.dir) / "logs")


def check_alike(gang: Gang) -> None:
    """Refuse hosts that have different MPIs: their daemons would not understand each other."""
    first = gang.plan.seats[0].node.host, gang.facts[0].mpi
    for seat, facts in zip(gang.plan.seats, gang.facts, strict=True):
        if (facts.mpi["kind"], facts.mpi["version"]) != (first[1]["kind"], first[1]["version"]):
            raise ConfigError(
                f"backend=mpi: {seat.node.host} has {told(facts.mpi)}, and {first[0]} has {told(first[1])}: install "
                "one on all, or say backend.mpi.mpirun=/path/of/one/that/all/have"
            )


def told(mpi: Any) -> str:
    """`openmpi 5.0.11 (/usr/bin/mpirun)`."""
    return f"{mpi['kind']} {mpi['version']} ({mpi['mpirun']})"


class Errands:
    """What mpirun's agents ask for is carried to the host that they name, and the daemon's end back to the agent."""

    def __init__(self, job: Job, gang: Gang) -> None:
        self._job = job
        self._gang = gang
        self._inbox: queue.SimpleQueue[tuple[str, int, Future[Any]] | None] = queue.SimpleQueue()
        self._leads = {fabric_mpi.host(s.node_rank): s.rank for s in gang.plan.seats if s.local_rank == 0}
        self._trouble = ""
        self._said = ""
        self._left = threading.Event()

    def begin(self) -> None:
        """Start mpirun; the ranks' seats wait for its children."""
        leads, facts = [self._gang.plan.seats[rank] for rank in self._leads.values()], self._gang.facts[0]
        ranks = [seat.local_world_size for seat in leads]
        more = self._job.backend.mpi.args
        words = fabric_mpi.command(facts.mpi, ranks, facts.interface, os.getuid() == 0, more)
        self._ask("mpirun", 0, "mpirun", words, self._job.env)
        self._ask("asked", 0, "asked")
        threading.Thread(target=self._carry, name="raydist-mpi", daemon=True).start()

    def end(self, logs: Path) -> None:
        """Let mpirun take leave, and keep what it said."""
        self._left.wait(LEAVE_S)
        self._inbox.put(None)
        if self._said:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / "mpirun.log").write_text(self._said)

    def _ask(self, what: str, agent: int, method: str, *args: Any, rank: int = 0) -> None:
        self._gang.call(rank, method, *args).add_done_callback(lambda done: self._inbox.put((what, agent, done)))

    def _carry(self) -> None:
        """One errand after the other, until mpirun has ended or nobody wants it any more."""
        while (heard := self._inbox.get()) is not None:
            what, agent, answer = heard
            if what == "asked" and answer.exception() is None:
                for asked in answer.result():
                    self._start_daemon(**asked)
                if answer.result():
                    self._ask("asked", 0, "asked")
            elif what == "daemon":
                self._gang.call(0, "answered", agent, self._end_of_daemon(answer))
            elif what == "mpirun":
                self._end_of_mpirun(answer)
                return

    def _start_daemon(self, id: int, host: str, words: list[str]) -> None:
        if host in self._leads:
            self._ask("daemon", id, "daemon", words, self._job.env, rank=self._leads[host])
        else:
            said = f"mpirun's agent was asked for {host}, which is not a host of this job\n"
            self._gang.call(0, "answered", id, {"code": 1, "said": said})

    def _end_of_daemon(self, answer: Future[Any]) -> dict[str, Any]:
        if (error := answer.exception()) is not None:
            self._trouble = self._trouble or cause(error)
            return {"code": 1, "said": f"{cause(error)}\n"}
        end: dict[str, Any] = answer.result()
        return end

    def _end_of_mpirun(self, answer: Future[Any]) -> None:
        if (error := answer.exception()) is not None:
            why = cause(error)
        else:
            end = answer.result()
            self._said = end["said"]
            ended = f"was killed by signal {end['signal']}" if end["signal"] else f"ended with code {end['code']}"
            why = f"mpirun {ended}: {self._trouble or in_short(self._said) or 'it left no word'}"
        everyone = [self._gang.call(seat.rank, "dismiss", why) for seat in self._gang.plan.seats]
        wait(everyone, timeout=LEAVE_S)
        self._left.set()


def in_short(said: str) -> str:
    """What mpirun said, on one line and without its frames."""
    lines = [line.strip() for line in said.splitlines()]
    plain = [line for line in lines if line.strip("-=") and not any(noise in line for noise in NOISE)]
    return " ".join(plain)[:500]
