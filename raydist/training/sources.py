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

import pickle
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from xxhash import xxh3_64

from raydist.settings.config import Data, Job
from raydist.shared.errors import ConfigError
from raydist.state.snapshot_layout import State
from raydist.state.write import unloadable
from raydist.training import data
from raydist.training.ray_data import split_over_ray
from raydist.training.reshard import from_bytes, to_bytes
from raydist.worker import context, random_state
from raydist.worker.backends import Comm
from raydist.worker.groups import collective

Batch = Any
T = TypeVar("T")
Collate = Callable[[list[Any]], Batch]


class Step(NamedTuple):
    """What a rank needs for one optimizer step."""

    batches: list[Batch]
    """The micro-batches of the step."""
    state: State | None
    """The state of the source after the step; None: the source is read again up to its position."""
    mark: int
    """A checksum of the first sample read, equal on all ranks of one stream; 0: not checked."""
    hash: str = ""
    """A checksum of all that was read for the step; empty: not wanted, or it has no bytes."""


@dataclass
class Deal(IterableDataset[Step]):
    """The steps of one rank in one epoch, in this process or in a worker of a DataLoader."""

    kind: str
    items: Any
    """Samples of a stream, or batches of a loader."""
    count: int
    """Items per step."""
    make: Callable[[list[Any]], list[Batch]]
    """Makes this rank's micro-batches from the items of a step."""
    seed: tuple[int, ...]
    stateful: bool
    loading: Data | None = None
    """How samples are loaded; None: the items are batches of a loader, which loads them itself."""
    epoch: int = 0
    begin: int = 0
    """Items of the epoch that were used before."""
    state: State | None = None
    hashed: bool = False
    """Whether the items of each step get a checksum."""
    rest: bool = False
    """Whether the last items make a step as well, if they are fewer than `count`."""

    def __iter__(self) -> Iterator[Step]:
        for each in epoch_setters(self.items):
            each.set_epoch(self.epoch)
        if self.state is not None:
            self.items.load_state_dict(self.state)
        passed_over = self.begin if self.state is None else 0
        at, mark = self.begin - passed_over, 0
        with self._seeded(-1):
            items = iter(self.items)
        while True:
            count = min(self.count, passed_over) or self.count
            with self._seeded(at):
                taken = list(islice(items, count))
                if not taken or (len(taken) < count and not self.rest):
                    return
                mark = mark or checksum(taken[0])
                batches = [] if passed_over else self.make(taken)
            at += count
            if passed_over:
                passed_over -= count
                continue
            state = self.items.state_dict() if self.stateful else None
            yield Step(batches, state, mark, hash_of(taken) if self.hashed else "")

    def _seeded(self, at: int) -> Any:
        return random_state.seeded(random_state.derive(*self.seed, self.epoch, at + 1))

    def steps(self) -> Iterator[Step]:
        """Return the steps of this epoch.

        With `data.workers`, a worker process makes those of a stream of samples.
        """
        if self.loading is None:
            return iter(self)
        made: DataLoader[Step] = DataLoader(
            self,
            batch_size=None,
            collate_fn=data.keep_batch,
            num_workers=min(1, self.loading.workers),
            pin_memory=self.loading.pin_memory and torch.cuda.is_available(),
            generator=torch.Generator(),
            multiprocessing_context=data.worker_start(self.loading.workers),
        )
        return iter(made)


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
        return self._next is not None

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
        """Return the micro-batches of the next step without consuming them."""
        if self.more and self._next is not None:
            return iter(self._next.batches)
        here = self.epoch, self.position, self._state
        self.next_epoch()
        batches = self._next.batches if self.more and self._next is not None else []
        self._close()
        self.epoch, self.position, self._state = here
        self._over = True
        return iter(batches)

    def next_epoch(self) -> None:
        if not self.position:
            what = "batches" if self.deal.loading is None else "samples"
            raise ConfigError(
                f"train={self.name} ended before the first step of epoch {self.epoch + 1}: a "
                "step takes "
                f"{self.deal.count} {what}, and each epoch calls iter() again; set "
                "data.batch_size=1, or give more"
            )
        super().next_epoch()
        self._close()

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


