"""Write a sharded state to the disk: each node writes the shards in its memory. (actor)

All of it happens in a writer process, a child of the fork server, for one request of the driver (launch/flush.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from raydist.settings.config import Checkpoint
from raydist.state import checkpoint_files
from raydist.state.object_store import StoragePath
from raydist.state.run_checkpoints import of_fit
from raydist.state.snapshot_layout import FIT, PAGE, read_words
from raydist.state.write import FileFacts, drop
from raydist.worker.protocol import (
    CommitShards,
    DropShards,
    HeldShards,
    ListShards,
    SavedShards,
    ShardsReply,
    ShardsRequest,
    UnseenShards,
    WriteShards,
    WrittenShards,
)

if TYPE_CHECKING:
    from raydist.state.distributed_checkpoint import RankPart

Descriptors = Mapping[int, int]
"""The memories of a run on this node, by local rank."""
AT_ONCE = 4
"""Files that a node writes at a time: one thread does not hash as fast as disks write."""


def answer_request(descriptors: Descriptors, folder: StoragePath, request: ShardsRequest) -> ShardsReply | None:
    """Do what the driver asks for. `folder`: the checkpoints of the run, as this node sees them."""
    folder = of_fit(folder, max(map(fit_in, descriptors.values()), default=0))
    match request:
        case ListShards():
            return list_shards(descriptors, folder)
        case WriteShards():
            return write_shards(descriptors, _beside(folder, request), request)
        case CommitShards():
            return commit_shards(folder, _beside(folder, request), request)
        case DropShards():
            drop(_beside(folder, request))
    return None


def fit_in(descriptor: int) -> int:
    """The number of the raydist.fit whose states are in this memory."""
    return read_words(os.pread(descriptor, PAGE, 0), FIT, 1)[0]


def _beside(folder: StoragePath, request: WriteShards | CommitShards | DropShards) -> StoragePath:
    from raydist.state.distributed_checkpoint import beside_name

    return beside_name(folder, request.step, request.mark)


def list_shards(descriptors: Descriptors, folder: StoragePath) -> HeldShards:
    """The shards in these memories."""
    held: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    for part, step, copied in parts_in(descriptors):
        held[copied].append((part.rank, part.world_size, step))
    steps = {step for shards in held.values() for _, _, step in shards}
    saved = max((step for step in steps if checkpoint_files.is_saved(folder, step)), default=-1)
    return HeldShards(held[False], held[True], saved)


def parts_in(descriptors: Descriptors) -> Iterator[tuple[RankPart, int, bool]]:
    """Each rank's part in these memories, its step, and whether it is a copy. Its tensors share the memory."""
    from raydist.state.distributed_checkpoint import RankPart
    from raydist.state.snapshot import SnapshotBuffer

    memories = [SnapshotBuffer(descriptor) for _, descriptor in sorted(descriptors.items())]
    for copied in (False, True):
        for memory in memories:
            for step, slot in (memory.replicas if copied else memory.steps).items():
                own = memory.read(slot, clone="none").get("own", {})
                if "plan" in own:
                    yield RankPart(**own), step, copied


def write_shards(descriptors: Descriptors, beside: StoragePath, request: WriteShards) -> WrittenShards:
    """Write the parts of some ranks."""
    from raydist.state.distributed_checkpoint import begin_writing, write_part

    parts = [part for part, step, _ in parts_in(descriptors) if step == request.step]
    by_rank = {part.rank: part for part in reversed(parts) if part.world_size == request.world_size}
    begin_writing(beside)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        written = pool.map(lambda rank: write_part(beside, by_rank[rank]), request.ranks)
    return WrittenShards({name: asdict(facts) for files in written for name, facts in files.items()})


def commit_shards(folder: StoragePath, beside: StoragePath, request: CommitShards) -> SavedShards | UnseenShards:
    """Make a checkpoint of the files that all nodes have written, if this node sees them."""
    from raydist.state.distributed_checkpoint import commit

    began, files = time.perf_counter(), {name: FileFacts(**facts) for name, facts in request.files.items()}
    kept = Checkpoint(keep=request.keep, best=request.best)
    if missing := commit(folder, beside, request.step, len(files), files, kept):
        return UnseenShards(missing, str(folder))
    return SavedShards(str(folder / f"step-{request.step:08d}"), time.perf_counter() - began)
