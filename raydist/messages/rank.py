"""Agent and rank: pause, continue, and what the rank is doing. (either side)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from raydist.messages.request import Request
from raydist.messages.wire import Message


class RankMessage(Message):
    """Goes from an agent to its rank."""


class RankReply(Message):
    """Goes from a rank to its agent."""


class Collective(TypedDict):
    """An entry of torch's flight recorder, with the fields that a hang report uses; a torch without
    a field gives None.

    torch documents them in docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
    """

    process_group: Sequence[str]
    """Its name and its description."""
    collective_seq_id: int
    p2p_seq_id: int
    is_p2p: bool
    profiling_name: str
    """As `gloo:all_reduce`, `nccl:all_reduce` or, with torch 2.15's NCCL, `nccl2:all_reduce`."""
    input_sizes: Sequence[Sequence[int]]
    state: str
    """scheduled, started or completed."""
    retired: bool


@dataclass(frozen=True)
class TellActivity(RankMessage):
    """Reply with the stacks and the last collectives."""


@dataclass(frozen=True)
class Activity(RankReply):
    """What the rank does at this moment."""

    stack: str
    """The stacks of all its threads, in faulthandler's format."""
    collectives: Sequence[Collective]
    """The last entries of torch's flight recorder, the oldest first."""


@dataclass(frozen=True)
class Holding(RankReply):
    """The rank stands still after this step, until it gets StopAfter or ReleaseRank."""

    step: int


@dataclass(frozen=True)
class HoldRank(Request[int], RankMessage):
    """Have the rank stand still after the step that it is making; reply with that step. To the rank
    as well."""


@dataclass(frozen=True)
class StopAfter(Request[None], RankMessage):
    """Have the rank go on to this step, keep its state, and emit `left`. To the rank as well."""

    step: int


@dataclass(frozen=True)
class ReleaseRank(Request[None], RankMessage):
    """Have a rank that holds continue: not all ranks can hold now. To the rank as well."""
