"""The agent of a rank under mpirun: serves mpirun's processes and forks the rank. (actor)

It forks the rank when mpirun starts it, from the fork server as without mpirun: the rank has the
same log, its process group, and a reported end. mpirun's daemon starts mpi_child.py instead of the
rank; that process passes the rank's MPI variables to this agent, and ends as the rank does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raydist.messages.agent import Open, Opened, ProcessEnd, RankEnd, StartRank
from raydist.messages.mpirun import (
    DaemonRequest,
    EndLaunchAgent,
    MpirunEnded,
    NextDaemons,
    RunDaemon,
    RunMpirun,
)
from raydist.messages.request import Request
from raydist.messages.server import ProgramSpec, SignalProcess
from raydist.messages.wire import PACKET
from raydist.node import mpi_child, mpi_install, mpi_segments
from raydist.node.agent import RankAgent
from raydist.shared.errors import LaunchError

ABANDONED_S = 1.0
"""Seconds until a rank is killed that neither ended nor was stopped after mpirun ended its child.
"""
OUTPUT = 4000
"""Maximum bytes of the output of mpirun or a daemon that the driver receives."""

ABORT = re.compile(r"^Abort\((\d+)\) on node \d+ .*application called MPI_Abort.*$", re.MULTILINE)
"""MPICH's line about the rank that called MPI_Abort, with its code."""
PMI_LOST = "PMIU_write error"
"""MPICH's error in a rank whose process manager ended because another rank called MPI_Abort."""


@dataclass(frozen=True)
class RankChild:
    """The message of mpirun's child for a rank (mpi_child.mpi_rank)."""

    env: dict[str, str]
    """The variables by which MPI's process manager identifies the rank."""
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class LaunchAgent:
    """The request of mpirun's launch agent for a daemon (mpi_child.agent)."""

    host: str
    argv: tuple[str, ...]


