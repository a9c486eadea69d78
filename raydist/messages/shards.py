"""Driver, agent and writer: the shards of a sharded state in memory and on the disk. (either
side)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.messages.request import Request
from raydist.messages.server import ServerMessage
from raydist.messages.wire import Message


class ShardsRequest(ServerMessage):
    """Passed on by an agent to the writer of its node."""


class ShardsReply(Message):
    """Is the reply of a writer."""


@dataclass(frozen=True)
class HeldShards(ShardsReply):
    """The shards of a sharded state that are in the memory of a node."""

    own: Sequence[tuple[int, int, int]]
    """Of its own ranks: rank, world size, step."""
    copies: Sequence[tuple[int, int, int]]
    """Of ranks of another node."""
    saved: int
    """The newest of these steps of which the node sees a checkpoint, or a later one; -1 if there is
    none."""


@dataclass(frozen=True)
class ListShards(Request["HeldShards | None"], ShardsRequest):
    """Reply with the shards in the memory of this node; None if there are none. To the writer as
    well."""


@dataclass(frozen=True)
class WrittenShards(ShardsReply):
    """The files that a node has written."""

    files: Mapping[str, Mapping[str, Any]]
    """By name the fields of state.write.FileFacts."""


@dataclass(frozen=True)
class WriteShards(Request[WrittenShards], ShardsRequest):
    """Write the shards of these ranks to the disk, beside the checkpoints. To the writer as
    well."""

    step: int
    mark: str
    """Names the folder: of all requests that make one checkpoint the same."""
    world_size: int
    ranks: tuple[int, ...]
    folder: str = ""
    """The checkpoints' folder of raydist.sharded.save: the ranks wait with what they save next
    until this is committed or dropped. Empty: the newest kept states of a run that can't continue,
    in its own folder."""


@dataclass(frozen=True)
class SavedShards(ShardsReply):
    """The files of all nodes are a checkpoint."""

    path: str


@dataclass(frozen=True)
class UnseenShards(ShardsReply):
    """The node does not see files of others."""

    files: Sequence[str]
    folder: str


@dataclass(frozen=True)
class CommitShards(Request["SavedShards | UnseenShards"], ShardsRequest):
    """Make a checkpoint of the files that all nodes have written. To the writer as well."""

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
    """Delete the files that this node has written: they become no checkpoint. To the writer as
    well."""

    step: int
    mark: str
    folder: str = ""
    """As in WriteShards."""


@dataclass(frozen=True)
class WriterFailed(ShardsReply):
    """The reply of a writer process that could not do what was asked."""

    error: str
