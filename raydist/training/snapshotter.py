"""Snapshots: keeping one, which one all ranks restore, writing one to disk. (rank side)"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch

from raydist.settings.config import Job, as_saved
from raydist.state.device import device_of
from raydist.state.object_store import StoragePath
from raydist.state.snapshot import Cloned, NoRoom, SnapshotBuffer, cloned, unpack
from raydist.state.snapshot_layout import LAST_SLOT, State
from raydist.state.write import SaveRequest
from raydist.training import optim
from raydist.training.snapshot_interval import SnapshotInterval, least_steps
from raydist.training.step import Stepper
from raydist.worker import checkpoint, context
from raydist.worker.backends import Comm

PIECE = 1 << 26
"""Bytes of a state that all ranks pass at a time to nodes that lack it, so that no rank holds a
second copy of the whole state."""
OFFERS = 2
"""Limit on the newest states that a rank offers: no rank is more than one step ahead of another."""


@dataclass(frozen=True)
class Restored:
    """A state restored from memory."""

    step: int
    state: State
    own: State | None
    """This rank's own part; None on all ranks if one of them has lost its own."""
    path: StoragePath = Path("a snapshot in memory")

    @property
    def mine(self) -> State:
        """This rank's own part, or that of the rank that sent the state."""
        return self.own or cast("State", self.state["own"])

    def random(self, rank: int, world_size: int) -> torch.Tensor | None:
        """Return the state of this rank's random generators; None unless each rank has its part."""
        return None if self.own is None else self.own["random"]

    def source(self, rank: int, world_size: int) -> State | None:
        """Return the state of this rank's source; None unless each rank has its part."""
        return None if self.own is None else self.own.get("source")

    def restore(self, stepper: Stepper, rehearse: Callable[[], None]) -> torch.Tensor:
        """Load the state after a rehearsal; return its loss."""
        rehearse()
        stepper.load(self.state, self.path)
        if stepper.model.device.type != "cpu":
            # ASGD's `step` was on the GPU, so it is no copy, but the optimizer leaves it on the
            # host: all ranks of the node would count it up together.
            optim.copy_host_state(stepper.model.optimizer)
        load_buffers(stepper.model.module, self.mine["buffers"])
        loss: torch.Tensor = self.mine["loss"]
        return loss.clone()  # a later step soon overwrites this memory


