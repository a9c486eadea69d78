"""Sharded states (FSDP) in memory: each rank keeps its own part, the next node a copy of it. (rank side)

    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))  # torch.distributed.checkpoint's
    begin = sharded.load(state)            # the step whose tensors are now in `state`; 0 if nothing was kept
    ...
    sharded.keep(step, state_of_now)       # after a step; the copy travels while the training goes on

All ranks call both, with the same keys. A rank that dies takes nothing away, nor does one node: its parts lie on the
next. The copies go from rank to rank over gloo, like gradients on a CPU: nothing new listens, nothing is unpickled.
When the run can't go on, the newest state of which every part is left becomes a checkpoint, which `load` finds when
`resume=` names it. A kept state serves the same number of ranks only; for another number there is torch's
`distributed.checkpoint`. Under torchrun, where nobody would come after the process, nothing is kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raydist import checkpoint, context
from raydist.errors import RaydistError
from raydist.snapshot import Memory, NoRoom, rebuilt
from raydist.writing import part_name

OFFERS = 2
"""So many of its newest states does a memory offer: there are two slots of each kind."""


def keep(step: int, state: Mapping[str, Any]) -> None:
    """Keep this rank's part of a state. Waits for the copy of the one before, if that is still on its way."""
    if (ring := _ring()) is not None:
        ring.keep(step, state)


def load(state: dict[str, Any]) -> int:
    """Put the newest state that all ranks have into this one, in place; its step, 0 if there is none.

    It is in memory, or in the checkpoint that the run goes on from. RaydistError if what was kept does not fit: another
    model, or a state without what the optimizer will have.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    step = ring.load(state) if again and (ring := _ring()) is not None else 0
    return step or _from_disk(state)


def _from_disk(state: dict[str, Any]) -> int:
    """As above, from the parts that a run left on the disk when it could not go on."""
    me, found = context.rank(), checkpoint.latest()
    if found is None or not found.parts:
        return 0
    if why := found.unlike(me.world_size):
        raise RaydistError(f"{found.path}: {why}")
    put_into(state, checkpoint.load(found.path, part_name(me.rank)), "state")
    context.stand_at(found.step)
    return found.step


def _ring() -> Ring | None:
    here = context.here()
    if here.memory is None or here.memory[0] < 0:
        return None
    if not dist.is_initialized():
        raise RaydistError("sharded states need torch.distributed: say backend=gloo or backend=nccl")
    if here.sharded is None:
        here.sharded = Ring(Memory(here.memory[0]), here.rank)
        here.leaving.append(here.sharded.rest)
    made: Ring = here.sharded
    return made


class Ring:
    """The nodes in a ring, each with copies of what the one before it has."""

    def __init__(self, memory: Memory, me: context.Rank) -> None:
        self._memory: Memory | None = memory
        self._rank, self._world = me.rank, me.world_size
        self._group: Any = dist.new_group(backend="gloo")
        self._holders = holders([int(row[0]) for row in self._gather(me.node_rank)])
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def keep(self, step: int, state: Mapping[str, Any]) -> None:
        """As the function above."""
        self.rest()
        if self._memory is None:
            return
        try:
            own = {"part": local(state), "of": [self._rank, self._world]}
            slot, why = self._memory.write(step, {"own": own}), ""
        except NoRoom as error:
            slot, why = -1, str(error)
        self._thread = threading.Thread(target=self._pass_on, args=(step, slot, why), name="raydist-sharded")
        self._thread.start()

    def rest(self) -> None:
        """Wait until the copy is there; what went wrong with it is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise self._failed

    def _pass_on(self, step: int, slot: int, why: str) -> None:
        try:
            self._copy(step, slot, why)
        except BaseException as error:
            self._failed = error

    def _copy(self, step: int, slot: int, why: str) -> None:
        """Have the next node hold a copy. When it ends on one rank, all ranks have this step, and all have their copy.

        So nobody overwrites the step before as long as somebody may need it.
        """
        assert self._memory is not None
        self._memory.settle()
        rows = self._gather(*((step, *self._memory.size(slot)) if slot >= 0 else (-1, 0, 0)))
        if any(row[0] < 0 for row in rows):
            self._give_up(why)
            return
        if self._holders is None:
            return
        guest, into, why = self._holders.index(self._rank), -1, ""
        try:
            into = self._memory.open_guest(*rows[guest][1:])
        except NoRoom as error:
            why = str(error)
        if any(row[0] < 0 for row in self._gather(into)):
            self._give_up(why)
            return
        sent = dist.isend(self._memory.raw(slot), self._holders[self._rank], group=self._group)
        dist.recv(self._memory.raw(into), guest, group=self._group)
        sent.wait()  # type: ignore[union-attr]
        self._memory.complete(into, step)
        dist.barrier(group=self._group)

    def _give_up(self, why: str) -> None:
        """All ranks at once: somebody has no room."""
        self._memory = None
        if why:
            context.tell("warning", text=f"no more snapshots of the sharded state: {why}")

    def load(self, state: dict[str, Any]) -> int:
        """As the function above."""
        assert self._memory is not None
        guest = self._holders.index(self._rank) if self._holders else -1
        own, guests = self._parts(self._memory.steps, self._rank), self._parts(self._memory.guests, guest)
        rows = self._gather(*own, *guests)
        step = common([row[:OFFERS] for row in rows], [row[OFFERS:] for row in rows], self._holders)
        if step < 0:
            self._memory.forget_after(0)
            return 0
        for rank, row in enumerate(rows):
            if step not in row[:OFFERS] and self._holders is not None:
                self._bring_back(step, rank, self._holders[rank])
        put_into(state, self._memory.read(self._memory.steps[step], clone=False)["own"]["part"], "state")
        self._memory.forget_after(step)
        context.stand_at(step)
        return step

    def _parts(self, slots: Mapping[int, int], rank: int) -> list[int]:
        """The newest steps among these slots in which lies the part of this rank of as many."""
        assert self._memory is not None
        found = {step: self._memory.read(slot, clone=False)["own"] for step, slot in slots.items()}
        return newest([step for step, own in found.items() if own.get("of") == [rank, self._world]])

    def _bring_back(self, step: int, rank: int, holder: int) -> None:
        """The part of a rank that is new, from the copy."""
        assert self._memory is not None
        if self._rank == holder:
            slot = self._memory.guests[step]
            dist.send(torch.tensor(self._memory.size(slot)), rank, group=self._group)
            dist.send(self._memory.raw(slot), rank, group=self._group)
        elif self._rank == rank:
            size = torch.zeros(2, dtype=torch.int64)
            dist.recv(size, holder, group=self._group)
            slot = self._memory.open_own(*size.tolist())
            dist.recv(self._memory.raw(slot), holder, group=self._group)
            self._memory.complete(slot, step)

    def _gather(self, *numbers: int) -> list[list[int]]:
        """What each rank says, by rank."""
        mine = torch.tensor(numbers)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine, group=self._group)
        return [each.tolist() for each in every]