def ordered(
    train: Any,
    job: Job,
    rank: int,
    world_size: int,
    collate: Collate | None,
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
    collate: Collate | None,
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
    batch = getattr(train, "batch_size", None) if kind == "loader" else None
    accumulate = job.train.accumulate
    settings, even = job.data, kind != "stream" or job.scale.max_nodes is None
    total = data.global_batch(settings, accumulate, world_size, even)
    if (
        isinstance(batch, int)
        and (total := batch * accumulate * world_size)
        and settings.global_batch not in (None, total)
    ):
        cause = f"the loader makes batches of {batch} on each of {world_size} ranks"
        raise ConfigError.of(
            "data.global_batch", settings.global_batch, cause, f"data.global_batch={total}"
        )
    order = data.Order(0, total, accumulate, rank, world_size, job.seed, settings.shuffle)
    order.hashes = deque() if job.train.check_resume else None
    deal = make_deal(kind, train, job, order, comm, collate or default_collate)
    deal.hashed = job.train.check_resume
    found = Stream(deal, comm, name, order, note_wait)
    found.size = length(train, kind, found, deal.count) * total
    if not found.size and job.train.steps is None:
        cause = (
            f"train={name} has no length, so train.epochs={job.train.epochs} sets no "
            "number of steps"
        )
        raise ConfigError.of("train.steps", None, cause, "train.steps=1000")
    if rank == 0 and (lacks := shortcomings(deal, train, world_size)):
        context.warn(f"train={name}: {'; '.join(lacks)}")
    return found


def source_kind(train: Any, world_size: int) -> str:
    """Return the kind of a source. ConfigError: `train` is not a source."""
    if hasattr(train, "iter_torch_batches"):
        return "ray"
    if not hasattr(train, "__iter__"):
        data.size_of(train, "train")  # raises the error that lists what a data set needs
    if hasattr(train, "__next__") and not hasattr(train, "load_state_dict"):
        raise ConfigError(
            f"train={type(train).__name__} is an iterator, which can be read only once: give fit "
            "the object that creates it: an IterableDataset with __iter__, or a DataLoader"
        )
    if not isinstance(train, IterableDataset):
        return "loader"
    shards = getattr(train, "num_shards", 0) if of_datasets(train) else 0
    return "split" if world_size > 1 and shards and shards % world_size == 0 else "stream"


def make_deal(
    kind: str, train: Any, job: Job, order: data.Order, comm: Comm, collate: Collate
) -> Deal:
    """Return how a rank gets its batches from this source."""
    own_seed = (order.seed, order.rank)
    if kind == "stream":
        make = partial(cut, collate, list(order.cuts()))
        return Deal(
            kind, train, order.global_batch, make, (order.seed,), keeps_its_place(train), job.data
        )
    if kind == "split":
        part = import_module("datasets.distributed").split_dataset_by_node(
            train, order.rank, order.world_size
        )
        cuts = [
            (micro * order.portion, (micro + 1) * order.portion)
            for micro in range(order.accumulate)
        ]
        count = order.portion * order.accumulate
        return Deal(
            kind,
            part,
            count,
            partial(cut, collate, cuts),
            own_seed,
            keeps_its_place(train),
            job.data,
        )
    if kind == "ray":
        train = split_over_ray(train, order.rank, order.world_size, order.portion, comm)
    return Deal(kind, train, order.accumulate, list, own_seed, keeps_its_place(train))


def cut(collate: Collate, cuts: Sequence[tuple[int, int]], samples: list[Any]) -> list[Batch]:
    """Collate the samples at these ranges into micro-batches."""
    return [collate(samples[first:last]) for first, last in cuts]


def keeps_its_place(train: Any) -> bool:
    """Report whether a source has a state that reproduces the same samples.

    The state of Hugging Face's shuffle buffer lacks the samples in the buffer: a stream that
    resumes from it loses them (datasets, IterableDataset.state_dict).
    """
    if isinstance(train, IterableDataset) and of_datasets(train):
        streams = import_module("datasets.iterable_dataset")
        buffer = getattr(streams, "BufferShuffledExamplesIterable", None)
        # Of a `datasets` without this class nobody knows which streams have a buffer.
        if buffer is None or has_part(train, buffer):
            return False
    return hasattr(train, "state_dict") and hasattr(train, "load_state_dict")


def has_part(stream: Any, kind: type) -> bool:
    """Report whether a stream of Hugging Face is, or reads from, an object of this class."""
    if isinstance(stream, list | tuple):
        return any(has_part(each, kind) for each in stream)
    if type(stream).__module__ != kind.__module__:
        return False
    return isinstance(stream, kind) or has_part([*vars(stream).values()], kind)


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
        if type(getattr(train, "sampler", None)).__name__ in ("RandomSampler", "SequentialSampler"):
            found.append(
                "each rank goes through all of its data set (a DistributedSampler gives it its "
                "part)"
            )
    if not deal.stateful:
        found.append("a resumed run reads the epoch again up to its position")
    if deal.loading is not None and deal.loading.workers > 1:
        found.append("data.workers: one worker of each rank reads it")
    return found


def of_datasets(train: Any) -> bool:
    """Report whether the source comes from Hugging Face's datasets."""
    return type(train).__module__.partition(".")[0] == "datasets"


def length(train: Any, kind: str, found: Stream, count: int) -> int:
    """Return the steps of an epoch on the rank with the fewest; 0: unknown. A collective."""
    try:
        items = len(train) if kind in ("stream", "loader") else 0
    except (TypeError, NotImplementedError):
        items = 0
    steps = found.all_of(torch.tensor([items // count]))
    return min(int(each) for each in steps)


def epoch_setters(items: Any) -> Iterator[Any]:
    """Yield the parts of a source that take the epoch: itself, its sampler, its data set."""
    parts = (
        items,
        getattr(items, "sampler", None),
        getattr(items, "batch_sampler", None),
        getattr(items, "dataset", None),
    )
    return (each for each in parts if hasattr(each, "set_epoch"))


def checksum(sample: Any) -> int:
    """Return a number above 1 that is equal for equal samples; 1 for a sample without bytes."""
    try:
        return zlib.crc32(raw(sample)) + 2
    except Exception:
        return 1


def hash_of(items: Sequence[Any]) -> str:
    """Return a checksum of samples or batches; empty if one of them has no bytes."""
    found = xxh3_64()
    try:
        for item in items:
            found.update(raw(item))
    except Exception:
        return ""
    return found.hexdigest()


def raw(value: Any) -> bytes:
    """Return the bytes of a sample. A tensor's pickle would contain the address of its memory."""
    if isinstance(value, torch.Tensor):
        return value.numpy(force=True).tobytes()
    if isinstance(value, Mapping | list | tuple):
        return b"".join(map(raw, value.values() if isinstance(value, Mapping) else value))
    return pickle.dumps(value)


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
