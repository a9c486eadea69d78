"""Driver, agent and writer: sharded states in memory and on the disk. (either side)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.messages.request import Request
from raydist.messages.server import ServerMessage
from raydist.messages.wire import Message


class ShardsRequest(ServerMessage):
    """A message that an agent forwards to the writer of its node."""


class ShardsReply(Message):
    """A reply of a writer."""


@dataclass(frozen=True)
class HeldShards(ShardsReply):
    """The shards of a sharded state that are in the memory of a node."""

    own: Sequence[tuple[int, int, int]]
    """Shards of its own ranks: rank, world size, step."""
    copies: Sequence[tuple[int, int, int]]
    """Copies of shards of ranks of another node."""
    saved: int
    """The newest of these steps for which the node sees a checkpoint of that step or a later one;
    -1 if there is none."""


@dataclass(frozen=True)
class ListShards(Request["HeldShards | None"], ShardsRequest):
    """Reply with the shards in the memory of this node; None if there are none.

    The agent forwards the message to the writer.
    """


@dataclass(frozen=True)
class WrittenShards(ShardsReply):
    """The files that a node has written."""

    files: Mapping[str, Mapping[str, Any]]
    """The fields of state.write.FileFacts, by file name."""


@dataclass(frozen=True)
class WriteShards(Request[WrittenShards], ShardsRequest):
    """Write the shards of these ranks to the disk, next to the checkpoints.

    The agent forwards the message to the writer.
    """

    step: int
    mark: str
    """Names the folder; it is the same in all requests that make one checkpoint."""
    world_size: int
    ranks: tuple[int, ...]
    folder: str = ""
    """The checkpoints' folder of raydist.sharded.save: the ranks do not save again until this is
    committed or dropped. Empty: the newest kept states of a run that can't continue, in the
    run's own folder."""


@dataclass(frozen=True)
class SavedShards(ShardsReply):
    """The files of all nodes are a checkpoint."""

    path: str
    trouble: str = ""
    """A warning: why old checkpoints are still there."""


@dataclass(frozen=True)
class UnseenShards(ShardsReply):
    """The node does not see files of others."""

    files: Sequence[str]
    folder: str


@dataclass(frozen=True)
class CommitShards(Request["SavedShards | UnseenShards"], ShardsRequest):
    """Make a checkpoint of the files that all nodes have written.

    The agent forwards the message to the writer.
    """

    step: int
    mark: str
    world_size: int
    files: Mapping[str, Mapping[str, Any]]
    """As in `WrittenShards`."""
    keep: int
    best: str | None
    """As in config.Checkpoint."""
    folder: str = ""
    """As in WriteShards."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)
    """As in state.write.Meta."""


@dataclass(frozen=True)
class DropShards(Request[None], ShardsRequest):
    """Delete the files that this node has written: they do not become a checkpoint.

    The agent forwards the message to the writer.
    """

    step: int
    mark: str
    folder: str = ""
    """As in WriteShards."""


@dataclass(frozen=True)
class RandomStates(ShardsReply):
    """The random generators of the ranks of a node."""

    states: Sequence[str]
    """The bytes of each rank's state in base64, in the order of the ranks."""


@dataclass(frozen=True)
class ReadRandomStates(Request["RandomStates | None"], ShardsRequest):
    """Reply with the random generators that the ranks of this node had at a kept step.

    The agent forwards the message to the writer.
    """

    step: int
    world_size: int
    """The number of all ranks: a state of another number of ranks is left out."""


@dataclass(frozen=True)
class WriterDone(ShardsReply):
    """The last message of a writer process for a checkpoint: it was not killed before."""


@dataclass(frozen=True)
class WriterFailed(ShardsReply):
    """The reply of a writer process that could not carry out a request."""

    error: str
