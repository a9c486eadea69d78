"""Sharded states (FSDP) in memory: each rank's shards, with a copy on the next node. (rank side)

    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    begin = sharded.load(state)         # the step whose tensors are now in `state`; 0: none
    ...
    sharded.keep(step, state_of_now)    # after a step; the copy travels meanwhile
    sharded.save(step, state_of_now)    # a checkpoint, written while the training continues

All ranks call them, with the same keys; `raydist.fit` with `parallel=fsdp` or `pp` does. The death
of a rank or of a node loses nothing: the copies of its shards are on the next node. They go from
rank to rank over gloo, as gradients do on a CPU. No port listens for them, and nothing is unpickled
from them without a list of the classes that may be in it.

A restart loads from memory. With another number of ranks each gets what it needs from the ranks
that have it (reshard.py). When the run can't continue, the newest state that is complete in the
memories becomes a checkpoint in torch.distributed.checkpoint's format, which `load` loads on any
number of ranks. Under torchrun, where no process outlives the ranks, nothing is kept.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from raydist.settings.config import Backend, Checkpoint
from raydist.shared import kinds
from raydist.shared.errors import RaydistError
from raydist.state import object_store
from raydist.state.device import device_of
from raydist.state.distributed_checkpoint import (
    SAME,
    Contents,
    RankPart,
    RankPlanner,
    begin_writing,
    commit,
    leave_out,
    load_by,
    load_into,
    temporary_name,
    write_part,
)
from raydist.state.object_store import StoragePath
from raydist.state.shard_choice import Shard, WholeShards, newest_whole
from raydist.state.snapshot import NoRoom, SnapshotBuffer, rebuilt
from raydist.state.snapshot_layout import SAVE_SLOT, State
from raydist.state.write import FileFacts, SaveRequest, drop, unloadable
from raydist.training.reshard import PartsReader
from raydist.worker import checkpoint, context
from raydist.worker.backends import Comm
from raydist.worker.backends.ddp import DDPComm
from raydist.worker.groups import new_group, wait_for_all, work_in_turns

OFFERS = 2
"""Limit on the newest states that a rank offers: it has two slots for its own states and two for
copies."""
ROW = 3 * OFFERS
"""Number of integers that encode a rank's offers: a rank, a world size and a step for each."""
LONGEST = 500
"""Limit on the characters of an error that a rank sends to the other ranks."""


def keep(step: SupportsIndex, state: Mapping[str, Any]) -> None:
    """Keep this rank's shards of a state in its node's memory, and a copy on the next node.

    All ranks must call it, with the same step and the same keys; a stage of a pipeline may have
    keys of its own. It returns when the shards are in memory; the copy travels in the background,
    and the next `keep` waits for it. A node needs about four times the bytes of its shards.

    - `step`: optimizer steps done so far.
    - `state`: nested dicts and lists of tensors, numbers and text, as `get_state_dict` of
      `torch.distributed.checkpoint.state_dict` returns. Of a DTensor this rank's local tensor is
      kept, other tensors whole. A checkpoint on disk holds rank 0's value of everything that is no
      DTensor; of what rank 0 does not have, that of the first rank of a stage.

    It does nothing under torchrun and with one rank of `group=inline`. If memory is short on any
    node, it warns once, and does nothing from then on. With one node, or with unequal
    numbers of ranks on the nodes, there are no copies.

    RaydistError: torch.distributed is not initialised, as with backend=horovod. An error in the
    background copy is raised by the next call.
    """
    begin_keep(context.whole_step(step, "keep"), state, alongside=False)


def begin_keep(step: int, state: Mapping[str, Any], alongside: bool) -> None:
    """Keep a state as `keep` does. `alongside`: a GPU copies it alongside what follows.

    In that case `catch_up` must come before anything that changes the state.
    """
    if (ring := _ring()) is not None:
        # a restart does not repeat this step: its report must be sent first
        context.current().flush()
        ring.keep(step, state, alongside)


def catch_up() -> None:
    """Have the device end its copies of the last state before the state is changed."""
    ring: Ring | None = context.current().sharded
    if ring is not None:
        ring.catch_up()


