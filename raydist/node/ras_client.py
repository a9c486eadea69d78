"""Asks the RAS of a rank's NCCL which ranks lag, and keeps a port for it. (actor)

The words of the conversation are those of NVIDIA's client, ncclras (src/ras/client.cc), which the
wheels of NCCL lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping

from raydist.network.names import RAS_PORT
from raydist.network.ras import ADDRESS

ASK = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
"""A RAS that does not know a line says so in another, and goes on."""
REPLIES = ("SERVER PROTOCOL ", "OK", "ERROR: Unknown command")
"""What RAS says to the first three lines."""
ALIVE_S = 5.0
"""Limit on the wait for the connection, and again for a first byte: those of a busy machine take
seconds, and nobody asks again."""
ANSWER_S = 8.0
"""Limit on the wait for the end: RAS itself waits for the processes of other nodes, 1 s as it is
asked to, and up to 5 s more for those that are out of its reach."""
MOST = 1 << 24
"""Limit on the bytes of an answer: some 700 for each rank of each communicator."""


class RasPort:
    """A port that NCCL of a rank may listen on, and nobody else gets meanwhile."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Fill in the port in the rank's variables, where one is wanted: `env` then has it."""
        self._socket: socket.socket | None = None
        self.env = dict(env)
        if RAS_PORT not in env.get(ADDRESS, ""):
            return
        try:
            # NCCL binds with the same options. Without listen() this socket gets no connection.
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(("127.0.0.1", 0))
            port = str(self._socket.getsockname()[1])
        except OSError:  # no port is free: NCCL's default, which others may share
            del self.env[ADDRESS]
        else:
            self.env[ADDRESS] = env[ADDRESS].replace(RAS_PORT, port)

    def close(self) -> None:
        """Let go of the port."""
        if self._socket is not None:
            self._socket.close()


async def ask_ras(env: Mapping[str, str]) -> str:
    """Return what RAS of a rank with these variables says; empty: none answers there."""
    host, _, port = env.get(ADDRESS, "").rpartition(":")
    if not host or not port.isdecimal():
        return ""
    try:
        connecting = asyncio.open_connection(host.strip("[]"), int(port))
        reader, writer = await asyncio.wait_for(connecting, ALIVE_S)
    except (OSError, asyncio.TimeoutError):
        return ""
    try:
        writer.write(ASK)
        received = await asyncio.wait_for(reader.read(1 << 16), ALIVE_S)
        return without_replies(await _read_on(reader, received))
    except (OSError, asyncio.TimeoutError):
        return ""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_on(reader: asyncio.StreamReader, received: bytes) -> str:
    """Return the answer, or the part of it that came in time. `received`: its beginning."""
    parts = [received]

    async def read() -> None:
        while (data := await reader.read(1 << 16)) and sum(map(len, parts)) < MOST:
            parts.append(data)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), ANSWER_S)
    return b"".join(parts).decode(errors="replace")


def without_replies(text: str) -> str:
    """Return what follows the replies to the first lines of ASK."""
    lines = text.splitlines(keepends=True)
    while lines and lines[0].startswith(REPLIES):
        lines.pop(0)
    return "".join(lines)
