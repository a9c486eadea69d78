"""When a state is kept in memory, which one all ranks return to, and how one is written to the
disk. (rank side)"""

from __future__ import annotations

import math
import mmap
import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch

from raydist.settings.config import Job, as_saved
from raydist.state.device import Mark, device_of
from raydist.state.object_store import StoragePath
from raydist.state.snapshot import Cloned, NoRoom, SnapshotBuffer, cloned, unpack
from raydist.state.snapshot_layout import LAST_SLOT, State
from raydist.state.write import SaveRequest
from raydist.worker import checkpoint, context
from raydist.worker.backends import Comm

SHARE = 0.01
"""The share of a step's time that snapshots may take, unless `snapshot.every` is set."""
FIRST_LOOK = 4
"""Steps after which the cost of a snapshot is known first, and reckoned with; again after 8, 16,
…"""
FETCHING = 3
"""Snapshots that fetch and page-lock the memory of their slots: they cost more than those that
follow."""
COSTS, MEASURED = 8, 64
"""Most snapshots and most steps of which the time is kept."""
PIECE = 1 << 26
"""Bytes of a state that all ranks pass on at a time to nodes that lack it: a rank never holds all
of it besides."""
OFFERS = 2
"""How many of its newest states a rank offers: no rank is more than one step ahead of another."""


@dataclass(frozen=True)
class Restored:
    """A state from memory."""

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
        """The state of this rank's random generators, if each rank has its own."""
        return None if self.own is None else self.own["random"]


class Offer(NamedTuple):
    """One state that a rank has, as numbers for a collective."""

    step: int = -1
    whole: int = 0
    """1: the whole state, 0: only the rank's own part."""
    text: int = 0
    """Bytes of the description of its tensors."""
    tensors: int = 0
    """Bytes of its tensors."""