def save(
    step: SupportsIndex,
    state: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    settings: Checkpoint | None = None,
    *,
    wait: bool = False,
) -> StoragePath | None:
    """Save a state as the checkpoint of a step; return the path, on all ranks.

    Each node writes the shards of its ranks.

    All ranks must call it, with the same step and the same keys. The checkpoint is in the format of
    torch.distributed.checkpoint. All nodes must see the folder.

    - `step`: optimizer steps done so far. A checkpoint of the same step is replaced.
    - `state`: as for `keep`.
    - `metrics`: name -> number, for `checkpoint.best=max:NAME`.
    - `settings`: how many checkpoints to keep. None: `checkpoint.keep` and `checkpoint.best` of the
      run.
    - `wait`: write before returning.

    Over Ray each rank copies its shards in memory, and another process of its node writes them
    while the training continues; the next `save` and the end of the job wait for it. A checkpoint
    on the disk is complete. It is written before `save` returns with `wait`, under torchrun, in a
    program (`script=`), with one rank of `group=inline`, and if the shards of a rank do not fit
    into memory once more.

    If a rank or node cannot write, as on a full disk, or does not see what others wrote, that
    is a warning, and the checkpoints before it stay. If it is written before `save` returns, that
    returns None then, on all ranks.

    RaydistError: torch.distributed is not initialized, in a program.
    """
    step = context.whole_step(step, "save")
    context.phase("save")
    wait_for_all(_comm(), rest)
    began, request = time.perf_counter(), checkpoint.save_request(step, {}, metrics, settings)
    me = context.rank()
    part = RankPart(me.rank, me.world_size, local(state), RankPlanner(me.rank).plan(state))
    if not wait and _hand_over(request, part):
        return request.path
    why = _write_together(request, part)
    if me.rank == 0:
        if why:
            context.warn(f"a checkpoint could not be written: {why}")
        else:
            context.emit_event(
                kinds.Saved(
                    rank=context.rank().rank,
                    step=step,
                    path=str(request.path),
                    s=time.perf_counter() - began,
                )
            )
    return None if why else request.path


def _comm() -> Comm:
    """Return the Comm of this rank; in a program, one of the process group that it has made.

    RaydistError: it has made none.
    """
    comm: Comm | None = context.current().comm
    if comm is None and not dist.is_initialized():
        raise RaydistError("raydist.sharded.save: call torch.distributed.init_process_group first")
    return comm or DDPComm(Backend(), context.rank().device)


def rest(within_s: float = math.inf) -> bool:
    """Wait until the checkpoint that this rank has requested is on the disk; report whether it is.

    Only rank 0 requests checkpoints.
    """
    memory = checkpoint.own_memory()
    return memory is None or memory.rest(within_s)


def _hand_over(request: SaveRequest, part: RankPart) -> bool:
    """Have the nodes write a checkpoint in the background; report whether that is possible.

    The part of each rank stays in its memory. Rank 0's part is locked until the checkpoint is
    complete or abandoned; only after that do the ranks overwrite their parts.
    """
    memory = checkpoint.own_memory()
    fits = memory is not None and next(unloadable(part.state, "state"), None) is None
    if fits and memory is not None:
        try:
            memory.keep_to_save(request.step, {"own": vars(part)})
        except NoRoom:
            fits = False
    if not all(int(each.item()) for each in _comm().gather(torch.tensor([int(fits)]))):
        if memory is not None:
            memory.free((SAVE_SLOT,))
        return False
    if part.rank == 0 and memory is not None:
        memory.lock(SAVE_SLOT)
        context.emit_event(
            kinds.SaveShards(
                rank=context.rank().rank,
                step=request.step,
                folder=request.checkpoints,
                keep=request.keep,
                best=request.best,
                metrics=request.metrics,
                reported=request.reported,
                kept=request.step in memory.steps,
            )
        )
    return True


