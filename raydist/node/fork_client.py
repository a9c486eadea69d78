"""A seat's talk with the fork server of its node: what it asks for, the answers, and how its processes end. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

from raydist.node.wire import PACKET


class ForkClient:
    """One connection to the fork server. When it hangs up, the server ends what was forked for it."""

    def __init__(self, folder: Path, sock: socket.socket) -> None:
        self._folder = folder
        self._sock = sock
        self._replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def dial(cls, folder: Path) -> ForkClient:
        """Connect to the server that owns `folder`; whoever brings it up may be a moment behind."""
        for _ in range(3000):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(str(folder / "fork"))
                return cls(folder, sock)
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                await asyncio.sleep(0.01)
        raise OSError(f"no fork server came up at {folder / 'fork'}")

    @property
    def connected(self) -> bool:
        """Whether the server is still there."""
        return not self._listening.done()

    def tell(self, descriptors: list[int] | None = None, **message: Any) -> None:
        """Say a message, with copies of `descriptors`."""
        socket.send_fds(self._sock, [json.dumps(message).encode()], descriptors or [])

    async def reply(self, key: str) -> dict[str, Any]:
        """The answer to the question told last, which has `key`."""
        message = await self._replies.get()
        if key not in message:
            raise OSError(f"the fork server of this node ended: {message.get('lost', message)}")
        return message

    def end_of(self, pid: int) -> asyncio.Future[dict[str, Any]]:
        """How a process of this seat ends. One that dies at once does so before its pid is known here."""
        return self._ends.setdefault(pid, asyncio.get_running_loop().create_future())

    async def close(self) -> None:
        """Hang up, and return once the server has too: all that it forked for this seat is gone then."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._listening})
        self._sock.close()

    async def _listen(self) -> None:
        """Sort what the server says: replies to a question, or the end of a process."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while packet := await loop.sock_recv(self._sock, PACKET):
                message = json.loads(packet)
                if "ended" not in message:
                    self._replies.put_nowait(message)
                else:
                    self.end_of(message["ended"]).set_result({key: message[key] for key in ("code", "signal", "at")})
        lost = self._server_words()
        self._replies.put_nowait({"lost": lost})
        for end in self._ends.values():
            if not end.done():
                end.set_result({"code": 0, "signal": signal.SIGKILL, "at": time.time(), "lost": lost})

    def _server_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / "server.log").read_text(errors="replace")[-2000:].strip() or "it left no word"
        return "its log is gone"
