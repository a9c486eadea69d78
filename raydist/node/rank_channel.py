"""The connection of a rank's process to its agent: what the agent asks, and the replies. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from raydist.messages.rank import (
    Activity,
    DebuggerSays,
    EditorPrepared,
    HeldAt,
    HoldForAction,
    Holding,
    HoldRank,
    HoldTimeouts,
    ParkRank,
    ParkReply,
    PrepareEditor,
    PrepareProfile,
    ProfilePrepared,
    RankMessage,
    TellActivity,
    TimeoutsHeld,
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
        self._hold_replies: deque[asyncio.Future[Holding]] = deque()
        """The HoldRank and HoldForAction requests that the rank has not answered, oldest first."""
        self._park_reply: asyncio.Future[str] | None = None
        """The ParkRank request that the rank has not answered yet."""
        self.parked_at = 0.0
        """When the rank began to wait for the next attempt, in seconds since the epoch; 0: it does
        not."""
        self.why_not_parked = ""
        """Why the rank can't park, as it said last."""
        self._profile_reply: asyncio.Future[str] | None = None
        """The PrepareProfile request that the rank has not answered yet."""
        self._timeout_replies: deque[asyncio.Future[int]] = deque()
        """The HoldTimeouts requests that the rank has not answered, oldest first."""
        self.debugger = DebuggerDesk()
        self.activity: Activity | None = None
        """The rank's reply to the last TellActivity."""
        self._replied = asyncio.Event()
        self.reader = asyncio.create_task(
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
        self._replied.clear()
        self.tell(TellActivity())

    async def await_activity(self, within_s: float) -> None:
        """Wait some seconds for `activity`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._replied.wait(), within_s)

    async def hold(self, request: HoldRank | HoldForAction) -> Holding:
        """Ask the rank to pause after its current step, and return that step.

        Raises LaunchError if the rank ends before.
        """
        held: asyncio.Future[Holding] = asyncio.get_running_loop().create_future()
        self._hold_replies.append(held)
        self.tell(request)
        return await held

    async def prepare_profile(self, request: PrepareProfile) -> str:
        """Have the rank prepare a profile; return why it can't be made, empty if it can."""
        self._note_preparing("another profile was asked for")
        self._profile_reply = asyncio.get_running_loop().create_future()
        self.tell(request)
        return await self._profile_reply

    async def prepare_editor(self, request: PrepareEditor) -> str:
        """Have the rank load debugpy; return why no editor can debug it, empty if one can."""
        prepared = self.debugger.expect_editor()
        self.tell(request)
        return await prepared

    async def hold_timeouts(self, request: HoldTimeouts) -> int:
        """Have the rank raise the timeouts of its groups; return the collectives begun so far."""
        raised: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._timeout_replies.append(raised)
        self.tell(request)
        return await raised

    async def park(self, within_s: float) -> str:
        """Ask the rank to wait for the next attempt; return why it does not, empty if it does."""
        if self.why_not_parked:  # the rank has said so before
            return self.why_not_parked
        self._park_reply = asyncio.get_running_loop().create_future()
        self.tell(ParkRank())
        try:
            self.why_not_parked = await asyncio.wait_for(self._park_reply, within_s)
        except asyncio.TimeoutError:
            self.why_not_parked = f"it did not leave its step within {within_s:g} s"
        return self.why_not_parked

    def note_end(self) -> None:
        """Fail what the rank has not answered: it has ended."""
        self._note_parking("it has ended")
        self._note_preparing("it has ended")
        while self._hold_replies:
            self._note_hold(LaunchError("the rank has ended"))
        while self._timeout_replies:
            self._note_raised(0)
        self.debugger.note(EditorPrepared("it has ended"))
        self.debugger.note(WentOn())

    def _note_connection(self, to_rank: asyncio.StreamWriter) -> None:
        self._to_rank = to_rank

    def _handle_reply(self, message: Message) -> None:
        if isinstance(message, Activity):
            self.activity = message
            self._replied.set()
        elif isinstance(message, ParkReply):
            self.why_not_parked = message.why_not
            self._note_parking(message.why_not)
        elif isinstance(message, Holding) and self._hold_replies:
            self._note_hold(message)
        elif isinstance(message, ProfilePrepared):
            self._note_preparing(message.why_not)
        elif isinstance(message, TimeoutsHeld) and self._timeout_replies:
            self._note_raised(message.begun)
        elif isinstance(message, HeldAt | DebuggerSays | WentOn | EditorPrepared):
            self.debugger.note(message)

    def _note_parking(self, why_not: str) -> None:
        if self._park_reply is not None and not self._park_reply.done():
            self._park_reply.set_result(why_not)

    def _note_preparing(self, why_not: str) -> None:
        if self._profile_reply is not None and not self._profile_reply.done():
            self._profile_reply.set_result(why_not)

    def _note_raised(self, begun: int) -> None:
        raised = self._timeout_replies.popleft()
        if not raised.done():
            raised.set_result(begun)

    def _note_hold(self, outcome: Holding | LaunchError) -> None:
        """Complete the oldest HoldRank, with the rank's step or with an error."""
        held = self._hold_replies.popleft()
        if held.done():  # cancelled when the agents' event loop ended
            return
        if isinstance(outcome, Holding):
            held.set_result(outcome)
        else:
            held.set_exception(outcome)
