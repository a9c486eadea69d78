"""Where mpirun's launch agents, and its child for the rank, connect to the rank's agent. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from raydist.messages.agent import ProcessEnd
from raydist.messages.mpirun import DaemonRequest, EndLaunchAgent
from raydist.messages.wire import PACKET
from raydist.node.rank_spec import FromMpirun
from raydist.node.writer import Spawn
from raydist.shared.errors import LaunchError


@dataclass(frozen=True)
class RankChild:
    """mpirun's child for a rank (mpi_child.mpi_rank), connected."""

    sock: socket.socket
    """Closed by mpirun's child when mpirun ends it."""
    request: FromMpirun
    """Among it the variables by which MPI's process manager identifies the rank."""


@dataclass(frozen=True)
class LaunchAgent:
    """The request of mpirun's launch agent for a daemon (mpi_child.agent)."""

    host: str
    argv: tuple[str, ...]


class MpirunListener:
    """The socket where processes of mpirun connect, and their connections."""

    def __init__(self, path: Path, secret: str, spawn: Spawn) -> None:
        """`spawn`: creates a task that ends with the agent."""
        self._secret = secret
        self._spawn = spawn
        self.child: asyncio.Future[RankChild] = asyncio.get_running_loop().create_future()
        self._daemons: asyncio.Queue[DaemonRequest | None] = asyncio.Queue()
        """None: mpirun has ended."""
        self._launch_agents: dict[int, socket.socket] = {}
        """By descriptor, which identifies the launch agent in messages."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        spawn(self._accept_all())

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
        """Fail what waits for processes of mpirun: no more will connect."""
        self._daemons.put_nowait(None)
        if not self.child.done():
            self.child.set_exception(LaunchError(why))
            self.child.exception()  # marks it as retrieved: perhaps no StartRank waits for it

    def close(self) -> None:
        """Close all connections."""
        socks = [self._listener, *self._launch_agents.values()]
        if self.child.done() and self.child.exception() is None:
            socks.append(self.child.result().sock)
        for sock in socks:
            sock.close()

    async def _accept_all(self) -> None:
        """Accept the connections of mpirun's launch agents, and of its child for this rank."""
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Read the message of a launch agent or of mpirun's child, and keep its connection open.

        The connection closes when the daemon or the rank ends.
        """
        await readable(sock)
        packet, descriptors, _, _ = socket.recv_fds(sock, PACKET, 1)
        request = parse_request(packet, self._secret)
        if isinstance(request, LaunchAgent):
            self._launch_agents[sock.fileno()] = sock
            self._daemons.put_nowait(DaemonRequest(sock.fileno(), request.host, request.argv))
        elif isinstance(request, FromMpirun) and not self.child.done():
            given = replace(request, descriptors=tuple(descriptors))
            self.child.set_result(RankChild(sock, given))
        else:
            for descriptor in descriptors:
                os.close(descriptor)
            end_child(sock, ProcessEnd(1, 0, 0.0, output="raydist: this is not mpirun's child\n"))
            sock.close()


async def readable(sock: socket.socket) -> None:
    """Wait until the socket has something to read, or its other end is closed."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def parse_request(packet: bytes, secret: str) -> FromMpirun | LaunchAgent | None:
    """Return the message of a process that has connected.

    None if its secret is wrong, or it is malformed.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        fields = json.loads(packet)
        if not secrets.compare_digest(str(fields.get("secret", "")).encode(), secret.encode()):
            return None
        if "env" in fields:
            return FromMpirun(fields["env"], tuple(fields["cpus"]))
        return LaunchAgent(fields["host"], tuple(fields["argv"]))
    return None


def end_child(sock: socket.socket, end: ProcessEnd) -> None:
    """Tell a process of mpirun how to end; it may be gone."""
    with contextlib.suppress(OSError):
        sock.send(
            json.dumps({"code": end.code, "signal": end.signal, "output": end.output}).encode()
        )