def _write_together(request: SaveRequest, part: RankPart) -> str:
    """Write each rank's shards and commit them on rank 0; return why that failed, on all ranks.

    Both may take longer than a collective: a rank of another replica writes nothing, and would wait
    for those that do.
    """
    me, comm = context.rank(), _comm()
    mark = _gather_states({"mark": uuid.uuid4().hex[:8]})[0]["mark"]
    temporary = temporary_name(request.folder, request.step, mark)
    states = _gather_states(work_in_turns(comm, lambda: _write_part(temporary, part)))
    why = "; ".join(each["why"] for each in states if "why" in each)
    if not why:
        committed = work_in_turns(
            comm, lambda: _commit(request, temporary, states) if me.rank == 0 else ""
        )
        why = _gather_states({"why": committed})[0]["why"]
    if why and me.local_rank == 0:
        drop(temporary)
    return why


def _write_part(temporary: StoragePath, part: RankPart) -> State:
    """Write the shards of this rank; return the facts of the files, or why that failed."""
    try:
        begin_writing(temporary)
        return {"files": {name: vars(facts) for name, facts in write_part(temporary, part).items()}}
    except Exception as error:  # an error of the disk or of the object store
        return {"why": f"rank {part.rank}: {object_store.reason(error)}"}


def _commit(
    request: SaveRequest, temporary: StoragePath, states: Sequence[Mapping[str, Any]]
) -> str:
    """Commit what all ranks have written as a checkpoint; return why that failed.

    Old checkpoints that could not be removed are a warning.
    """
    files = {name: FileFacts(**facts) for each in states for name, facts in each["files"].items()}
    contents = Contents(request.step, len(states), files, request.metrics, request.reported)
    try:
        unseen, trouble = commit(request.folder, temporary, contents, request)
    except Exception as error:
        return object_store.reason(error)
    if trouble:
        context.warn(trouble)
    where = f"rank 0 does not see {', '.join(unseen[:4])} in {request.folder}"
    return (
        f"{where}; set storage=FOLDER, one that all nodes see, or storage=s3://BUCKET/FOLDER"
        if unseen
        else ""
    )


