"""The snapshot memories of a node, which its fork server holds and writers save. (actor)"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from raydist.messages.server import RankSpec, WriteCheckpoint
from raydist.messages.wire import encode
from raydist.messages.writer import (
    CommitShards,
    DropShards,
    ListShards,
    ReadRandomStates,
    ShardsRequest,
    WriterDone,
    WriterFailed,
    WriteShards,
)
from raydist.node import writer_requests
from raydist.shared import env_names, kinds
from raydist.shared.kinds import Event
from raydist.state import checkpoint_files
from raydist.state.object_store import StoragePath, parse_path
from raydist.state.snapshot_layout import (
    LAST_SLOT,
    LOCK,
    PAGE,
    REPLICA_SLOTS,
    SAVE_SLOT,
    SLOT_WORDS,
    SLOTS,
    WORD,
    at_slot,
    blank_page,
    common_steps,
    complete_slots,
    last_whole_step,
    read_words,
    whole_slots,
)
from raydist.state.write import SaveRequest

BESIDE_THEM = 5
"""The nice value of a process that writes a checkpoint while ranks train. With one rank per core
the writer takes a quarter of a core from one of them, not half. Where Linux shares CPU time among
sessions (sched_autogroup_enabled, and no CPU cgroup) it changes nothing, because the writer has a
separate session."""


@dataclass(eq=False)
class SnapshotBuffers:
    """The snapshot memories of one run on this node, by local rank.

    They outlive the ranks, and are freed with the last agent of the run, unless they are held for
    its next placement.
    """

    run: Path
    """The run's folder on this node."""
    checkpoints: StoragePath
    descriptors: dict[int, int] = field(default_factory=dict)
    agents: set[socket.socket] = field(default_factory=set)
    first: bool = False
    """Whether rank 0 is on this node, which then writes the last state without a request."""
    held: bool = False
    """Whether they outlive the last agent, because the run has made way (HeldStates)."""

    @classmethod
    def of_run(cls, spec: RankSpec, known: Iterable[SnapshotBuffers]) -> SnapshotBuffers:
        """Return the memories of the run that a rank belongs to, known or new."""
        run = Path(spec.value).parent
        found = next((each for each in known if each.run == run), None)
        if found is not None:
            return found
        named = spec.env.get(env_names.CHECKPOINTS)
        return cls(
            run,
            parse_path(named)
            if named
            else Path(spec.env.get(env_names.RUN_DIR, run)) / "checkpoints",
        )

    def of_rank(
        self, agent: socket.socket, env: Mapping[str, str], saving: bool = False
    ) -> tuple[int, int]:
        """Return descriptors of the memories of a rank and of the first rank on this node.

        They are -1 without memfd_create. `saving`: as in StartRank.
        """
        self.agents.add(agent)
        local = int(env.get("LOCAL_RANK", "0"))
        self.first |= env.get("RANK") == "0"
        for each in (
            sorted({0, local} - self.descriptors.keys()) if hasattr(os, "memfd_create") else ()
        ):
            self.descriptors[each] = os.memfd_create(f"raydist-snapshot-{each}")
            os.pwrite(self.descriptors[each], blank_page(), 0)
        if local == 0 and not saving:
            self.unlock()  # the previous rank may have died between its lock and its request
        return self.descriptors.get(local, -1), self.descriptors.get(0, -1)

    def unlock(self) -> None:
        """Note that no slot is being written any more."""
        if 0 in self.descriptors:
            os.pwrite(self.descriptors[0], blank_page()[:WORD], LOCK)

    def owed_checkpoint(self) -> WriteCheckpoint | None:
        """Return what may still have to be written when the last agent leaves.

        That is a checkpoint that rank 0 requested, then the newest state, each at most once.
        """
        if not self.first or len(self.agents) > 1:
            return None
        if self._owes_checkpoint():
            return WriteCheckpoint(last=False)  # the end of its writer unlocks the memory
        self.first = False
        return WriteCheckpoint() if self.has_state() else None

    def _owes_checkpoint(self) -> bool:
        """Return whether rank 0 has requested a checkpoint of a whole state, not yet written."""
        page = os.pread(self.descriptors[0], PAGE, 0) if 0 in self.descriptors else blank_page()
        locked = read_words(page, LOCK, 1)[0]
        return locked >= 0 and bool(read_words(page, at_slot(locked), SLOT_WORDS)[-1])

    def has_state(self) -> bool:
        """Return whether a whole state of the first rank is in memory here.

        The writer process checks whether it is on the disk already: a hanging file server would
        also hang the fork server, which must be able to end ranks.
        """
        return 0 in self.descriptors and bool(whole_slots(os.pread(self.descriptors[0], PAGE, 0)))

    def newest_step(self) -> int:
        """Return the newest step that this node can save; -1: none.

        A whole state, a rank's part of one, and a checkpoint to be written all count.
        """
        pages = first_pages(self.descriptors)
        whole = last_whole_step(pages)
        slots = (SAVE_SLOT,) if whole >= 0 else (*range(SLOTS), SAVE_SLOT)
        return max([whole, *(step for page in pages for step in complete_slots(page, slots))])

    def common_steps(self, ranks: int) -> list[int]:
        """Return the steps that the first `ranks` ranks of this node have, the first one whole."""
        if not self.descriptors.keys() >= {*range(ranks)}:
            return []
        return sorted(common_steps(first_pages(self.descriptors)[:ranks]))

    def wants_writer(self, request: WriteCheckpoint | ShardsRequest) -> bool:
        """Return whether a writer process would have anything to do."""
        match request:
            case WriteCheckpoint(last=True):
                return self.has_state()
            case ListShards():
                return self.has_shards()
        return True

    def has_shards(self) -> bool:
        """Return whether these memories hold parts of ranks, and no whole state."""
        pages = first_pages(self.descriptors)
        kept = any(complete_slots(page) or complete_slots(page, REPLICA_SLOTS) for page in pages)
        return kept and not whole_slots(pages[0])

    def release(self, agent: socket.socket) -> None:
        """Remove an agent that has gone; the memories are freed with the last one."""
        self.agents.discard(agent)
        self.free_unused()

    def free_unused(self) -> None:
        """Free the memories if no agent uses them, and they are not held."""
        if not self.agents and not self.held:
            for descriptor in self.descriptors.values():
                os.close(descriptor)
            self.descriptors.clear()

    def size(self) -> int:
        """Return the bytes of memory that they take."""
        return sum(512 * os.fstat(each).st_blocks for each in self.descriptors.values())