def load_buffers(module: torch.nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """Load a rank's own buffers, also those that `state_dict` leaves out.

    Such a buffer may have grown with the inputs, as a table of positions; or it may not have been
    there yet.
    """
    for name, buffer in [*module.named_buffers()]:
        if name not in kept:
            continue
        if buffer.shape == kept[name].shape:
            buffer.copy_(kept[name])
        else:
            owner, _, own_name = name.rpartition(".")
            grown = kept[name].to(buffer.device, copy=True)
            setattr(module.get_submodule(owner), own_name, grown)


class Offer(NamedTuple):
    """One state that a rank has, as numbers for a collective."""

    step: int = -1
    whole: int = 0
    """1: the whole state, 0: only the rank's own part."""
    text: int = 0
    """Bytes of the description of the tensors."""
    tensors: int = 0
    """Bytes of the tensors."""


class Snapshotter:
    """The snapshots of one rank.

    The first rank of a node keeps the whole state, all other ranks only their own part.
    """

    def __init__(self, job: Job, comm: Comm) -> None:
        current = context.current()
        self._me = current.rank
        self._comm = comm
        self._job = job
        # the same value on all ranks, because choosing a snapshot is a collective
        self.on = current.memory is not None and job.snapshot.every != 0
        _, lead = current.memory or (-1, -1)
        self._memory = checkpoint.own_memory() if self.on else None
        self._finished = self._memory is not None and self._memory.fit > current.fit
        """Whether this rank was in a later raydist.fit of the job, which needs its memory: this one
        has finished, and is on the disk."""
        if self._finished:
            self._memory = None
        if self._memory is not None:
            self._memory.begin_fit(current.fit)
        self._lead = SnapshotBuffer(lead) if self._memory is not None and lead >= 0 else None
        self._changed_step = -1
        """A step whose state was kept before it was changed."""
        self._clone: Cloned = "host" if current.rank.device.type == "cuda" else "all"
        """What must be copied of a state that is read: a GPU has its own copy of the rest as soon
        as the state is loaded."""
        device = device_of(current.rank.device)
        least = least_steps(job)
        self.interval = SnapshotInterval(job.snapshot.every, comm, device, least=least)

    def begin(self, step: int) -> None:
        """Describe the checkpoint of the last state, and drop the states of later steps."""
        if self._memory is not None and self._me.local_rank == 0:
            self._memory.fill_request(LAST_SLOT, self._request(0, {}, {}))
        if self._memory is not None:
            self._memory.forget_after(step)
        self.go_on()

    def _request(self, step: int, state: State, metrics: dict[str, float]) -> SaveRequest:
        described = {**state, "config": as_saved(self._job)}
        return checkpoint.save_request(step, described, metrics, self._job.checkpoint)

    def go_on(self) -> None:
        """Exclude the time since the last step from the measured steps."""
        self.interval.go_on()

    def step(
        self,
        step: int,
        own: Callable[[], State],
        state: Callable[[], State],
        can_wait: bool = False,
    ) -> None:
        """Keep the state after a step if it is due.

        `own`: what differs from rank to rank, `state`: everything else. `can_wait`: as for
        SnapshotInterval.step.
        """
        if self.on:
            self.interval.step(
                step, lambda alongside: self._keep(step, own, state, alongside), can_wait
            )

    def catch_up(self) -> None:
        """Have the device end its copies of the last state before the state is changed."""
        if self._memory is not None:
            self.interval.catch_up(self._memory.catch_up)

    def note_change(self, step: int) -> None:
        """Note that the state of this step, which may have been kept, is now changed."""
        self.catch_up()
        if self._memory is not None:
            self._memory.settle()
            if step in self._memory.steps:
                self._changed_step = step

    def _keep(
        self,
        step: int,
        own: Callable[[], State],
        state: Callable[[], State],
        alongside: bool = False,
    ) -> int | None:
        """Keep a state now; return its slot, or None if there is too little memory."""
        if self._memory is None:
            return None
        # a restart does not repeat this step, so its report must be sent first
        context.current().flush()
        try:
            kept = {"own": own(), **(state() if self._me.local_rank == 0 else {})}
            slot = self._memory.write(step, kept, alongside=alongside)
            context.current().kept = max(self._memory.steps, default=0)
            return slot
        except NoRoom as why:
            # If a slot is locked, two slots may be enough once the checkpoint is on the disk.
            if self._memory.locked_slot < 0:
                self._memory.drop()
                self._memory = None
                context.warn(f"no more snapshots: {why}; a restart continues from a checkpoint")
            return None

    def hold(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> bool:
        """Keep the state of this step whether or not it is due; report whether it is in memory."""
        if self._memory is None:
            return False
        self._memory.settle()
        if step not in self._memory.steps:
            self._keep(step, own, state)
        if self._memory is not None:
            self._memory.settle()
        return self._memory is not None and step in self._memory.steps

    def to_disk(self, step: int, extra: State, metrics: dict[str, float]) -> bool:
        """Have this step's snapshot written to the disk in the background; report whether it is.

        It is not if `hold` could not keep the state, or if the state was changed since. `extra`:
        what the checkpoint has instead of the snapshot's values, or in addition.
        """
        slot = None if self._memory is None else self._memory.steps.get(step)
        if slot is None or step == self._changed_step:
            return False
        return checkpoint.hand_over(self._request(step, extra, metrics), slot)

    def rest(self, within_s: float = math.inf) -> bool:
        """Wait until the checkpoint that is being written is on the disk; report whether it is."""
        return self._memory is None or self._memory.rest(within_s)

    def can_go_on(self, within_s: float) -> bool:
        """Report whether the next states can be kept beside the one that is being written.

        If there is too little memory, wait until it is on the disk. Otherwise this rank would keep
        none meanwhile, and soon have no step that the other ranks have.
        """
        return self._memory is None or self._memory.room_while_saving() or self.rest(within_s)

    def find(self) -> Restored | None:
        """Return the newest state that all ranks can restore, the same on all. A collective."""
        if not self.on or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        mine = (
            []
            if self._memory is None
            else [Offer(*each) for each in self._memory.offers()[:OFFERS]]
        )
        padded = [*mine, *[Offer()] * (OFFERS - len(mine))]
        numbers = (number for offer in padded for number in offer)
        rows = self._comm.gather(torch.tensor([self._me.node_rank, self._finished, *numbers]))
        if any(int(row[1]) for row in rows):
            return None  # also if the other ranks failed before they entered the later one
        nodes = [int(row[0]) for row in rows]
        offers = [[Offer(*four) for four in row[2:].view(OFFERS, -1).tolist()] for row in rows]
        if (chosen := choose_snapshot(offers)) is None:
            return None
        step, source = chosen
        own = None
        if (
            all(step in (offer.step for offer in each) for each in offers)
            and self._memory is not None
        ):
            own = cloned(self._memory.read(self._memory.steps[step], clone="none")["own"])
        if own is not None and own["world_size"] != self._me.world_size:
            own = None  # the number of ranks has changed
        context.current().common = -1 if own is None else step
        return Restored(step, self._whole(step, source, nodes, offers), own)

    def _whole(
        self, step: int, source: int, nodes: Sequence[int], offers: Sequence[Sequence[Offer]]
    ) -> State:
        """Return the state of a step, from this node's memory or from the rank `source`.

        It comes from memory only if every node has it.
        """
        there = {
            node for node, each in zip(nodes, offers, strict=True) if of_step(each, step).whole
        }
        if there == set(nodes) and self._lead is not None:
            return self._lead.read(self._lead.steps[step], self._clone)
        offer, new = of_step(offers[source], step), self._me.node_rank not in there
        slot = self._room(offer) if new and self._me.local_rank == 0 else -1
        slots = [int(each) for each in self._comm.gather(torch.tensor([slot]))]
        slot = slots[nodes.index(self._me.node_rank)]  # of the first rank of this node
        into: bytearray | mmap.mmap | None = (
            bytearray(offer.tensors + offer.text) if new and slot < 0 else None
        )
        if new and slot >= 0 and self._me.local_rank == 0 and self._memory is not None:
            into = self._memory.bytes_of(slot)
        giver = self._memory if self._me.rank == source else None
        raw = None if giver is None else giver.bytes_of(giver.steps[step])
        self._pass_on(raw, into, offer.tensors + offer.text)
        if into is not None and slot < 0:
            return unpack(into, offer.tensors, offer.text, self._clone)
        assert self._lead is not None, "its node has a memory"
        return self._lead.read(slot if new else self._lead.steps[step], self._clone)

    def _room(self, offer: Offer) -> int:
        """Return a slot for a state in this node's memory, for all its ranks; -1 without room.

        It is complete for no other use: its own part is that of another rank.
        """
        if self._memory is not None:
            with suppress(NoRoom):
                return self._memory.open_own(offer.tensors, offer.text)
        return -1

    def _pass_on(
        self, raw: mmap.mmap | None, into: bytearray | mmap.mmap | None, size: int
    ) -> None:
        """Send `size` bytes, in pieces, from the rank that has `raw` to the ranks that have `into`.

        All ranks must call it. The bytes travel as int64, because not every backend can sum bytes;
        the other ranks add zeros.
        """
        for begin in range(0, size, PIECE):
            length = min(PIECE, size - begin)
            words = torch.zeros(-(-length // 8), dtype=torch.int64)
            if raw is not None:
                words.view(torch.uint8)[:length] = torch.frombuffer(
                    raw, dtype=torch.uint8, count=length, offset=begin
                )
            words = self._comm.sum(words)
            if into is not None:
                piece = torch.frombuffer(into, dtype=torch.uint8, count=length, offset=begin)
                piece.copy_(words.view(torch.uint8)[:length])
        self._comm.gather(torch.zeros(1))  # the first rank of each node has all of it


def of_step(offers: Sequence[Offer], step: int) -> Offer:
    return next((offer for offer in offers if offer.step == step), Offer())


def choose_snapshot(offers: Sequence[Sequence[Offer]]) -> tuple[int, int] | None:
    """Return (step, a rank with the whole state) of the newest state that qualifies.

    A step qualifies if some rank has the whole state, and every other rank has its own part of it
    or no state at all. A rank without a state is new, and takes that of the others.
    """
    held = [{offer.step: offer for offer in each if offer.step >= 0} for each in offers]
    for step in sorted({step for each in held for step in each}, reverse=True):
        whole = [rank for rank, each in enumerate(held) if step in each and each[step].whole]
        if whole and all(step in each for each in held if each):
            return step, whole[0]
    return None