def holders(nodes: Sequence[int]) -> list[int] | None:
    """By rank, who holds its copy: the rank in the same place on the next node. None for one node, or unequal ones."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    order = sorted(ranks)
    if len(order) < 2 or len({len(own) for own in ranks.values()}) > 1:
        return None
    after = {node: ranks[order[(place + 1) % len(order)]] for place, node in enumerate(order)}
    return [after[node][ranks[node].index(rank)] for rank, node in enumerate(nodes)]


def common(own: Sequence[Sequence[int]], guests: Sequence[Sequence[int]], held_by: Sequence[int] | None) -> int:
    """The newest step of which every rank has its part, or somebody has the copy; -1 if there is none."""
    there = [{*steps, *(guests[held_by[rank]] if held_by else ())} for rank, steps in enumerate(own)]
    return max(set.intersection(*there) - {-1}, default=-1)


def newest(steps: Sequence[int]) -> list[int]:
    """The newest steps, padded with -1."""
    return [*sorted(steps, reverse=True), *[-1] * OFFERS][:OFFERS]


def local(value: Any) -> Any:
    """The value with this rank's part in the place of each sharded tensor."""
    return _part(value) if isinstance(value, torch.Tensor) else rebuilt(value, local)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def put_into(into: Any, kept: Any, where: str) -> Any:
    """What takes the place of `into`: tensors are filled in place, dicts and lists go on, all else is replaced."""
    if isinstance(into, torch.Tensor) and isinstance(kept, torch.Tensor):
        part = _part(into)
        if part.shape != kept.shape:
            raise RaydistError(f"{where} is {tuple(part.shape)} on this rank, and was kept as {tuple(kept.shape)}")
        with torch.no_grad():
            part.copy_(kept)
        return into
    if isinstance(into, dict) and isinstance(kept, Mapping):
        if into.keys() != kept.keys():
            odd = ", ".join(map(str, sorted(map(str, into.keys() ^ kept.keys()))[:4]))
            raise RaydistError(
                f"{where} and what was kept differ in {odd}: give both keep and load what "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) gives"
            )
        for key, inner in kept.items():
            into[key] = put_into(into[key], inner, f"{where}[{key!r}]")
        return into
    if isinstance(into, list) and isinstance(kept, list) and len(into) == len(kept):
        into[:] = [put_into(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(into, kept, strict=True))]
        return into
    return kept.clone() if isinstance(kept, torch.Tensor) else kept  # its bytes are those of the memory