def runs_alongside_ranks(request: WriteCheckpoint | ShardsRequest) -> bool:
    """Return whether the ranks train during this request."""
    if isinstance(request, WriteCheckpoint):
        return not request.last
    return isinstance(request, WriteShards | CommitShards | DropShards) and bool(request.folder)


def ends_save(request: WriteCheckpoint | ShardsRequest) -> bool:
    """Return whether this request ends a save: what rank 0 has locked is on the disk, or given up.

    Writing the shards of one node does not: those of the others may still be read.
    """
    return not isinstance(request, ListShards | WriteShards | ReadRandomStates)


def run_writer(
    memories: SnapshotBuffers, request: WriteCheckpoint | ShardsRequest, reply: int
) -> NoReturn:
    """Execute a request in a new child of the fork server.

    Sends the events or the reply to the socket `reply` (-1: to none).
    """
    os.setsid()
    try:
        if runs_alongside_ranks(request):
            os.nice(BESIDE_THEM)
        if isinstance(request, WriteCheckpoint):
            lines = [
                json.dumps(each.to_json()).encode()
                for each in write_checkpoint(memories.descriptors, request)
            ]
            lines.append(encode(WriterDone()))
        else:
            answer = writer_requests.answer_request(
                memories.descriptors, memories.checkpoints, request
            )
            lines = [] if answer is None else [encode(answer)]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(request, WriteCheckpoint):
            warning = kinds.Warning(text=f"a checkpoint could not be written: {why}")
            lines = [json.dumps(warning.to_json()).encode(), encode(WriterDone())]
        else:
            lines = [encode(WriterFailed(why))]
    if reply >= 0:
        with contextlib.suppress(OSError), socket.socket(fileno=reply) as agent:
            agent.sendall(b"".join(line + b"\n" for line in lines))
    os._exit(0)


def write_checkpoint(descriptors: Mapping[int, int], request: WriteCheckpoint) -> list[Event]:
    """Write the checkpoint that a rank requested, or the last state; return the events of it."""
    from raydist.state.snapshot import SnapshotBuffer

    began = time.perf_counter()
    if request.last:
        save = last_state(descriptors, request)
    else:
        save = SnapshotBuffer(descriptors[0]).read_request(SAVE_SLOT)
    if save is None:
        return []
    path, trouble = checkpoint_files.write_and_prune(save)
    saved = kinds.Saved(rank=0, step=save.step, path=str(path), s=time.perf_counter() - began)
    warnings = [trouble] if trouble else []
    if request.last and not len(save.state["random"]):
        warnings.append(
            f"step {save.step} was saved without the random generators of some ranks: a run that "
            "continues from it draws other random numbers (dropout)"
        )
    return [*(kinds.Warning(text=each) for each in warnings), saved]


def first_pages(descriptors: Mapping[int, int]) -> list[bytes]:
    """Return the first pages of the memories, in the order of the local ranks."""
    return [os.pread(descriptor, PAGE, 0) for _, descriptor in sorted(descriptors.items())]


def last_state(descriptors: Mapping[int, int], write: WriteCheckpoint) -> SaveRequest | None:
    """Return the last snapshot as a checkpoint; None if the disk has that step or a later one."""
    import torch

    from raydist.state.snapshot import SnapshotBuffer

    memory = SnapshotBuffer(descriptors[0])
    step = write.step
    if step in memory.steps:
        # Not all ranks have a later one. This server would write it when its agents leave, and a
        # run would continue from it with other random numbers.
        for descriptor in descriptors.values():
            SnapshotBuffer(descriptor).forget_after(step)
    else:
        step = last_whole_step(first_pages(descriptors))
    slot = memory.steps[step]
    request = memory.read_request(LAST_SLOT, slot)
    if checkpoint_files.is_saved(request.folder, step):
        return None
    loss = memory.read(slot, clone="none")["own"]["loss"]
    drawn = (
        writer_requests.decoded(write.random)
        if step == write.step
        else writer_requests.random_states(descriptors, step, request.world_size)
    )
    # Empty without those of all ranks: a run that continues from it seeds them anew.
    whole = len(drawn) == request.world_size
    random = torch.stack(drawn) if whole else torch.empty(0, dtype=torch.uint8)
    return replace(
        request,
        step=step,
        state={**request.state, "random": random},
        metrics={}
        if loss is None
        else {"loss": float(loss)},  # a loop of one's own may report none
    )
