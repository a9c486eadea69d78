"""The agent of a rank under mpirun: serves mpirun's processes and forks the rank. (actor)

It forks the rank when mpirun starts it, from the fork server as without mpirun: the rank has the
same log, its process group, and a reported end. mpirun's daemon starts mpi_child.py instead of the
rank; that process passes the rank's MPI variables to this agent, and ends as the rank does.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from raydist.messages.agent import Open, Opened, ProcessEnd, ProcessId, RankEnd, StartRank
from raydist.messages.mpirun import (
    EndLaunchAgent,
    MpirunEnded,
    NextDaemons,
    RunDaemon,
    RunMpirun,
)
from raydist.messages.request import Request
from raydist.messages.server import ProgramSpec
from raydist.node import mpi_child, mpi_install, mpi_segments
from raydist.node.agent import RankAgent
from raydist.node.mpi_listener import MpirunListener, RankChild, end_child, readable
from raydist.shared.errors import LaunchError

ABANDONED_S = 1.0
"""Seconds until a rank is killed that neither ended nor was stopped after mpirun ended its child.
"""
OUTPUT = 1 << 20
"""Maximum bytes of the output of mpirun or a daemon that the driver receives."""

ALLOCATION = (
    "SLURM",
    "PBS_",
    "COBALT_",
    "LSB_",
    "FLUX_",
    "PALS_",
    "BASIL_",
    "LOADL_",
    "PE_HOSTFILE",
)
"""Prefixes of the variables by which Open MPI notices a scheduler's job, and takes its nodes and
its launcher. Sources: mca/ras, mca/plm and mca/ess of PRRTE 3 and of ORTE (Open MPI 4).
"""

ABORT = re.compile(r"^Abort\((-?\d+)\) on node \d+ .*application called MPI_Abort.*$", re.MULTILINE)
"""MPICH's line about the rank that called MPI_Abort, with its code."""
PMI_LOST = "PMIU_write error"
"""MPICH's error in a rank whose process manager ended because another rank called MPI_Abort."""


