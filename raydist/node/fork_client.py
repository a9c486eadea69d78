"""An agent's connection to the node's fork server: messages, replies, ends of processes. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from raydist.messages.agent import ProcessEnd, ProcessId
from raydist.messages.server import (
    Busy,
    CommandSpec,
    Ended,
    Failed,
    Forked,
    InFile,
    OpenStore,
    Ping,
    Pong,
    ProgramSpec,
    RankSpec,
    ServerMessage,
    SignalProcess,
    Warm,
)
from raydist.messages.wire import PACKET, Message, decode, encode, numbered, split_number
from raydist.node.processes import holds_something, signal_process
from raydist.shared.own_path import own_folder

Kind = TypeVar("Kind")
PING_S = 2.0
"""Seconds between an answer of the server and the next ping."""
NUMBER = 24
"""Bytes reserved in a packet for a request's number."""
CONNECT_S = 300.0
"""Limit on the wait for the first agent's server: a cold network file system takes minutes to
deliver torch. The driver waits as long for the agent (launch.limits.OPEN_S)."""
REFUSED_S = 5.0
"""Limit on the wait for a server whose socket refuses connections: it has died. A new server also
refuses for a moment."""


class ForkClient:
    """One connection to the fork server.

    When it closes, the server ends the processes that it forked for this agent.
    """

    def __init__(self, folder: Path, sock: socket.socket) -> None:
        self._folder = folder
        self._sock = sock
        self._requests = 0
        """The number of the last request."""
        self._replies: dict[int, asyncio.Future[Message | None]] = {}
        """By number: the requests without a reply. A result of None: the server has ended."""
        self._ends: dict[int, asyncio.Future[ProcessEnd]] = {}
        """By serial number: the ends of the living processes that were forked on request."""
        self._began: dict[int, asyncio.Future[ProcessEnd]] = {}
        """The same for those that `fork` has not returned yet: one may end before."""
        self.pid = 0
        """The server's pid, once it has imported the modules."""
        self._pinged_at: float | None = None
        """When the unanswered ping was sent, on the monotonic clock."""
        self._answered_at = 0.0
        self._busy_since: float | None = None
        """When the server last sent Busy, on the monotonic clock; None if it has sent anything
        since."""
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def connect(cls, folder: Path) -> ForkClient:
        """Connect to the server of `folder`, and wait until it listens.

        A server that has not started yet has no folder; one that imports modules may have a full
        queue. Raises OSError if the server has died, is not there after CONNECT_S, or if another
        user can reach the folder.
        """
        began = refused_since = time.monotonic()
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                if not own_folder(folder, make=False):
                    raise PermissionError(f"another user may have made {folder}")
                sock.connect(str(folder / "fork"))
                return cls(folder, sock)
            except OSError as error:
                sock.close()
                now = time.monotonic()
                if isinstance(error, FileNotFoundError | BlockingIOError):
                    refused_since = now
                elif not isinstance(error, ConnectionRefusedError):
                    raise
                if now - refused_since >= REFUSED_S:
                    raise OSError(
                        f"the fork server of this node ended: {log_end(folder)}"
                    ) from None
                if now - began >= CONNECT_S:
                    raise OSError(
                        f"the fork server of this node is not ready after {CONNECT_S:g} s: "
                        "nothing listens at "
                        f"{folder / 'fork'}"
                    ) from None
            await asyncio.sleep(max(0.01, (now - began) / 100))

    @property
    def connected(self) -> bool:
        """Whether the server still runs."""
        return not self._listener.done()

    @property
    def busy(self) -> bool:
        """Whether the server has announced that it reads no message for a while."""
        return self._busy_since is not None

    def quiet(self, after: float = PING_S) -> float:
        """Return the seconds for which the server, stopped or waiting for a disk, has not answered.

        Returns 0 while it is busy with what it has announced, at most for CONNECT_S. `after`:
        seconds after its last answer until the next ping.
        """
        now = time.monotonic()
        if self._busy_since is not None and now - self._busy_since < CONNECT_S:
            return 0.0
        if self._pinged_at is None and now - self._answered_at >= after and self.connected:
            self._pinged_at = now
            with contextlib.suppress(OSError):
                self.send(Ping())
        return 0.0 if self._pinged_at is None else now - self._pinged_at

    def signal(self, process: ProcessId, number: int, ended: asyncio.Future[ProcessEnd]) -> None:
        """Send a signal to a process that the server forked for this agent, as SignalProcess.

        `ended`: its end. A busy server would only send the signal, and notice the end, after
        minutes of imports: the process gets it from here, and what SIGKILL has ended is known.
        """
        if not self.busy:
            self.send(SignalProcess(process.pid, number))
            return
        signal_process(process, number)
        if number == signal.SIGKILL:
            noticing = asyncio.get_running_loop().create_task(notice_kill(process, ended))
            ended.add_done_callback(lambda _: noticing.cancel())

    def end_server(self) -> None:
        """Kill a server that does not answer.

        Its processes end with it, and are all reported as lost.
        """
        if self.pid and self.connected:
            # The second is that of a kept server.
            places = {
                self._folder,
                (self._folder / "fork").resolve().parent,
            }
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            for place in places:
                shutil.rmtree(place, ignore_errors=True)

    def send(
        self, message: ServerMessage, descriptors: Sequence[int] = (), number: int = 0
    ) -> None:
        """Send a message with copies of `descriptors`. `number`: of a request that gets a reply."""
        packet = encode(message)
        with contextlib.ExitStack() as stack:
            if len(packet) > PACKET - NUMBER:  # a long environment or command line
                file = stack.enter_context(open(os.memfd_create("raydist-message"), "wb"))
                file.write(packet)
                file.flush()
                packet, descriptors = encode(InFile()), [*descriptors, file.fileno()]
            socket.send_fds(self._sock, [numbered(number, packet)], list(descriptors))

    async def ask(
        self, message: ServerMessage, kind: type[Kind], descriptors: Sequence[int] = ()
    ) -> Kind:
        """Send a request, and return the reply, which must be of this kind.

        Raises OSError if the server failed to execute it, or has ended.
        """
        self._requests += 1
        number = self._requests
        waiting = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            # The server may have ended: the listener notices.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send(message, descriptors, number)
            reply = await waiting if self.connected else None
        finally:
            del self._replies[number]
        if isinstance(reply, Failed):
            raise OSError(f"the fork server of this node failed: {reply.error}")
        if reply is None:
            raise OSError(f"the fork server of this node ended: {self.log_end()}")
        if not isinstance(reply, kind):
            raise OSError(
                f"the fork server of this node sent {reply} as its reply to "
                f"{type(message).__name__}"
            )
        return reply

    async def fork(
        self, spec: RankSpec | ProgramSpec | CommandSpec | OpenStore, descriptors: Sequence[int]
    ) -> tuple[int, asyncio.Future[ProcessEnd]]:
        """Have the server fork a process; return its pid and a future of its end.

        Raises OSError as `ask` does.
        """
        forked = await self.ask(spec, Forked, descriptors)
        return forked.pid, self._began.pop(forked.serial)

    async def close(self) -> None:
        """Disconnect, and wait until the server has closed the connection too.

        It does once it has ended all processes that it forked for this agent.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._listener})
        self._sock.close()

    async def _listen(self) -> None:
        """Receive the server's messages: replies, and the ends of processes."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while packet := await loop.sock_recv(self._sock, PACKET):
                try:
                    self._take(*split_number(packet))
                # An error must not end the listener, which receives the ends of processes.
                except ValueError as error:
                    print(
                        f"raydist: a message of the fork server was not understood: {error}",
                        file=sys.stderr,
                    )
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_result(None)
        lost = self.log_end()
        for end in self._ends.values():
            if not end.done():
                end.set_result(ProcessEnd(0, signal.SIGKILL, time.time(), lost=lost))

    def _take(self, number: int, packet: bytes) -> None:
        message = decode(packet)
        self._answered_at = time.monotonic()
        self._busy_since = self._answered_at if isinstance(message, Busy) else None
        if isinstance(message, Pong):
            self._pinged_at = None
            return
        if isinstance(message, Warm):
            self.pid = message.pid
        if isinstance(message, Ended):
            if (end := self._ends.pop(message.serial, None)) is not None and not end.done():
                end.set_result(ProcessEnd(message.code, message.signal, message.at))
            return
        if isinstance(message, Forked):
            self._ends[message.serial] = self._began[message.serial] = (
                asyncio.get_running_loop().create_future()
            )
        if (waiting := self._replies.get(number)) is not None and not waiting.done():
            waiting.set_result(message)

    def log_end(self) -> str:
        """Return the end of the server's log."""
        return log_end(self._folder)


async def notice_kill(process: ProcessId, ended: asyncio.Future[ProcessEnd]) -> None:
    """Set the end of a process that was killed, unless the server has reported it before."""
    while holds_something(process):
        await asyncio.sleep(0.02)
    if not ended.done():
        ended.set_result(ProcessEnd(0, signal.SIGKILL, time.time()))


def log_end(folder: Path) -> str:
    """Return the end of the log of the server of a folder."""
    with contextlib.suppress(OSError):
        return (folder / "server.log").read_text(errors="replace")[
            -2000:
        ].strip() or "its log is empty"
    return "its log is gone"
