"""A node's part in a check-up: listen, call, try out, write; nothing of it stays. (actor)"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.node import peers
from raydist.node.peers import Listener, Peer, Trip

SHM_TRIAL = 1 << 20
"""Bytes that are written to /dev/shm: a loader's batch."""


class Checkup:
    """The steps of one node; a driver takes each of them on all nodes at once."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    async def listen(self, address: str, secret: bytes) -> Peer:
        """Answer the other nodes, on the training address only."""
        self._listener = Listener(secret)
        return await self._listener.open(address)

    async def call(self, others: Sequence[Peer], own: int, secret: bytes, timeout: float) -> list[Trip]:
        """Call all the others."""
        return await peers.call_all(others, own, secret, timeout)

    async def reach(self, address: str, port: int, timeout: float) -> str:
        """Connect to the store as the ranks will; empty, or why it can't be."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return f"no answer within {timeout:g} s"
        except OSError as error:
            return peers.words(error)
        writer.close()
        return ""

    async def try_out(self, names: Sequence[str], env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """What gloo and NCCL would do here with a rank's variables: dryrun's answer, from a process of its own."""
        own = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "raydist.node.dryrun", *names]
        ended = await asyncio.to_thread(subprocess.run, command, env=own, capture_output=True, text=True)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or [f"it ended with code {ended.returncode}"])[-1]
            return {name: {"error": last} for name in names}
        found: dict[str, dict[str, Any]] = json.loads(ended.stdout)
        return found

    async def look(self, folder: str) -> dict[str, Any]:
        """Why /dev/shm can't be written, if so; whether the driver's folder is here; what the host's name leads to."""
        return {"shm": shm_refuses(), "sees": os.path.isdir(folder), "name": await asyncio.to_thread(own_addresses)}

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None


def shm_refuses(place: Path = Path("/dev/shm")) -> str:
    """Empty, or why nothing can be written there. A file's space is taken at once: later would be a SIGBUS."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, SHM_TRIAL)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def own_addresses() -> list[str]:
    """What this host's own name resolves to: where gloo would listen if nobody told it the interface."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))
