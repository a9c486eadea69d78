"""Streams and loaders for raydist.fit: sources without an index, and their states. (rank side)

    kind    what                                   what a rank gets               after a resize
    stream  IterableDataset                        its part of each batch         continues
    split   Hugging Face's, if the shards divide   samples of its shards          new epoch
    loader  DataLoader, StatefulDataLoader, …      the batches of its own loader  new epoch
    ray     ray.data.Dataset                       its part of streaming_split    new epoch

A source is recognized by its methods (__iter__, state_dict, …), never by importing its library.
After a resume it continues from its own state, if it has one; otherwise it is read again up to its
position. That position seeds its random numbers. Ray Data has no reproducible order.

Ranks may reach the end at different steps. They agree on each step before it begins (24 bytes from
each rank), and all end an epoch when the first of them has no full step left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch

from raydist.settings.config import Job
from raydist.shared.errors import ConfigError
from raydist.state.snapshot_layout import State
from raydist.state.write import unloadable
from raydist.training import data
from raydist.training.deal import (
    Batch,
    Collate,
    Deal,
    Step,
    check_shuffles,
    inner_sampler,
    make_deal,
    source_kind,
)
from raydist.training.reshard import from_bytes, to_bytes
from raydist.worker import context
from raydist.worker.backends import Comm
from raydist.worker.groups import collective

T = TypeVar("T")


class Stream(data.Order):
    """The order of a source without an index, for one rank, and its batches."""

    def __init__(
        self,
        deal: Deal,
        comm: Comm,
        name: str,
        order: data.Order,
        note_wait: Callable[[float], None],
    ) -> None:
        super().__init__(**{each: getattr(order, each) for each in order.__dataclass_fields__})
        self.deal = deal
        self.name = name
        self._comm = comm
        self.all_of = collective(comm)
        self.note_wait = note_wait
        self._steps: Iterator[Step] | None = None
        self._next: Step | None = None
        self._over = self._warned = False
        self._state: State | None = None

    @property
    def kind(self) -> str:
        return "stream" if self.deal.kind == "split" else self.deal.kind

    @property
    def common(self) -> bool:
        """Whether all ranks read the same stream."""
        return self.deal.kind == "stream"

    @property
    def more(self) -> bool:
        """Whether every rank has the batches of another step of this epoch.

        A collective, once per step.
        """
        if self._next is None and not self._over:
            context.phase("data")
            began = time.perf_counter()
            if self._steps is None:
                self._steps = self._open()
            self._next = next(self._steps, None)
            self.note_wait(time.perf_counter() - began)
            self._agree()
        return self._next is not None and not self._over

    def _open(self) -> Iterator[Step]:
        self.deal.epoch = self.epoch
        self.deal.state = self._state
        self.deal.begin = self.position * self.deal.count // self.global_batch
        return self.deal.steps()

    def _agree(self) -> None:
        mine = self._next
        if context.rank().world_size > 1:
            part = 0 if self.common else self.rank
            rows = self.all_of(
                torch.tensor([mine is not None, mine.mark if mine else 0, part], dtype=torch.int64)
            )
            parts = {(int(row[2]), int(row[1])) for row in rows if row[0]}
            if len(parts) > len({part for part, _ in parts}):
                raise ConfigError(self._differs)
            if mine is not None and not all(row[0] for row in rows):
                self._next = None
                self._tell_left()
        self._over = self._next is None

    @property
    def _differs(self) -> str:
        if self.common:
            cause = (
                "gives different samples on different ranks, so it cannot be divided: seed its "
                "generator with the same number on"
            )
            return (
                f"train={self.name} {cause} all ranks; if it divides itself, give fit a torch "
                "DataLoader of it"
            )
        cause = (
            "gives different batches on ranks that compute a sample together: its sampler must have"
        )
        return (
            f"train={self.name} {cause} {self.world_size} parts, and give this rank that of "
            f"number {self.rank}"
        )

    @property
    def advice(self) -> str:
        """What it has too few of, if it does not fill a step, and what to change."""
        if self.deal.kind == "loader":
            fewer = ", or set train.accumulate=1" if self.deal.count > 1 else ""
            return (
                f"batches: a step takes {self.deal.count} on each rank; give the loader a smaller "
                f"batch_size or drop_last=False{fewer}"
            )
        what = "batches" if self.deal.loading is None else "samples"
        return f"{what}: a step takes {self.deal.count}; set data.batch_size=1, or give more"

    def _tell_left(self) -> None:
        if not self._warned:
            self._warned = True
            text = (
                f"train={self.name} has more batches here than on other ranks: each epoch "
                "ends with the shortest"
            )
            context.warn(text)

    def __iter__(self) -> Iterator[Batch]:
        while self.more and self._next is not None:
            step, self._next = self._next, None
            self._state = step.state
            if self.hashes is not None:
                self.hashes.append(step.hash)
            yield from step.batches

    def ahead(self) -> Iterator[Batch]:
        """Return copies of the micro-batches of the next step, which are not consumed."""
        if self.more and self._next is not None:
            return iter(_copied(self._next.batches))
        here = self.epoch, self.position, self._state
        self.next_epoch()
        batches = self._next.batches if self.more and self._next is not None else []
        # It stays open for next_epoch: a source with a state has moved on by this step, and would
        # begin behind it if it were opened anew.
        self.epoch, self.position, self._state = here
        self._over = True
        return iter(_copied(batches))

    def next_epoch(self) -> None:
        if not self.position:
            raise ConfigError(
                f"train={self.name} ended before the first step of epoch {self.epoch + 1}, and "
                f"each epoch calls iter() again: it has too few {self.advice}"
            )
        super().next_epoch()
        opened = (self._steps, self._next) if self._over and self._next is not None else None
        self._close()
        if opened:  # by ahead()
            self._steps, self._next = opened

    def _close(self) -> None:
        self._steps = self._next = self._state = None
        self._over = False

    def place(self) -> State:
        """Return the part of the position that is equal on all ranks."""
        own = {"source": self._plain()} if self.common else {"ranks": self.world_size}
        return {**super().place(), **own}

    def own(self) -> State:
        """Return the state of this rank's own source."""
        return {} if self.common else {"source": self._plain()}

    def owns(self) -> State:
        """Return the states of all parts, for a checkpoint. A collective."""
        if self.common:
            return {}
        by_part = dict(gather_states((self.rank, self._plain()), self._comm))
        return {"sources": [by_part[part] for part in sorted(by_part)]}

    def _plain(self) -> State | None:
        """Return the state if it can be loaded without running code, otherwise None.

        In that case a warning is sent, and the source is read again up to its position.
        """
        why = next(unloadable(self._state, f"the state of train={self.name}"), None)
        if why is not None and self.deal.stateful:
            self.deal.stateful = False
            context.warn(f"{why}; a resumed run reads the epoch again up to its position")
        return None if why else self._state

    def go_on(self, place: State, own: State | None) -> None:
        """Continue at the position of a saved state. `own`: this rank's part of it, if any."""
        super().go_on(place, own)
        self._close()
        saved_by, now = place.get("ranks", 0), 0 if self.common else self.world_size
        if self.position and (saved_by != now or self.deal.kind == "ray"):
            self.position = 0
            own = None
            if self.rank == 0:
                why = (
                    "Ray Data"
                    if saved_by == now
                    else f"the parts of {saved_by or 'all'} ranks do not fit these"
                )
                text = (
                    f"train={self.name}: {why}: epoch {self.epoch + 1} starts again "
                    "from its first sample"
                )
                context.warn(text)
        self._state = place.get("source") if self.common else own
        if not self.position or not self.deal.stateful:
            self._state = None


