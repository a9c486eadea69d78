"""Shards or a whole state in ranks' memories, read by any number of ranks with DCP. (rank side)

The reader is a StorageReader of torch.distributed.checkpoint (DCP), like that of a checkpoint on
the disk; torch divides the tensors. Each rank plans what it needs, requests it from the ranks that
have it, and receives it over gloo. Nothing received is unpickled without a list of the classes that
may be in it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    WriteItemType,
)
from torch.futures import Future

from raydist.state.distributed_checkpoint import (
    PartPlanner,
    RankPart,
    RankPlanner,
    joined_metadata,
    load_by,
    read_plan,
)
from raydist.state.snapshot_layout import State
from raydist.worker.groups import new_group

Piece = tuple[int, int, Sequence[int], Sequence[int]]
"""A part of a shard: the former rank, the number of the item in its plan, offsets and lengths."""


class PartsReader(FileSystemReader):
    """Reads the parts that the ranks of a group have in memory. Its reads are collectives."""

    def __init__(self, parts: Mapping[int, RankPart], group: Any) -> None:
        """Set up the reader. `parts`: those that this rank provides, by former rank.

        Over all ranks each part is provided once.
        """
        super().__init__("")
        self._parts = parts
        self._group = group
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._values = dict[tuple[int, int], bytes]()
        self._holder = dict[int, int]()
        self._planners = dict[int, PartPlanner]()
        self._plans = dict[int, Any]()
        for rank, part in self._parts.items():
            self._planners[rank] = PartPlanner()
            self._planners[rank].set_up_planner(part.state)
        own = {
            rank: {"plan": part.plan, "values": self._texts(rank, part)}
            for rank, part in self._parts.items()
        }
        for holder, replies in enumerate(self._gather(to_bytes(own))):
            for rank, each in from_bytes(replies).items():
                self._plans[rank] = read_plan(each["plan"])
                self._holder[rank] = holder
                self._values |= {(rank, number): text for number, text in each["values"].items()}
        plans = sorted(self._plans.items())
        metadata = joined_metadata([plan for _, plan in plans])
        metadata.storage_data = {  # an item that several ranks have is read from the lowest
            item.index: (rank, number)
            for rank, plan in reversed(plans)
            for number, item in enumerate(plan.items)
        }
        self._known = metadata.state_dict_metadata
        return metadata

    def _texts(self, rank: int, part: RankPart) -> dict[int, bytes]:
        """Return the non-tensors of a part, as torch.save writes them, by the item's number."""
        items = [*enumerate(read_plan(part.plan).items)]
        values = {
            number: item.index for number, item in items if item.type == WriteItemType.BYTE_IO
        }
        return {
            number: to_bytes(self._planners[rank].lookup_object(index))
            for number, index in values.items()
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: list[list[tuple[ReadItem, Piece]]] = [[] for _ in range(self._world)]
        for item in plan.items:
            rank, number = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._values[rank, number]))
            else:
                wanted[self._holder[rank]].append(
                    (item, (rank, number, [*item.storage_offsets], [*item.lengths]))
                )
        replies = self._gather(
            json.dumps([[piece for _, piece in each] for each in wanted]).encode()
        )
        requests = [json.loads(each)[self._rank] for each in replies]
        for shift in range(self._world):  # with each rank once, starting with itself
            to, source = (self._rank + shift) % self._world, (self._rank - shift) % self._world
            sent = [] if to == self._rank else [self._send(piece, to) for piece in requests[to]]
            for item, piece in wanted[source]:
                into = planner.resolve_tensor(item).detach()
                into.copy_(
                    self._piece(piece) if source == self._rank else self._receive(item, source)
                )
                planner.commit_tensor(item, into)
            for each in sent:
                each.wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, piece: Piece) -> torch.Tensor:
        """Return this part of a shard, which this rank has."""
        rank, number, offsets, lengths = piece
        found: torch.Tensor = self._planners[rank].lookup_object(
            self._plans[rank].items[number].index
        )
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        return found

    def _send(self, piece: Piece, to: int) -> Any:
        return dist.isend(_as_bytes(self._piece(piece).contiguous()), to, group=self._group)

    def _receive(self, item: ReadItem, source: int) -> torch.Tensor:
        dtype = self._known[item.storage_index.fqn].properties.dtype  # type: ignore[union-attr]
        piece = torch.empty(tuple(item.lengths), dtype=dtype)
        dist.recv(_as_bytes(piece), source, group=self._group)
        return piece

    def _gather(self, own: bytes) -> list[bytes]:
        """Gather the bytes of all ranks, by rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self._group)
        longest = int(max(sizes))
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in sizes]
        dist.all_gather(rows, row, group=self._group)
        return [each[: int(size)].numpy().tobytes() for each, size in zip(rows, sizes, strict=True)]


def divide(
    whole: State | None,
    state: State,
    of_ranks: str,
    optional: Sequence[str],
    source: str,
    part: bool = False,
) -> None:
    """Load a whole state that only rank 0 has into the shards of all ranks. A collective.

    `whole`: None on the other ranks. `state` and the rest: as for `load_by`.
    """
    parts = {} if whole is None else {0: RankPart(0, 1, whole, RankPlanner(0).plan(whole))}
    load_by(PartsReader(parts, new_group(backend="gloo")), state, of_ranks, optional, source, part)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, without a copy: gloo does not support every type."""
    return tensor.view(-1).view(torch.uint8)


def to_bytes(value: Any) -> bytes:
    """Return a value as torch.save writes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def from_bytes(text: bytes) -> Any:
    """Return the value of `to_bytes`. pickle.UnpicklingError: loading it would run code."""
    return torch.load(io.BytesIO(text), weights_only=True)
