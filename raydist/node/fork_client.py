"""An agent's connection to the fork server of its node: messages, replies, and the ends of processes. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from pathlib import Path
from typing import TypeVar

from raydist.worker.protocol import PACKET, Ended, Message, ProcessEnd, ServerMessage, decode, encode

Kind = TypeVar("Kind")


class ForkClient:
    """One connection to the fork server, which ends the processes that it forked for this agent when it closes."""

    def __init__(self, folder: Path, sock: socket.socket) -> None:
        self._folder = folder
        self._sock = sock
        self._replies: asyncio.Queue[Message | str] = asyncio.Queue()
        """Replies in order; the last is a text: the end of the server's log once it has ended."""
        self._ends: dict[int, asyncio.Future[ProcessEnd]] = {}
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def connect(cls, folder: Path) -> ForkClient:
        """Connect to the server of `folder`; another agent may be about to start it, so this tries for 30 s."""
        for _ in range(3000):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(str(folder / "fork"))
                return cls(folder, sock)
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                await asyncio.sleep(0.01)
        raise OSError(f"no fork server listens at {folder / 'fork'}: the first agent of the node did not start it")

    @property
    def connected(self) -> bool:
        """Whether the server still runs."""
        return not self._listening.done()

    def send(self, message: ServerMessage, descriptors: list[int] | None = None) -> None:
        """Send a message, with copies of `descriptors`."""
        socket.send_fds(self._sock, [encode(message)], descriptors or [])

    async def reply(self, kind: type[Kind]) -> Kind:
        """The next reply, which must be of this kind. OSError: the server has ended."""
        reply = await self._replies.get()
        if not isinstance(reply, kind):
            raise OSError(f"the fork server of this node ended: {reply}")
        return reply

    def end_of(self, pid: int) -> asyncio.Future[ProcessEnd]:
        """The end of a process of this agent. It may come before the reply with the process's pid."""
        return self._ends.setdefault(pid, asyncio.get_running_loop().create_future())

    async def close(self) -> None:
        """Disconnect; returns once the server has ended all that it forked for this agent, and has disconnected too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._listening})
        self._sock.close()

    async def _listen(self) -> None:
        """Receive the server's messages: replies, and the ends of processes."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while packet := await loop.sock_recv(self._sock, PACKET):
                message = decode(packet)
                if isinstance(message, Ended):
                    self.end_of(message.pid).set_result(ProcessEnd(message.code, message.signal, message.at))
                else:
                    self._replies.put_nowait(message)
        lost = self._log_end()
        self._replies.put_nowait(lost)
        for end in self._ends.values():
            if not end.done():
                end.set_result(ProcessEnd(0, signal.SIGKILL, time.time(), lost=lost))

    def _log_end(self) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / "server.log").read_text(errors="replace")[-2000:].strip() or "its log is empty"
        return "its log is gone"