def _gather_states(facts: Mapping[str, Any]) -> list[State]:
    """Gather small facts from all ranks, by rank, as JSON: nothing received is unpickled."""
    text = json.dumps(
        {
            name: value[:LONGEST] if isinstance(value, str) else value
            for name, value in facts.items()
        }
    )
    row = torch.zeros(8 * LONGEST, dtype=torch.uint8)
    row[: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    rows = _comm().gather(row)
    return [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in rows]


def load(
    state: State, *, of_ranks: str = "", optional: Sequence[str] = (), part: bool = False
) -> int:
    """Load the newest complete kept state into `state`, in place; return its step, 0 for none.

    All ranks must call it, with the keys that `keep` gets. After a restart the state comes from
    memory, kept by any number of ranks; otherwise from the checkpoint that the run continues from,
    saved by any number of ranks.

    - `state`: as for `keep`. Tensors are filled in place, all other values are replaced. Pass it to
      `set_state_dict` afterwards.
    - `of_ranks`: the key of a tensor with one row for each rank, as of random generators. Where
      another number of ranks has saved it, it is removed from `state`.
    - `optional`: the keys that lead to a dict, as the optimizer's state by parameter. Entries of it
      that were not kept are removed from `state`.
    - `part`: this rank has some of the keys only, as a stage of a pipeline: a checkpoint may have
      others.

    RaydistError: the kept state has other keys or shapes (another model, or a state without the
    optimizer's).
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    step = (
        ring.load(state, of_ranks, optional, part)
        if restarted and (ring := _ring()) is not None
        else 0
    )
    return step or load_from_disk(state, of_ranks, optional, part)


def load_from_disk(
    state: State, of_ranks: str = "", optional: Sequence[str] = (), part: bool = False
) -> int:
    """Load as `load` does, but only from the checkpoint that the run continues from.

    Return 0 if there is none or it is not sharded. Not a collective.
    """
    found = checkpoint.continued_from()
    if found is None or not found.sharded:
        return 0
    load_into(found.path, state, of_ranks, optional, part)
    checkpoint.recall(found)
    context.set_step(found.step)
    return found.step


def begin_fit() -> None:
    """Keep the states of the raydist.fit that begins, and discard those of the previous one.

    A collective.
    """
    if (ring := _ring()) is not None:
        ring.begin_fit(context.current().fit)


def copied() -> bool:
    """Wait until the copy of the last kept state is complete; report whether states are kept."""
    ring: Ring | None = context.current().sharded
    if ring is not None:
        ring.rest()
    return ring is not None and ring.keeps and not ring.passed


def leave() -> None:
    """End the copies of an attempt that is over: its connections to other ranks are broken.

    The next attempt keeps its states in a new ring.
    """
    current = context.current()
    ring: Ring | None = current.sharded
    current.sharded = None
    if ring is not None:
        current.final_waits.remove(ring.rest)
        ring.leave()


def copy_s() -> float:
    """Return how many seconds the last copy to the next node took."""
    ring: Ring | None = context.current().sharded
    return 0.0 if ring is None else ring.copy_s


def _ring() -> Ring | None:
    current = context.current()
    if current.memory is None or current.memory[0] < 0:
        return None
    if not dist.is_initialized():
        raise RaydistError(
            "sharded states need torch.distributed: set backend=gloo or backend=nccl"
        )
    if current.sharded is None:
        current.sharded = Ring(current.memory[0], current.rank)
        current.final_waits.append(current.sharded.rest)
    made: Ring = current.sharded
    return made


class Ring:
    """The nodes in a ring: each node holds copies of the shards of the previous node."""

    def __init__(self, descriptor: int, me: context.Rank) -> None:
        self._cuda = me.device if me.device.type == "cuda" else None
        self._memory: SnapshotBuffer | None = SnapshotBuffer(descriptor, device_of(me.device))
        self._rank = me.rank
        self._world = me.world_size
        self._planner = RankPlanner(me.rank)
        self._group: Any = new_group(backend="gloo")
        self._holders = holders([int(row[0]) for row in self._gather(me.node_rank)])
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.copy_s = 0.0
        """Seconds that the last copy to the next node took."""
        self.passed = False
        """Whether the memory of a rank has states of a later raydist.fit, so the current one has
        finished."""

    def begin_fit(self, number: int) -> None:
        """Begin a fit as the module's `begin_fit` does, unless a later one has begun.

        In that case the states of the later one stay, and this one keeps none.
        """
        self.rest()
        if self._memory is None:
            return
        self.passed = max(row[0] for row in self._gather(self._memory.fit)) > number > 0
        if not self.passed:
            self._memory.begin_fit(number)

    def keep(self, step: int, state: Mapping[str, Any], alongside: bool = False) -> None:
        """Keep a state as the module's `begin_keep` does."""
        self.rest()
        if self._memory is None or self.passed:
            return
        try:
            part = RankPart(self._rank, self._world, local(state), self._planner.plan(state))
            slot = self._memory.write(step, {"own": vars(part)}, agreed=True, alongside=alongside)
            why = ""
        except NoRoom as error:
            slot, why = -1, str(error)
        self._thread = threading.Thread(
            target=self._copy_in_background, args=(step, slot, why), name="raydist-sharded"
        )
        self._thread.start()

    def catch_up(self) -> None:
        """Have the device end its copies, as the module's `catch_up` does."""
        memory = self._memory  # the thread sets it to None once it has waited for the copies
        if memory is not None:
            memory.catch_up()

    @property
    def keeps(self) -> bool:
        """Whether snapshots are still kept: no rank has stopped for lack of memory."""
        return self._memory is not None

    def rest(self) -> None:
        """Wait until the background copy is complete, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise self._failed

    def leave(self) -> None:
        """Wait for the end of the copies, whose error belongs to the attempt that is over."""
        if self._thread is not None:
            self._thread.join()

    def _copy_in_background(self, step: int, slot: int, why: str) -> None:
        try:
            # A new thread starts on GPU 0, where a wait would create a context of 0.5 GB.
            if self._cuda is not None:
                torch.cuda.set_device(self._cuda)
            began = time.perf_counter()
            self._copy(step, slot, why)
            self.copy_s = time.perf_counter() - began
        except BaseException as error:
            self._failed = error

    def _copy(self, step: int, slot: int, why: str) -> None:
        """Send the shards to the next node; on return all ranks have this step and all copies.

        Therefore no rank overwrites the previous step while another rank may still need it.
        """
        assert self._memory is not None
        self._memory.settle()
        rows = self._gather(*((step, *self._memory.size(slot)) if slot >= 0 else (-1, 0, 0)))
        if any(row[0] < 0 for row in rows):
            self._give_up(why)
            return
        if self._holders is None:
            context.current().common = step
            return
        source = self._holders.index(self._rank)
        into = -1
        why = ""
        try:
            into = self._memory.open_replica(*rows[source][1:])
        except NoRoom as error:
            why = str(error)
        if any(row[0] < 0 for row in self._gather(into)):
            self._give_up(why)
            return
        sent = dist.isend(self._memory.raw(slot), self._holders[self._rank], group=self._group)
        dist.recv(self._memory.raw(into), source, group=self._group)
        sent.wait()  # type: ignore[union-attr]
        self._memory.complete(into, step)
        dist.barrier(group=self._group)
        context.current().common = step

    def _give_up(self, why: str) -> None:
        """Free the snapshots and keep no more, on all ranks: one has too little memory."""
        assert self._memory is not None
        self._memory.free()
        self._memory = None
        context.current().common = -1
        if why:
            context.warn(f"no more snapshots of the sharded state: {why}")

    def load(self, state: State, of_ranks: str, optional: Sequence[str], part: bool) -> int:
        """Load as the module's `load` does, but only from memory."""
        assert self._memory is not None
        self.begin_fit(context.current().fit)
        if self.passed:
            return 0
        rows = self._gather(
            *_as_row(self._shards(self._memory.steps)),
            *_as_row(self._shards(self._memory.replicas)),
        )
        own, copies = (
            [_from_row(row[part]) for row in rows] for part in (slice(0, ROW), slice(ROW, None))
        )
        step = self._common(own, copies)
        whole = newest_whole(dict(enumerate(own)), dict(enumerate(copies)))
        newest = max(step, whole.step if whole else -1)
        # No state is in memory, or a newer one is on the disk.
        if newest < max(0, checkpoint.resumed_step()):
            if any((*own, *copies)) and whole is None and self._rank == 0:
                text = (
                    "no step has the shards of all ranks in memory: the run continues from "
                    "the checkpoint before it"
                )
                context.warn(text)
            self._memory.forget_after(0)
            context.current().common = -1
            return 0
        if step == newest:
            self._take_back(step, own, state, optional)
            context.current().common = step
        elif whole is not None:
            reader = PartsReader(self._given(whole), self._group)
            load_by(reader, state, of_ranks, optional, "the state in memory", part)
        self._memory.forget_after(newest)
        context.set_step(newest)
        return newest

    def _common(self, own: Sequence[Set[Shard]], copies: Sequence[Set[Shard]]) -> int:
        """Return the newest step of which all shards of this world size are in memory."""
        after = self._holders or []
        mine = [self._steps_of(rank, shards) for rank, shards in enumerate(own)]
        others = (
            [self._steps_of(after.index(rank), shards) for rank, shards in enumerate(copies)]
            if after
            else []
        )
        return common(mine, others, self._holders)

    def _steps_of(self, rank: int, shards: Set[Shard]) -> list[int]:
        return [step for of, world_size, step in shards if (of, world_size) == (rank, self._world)]

    def _shards(self, slots: Mapping[int, int]) -> dict[Shard, int]:
        """Return the slots of the newest shards among `slots`."""
        assert self._memory is not None
        found = {}
        for step, slot in sorted(slots.items())[-OFFERS:]:
            own = self._memory.read(slot, clone="none")["own"]
            if "plan" in own:
                found[own["rank"], own["world_size"], step] = slot
        return found

    def _given(self, whole: WholeShards) -> dict[int, RankPart]:
        """Return the parts that this rank sends to all; their tensors share the memory."""
        assert self._memory is not None
        slots = self._shards(self._memory.replicas) | self._shards(self._memory.steps)
        named = {
            rank: slots[rank, whole.world_size, whole.step]
            for rank in whole.ranks.get(self._rank, ())
        }
        return {
            rank: RankPart(**self._memory.read(slot, clone="none")["own"])
            for rank, slot in named.items()
        }

    def _take_back(
        self, step: int, own: Sequence[Set[Shard]], state: State, optional: Sequence[str]
    ) -> None:
        """Restore each rank's own shards, from its memory or from the node that holds the copy."""
        assert self._memory is not None
        for rank, shards in enumerate(own):
            if (rank, self._world, step) not in shards and self._holders is not None:
                self._send_back(step, rank, self._holders[rank])
        kept = self._memory.read(self._memory.steps[step], clone="none")["own"]["state"]
        there: Any = kept
        for key in optional:
            there = there[key]
        leave_out(state, optional, lambda name, _: name in there)
        put_into(state, kept, "state")

    def _send_back(self, step: int, rank: int, holder: int) -> None:
        """Send a new rank its shards from the rank that holds the copy."""
        assert self._memory is not None
        if self._rank == holder:
            slot = self._memory.replicas[step]
            dist.send(torch.tensor(self._memory.size(slot)), rank, group=self._group)
            dist.send(self._memory.raw(slot), rank, group=self._group)
        elif self._rank == rank:
            size = torch.zeros(2, dtype=torch.int64)
            dist.recv(size, holder, group=self._group)
            slot = self._memory.open_own(*size.tolist())
            dist.recv(self._memory.raw(slot), holder, group=self._group)
            self._memory.complete(slot, step)

    def _gather(self, *numbers: int) -> list[list[int]]:
        """Gather the numbers of all ranks, by rank."""
        mine = torch.tensor(numbers)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine, group=self._group)
        return [each.tolist() for each in every]


