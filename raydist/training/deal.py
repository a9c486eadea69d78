"""Deals the items of a source without an index to a rank, step by step. (rank side)

In the rank's process, or in a worker of a DataLoader. sources.py has the kinds of sources.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset
from xxhash import xxh3_64

from raydist.settings.config import Data, Job
from raydist.shared.errors import ConfigError
from raydist.state.snapshot_layout import State
from raydist.training import data
from raydist.training.ray_data import split_over_ray
from raydist.worker import random_state
from raydist.worker.backends import Comm

FIRST_SEEDS: WeakKeyDictionary[torch.Generator, int] = WeakKeyDictionary()
"""The seed that each generator of a source had in the first epoch."""

Batch = Any
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
        if self.state is None:
            seed_generators(self.items, self.epoch)
        else:  # the state has that of its generators, with the seed of another epoch
            note_first_seeds(self.items)
        # Afterwards: it may seed a generator of the source itself, as the job wants it.
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


def check_shuffles(train: Any, all_of: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
    """Raise ConfigError if ranks shuffle the shards that they divide differently. A collective.

    Without a seed each rank draws one: some shards would be read twice, and others never.
    `all_of`: gathers a number of each rank.
    """
    generators = (getattr(buffer, "generator", None) for buffer in shuffles_of(train) or ())
    states = [each.bit_generator.state for each in generators if each is not None]
    if len({int(each) for each in all_of(torch.tensor([checksum(states)]))}) > 1:
        raise ConfigError(
            f"train={type(train).__name__} is shuffled differently on each rank, so that ranks "
            "would read some shards twice and others never: give .shuffle a seed, as in "
            ".shuffle(seed=0)"
        )


def keeps_its_place(train: Any) -> bool:
    """Report whether a source has a state that reproduces the same samples.

    The state of Hugging Face's shuffle buffer lacks the samples in the buffer: a stream that
    resumes from it loses them (datasets, IterableDataset.state_dict).
    """
    if isinstance(train, IterableDataset) and of_datasets(train) and shuffles_of(train) != []:
        return False
    return hasattr(train, "state_dict") and hasattr(train, "load_state_dict")


def shuffles_of(train: Any) -> list[Any] | None:
    """Return the shuffle buffers of a stream of Hugging Face.

    None for a `datasets` without their class: nobody knows which streams have one.
    """
    streams = import_module("datasets.iterable_dataset")
    buffer = getattr(streams, "BufferShuffledExamplesIterable", None)
    return None if buffer is None else [*inner_streams(train, buffer)]


def inner_streams(stream: Any, kind: type) -> Iterator[Any]:
    """Yield the objects of this class that a stream of Hugging Face is or reads from."""
    if isinstance(stream, list | tuple):
        for each in stream:
            yield from inner_streams(each, kind)
    elif type(stream).__module__ == kind.__module__:
        if isinstance(stream, kind):
            yield stream
        yield from inner_streams([*vars(stream).values()], kind)


def of_datasets(train: Any) -> bool:
    """Report whether the source comes from Hugging Face's datasets."""
    return type(train).__module__.partition(".")[0] == "datasets"


def epoch_setters(items: Any) -> Iterator[Any]:
    """Yield the parts of a source that take the epoch: itself, its sampler, its data set."""
    return (each for each in source_parts(items) if hasattr(each, "set_epoch"))


def seed_generators(items: Any, epoch: int) -> None:
    """Seed the generators that a source has for itself, as if it had drawn nothing for this epoch.

    A process that continues in a later epoch has not drawn what came before. In the first epoch
    the generators are left as the job has made them.
    """
    for generator in generators_of(items):
        drawn = generator in FIRST_SEEDS
        first = FIRST_SEEDS.setdefault(generator, generator.initial_seed())
        if epoch or drawn:
            generator.manual_seed(random_state.derive(first, epoch) if epoch else first)


def note_first_seeds(items: Any) -> None:
    """Note the seeds of the generators that a source has for itself, before they change."""
    for generator in generators_of(items):
        FIRST_SEEDS.setdefault(generator, generator.initial_seed())


def generators_of(items: Any) -> set[torch.Generator]:
    """Return the generators of a source: a loader and its sampler may share one."""
    parts = [getattr(part, "generator", None) for part in source_parts(items)]
    return {part for part in parts if isinstance(part, torch.Generator)}


def source_parts(items: Any) -> Iterator[Any]:
    """Yield a source and what it takes its items from."""
    yield items
    for name in ("sampler", "batch_sampler", "dataset"):
        yield getattr(items, name, None)
    if (inner := inner_sampler(items)) is not getattr(items, "sampler", None):
        yield inner


def inner_sampler(items: Any) -> Any:
    """Return the sampler of a loader's batch_sampler, None without one.

    A DataLoader that was given a batch_sampler has another one, unused, as its `sampler`.
    """
    return getattr(getattr(items, "batch_sampler", None), "sampler", None)


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