class MpiRankAgent(RankAgent):
    """The agent of one rank under mpirun.

    The agent of rank 0 also runs mpirun; the first agent of each node runs the node's daemon.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listener: MpirunListener | None = None
        self._secret = ""
        self._mpirun_end = ""
        """How mpirun ended; empty while it runs."""
        self._has_daemon = False
        self._abandoned = False
        """Whether the agent has killed the rank because mpirun had ended its child."""

    async def handle(self, request: Request[Any]) -> Any:
        """Answer a request of the driver, including those about mpirun."""
        match request:
            case RunMpirun():
                return await self.run_mpirun(request)
            case RunDaemon():
                return await self.run_daemon(request)
            case NextDaemons():
                return await self._open_listener().next_daemons()
            case EndLaunchAgent():
                return self._open_listener().end_launch_agent(request)
            case MpirunEnded():
                return self.note_mpirun_ended(request.why)
        return await super().handle(request)

    async def open(self, request: Open) -> Opened:
        """Open as any agent does, and listen for mpirun's processes.

        The first agent of a node also finds the node's MPI.
        """
        self._secret = request.secret
        opened = await super().open(request)
        if opened.facts is not None:
            self._install = mpi_install.find_mpirun(request.mpirun)
            self._interface = opened.facts.interface
            opened = replace(opened, facts=replace(opened.facts, mpi=asdict(self._install)))
        path = self.folder / f"mpi-{request.rank}"
        self._listener = MpirunListener(path, request.secret, self._spawn)
        return opened

    async def start(self, request: StartRank) -> ProcessId:
        """Wait for mpirun's child, then fork the rank with its variables."""
        child = await self._open_listener().child
        self._spawn(self._end_with_child(child))
        given = child.request
        if request.script.endswith(".py") or request.script.startswith("-m "):
            # The loader reads it at exec only, and this rank is a fork.
            env = {**given.env}
            env.pop("LD_LIBRARY_PATH", None)
            given = replace(given, env=env)
        if set(given.cpus or ()) == os.sched_getaffinity(0):  # else mpirun has bound it: --bind-to
            given = replace(given, cpus=None)
        try:
            return await self._start(request, given)
        finally:
            for descriptor in given.descriptors:
                os.close(descriptor)

    async def run_mpirun(self, request: RunMpirun) -> ProcessEnd:
        """Run mpirun to its end."""
        agent = self.folder / "agent"
        agent.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -IS "{mpi_child.__file__}" agent "$@"\n'
        )
        agent.chmod(0o700)
        if os.statvfs(self.folder).f_flag & os.ST_NOEXEC:
            raise LaunchError(
                f"{self.folder.parent} is mounted noexec, and mpirun runs its launch agent "
                "there: set TMPDIR"
            )
        argv = [
            self._install.mpirun,
            *(word.replace("{agent}", str(agent)) for word in request.argv),
        ]
        return await self._execute(argv, request.env)

    async def run_daemon(self, request: RunDaemon) -> ProcessEnd:
        """Run mpirun's daemon for this node to its end.

        Raises LaunchError for a second daemon, which mpirun never needs.
        """
        argv, variables = mpi_install.daemon(request.argv, self._install, self._interface)
        if self._has_daemon:
            raise LaunchError(
                f"{socket.gethostname()} was asked to run a second {os.path.basename(argv[0])}"
            )
        self._has_daemon = True
        return await self._execute(argv, {**request.env, **variables})

    def note_mpirun_ended(self, why: str) -> None:
        """Note that mpirun has ended and will start no process for this rank any more."""
        self._mpirun_end = why
        if self._listener is not None:
            self._listener.note_mpirun_ended(why)

    async def close(self) -> None:
        """Close as any agent does, and remove the shared memory that killed MPI ranks left."""
        self.note_mpirun_ended("the run is over")
        await super().close()
        if self._listener is not None:
            self._listener.close()
        if self._lead:
            mpi_segments.remove_leftovers(self.born)

    async def _execute(self, argv: Sequence[str], env: Mapping[str, str]) -> ProcessEnd:
        """Run an MPI program as a child of the fork server, and return how it ended.

        The fork server ends the program in any case.
        """
        own_variables = {
            "RAYDIST_MPI_FOLDER": str(self.folder),
            "RAYDIST_MPI_SECRET": self._secret,
            "TMPDIR": str(self.folder),
            "RAYDIST_MPI_PYTHON": sys.executable,
            "RAYDIST_MPI_CHILD": mpi_child.__file__,
        }
        path = self.folder / f"{os.path.basename(argv[0])}.log"
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # The ranks keep the scheduler's variables: they are not MPI's children.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(ALLOCATION)
        }
        program = ProgramSpec(tuple(argv), {**inherited, **env, **own_variables}, "/")
        try:
            _, ended = await self._server.fork(program, [log])
        finally:
            os.close(log)
        end = await asyncio.shield(ended)
        return replace(end, output=last_output(path))

    def _open_listener(self) -> MpirunListener:
        """Return where mpirun's processes connect, once the agent is open."""
        assert self._listener is not None, "open() comes first"
        return self._listener

    def _explain_end(self, end: RankEnd) -> RankEnd:
        """Return the end with what MPI says about it, and end mpirun's child likewise.

        The child reports the end to mpirun.
        """
        output = last_output(Path(f"{self._newest_process().reports.base}.log"))
        if aborted := ABORT.search(output):
            end = replace(end, code=exit_code_of(int(aborted[1])), signal=0, lost=aborted[0])
        elif (self._abandoned and end.signal == signal.SIGKILL) or (
            end.code and PMI_LOST in output
        ):
            end = replace(end, by_mpirun=True, lost=self._mpirun_end)
        end_child(self._open_listener().child.result().sock, end)
        return end

    async def _end_with_child(self, child: RankChild) -> None:
        """Wait until mpirun ends its child, then end the rank too.

        mpirun ends the child once a rank fails or calls MPI_Abort.
        """
        await readable(child.sock)
        child.sock.close()
        # With Open MPI the rank that calls MPI_Abort ends with its code. With MPICH it waits to be
        # killed, and soon continues.
        seconds = ABANDONED_S if "PMIX_RANK" in child.request.env else ABANDONED_S / 4
        if self._process is None:  # being forked
            await asyncio.sleep(seconds)
        else:
            await self._process.wait_end(seconds)
        if self._process is not None and self._process.running:
            self._abandoned = True
            self._process.kill()


def last_output(path: Path) -> str:
    """Return the last OUTPUT bytes of a log as text.

    No more is read: the log of a rank may have holes of gigabytes.
    """
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - OUTPUT))
        return log.read(OUTPUT).decode(errors="replace")


def exit_code_of(abort: int) -> int:
    """Return the exit code of a rank that called MPI_Abort with this one: never that of success."""
    return abort & 0xFF or 1
