"""Agent and rank: pause, continue, and what the rank is doing. (either side)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from raydist.messages.request import Request
from raydist.messages.wire import Message


class RankMessage(Message):
    """A message from an agent to its rank."""


class RankReply(Message):
    """A message from a rank to its agent."""


class Collective(TypedDict):
    """An entry of torch's flight recorder, with the fields that a hang report uses.

    A field that this torch lacks is None. torch documents the fields in
    docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
    """

    process_group: Sequence[str]
    """Its name and its description."""
    collective_seq_id: int
    p2p_seq_id: int
    is_p2p: bool
    profiling_name: str
    """For example `gloo:all_reduce`, `nccl:all_reduce` or, with torch 2.15's NCCL,
    `nccl2:all_reduce`."""
    input_sizes: Sequence[Sequence[int]]
    state: str
    """scheduled, started or completed."""
    retired: bool


@dataclass(frozen=True)
class TellActivity(RankMessage):
    """Reply with the stacks and the last collectives."""


@dataclass(frozen=True)
class Activity(RankReply):
    """What the rank is doing at this moment."""

    stack: str
    """The stacks of all its threads, in faulthandler's format."""
    collectives: Sequence[Collective]
    """The last entries of torch's flight recorder, oldest first."""


@dataclass(frozen=True)
class Holding(RankReply):
    """The rank pauses after this step, until it gets StopAfter or ReleaseRank.

    The reply to HoldForAction is the same: it then waits for DoAfter or ReleaseFromAction.
    """

    step: int
    fit: int = 0
    """The number of the raydist.fit whose step it is; 0: a step of an optimizer outside of one."""


@dataclass(frozen=True)
class HoldRank(Request[Holding], RankMessage):
    """Ask the rank to pause after its current step; reply with that step.

    The agent forwards the message to the rank.
    """


@dataclass(frozen=True)
class StopAfter(Request[None], RankMessage):
    """Let the rank continue to this step, keep its state, and emit `left`.

    The agent forwards the message to the rank.
    """

    step: int
    fit: int = 0
    """As Holding.fit."""


@dataclass(frozen=True)
class ReleaseRank(Request[None], RankMessage):
    """Let a paused rank continue, because not all ranks can hold now.

    The agent forwards the message to the rank.
    """


@dataclass(frozen=True)
class HoldForAction(Request[Holding], RankMessage):
    """Ask the rank to pause after its next step; reply with that step.

    The agent forwards the message to the rank.
    """


@dataclass(frozen=True)
class DoAfter(Request[None], RankMessage):
    """Let the rank continue, and do something after this step, without stopping.

    The agent forwards the message to the rank.
    """

    step: int
    what: str
    """save: save a checkpoint. set: change settings to these `values`, by name. profile: begin
    the profile that PrepareProfile named; `values` has the number of its `steps`."""
    values: Mapping[str, Any]
    fit: int = 0
    """As Holding.fit."""


@dataclass(frozen=True)
class ReleaseFromAction(Request[None], RankMessage):
    """Let a rank continue that was paused for an action, because not all ranks can do it.

    The agent forwards the message to the rank.
    """


@dataclass(frozen=True)
class PrepareProfile(Request[str], RankMessage):
    """Prepare a profile, without a pause of the training; reply why it can't be made, or "".

    The agent forwards the message to the rank.
    """

    name: str
    """Unique in the run."""
    memory: bool
    """Whether to take a snapshot of the GPU's memory too."""


@dataclass(frozen=True)
class ProfilePrepared(RankReply):
    """The reply to PrepareProfile."""

    why_not: str


@dataclass(frozen=True)
class ProfileNow(Request[None], RankMessage):
    """Make the prepared profile now. The agent forwards the message to the rank."""

    seconds: float


@dataclass(frozen=True)
class HoldTimeouts(Request[int], RankMessage):
    """Raise the timeouts of the rank's process groups; reply with the collectives begun so far.

    The agent forwards the message to the rank.
    """

    reason: str
    """Which session or rank it is for."""


@dataclass(frozen=True)
class TimeoutsHeld(RankReply):
    """The reply to HoldTimeouts."""

    begun: int
    """Collectives of the default group; 0: unknown."""


@dataclass(frozen=True)
class LetGoTimeouts(Request[None], RankMessage):
    """Put the timeouts back, unless there is another reason to raise them.

    The agent forwards the message to the rank.
    """

    reason: str


@dataclass(frozen=True)
class HeldAt(RankReply):
    """The rank waits in the debugger, at this line."""

    file: str
    """Empty: an editor debugs it, which says nothing about where it is."""
    line: int


@dataclass(frozen=True)
class DebuggerSays(RankReply):
    """What the debugger shows."""

    text: str


@dataclass(frozen=True)
class WentOn(RankReply):
    """The session is over, and the rank continues."""


@dataclass(frozen=True)
class AttachDebugger(Request[None], RankMessage):
    """Begin a session: where the rank waits, or at its next line of Python.

    The agent forwards the message to the rank.
    """

    after: int = 0
    """The number of collectives that it begins first, if it does so within seconds: the others may
    wait for it in these with the old timeout."""
    by_editor: bool = False
    """Whether an editor debugs it, by debugpy, which it has loaded; otherwise pdb."""


@dataclass(frozen=True)
class PrepareEditor(Request[str], RankMessage):
    """Load debugpy; reply why no editor can debug the rank, or "".

    The agent forwards the message to the rank.
    """


@dataclass(frozen=True)
class EditorPrepared(RankReply):
    """The reply to PrepareEditor."""

    why_not: str


@dataclass(frozen=True)
class TellDebugger(Request[None], RankMessage):
    """A line for the debugger, or text of the editor ("": it has left).

    The agent forwards the message to the rank.
    """

    line: str


@dataclass(frozen=True)
class DetachDebugger(Request[None], RankMessage):
    """The person has left: the rank continues. The agent forwards the message to the rank."""


@dataclass(frozen=True)
class Meet(Request[None], RankMessage):
    """Connect to all other ranks. The agent forwards the message to the rank."""

    number: int
    """The attempt."""
    contacts: Sequence[str]
    """How each rank is reached (kinds.MeetRequest.contact), by rank."""


@dataclass(frozen=True)
class ParkRank(RankMessage):
    """Leave the current step and wait for GoOn, because another rank was killed."""


@dataclass(frozen=True)
class ParkReply(RankReply):
    """The rank waits for GoOn; or it can't, and is to be killed."""

    why_not: str = ""
    """Why it can't, for a person; empty if it waits."""


@dataclass(frozen=True)
class GoOn(RankMessage):
    """Continue in the next attempt."""

    env: Mapping[str, str]
    """The variables that differ from those of the previous attempt."""
