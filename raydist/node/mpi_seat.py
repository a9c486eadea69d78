"""The seat of a rank that mpirun starts: it has mpirun's word with the node, and forks when mpirun says so. (actor)

The fork server forks the rank as ever, so that it has its log, its end and its group of its own. What mpirun's daemon
starts in its place (mpi_child.py) hands over the rank's place in MPI, and ends as the rank does.
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
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from raydist.errors import LaunchError
from raydist.node import mpi_child, mpi_install, mpi_segments
from raydist.node.seat import Seat
from raydist.node.wire import PACKET

GIVEN_UP_S = 1.0
"""Seconds that a rank has to end by itself, or be ended by the driver, once mpirun has let go of it."""
SAID = 4000
"""Most characters of what mpirun or a daemon said that travel to the driver."""

ABORT = re.compile(r"^Abort\((\d+)\) on node \d+ .*application called MPI_Abort.*$", re.MULTILINE)
"""MPICH's last word of who called MPI_Abort, and with which code."""
FORSAKEN = "PMIU_write error"
"""MPICH: a rank whose process manager is gone, since another one called MPI_Abort, fails all by itself."""


class MpiSeat(Seat):
    """One rank's place under mpirun. The seat of rank 0 also runs mpirun, the first seat of each node its daemon."""

    def __init__(self) -> None:
        super().__init__()
        self._door: socket.socket | None = None
        self._secret = ""
        self._lead = False
        self._child: asyncio.Future[dict[str, Any]] | None = None
        self._child_sock: socket.socket | None = None
        self._asked: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._agents: dict[int, socket.socket] = {}
        self._why = ""
        self._has_daemon = False
        self._given_up = False

    async def open(self, ask: dict[str, Any]) -> dict[str, Any]:
        """As ever; the lead of a node also finds its MPI. Then listen for mpirun's children."""
        self._secret, self._lead = ask["secret"], ask["lead"]
        answer = await super().open(ask)
        if answer["facts"] is not None:
            self._install = mpi_install.find(ask["mpirun"])
            self._interface = answer["facts"]["interface"]
            answer["facts"]["mpi"] = {**asdict(self._install), "rdma": mpi_install.rdma()}
        self._child = asyncio.get_running_loop().create_future()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.setblocking(False)
        self._door.bind(str(self.folder / f"mpi-{self.rank}"))
        self._door.listen(1024)
        self._spawn(self._welcome())
        return answer

    async def start(self, spec: dict[str, Any], call: bytes | None) -> int:
        """Wait for mpirun's child, then fork the rank into its place."""
        assert self._child is not None, "open comes before start"
        told = await self._child
        if spec["script"].endswith(".py") or spec["script"].startswith("-m "):
            told["env"].pop("LD_LIBRARY_PATH", None)  # read when a program starts, and Python has: it is a fork
        self._adds = told["env"]
        if set(told["cpus"]) != os.sched_getaffinity(0):
            spec = {**spec, "cpus": told["cpus"]}  # somebody said --bind-to
        pid = await super().start(spec, call)
        for descriptor in self._hands:
            os.close(descriptor)
        self._hands = []
        return pid

    async def mpirun(self, words: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
        """Run mpirun to its end; how it ended and what it `said`. `{agent}` and `{rank}` in `words` become paths."""
        agent = self.folder / "agent"
        agent.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{mpi_child.__file__}" agent "$@"\n')
        agent.chmod(0o700)
        if os.statvfs(self.folder).f_flag & os.ST_NOEXEC:
            raise LaunchError(f"{self.folder.parent} is mounted noexec, and mpirun's agent must lie there: set TMPDIR")
        argv = [self._install.mpirun, *(word.replace("{agent}", str(agent)) for word in words)]
        return await self._execute(argv, env)

    async def daemon(self, words: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
        """Run mpirun's daemon for this node to its end. Once: mpirun has no use for a second one."""
        argv, own = mpi_install.daemon(words, self._install, self._interface)
        if self._has_daemon:
            raise LaunchError(f"{socket.gethostname()} was asked for a second {os.path.basename(argv[0])}")
        self._has_daemon = True
        return await self._execute(argv, {**env, **own})

    async def asked(self) -> list[dict[str, Any]]:
        """The next daemons that mpirun's agents ask for, as soon as there are any: id, host, words. None at the end."""
        found = [await self._asked.get()]
        while not self._asked.empty():
            found.append(self._asked.get_nowait())
        return [asked for asked in found if asked is not None]

    async def answered(self, agent: int, end: dict[str, Any]) -> None:
        """Let an agent end as the daemon did that it asked for."""
        sock = self._agents.pop(agent)
        tell(sock, end)
        sock.close()

    async def dismiss(self, why: str) -> None:
        """mpirun is gone: nobody will come for this rank any more."""
        self._why = why
        self._asked.put_nowait(None)
        if self._child is not None and not self._child.done():
            self._child.set_exception(LaunchError(why))
            self._child.exception()  # maybe nobody waits for it

    async def close(self) -> None:
        """As ever; and take away the shared memory that MPI's killed ranks left."""
        await self.dismiss("the run is over")
        await super().close()
        for sock in filter(None, [self._door, self._child_sock, *self._agents.values()]):
            sock.close()
        if self._lead:
            mpi_segments.sweep(self.born)

    async def _execute(self, argv: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
        """A program of mpirun's as a child of the fork server: it ends with its node's folder, whatever happens."""
        ours = {
            "RAYDIST_MPI_FOLDER": str(self.folder), "RAYDIST_MPI_SECRET": self._secret, "TMPDIR": str(self.folder),
            "RAYDIST_MPI_PYTHON": sys.executable, "RAYDIST_MPI_CHILD": mpi_child.__file__,
        }  # fmt: skip
        path = self.folder / f"{os.path.basename(argv[0])}.log"
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        spec = {"argv": list(argv), "env": {**os.environ, **env, **ours}, "cwd": "/"}
        self._server.tell([log], op="exec", spec=spec)
        os.close(log)
        pid = int((await self._server.reply("forked"))["forked"])
        end = await asyncio.shield(self._server.end_of(pid))
        return {**end, "said": path.read_text(errors="replace")[-SAID:]}

    async def _welcome(self) -> None:
        """Take in whoever knocks at the door: mpirun's agents, and its child for this rank."""
        loop = asyncio.get_running_loop()
        assert self._door is not None, "open made it"
        while True:
            sock, _ = await loop.sock_accept(self._door)
            self._spawn(self._take_in(sock))

    async def _take_in(self, sock: socket.socket) -> None:
        await readable(sock)
        packet, descriptors, _, _ = socket.recv_fds(sock, PACKET, 1)
        told = heard(packet)
        right = secrets.compare_digest(str(told.get("secret", "")).encode(), self._secret.encode())
        assert self._child is not None, "open made it"
        if not right or ("env" in told and self._child.done()) or not told.keys() & {"env", "words"}:
            for descriptor in descriptors:
                os.close(descriptor)
            tell(sock, {"code": 1, "said": "raydist: this is not mpirun's child\n"})
            sock.close()
        elif "env" in told:
            self._child_sock, self._hands = sock, descriptors
            self._child.set_result(told)
            self._spawn(self._mind(sock))
        else:
            self._agents[sock.fileno()] = sock
            self._asked.put_nowait({"id": sock.fileno(), "host": told["host"], "words": told["words"]})

    async def _see_end(self, pid: int) -> None:
        """As ever; mpirun's child then ends likewise, so that mpirun knows."""
        end = await self._server.end_of(pid)
        said = (self.folder / f"rank-{self.rank}.log").read_bytes()[-SAID:].decode(errors="replace")
        if called := ABORT.search(said):
            end.update(code=int(called[1]), signal=0, lost=called[0])
        elif (self._given_up and end["signal"] == signal.SIGKILL) or (end["code"] and FORSAKEN in said):
            end.update(by="mpirun", lost=self._why)
        if self._child_sock is not None:
            tell(self._child_sock, end)
        await super()._see_end(pid)

    async def _mind(self, sock: socket.socket) -> None:
        """mpirun ends its children if one of them failed, or called MPI_Abort: end the rank too, if nobody does."""
        await readable(sock)
        sock.close()
        # Open MPI's caller of MPI_Abort ends with its code; MPICH's waits to be killed, and would go on soon
        await self._gone(GIVEN_UP_S if "PMIX_RANK" in self._adds else GIVEN_UP_S / 4)
        if self._end is None and self.pid:
            self._given_up = True
            self._server.tell(op="kill", pid=self.pid, signal=signal.SIGKILL)


async def readable(sock: socket.socket) -> None:
    """Until there is something to read, or the other end is gone."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def heard(packet: bytes) -> dict[str, Any]:
    """What somebody said at the door; nothing, if it is not in our words."""
    with contextlib.suppress(ValueError):
        told = json.loads(packet)
        return told if isinstance(told, dict) else {}
    return {}


def tell(sock: socket.socket, end: dict[str, Any]) -> None:
    """The last word to a child of mpirun's, which may be gone."""
    with contextlib.suppress(OSError):
        sock.send(json.dumps(end).encode())