class MpiRankAgent(RankAgent):
    """The agent of one rank under mpirun.

    The agent of rank 0 also runs mpirun; the first agent of each node runs the node's daemon.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listener: socket.socket | None = None
        self._secret = ""
        self._child: asyncio.Future[RankChild] | None = None
        self._child_sock: socket.socket | None = None
        self._daemons: asyncio.Queue[DaemonRequest | None] = asyncio.Queue()
        self._launch_agents: dict[int, socket.socket] = {}
        """By descriptor, which identifies the launch agent in messages."""
        self._mpirun_end = ""
        """How mpirun ended; empty while it runs."""
        self._has_daemon = False
        self._abandoned = False

    async def handle(self, request: Request[Any]) -> Any:
        """Answer a request of the driver, including those about mpirun."""
        match request:
            case RunMpirun():
                return await self.run_mpirun(request)
            case RunDaemon():
                return await self.run_daemon(request)
            case NextDaemons():
                return await self.next_daemons()
            case EndLaunchAgent():
                return self.end_launch_agent(request)
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
            mpi = {**asdict(self._install), "rdma": mpi_install.rdma_support()}
            opened = replace(opened, facts=replace(opened.facts, mpi=mpi))
        self._child = asyncio.get_running_loop().create_future()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(str(self.folder / f"mpi-{self.rank}"))
        self._listener.listen(1024)
        self._spawn(self._accept_all(self._listener))
        return opened

    async def start(self, request: StartRank) -> int:
        """Wait for mpirun's child, then fork the rank with its variables."""
        assert self._child is not None, "Open comes before StartRank"
        child = await self._child
        if request.script.endswith(".py") or request.script.startswith("-m "):
            # The loader reads it at exec only, and this rank is a fork.
            child.env.pop("LD_LIBRARY_PATH", None)
        self._mpi_env = child.env
        # Differs with mpirun's --bind-to.
        self._cpus = child.cpus if set(child.cpus) != os.sched_getaffinity(0) else None
        pid = await super().start(request)
        for descriptor in self._mpi_fds:
            os.close(descriptor)
        self._mpi_fds = []
        return pid

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

    async def next_daemons(self) -> list[DaemonRequest]:
        """Wait for and return the next daemons that mpirun's launch agents request.

        Returns an empty list once mpirun has ended.
        """
        daemons = [await self._daemons.get()]
        while not self._daemons.empty():
            daemons.append(self._daemons.get_nowait())
        return [daemon for daemon in daemons if daemon is not None]

    def end_launch_agent(self, request: EndLaunchAgent) -> None:
        """End a launch agent in the way that the daemon it requested ended."""
        sock = self._launch_agents.pop(request.agent)
        end_child(sock, request.end)
        sock.close()

    def note_mpirun_ended(self, why: str) -> None:
        """Note that mpirun has ended and will start no process for this rank any more."""
        self._mpirun_end = why
        self._daemons.put_nowait(None)
        if self._child is not None and not self._child.done():
            self._child.set_exception(LaunchError(why))
            self._child.exception()  # marks it as retrieved: perhaps no StartRank waits for it

    async def close(self) -> None:
        """Close as any agent does, and remove the shared memory that killed MPI ranks left."""
        self.note_mpirun_ended("the run is over")
        await super().close()
        for sock in filter(None, [self._listener, self._child_sock, *self._launch_agents.values()]):
            sock.close()
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
        program = ProgramSpec(tuple(argv), {**os.environ, **env, **own_variables}, "/")
        try:
            _, ended = await self._server.fork(program, [log])
        finally:
            os.close(log)
        end = await asyncio.shield(ended)
        return replace(end, output=last_output(path))

    async def _accept_all(self, listener: socket.socket) -> None:
        """Accept the connections of mpirun's launch agents, and of its child for this rank."""
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Read the message of a launch agent or of mpirun's child, and keep its connection open.

        The connection closes when the daemon or the rank ends.
        """
        await readable(sock)
        packet, descriptors, _, _ = socket.recv_fds(sock, PACKET, 1)
        request = parse_request(packet, self._secret)
        assert self._child is not None, "open made it"
        if isinstance(request, LaunchAgent):
            self._launch_agents[sock.fileno()] = sock
            self._daemons.put_nowait(DaemonRequest(sock.fileno(), request.host, request.argv))
        elif isinstance(request, RankChild) and not self._child.done():
            self._child_sock, self._mpi_fds = sock, descriptors
            self._child.set_result(request)
            self._spawn(self._end_with_child(sock))
        else:
            for descriptor in descriptors:
                os.close(descriptor)
            end_child(sock, ProcessEnd(1, 0, 0.0, output="raydist: this is not mpirun's child\n"))
            sock.close()

    def _note_end(self, pid: int, end: RankEnd) -> None:
        """Note the end as any agent does, and end mpirun's child likewise.

        The child reports the end to mpirun.
        """
        output = last_output(self.folder / f"rank-{self.rank}.log")
        if aborted := ABORT.search(output):
            end = replace(end, code=int(aborted[1]), signal=0, lost=aborted[0])
        elif (self._abandoned and end.signal == signal.SIGKILL) or (
            end.code and PMI_LOST in output
        ):
            end = replace(end, by_mpirun=True, lost=self._mpirun_end)
        if self._child_sock is not None:
            end_child(self._child_sock, end)
        super()._note_end(pid, end)

    async def _end_with_child(self, sock: socket.socket) -> None:
        """Wait until mpirun ends its child, then end the rank too.

        mpirun ends the child once a rank fails or calls MPI_Abort.
        """
        await readable(sock)
        sock.close()
        # With Open MPI the rank that calls MPI_Abort ends with its code. With MPICH it waits to be
        # killed, and soon continues.
        await self._wait_end(ABANDONED_S if "PMIX_RANK" in self._mpi_env else ABANDONED_S / 4)
        if self._end is None and self.pid:
            self._abandoned = True
            self._server.send(SignalProcess(self.pid, signal.SIGKILL))


def last_output(path: Path) -> str:
    """Return the last OUTPUT bytes of a log as text.

    No more is read: the log of a rank may have holes of gigabytes.
    """
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - OUTPUT))
        return log.read(OUTPUT).decode(errors="replace")


async def readable(sock: socket.socket) -> None:
    """Wait until the socket has something to read, or its other end is closed."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def parse_request(packet: bytes, secret: str) -> RankChild | LaunchAgent | None:
    """Return the message of a process that has connected.

    None if its secret is wrong, or it is malformed.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        fields = json.loads(packet)
        if not secrets.compare_digest(str(fields.get("secret", "")).encode(), secret.encode()):
            return None
        if "env" in fields:
            return RankChild(fields["env"], tuple(fields["cpus"]))
        return LaunchAgent(fields["host"], tuple(fields["argv"]))
    return None


def end_child(sock: socket.socket, end: ProcessEnd) -> None:
    """Tell a process of mpirun how to end; it may be gone."""
    with contextlib.suppress(OSError):
        sock.send(
            json.dumps({"code": end.code, "signal": end.signal, "output": end.output}).encode()
        )
