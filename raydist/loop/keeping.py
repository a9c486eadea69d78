"""When a state is kept in memory, which one all ranks go back to, and how one gets to the disk. (rank side)"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from raydist import checkpoint, context
from raydist.backends import Comm
from raydist.config import Job, as_saved
from raydist.node.wire import ABOUT, BESIDE
from raydist.snapshot import Memory, NoRoom, unpack
from raydist.storage import Place

State = dict[str, Any]

SHARE = 0.01
"""The share of the time of steps that snapshots may take, where nobody said how often they are made."""
FIRST_LOOK = 8
"""Steps after which the cost of a snapshot is known well enough; it is looked at again after 16, 32, …"""
OFFERS = 2
"""So many of its newest states does a rank offer: none is more than one step ahead of another."""


@dataclass(frozen=True)
class Kept:
    """A state that was found in memory."""

    step: int
    state: State
    own: State | None
    """This rank's own part; None on all ranks if one has lost its own."""
    path: Place = Path("a snapshot in memory")

    @property
    def mine(self) -> State:
        """This rank's own part, or that of the rank whose state this is."""
        return self.own or cast("State", self.state["own"])

    def random(self, rank: int, world_size: int) -> torch.Tensor | None:
        """The generators of this rank, if each rank has its own."""
        return None if self.own is None else self.own["random"]


class Offer(NamedTuple):
    """One state that a rank has, in numbers that travel."""

    step: int = -1
    whole: int = 0
    """1: all of it, 0: only the rank's own part."""
    text: int = 0
    """Bytes of the description of its tensors."""
    tensors: int = 0
    """Bytes of its tensors."""


