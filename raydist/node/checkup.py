"""The doctor's check-up of one node: connections, libraries, /dev/shm; it cleans up. (actor)"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydist.messages.checkup import (
    CallPeers,
    CheckHost,
    CheckupRequest,
    HostCheck,
    LibraryTrial,
    ListenForPeers,
    Peer,
    ReachStore,
    StopListening,
    TryLibraries,
)
from raydist.node import cache_folder, peers
from raydist.node.peers import Listener
from raydist.node.tracing import read_tracing

SHM_BYTES = 1 << 20
"""Bytes to write to /dev/shm: a batch of a DataLoader."""

LOOKUP_LIMIT_S = 20.0
"""Limit on a name look-up in seconds. A silent name server costs 10 (resolv.conf(5): 5 s, two
attempts)."""
LOOK_UP = """
import socket, sys, time
began = time.perf_counter()
try:
    socket.getnameinfo((sys.argv[1], 0), 0)
except OSError:
    pass
print(time.perf_counter() - began)
"""
"""Look up the name of an address, as torch's c10d does for each connection, and print the seconds
that it took."""


class Checkup:
    """The check-up of one node; the driver sends each request to all nodes at once."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    async def handle(self, request: CheckupRequest[Any]) -> Any:
        """Answer a request of the doctor."""
        match request:
            case ListenForPeers():
                return await self.listen(request)
            case CallPeers():
                return await peers.call_all(
                    request.peers, request.own, request.secret, request.timeout
                )
            case StopListening():
                return await self.close()
            case ReachStore():
                return await self.reach(request)
            case TryLibraries():
                return await self.try_libraries(request)
            case CheckHost():
                addresses = await asyncio.to_thread(host_addresses)
                lookup_s = 0.0
                if request.address:
                    lookup_s = await asyncio.to_thread(lookup_time, request.address, request.env)
                sees, may = os.path.isdir(request.folder), await asyncio.to_thread(read_tracing)
                return HostCheck(shm_error(), sees, addresses, lookup_s, may)
        raise TypeError(f"a check-up can't answer {request}")

    async def listen(self, request: ListenForPeers) -> Peer:
        """Start answering the other nodes, on the training address only."""
        self._listener = Listener(request.secret)
        return await self._listener.open(request.address)

    async def reach(self, request: ReachStore) -> str:
        """Connect to the store as the ranks will; return the error, or an empty text."""
        try:
            connecting = asyncio.open_connection(request.address, request.port)
            _, writer = await asyncio.wait_for(connecting, request.timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return f"no answer within {request.timeout:g} s"
        except OSError as error:
            return peers.error_text(error)
        writer.close()
        return ""

    async def try_libraries(self, request: TryLibraries) -> dict[str, LibraryTrial]:
        """Run node.dryrun with the variables of a rank; return its result for each library."""
        env = {
            **os.environ,
            **cache_folder.fill_in(request.env),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-m", "raydist.node.dryrun", *request.names]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env=env,
            cwd="/",  # -m imports from the current folder first, which may be /tmp
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[
                -1
            ]
            return {name: {"error": last} for name in request.names}
        trials: dict[str, LibraryTrial] = json.loads(done.stdout)
        return trials

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None


def shm_error(folder: Path = Path("/dev/shm")) -> str:
    """Return the error of writing to shared memory, or an empty text.

    The space is allocated, because using a hole raises SIGBUS.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, SHM_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def host_addresses() -> list[str]:
    """Return the addresses of this host's name.

    gloo listens on the first one if GLOO_SOCKET_IFNAME is not set.
    """
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))


def lookup_time(address: str, env: Mapping[str, str]) -> float:
    """Return the seconds that a look-up of an address's name takes, at most LOOKUP_LIMIT_S.

    It runs with a rank's variables in a separate process: the C library reads RES_OPTIONS once, and
    a look-up in a thread cannot be ended.
    """
    command = [sys.executable, "-S", "-c", LOOK_UP, address]
    environ = {**os.environ, **env}
    try:
        done = subprocess.run(
            command,
            env=environ,
            cwd="/",  # -c imports from the current folder first, which may be /tmp
            stdout=subprocess.PIPE,
            text=True,
            timeout=LOOKUP_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return LOOKUP_LIMIT_S
    return float(done.stdout)