def _copied(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return copies of batches that a step is rehearsed with: it may change what it gets."""
    try:
        return deepcopy(batches)
    except Exception:  # an object of the source's that can't be copied
        return batches


def ordered(
    train: Any,
    job: Job,
    rank: int,
    world_size: int,
    collate: Collate,
    note_wait: Callable[[float], None],
) -> tuple[data.Order, Any]:
    """Return the order of the training samples, and the batches in that order.

    `note_wait`: gets the seconds of each wait for the next step of a stream or a loader.
    ConfigError: the samples do not fit the settings.
    """
    if not data.indexed(train):
        found = stream(train, job, rank, world_size, collate, note_wait)
        return found, found
    order = data.order(train, job, rank, world_size)
    return order, data.loader(train, order, job.data, collate)


def saved_part(state: State, rank: int, world_size: int) -> State | None:
    """Return the state of this rank's source in a checkpoint: one of those that `owns` gives.

    None: there is none, or it belongs to another number of ranks.
    """
    states = state.get("sources", [])
    return states[rank] if len(states) == world_size else None


def stream(
    train: Any,
    job: Job,
    rank: int,
    world_size: int,
    collate: Collate,
    note_wait: Callable[[float], None],
) -> Stream:
    """Return the order and the batches of a source without an index.

    `rank`, `world_size`: among the ranks that get different samples. ConfigError: it is not such a
    source, or a setting does not fit.
    """
    comm, name = context.current().comm, type(train).__name__
    kind = source_kind(train, world_size)
    if kind == "ray" and world_size < context.rank().world_size:
        cause = (
            f"train={name} gives no batch to two ranks, which those that compute a sample "
            "together need"
        )
        raise ConfigError.of("parallel", job.parallel.name, cause, "parallel=fsdp")
    batch = loader_batch(train) if kind == "loader" else None
    accumulate = job.train.accumulate
    settings, even = job.data, kind != "stream" or job.scale.max_nodes is None
    if kind != "stream" and job.scale.max_nodes is not None:
        # The driver has set global_batch, for the first number of ranks (recovery/attempts.py).
        # Ranks with sources of their own have equal parts, and a loader decides their size.
        each = accumulate * world_size
        size = max(1, (settings.global_batch or settings.batch_size * each) // each)
        settings = replace(settings, batch_size=size, global_batch=None)
    total = data.global_batch(settings, accumulate, world_size, even)
    if (
        batch is not None
        and (total := batch * accumulate * world_size)
        and settings.global_batch not in (None, total)
    ):
        cause = f"the loader makes batches of {batch} on each of {world_size} ranks"
        raise ConfigError.of(
            "data.global_batch", settings.global_batch, cause, f"data.global_batch={total}"
        )
    order = data.Order(0, total, accumulate, rank, world_size, job.seed, settings.shuffle)
    order.hashes = deque() if job.train.check_resume else None
    deal = make_deal(kind, train, job, order, comm, collate)
    deal.hashed = job.train.check_resume
    found = Stream(deal, comm, name, order, note_wait)
    if kind == "split":
        check_shuffles(train, found.all_of)
    steps = length(train, kind, found, deal.count)
    found.size = max(0, steps) * total
    if not found.size and job.train.steps is None:
        if steps == 0:
            raise ConfigError(f"train={name} has too few {found.advice}")
        cause = (
            f"train={name} has no length, so train.epochs={job.train.epochs} sets no "
            "number of steps"
        )
        raise ConfigError.of("train.steps", None, cause, "train.steps=1000")
    if rank == 0 and job.scale.max_nodes is not None and job.data.global_batch not in (None, total):
        context.warn(
            f"train={name}: a step has {total} samples on {world_size} ranks, and others on "
            "another number of ranks: their parts are equal"
        )
    if rank == 0 and (lacks := shortcomings(deal, train, world_size)):
        context.warn(f"train={name}: {'; '.join(lacks)}")
    return found


def loader_batch(loader: Any) -> int | None:
    """Return the samples of a loader's batch, where it or its batch_sampler says so."""
    for each in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(each, "batch_size", None), int):
            return size
    return None