class Snapshotter:
    """The snapshots of one rank: of the whole state on the first rank of a node, of its own part on
    all others."""

    def __init__(self, job: Job, comm: Comm) -> None:
        current = context.current()
        self._me, self._comm, self._job = current.rank, comm, job
        # the same on all ranks: choosing a snapshot is a collective
        self.on = current.memory is not None and job.snapshot.every != 0
        _, lead = current.memory or (-1, -1)
        self._memory = checkpoint.own_memory() if self.on else None
        if self._memory is not None and self._memory.fit > current.fit:
            # a later raydist.fit of the job needs it: this one has finished, and is on the disk
            self._memory = None
        if self._memory is not None:
            self._memory.begin_fit(current.fit)
        self._lead = SnapshotBuffer(lead) if self._memory is not None and lead >= 0 else None
        self._every, self._fixed = job.snapshot.every or 1, job.snapshot.every is not None
        self._clone: Cloned = "host" if current.rank.device.type == "cuda" else "all"
        """What of a state that is read must be copied: a GPU has its own copy of the rest as soon
        as it is loaded."""
        self._device = device_of(current.rank.device)
        self._costs: deque[tuple[Mark, Mark]] = deque(maxlen=COSTS)
        """The beginning and the end of the last snapshots, and below of the last steps, in the
        queue of the device."""
        self._steps: deque[tuple[Mark, Mark]] = deque(maxlen=MEASURED)
        self._count, self._kept_count, self._look = 0, 0, FIRST_LOOK
        self._since = self._device.mark()

    def begin(self, step: int) -> None:
        """Describe the checkpoint of the last state, and drop the states of steps after this
        one."""
        if self._memory is not None and self._me.local_rank == 0:
            self._memory.fill_request(LAST_SLOT, self._request(0, {}, {}))
        if self._memory is not None:
            self._memory.forget_after(step)
        self.go_on()

    def _request(self, step: int, state: State, metrics: dict[str, float]) -> SaveRequest:
        described = {**state, "config": as_saved(self._job)}
        return checkpoint.save_request(step, described, metrics, self._job.checkpoint)

    def go_on(self) -> None:
        """The time since the last step belongs to no step."""
        if not self._fixed:
            self._since = self._device.mark()

    def step(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> None:
        """After a step: keep it, if it is due. `own`: what differs from rank to rank, `state`:
        everything else."""
        if not self.on:
            return
        if self._fixed:
            if step % self._every == 0:
                self._keep(step, own, state)
            return
        began = self._device.mark()
        self._steps.append((self._since, began))
        if step % self._every == 0:
            self._wait_for_copy()
            began = self._device.mark()
            self._keep(step, own, state)
            self._kept_count += 1
            if self._kept_count > FETCHING:
                self._costs.append((began, self._device.mark()))
        self._count += 1
        if self._count == self._look:
            self._reckon()
        self.go_on()

    def _wait_for_copy(self) -> None:
        """Wait until what goes on with the snapshot before is done: no part of the cost of one, if
        they are spaced."""

    def _copy_s(self) -> float:
        """Seconds for which that went on beside the steps."""
        return 0.0

    def _keep(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> int | None:
        """Keep a state now; return its slot, or None if there is too little memory."""
        if self._memory is None:
            return None
        # a restart does not repeat this step: its report must be sent first
        context.current().flush()
        try:
            slot = self._memory.write(
                step, {"own": own(), **(state() if self._me.local_rank == 0 else {})}
            )
            context.current().kept = max(self._memory.steps, default=0)
            return slot
        except NoRoom as why:
            if (
                self._memory.locked < 0
            ):  # otherwise two slots may be enough once the checkpoint is on the disk
                self._memory.drop()
                self._memory = None
                context.emit_event(
                    "warning",
                    text=f"no more snapshots: {why}; a restart continues from a checkpoint",
                )
            return None

    def hold(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> bool:
        """Keep the state of this step, due or not; whether it is in memory."""
        if self._memory is None:
            return False
        self._memory.settle()
        if step not in self._memory.steps:
            self._keep(step, own, state)
        if self._memory is not None:
            self._memory.settle()
        return self._memory is not None

    def to_disk(
        self,
        step: int,
        own: Callable[[], State],
        state: Callable[[], State],
        beside: State,
        metrics: dict[str, float],
    ) -> bool:
        """Have the snapshot of this step written as a checkpoint while the training continues;
        whether it can.

        `beside`: what the checkpoint has instead of the snapshot's values, or in addition.
        """
        self.rest()
        if self._memory is None:
            return False
        self._memory.settle()
        slot = self._memory.steps.get(step)
        if slot is None:
            slot = self._keep(step, own, state)
        if slot is None or self._memory is None:
            return False
        self._memory.settle()
        return checkpoint.hand_over(self._request(step, beside, metrics), slot)

    def rest(self, within_s: float = math.inf) -> bool:
        """Wait until the checkpoint that is being written is on the disk; whether it is."""
        return self._memory is None or self._memory.rest(within_s)

    def find(self) -> Restored | None:
        """The newest state that all ranks can return to. A collective; all ranks find the same."""
        if not self.on or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        mine = (
            []
            if self._memory is None
            else [Offer(*told) for told in self._memory.offers()[:OFFERS]]
        )
        padded = [*mine, *[Offer()] * (OFFERS - len(mine))]
        rows = self._comm.gather(
            torch.tensor([self._me.node_rank, *(number for offer in padded for number in offer)])
        )
        nodes = [int(row[0]) for row in rows]
        offers = [[Offer(*four) for four in row[1:].view(OFFERS, -1).tolist()] for row in rows]
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
            own = None  # the number of ranks is another one now
        return Restored(step, self._whole(step, source, nodes, offers), own)

    def _whole(
        self, step: int, source: int, nodes: Sequence[int], offers: Sequence[Sequence[Offer]]
    ) -> State:
        """The state of a step, from the memory of this node if every node has it, otherwise from
        the rank `source`."""
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
        """A slot for a state in the memory of this node, where all its ranks read it; -1 without
        room.

        It is complete for nobody else: its own part is that of another rank.
        """
        if self._memory is not None:
            with suppress(NoRoom):
                return self._memory.open_own(offer.tensors, offer.text)
        return -1

    def _pass_on(
        self, raw: mmap.mmap | None, into: bytearray | mmap.mmap | None, size: int
    ) -> None:
        """Send `size` bytes of the rank that has `raw` to those that have `into`, piece by piece;
        all ranks call it.

        As int64, because not every backend can sum bytes; the others add zeros.
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

    def _reckon(self) -> None:
        """Set the spacing of snapshots from their measured cost, the same on all ranks."""
        self._device.mark().wait()
        cost, took = median_s(self._costs), median_s(self._steps)
        mine = [cost / took if cost else 0.0, self._copy_s() / took if took else 0.0]
        rows = self._comm.gather(torch.tensor(mine, dtype=torch.float64))
        self._every = spacing([float(row[0]) for row in rows], [float(row[1]) for row in rows])
        self._look *= 2
        self._steps.clear()


def median_s(spans: Sequence[tuple[Mark, Mark]]) -> float:
    """The median of the seconds between these marks; 0.0 without any."""
    return statistics.median(end.seconds_since(begin) for begin, end in spans) if spans else 0.0


def spacing(shares: Sequence[float], copies: Sequence[float] = (0.0,)) -> int:
    """Steps between snapshots, from the cost of one on each rank as a share of a step; at least 1.

    `copies`: for how many steps each is copied beside them, at least so many: the next one would
    wait for it.
    """
    return max(1, math.ceil(max(shares) / SHARE), math.ceil(max(copies)))


def of_step(offers: Sequence[Offer], step: int) -> Offer:
    return next((offer for offer in offers if offer.step == step), Offer())


def choose_snapshot(offers: Sequence[Sequence[Offer]]) -> tuple[int, int] | None:
    """(step, a rank with the whole state) of the newest state that qualifies, from the offers of
    each rank.

    A step qualifies if some rank has the whole state, and every other rank has its own part of it
    or no state at all: a rank without any is new, and takes the state of the others.
    """
    held = [{offer.step: offer for offer in each if offer.step >= 0} for each in offers]
    for step in sorted({step for each in held for step in each}, reverse=True):
        whole = [rank for rank, each in enumerate(held) if step in each and each[step].whole]
        if whole and all(step in each for each in held if each):
            return step, whole[0]
    return None