def holders(nodes: Sequence[int]) -> list[int] | None:
    """Return for each rank the rank that holds its copy, of the same local rank on the next node.

    None: there is one node, or the nodes have unequal numbers of ranks.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    order = sorted(ranks)
    if len(order) < 2 or len({len(own) for own in ranks.values()}) > 1:
        return None
    after = {node: ranks[order[(place + 1) % len(order)]] for place, node in enumerate(order)}
    return [after[node][ranks[node].index(rank)] for rank, node in enumerate(nodes)]


def common(
    own: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], held_by: Sequence[int] | None
) -> int:
    """Return the newest step of which the shards of every rank exist; -1 for none.

    A rank's shards exist in its own memory or as the copy.
    """
    exist = [
        {*steps, *(copies[held_by[rank]] if held_by else ())} for rank, steps in enumerate(own)
    ]
    return max(set.intersection(*exist), default=-1)


def _as_row(shards: Iterable[Shard]) -> list[int]:
    """Return the shards as a list of the same length on every rank, for a collective."""
    return [*(number for shard in shards for number in shard), *[-1] * ROW][:ROW]


def _from_row(row: Sequence[int]) -> set[Shard]:
    triples = zip(row[::3], row[1::3], row[2::3], strict=True)
    return {(rank, world_size, step) for rank, world_size, step in triples if rank >= 0}


def local(value: Any) -> Any:
    """Return the value with this rank's local tensor in place of each DTensor."""
    return _part(value) if isinstance(value, torch.Tensor) else rebuilt(value, local)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def put_into(into: Any, kept: Any, where: str) -> Any:
    """Load `kept` into `into`, and return the result.

    Tensors are filled in place, other values are replaced. `where` names the value in errors.
    """
    if isinstance(into, torch.Tensor) and isinstance(kept, torch.Tensor):
        part = _part(into)
        if part.shape != kept.shape:
            raise RaydistError(
                f"{where} is {tuple(part.shape)} on this rank, and was kept as {tuple(kept.shape)}"
            )
        with torch.no_grad():
            part.copy_(kept)
        return into
    if isinstance(into, dict) and isinstance(kept, Mapping):
        if into.keys() != kept.keys():
            odd = ", ".join(map(str, sorted(map(str, into.keys() ^ kept.keys()))[:4]))
            raise RaydistError(f"{where} and the kept state differ in {odd}: {SAME}")
        for key, inner in kept.items():
            into[key] = put_into(into[key], inner, f"{where}[{key!r}]")
        return into
    if isinstance(into, list) and isinstance(kept, list) and len(into) == len(kept):
        into[:] = [
            put_into(*pair, f"{where}[{index}]")
            for index, pair in enumerate(zip(into, kept, strict=True))
        ]
        return into
    # The kept tensor shares the memory.
    return kept.clone() if isinstance(kept, torch.Tensor) else kept