def shortcomings(deal: Deal, train: Any, world_size: int) -> list[str]:
    """List what this source does not promise, or what it costs, in a few words each."""
    found = []
    if deal.kind == "ray":
        return ["the order of Ray Data cannot be reproduced: a resumed run starts the epoch again"]
    if world_size > 1:
        if deal.kind == "stream":
            found.append(
                f"each of {world_size} ranks reads all of it, and takes its part of each batch"
            )
        else:
            found.append("with another number of ranks the epoch starts again")
        sampler = inner_sampler(train) or getattr(train, "sampler", None)
        if type(sampler).__name__ in ("RandomSampler", "SequentialSampler"):
            found.append(
                "each rank goes through all of its data set (a DistributedSampler gives it its "
                "part)"
            )
    if not deal.stateful:
        found.append("a resumed run reads the epoch again up to its position")
    if deal.loading is not None and deal.loading.workers > 1:
        found.append("data.workers: one worker of each rank reads it")
    return found


def length(train: Any, kind: str, found: Stream, count: int) -> int:
    """Return the steps of an epoch on the rank with the fewest; -1: unknown. A collective."""
    try:
        items = len(train) if kind in ("stream", "loader") else -1
    except (TypeError, NotImplementedError):
        items = -1
    steps = found.all_of(torch.tensor([items // count]))
    return min(int(each) for each in steps)


def gather_states(state: T, comm: Comm) -> list[T]:
    """Gather the state of each rank, on every rank. A collective."""
    mine = torch.frombuffer(bytearray(to_bytes(state)), dtype=torch.uint8)
    sizes = [int(size) for size in comm.gather(torch.tensor([len(mine)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts = [
        part[:size].numpy().tobytes() for part, size in zip(comm.gather(padded), sizes, strict=True)
    ]
    return [from_bytes(part) for part in parts]
