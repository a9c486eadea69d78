"""Has writer processes write checkpoints alongside the ranks, and reads their messages. (actor)"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from raydist.messages.server import WriteCheckpoint
from raydist.messages.wire import PACKET, TAG, Message, decode, from_json
from raydist.messages.writer import ShardsReply, ShardsRequest, WriterFailed
from raydist.node.fork_client import ForkClient
from raydist.shared import kinds
from raydist.shared.kinds import EventJson

MAX_LINE = 1 << 26
"""Maximum bytes of a message."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Writer:
    """Has the fork server fork writer processes, one at a time, and reads what they send."""

    def __init__(self, server: ForkClient, spawn: Spawn) -> None:
        """`spawn`: creates a task that ends with the agent."""
        self._server = server
        self._spawn = spawn
        self._reply: ShardsReply | None = None
        self._events: list[EventJson] = []
        self._request: WriteCheckpoint | ShardsRequest | None = None
        """What the last process was forked for."""
        self._needed = True
        """Whether the next attempt needs what it writes."""
        self.reader: asyncio.Task[None] | None = None
        """The task that reads what the last process sends, and ends with it."""

    @property
    def busy(self) -> bool:
        """Whether a requested process has not ended."""
        return self.reader is not None and not self.reader.done()

    @property
    def silent(self) -> bool:
        """Whether the last process was killed, or was not forked."""
        return self._reply is None

    @property
    def saves(self) -> bool:
        """Whether a process writes a whole state, which the fork server then unlocks.

        Shards are unlocked by the driver, once those of all nodes are on the disk.
        """
        return self.busy and isinstance(self._request, WriteCheckpoint)

    def start(
        self, message: WriteCheckpoint | ShardsRequest, needed: bool = True
    ) -> asyncio.Task[None]:
        """Fork a process for this request, and return the task that ends with it.

        `needed`: whether the next attempt needs its checkpoint, because it has the state nowhere
        else.
        """
        self._request = message
        self._needed = needed
        self._reply = None
        agent_end, writer_end = socket.socketpair()
        self._server.send(message, [writer_end.fileno()])
        writer_end.close()
        self.reader = self._spawn(self._read(agent_end, message))
        return self.reader

    async def _read(self, sock: socket.socket, request: WriteCheckpoint | ShardsRequest) -> None:
        """Read what a process sends.

        One that a rank has asked for a checkpoint says what became of it, unless it was killed, or
        the kernel refused the fork: the fork server then has unlocked the state all the same.
        """
        await read_messages(sock, self._events.append, self._note)
        if isinstance(request, WriteCheckpoint) and not request.last and self.silent:
            text = (
                "a checkpoint was not written: its process was killed, or could not be started "
                "(see the memory and the limit of processes of rank 0's node)"
            )
            self._events.append(kinds.Warning(text=text).to_json())

    async def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if self.reader is not None:
            await asyncio.wait({self.reader})

    async def wait_if_needed(self) -> None:
        """Wait until then, unless the next attempt does not need it."""
        if self._needed:
            await self.wait()

    def take_events(self) -> list[EventJson]:
        """Return the events of its processes that have not been taken."""
        events = [*self._events]
        self._events.clear()  # the same list, to which the reader appends
        return events

    async def ask(self, request: ShardsRequest) -> ShardsReply | None:
        """Have a process execute this request, and return its reply.

        Raises OSError if the process failed.
        """
        await self.wait()
        # The driver waits for the shards of all nodes, where the next attempt needs them.
        await asyncio.wait({self.start(request, needed=False)})
        if isinstance(self._reply, WriterFailed):
            raise OSError(self._reply.error)
        return self._reply

    def _note(self, message: Message) -> None:
        if isinstance(message, ShardsReply):
            self._reply = message


async def read_reply(sock: socket.socket) -> Message | None:
    """Return the only message that a process sends before it closes its end, or None."""
    sock.setblocking(False)
    text = b""
    while part := await asyncio.get_running_loop().sock_recv(sock, PACKET):
        text += part
    return decode(text) if text else None


async def read_messages(
    sock: socket.socket,
    add_event: Callable[[EventJson], None],
    take: Callable[[Message], None],
    opened: Callable[[asyncio.StreamWriter], None] = lambda _: None,
) -> None:
    """Read lines until the other end closes: events, and messages of the protocol.

    A line that is too long, or that can't be handled, becomes a warning. `opened`: receives the
    stream for messages in the other direction.
    """
    reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE)
    opened(writer)

    def note_loss(error: Exception) -> None:
        text = f"a message of a rank or a writer was lost: {type(error).__name__}: {error}"
        add_event(kinds.Warning(text=text).to_json())

    while True:
        try:
            line = await reader.readline()
        except OSError:
            break
        except ValueError as error:  # it is too long; what is left of it is no message
            note_loss(error)
            continue
        if not line.endswith(b"\n"):  # the other end has closed, perhaps within a message
            break
        try:
            received = json.loads(line)
            if TAG in received:
                take(from_json(received))
            else:
                add_event(received)
        except Exception as error:  # the next messages must not be lost, too
            note_loss(error)
    writer.close()