class Keeper:
    """The snapshots of one rank: of the whole state on the first rank of a node, of its own part on all others."""

    def __init__(self, job: Job, comm: Comm) -> None:
        here = context.here()
        self._me, self._comm, self._job = here.rank, comm, job
        # whether it is on must be the same for all ranks: what they agree on takes all of them
        self.on = here.memory is not None and job.snapshot.every != 0
        own, lead = here.memory or (-1, -1)
        self._memory = Memory(own) if self.on and own >= 0 else None
        self._lead = Memory(lead) if self.on and lead >= 0 else None
        self._every, self._fixed = job.snapshot.every or 1, job.snapshot.every is not None
        self._costs: list[float] = []
        self._steps: list[float] = []
        self._count, self._look, self._since = 0, FIRST_LOOK, 0.0

    def begin(self, step: int) -> None:
        """Say what is the same for all states to come, of the steps after this one."""
        about = {
            "world_size": self._me.world_size, "run_dir": str(self._me.run_dir), "config": as_saved(self._job),
            "keep": self._job.checkpoint.keep, "best": self._job.checkpoint.best,
            "checkpoints": str(checkpoint.home().absolute()),
        }  # fmt: skip
        if self._memory is not None and self._me.local_rank == 0:
            self._memory.fill(ABOUT, 0, about)
        if self._memory is not None:
            self._memory.forget_after(step)
        self.go_on()

    def go_on(self) -> None:
        """What lies between the last step and this moment was no step."""
        self._since = time.perf_counter()

    def step(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> None:
        """A step is done: keep it, if it is its turn. `own`: what differs from rank to rank, `state`: all else."""
        if not self.on:
            return
        began = time.perf_counter()
        self._steps.append(began - self._since)
        if step % self._every == 0 or context.here().going:
            self._keep(step, own, state)
            self._costs.append(time.perf_counter() - began)
        self._count += 1
        if not self._fixed and self._count == self._look:
            self._reckon()
        self.go_on()

    def _keep(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> int | None:
        """Keep a state now; its slot, None if there is no room for it."""
        if self._memory is None:
            return None
        context.here().flush()  # a step that no restart repeats must have been told
        try:
            return self._memory.write(step, {"own": own(), **(state() if self._me.local_rank == 0 else {})})
        except NoRoom as why:
            if self._memory.locked < 0:  # else two slots may do, once the checkpoint is on the disk
                self._memory.drop()
                self._memory = None
                context.tell("warning", text=f"no more snapshots: {why}; a restart goes back to a checkpoint")
            return None

    def hold(self, step: int, own: Callable[[], State], state: Callable[[], State]) -> bool:
        """Have the state of this step in memory, whoever's turn it is; whether it is there."""
        if self._memory is None:
            return False
        self._memory.settle()
        if step not in self._memory.steps:
            self._keep(step, own, state)
        if self._memory is not None:
            self._memory.settle()
        return self._memory is not None

    def to_disk(
        self, step: int, own: Callable[[], State], state: Callable[[], State], beside: State, metrics: dict[str, float]
    ) -> bool:
        """Have the state of this step written as a checkpoint while the training goes on; False if that can't be.

        It is the snapshot that is written, with what `beside` has instead or in addition.
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
        self._memory.fill(BESIDE, 0, {"state": beside, "metrics": metrics})
        self._memory.lock(slot)
        context.tell("save", slot=slot)
        return True

    def rest(self) -> None:
        """Wait until the checkpoint that is being written is on the disk: there is one at a time."""
        if self._memory is not None:
            self._memory.rest()

    def find(self) -> Kept | None:
        """The newest state that all ranks can go back to. All ranks call it, and find the same."""
        if not self.on or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        mine = [] if self._memory is None else [Offer(*told) for told in self._memory.told()[:OFFERS]]
        padded = [*mine, *[Offer()] * (OFFERS - len(mine))]
        rows = self._comm.gather(torch.tensor([self._me.node_rank, *(number for offer in padded for number in offer)]))
        nodes = [int(row[0]) for row in rows]
        offers = [[Offer(*four) for four in row[1:].view(OFFERS, -1).tolist()] for row in rows]
        if (chosen := choose(offers)) is None:
            return None
        step, source = chosen
        own = None
        if all(step in (offer.step for offer in each) for each in offers) and self._memory is not None:
            own = self._memory.read(self._memory.steps[step])["own"]
        if own is not None and own["world_size"] != self._me.world_size:
            own = None  # the ranks are other ones now
        return Kept(step, self._whole(step, source, nodes, offers), own)

    def _whole(self, step: int, source: int, nodes: Sequence[int], offers: Sequence[Sequence[Offer]]) -> State:
        """The state of a step, from the memory of this node if every node has it, else from the rank `source`."""
        there = {node for node, each in zip(nodes, offers, strict=True) if of_step(each, step).whole}
        if there == set(nodes) and self._lead is not None:
            return self._lead.read(self._lead.steps[step])
        offer = of_step(offers[source], step)
        # as whole words: not every backend can add up bytes
        words = torch.zeros(-(-(offer.tensors + offer.text) // 8), dtype=torch.int64)
        if self._me.rank == source and self._memory is not None:
            raw = self._memory.bytes_of(self._memory.steps[step])[: offer.tensors + offer.text]
            words.view(torch.uint8)[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        # the others add zeros
        return unpack(self._comm.sum(words).view(torch.uint8).numpy(), offer.tensors, offer.text)

    def _reckon(self) -> None:
        """How often a snapshot is made from here on: as often on all ranks."""
        mine = statistics.median(self._costs) / statistics.median(self._steps) if self._costs else 0.0
        shares = self._comm.gather(torch.tensor([mine], dtype=torch.float64))
        self._every = spacing([float(share) for share in shares])
        self._look *= 2
        self._steps.clear()
        del self._costs[:-FIRST_LOOK]


def spacing(shares: Sequence[float]) -> int:
    """Steps between snapshots, by what one costs each rank as a share of a step: of every step, if that is cheap."""
    return max(1, math.ceil(max(shares) / SHARE))


def of_step(offers: Sequence[Offer], step: int) -> Offer:
    return next((offer for offer in offers if offer.step == step), Offer())


def choose(offers: Sequence[Sequence[Offer]]) -> tuple[int, int] | None:
    """(step, a rank that has all of it) of the newest state that will do, by the offers of each rank.

    It will do if somebody has all of it, and every rank has its own part of it or nothing at all: such a rank
    is new, and takes what the others have.
    """
    held = [{offer.step: offer for offer in each if offer.step >= 0} for each in offers]
    for step in sorted({step for each in held for step in each}, reverse=True):
        whole = [rank for rank, each in enumerate(held) if step in each and each[step].whole]
        if whole and all(step in each for each in held if each):
            return step, whole[0]
    return None
