"""The connection of a rank's process to its agent: what the agent asks, and the replies. (actor)"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from raydist.messages.rank import (
    Activity,
    DebuggerSays,
    HeldAt,
    HoldForAction,
    Holding,
    HoldRank,
    RankMessage,
    TellActivity,
    WentOn,
)
from raydist.messages.wire import Message, encode
from raydist.node.debugger_desk import DebuggerDesk
from raydist.node.writer import read_messages
from raydist.shared.errors import LaunchError
from raydist.shared.kinds import EventJson


class RankChannel:
    """The connection of one rank's process to its agent."""

    def __init__(self, sock: socket.socket, add_event: Callable[[EventJson], None]) -> None:
        """`add_event`: receives the events of the rank."""
        self._to_rank: asyncio.StreamWriter | None = None
        self._holding: deque[asyncio.Future[int]] = deque()
        """The HoldRank and HoldForAction requests that the rank has not answered, oldest first."""
        self.debugger = DebuggerDesk()
        self.activity: Activity | None = None
        """The rank's reply to the last TellActivity."""
        self.reading = asyncio.create_task(
            read_messages(sock, add_event, self._handle_reply, self._note_connection)
        )
        """Ends when the rank, and each child that has its end of the socket, has closed it."""

    def tell(self, message: RankMessage) -> None:
        """Send a message to the rank, if it is connected."""
        if self._to_rank is not None:
            self._to_rank.write(encode(message) + b"\n")

    def ask_activity(self) -> None:
        """Ask the rank what it is doing; its reply becomes `activity`."""
        self.activity = None
        self.tell(TellActivity())

    async def hold(self, request: HoldRank | HoldForAction) -> int:
        """Ask the rank to pause after its current step, and return that step.

        Raises LaunchError if the rank ends before.
        """
        held: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._holding.append(held)
        self.tell(request)
        return await held

    def note_end(self) -> None:
        """Fail what the rank has not answered: it has ended."""
        while self._holding:
            self._note_hold(LaunchError("the rank has ended"))
        self.debugger.note(WentOn())

    def _note_connection(self, to_rank: asyncio.StreamWriter) -> None:
        self._to_rank = to_rank

    def _handle_reply(self, message: Message) -> None:
        if isinstance(message, Activity):
            self.activity = message
        elif isinstance(message, Holding) and self._holding:
            self._note_hold(message.step)
        elif isinstance(message, HeldAt | DebuggerSays | WentOn):
            self.debugger.note(message)

    def _note_hold(self, outcome: int | LaunchError) -> None:
        """Complete the oldest HoldRank, with the rank's step or with an error."""
        held = self._holding.popleft()
        if held.done():  # cancelled when the agents' event loop ended
            return
        if isinstance(outcome, int):
            held.set_result(outcome)
        else:
            held.set_exception(outcome)
