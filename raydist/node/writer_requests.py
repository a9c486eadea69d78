"""Answers the driver in a writer process: each node writes the shards in its memory. (actor)

All of it happens in a writer process, a child of the fork server, for one request of the driver
(launch/flush.py): the newest states of a run that can't continue, or those that the ranks have put
into SAVE_SLOT while they train. Of a model that is not sharded it reads the random generators only;
node/snapshots.py writes the rest.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from raydist.messages.writer import (
    CommitShards,
    DropShards,
    HeldShards,
    ListShards,
    RandomStates,
    ReadRandomStates,
    SavedShards,
    ShardsReply,
    ShardsRequest,
    UnseenShards,
    WriteShards,
    WrittenShards,
)
from raydist.settings.config import Checkpoint
from raydist.state import checkpoint_files
from raydist.state.object_store import StoragePath, parse_path
from raydist.state.run_checkpoints import of_fit
from raydist.state.snapshot_layout import FIT, PAGE, SAVE_SLOT, complete_slots, read_words
from raydist.state.write import FileFacts, drop

if TYPE_CHECKING:
    import torch

    from raydist.state.distributed_checkpoint import RankPart

Descriptors = Mapping[int, int]
"""The memories of a run on this node, by local rank."""
AT_ONCE = 4
"""Files that a node writes concurrently: one thread does not hash as fast as disks write."""


def answer_request(
    descriptors: Descriptors, folder: StoragePath, request: ShardsRequest
) -> ShardsReply | None:
    """Execute a request of the driver. `folder`: the run's checkpoints, as this node sees them."""
    if isinstance(request, WriteShards | CommitShards | DropShards) and request.folder:
        folder = parse_path(request.folder)
    else:
        folder = of_fit(folder, max(map(fit_in, descriptors.values()), default=0))
    match request:
        case ListShards():
            return list_shards(descriptors, folder)
        case WriteShards():
            return write_shards(descriptors, _temporary(folder, request), request)
        case CommitShards():
            return commit_shards(folder, _temporary(folder, request), request)
        case ReadRandomStates(step, world_size):
            found = random_states(descriptors, step, world_size)
            return RandomStates(
                [base64.b64encode(each.numpy().tobytes()).decode() for each in found]
            )
        case DropShards():
            drop(_temporary(folder, request))
    return None


def fit_in(descriptor: int) -> int:
    """Return the number of the raydist.fit whose states are in this memory."""
    return read_words(os.pread(descriptor, PAGE, 0), FIT, 1)[0]


def _temporary(
    folder: StoragePath, request: WriteShards | CommitShards | DropShards
) -> StoragePath:
    from raydist.state.distributed_checkpoint import temporary_name

    return temporary_name(folder, request.step, request.mark)


def random_states(descriptors: Descriptors, step: int, world_size: int) -> list[torch.Tensor]:
    """Return the random generators, each [bytes], of the ranks of this node at this step.

    Those are left out that were not kept, or that another number of ranks has kept.
    """
    from raydist.state.snapshot import SnapshotBuffer

    found = []
    for _, descriptor in sorted(descriptors.items()):
        memory = SnapshotBuffer(descriptor)
        if step in memory.steps:
            own = memory.read(memory.steps[step])["own"]
            if own["world_size"] == world_size:
                found.append(own["random"])
    return found


def decoded(states: Sequence[str]) -> list[torch.Tensor]:
    """Return the random generators of RandomStates, each [bytes]."""
    import torch

    return [
        torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.uint8) for each in states
    ]


def list_shards(descriptors: Descriptors, folder: StoragePath) -> HeldShards:
    """Return the shards in these memories."""
    held: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    for part, step, copied in parts_in(descriptors):
        held[copied].append((part.rank, part.world_size, step))
    steps = {step for shards in held.values() for _, _, step in shards}
    saved = max((step for step in steps if checkpoint_files.is_saved(folder, step)), default=-1)
    return HeldShards(held[False], held[True], saved)


def parts_in(descriptors: Descriptors) -> Iterator[tuple[RankPart, int, bool]]:
    """Yield each rank's part in these memories, its step, and whether it is a copy.

    The tensors of a part share the memory.
    """
    from raydist.state.distributed_checkpoint import RankPart
    from raydist.state.snapshot import SnapshotBuffer

    memories = [SnapshotBuffer(descriptor) for _, descriptor in sorted(descriptors.items())]
    for copied in (False, True):
        for memory in memories:
            for step, slot in (memory.replicas if copied else memory.steps).items():
                own = memory.read(slot, clone="none").get("own", {})
                if "plan" in own:
                    yield RankPart(**own), step, copied


def saved_parts(descriptors: Descriptors, step: int) -> list[RankPart]:
    """Return the parts of this step that ranks have put into SAVE_SLOT.

    Their tensors share the memory.
    """
    from raydist.state.distributed_checkpoint import RankPart
    from raydist.state.snapshot import SnapshotBuffer

    pages = {
        descriptor: os.pread(descriptor, PAGE, 0) for _, descriptor in sorted(descriptors.items())
    }
    there = [
        descriptor
        for descriptor, page in pages.items()
        if step in complete_slots(page, (SAVE_SLOT,))
    ]
    return [RankPart(**SnapshotBuffer(each).read(SAVE_SLOT, clone="none")["own"]) for each in there]


def write_shards(
    descriptors: Descriptors, temporary: StoragePath, request: WriteShards
) -> WrittenShards:
    """Write the parts of some ranks. Raises RuntimeError if their memory holds another step now."""
    from raydist.state.distributed_checkpoint import begin_writing, write_part

    if request.folder:
        parts = saved_parts(descriptors, request.step)
    else:
        parts = [part for part, step, _ in parts_in(descriptors) if step == request.step]
    by_rank = {part.rank: part for part in reversed(parts) if part.world_size == request.world_size}
    if missing := [rank for rank in request.ranks if rank not in by_rank]:
        raise RuntimeError(f"the memory has no state of step {request.step} of rank {missing[0]}")
    begin_writing(temporary)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        written = [*pool.map(lambda rank: write_part(temporary, by_rank[rank]), request.ranks)]
    # A slot loses its step before its first byte changes: the ranks of a later attempt may have
    # saved another step.
    if request.folder and len(saved_parts(descriptors, request.step)) != len(parts):
        raise RuntimeError(f"the state of step {request.step} was replaced while it was written")
    return WrittenShards(
        {name: asdict(facts) for files in written for name, facts in files.items()}
    )


def commit_shards(
    folder: StoragePath, temporary: StoragePath, request: CommitShards
) -> SavedShards | UnseenShards:
    """Commit a checkpoint of the files that all nodes have written, if this node sees them."""
    from raydist.state.distributed_checkpoint import Contents, commit

    files = {name: FileFacts(**facts) for name, facts in request.files.items()}
    contents = Contents(request.step, request.world_size, files, request.metrics, request.reported)
    kept = Checkpoint(keep=request.keep, best=request.best)
    missing, trouble = commit(folder, temporary, contents, kept)
    if missing:
        return UnseenShards(missing, str(folder))
    return SavedShards(str(folder / f"step-{request.step:08d}"), trouble)
