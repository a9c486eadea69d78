"""The samples: in which order, in which portions, which rank takes which. (rank side)

The order is a function of the seed and of the position in samples, never of the number of ranks:

    epoch e             a permutation of all samples, from (seed, e)
    optimizer step      takes the next `global_batch` samples of it
    accumulation        cuts these into `accumulate` equal micro-batches
    rank                cuts each micro-batch into `world_size` equal portions and takes its own

Where the number of ranks may change while the global batch stays, the cuts are as equal as they can be, and each
portion counts by its size.

The end of an epoch that does not fill a global batch is dropped, as in most training loops: another order follows, and
other samples are left out then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from raydist.config import Data
from raydist.errors import ConfigError
from raydist.loop import random_state

T = TypeVar("T")


class Portion(NamedTuple):
    """What one rank loads at once."""

    indices: torch.Tensor
    """Which samples, int64."""
    luck: tuple[int, ...] | None
    """What the seed of random augmentation is derived from; None: nothing random happens."""


@dataclass
class Order:
    """A rank's portions of the training samples, from a position on. Iterable: a DataLoader's batch_sampler."""

    size: int
    global_batch: int
    accumulate: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0
    """Samples of this epoch that all ranks have seen together."""

    @property
    def portion(self) -> int:
        """Samples of one forward pass on one rank; the most of them where they differ by one."""
        return math.ceil(self.global_batch / (self.accumulate * self.world_size))

    @property
    def even(self) -> bool:
        """Whether all portions have the same size."""
        return self.global_batch % (self.accumulate * self.world_size) == 0

    @property
    def shares(self) -> list[float]:
        """What each micro-batch of this rank counts in the average over all ranks."""
        return [(last - first) * self.world_size / self.global_batch for first, last in self.cuts()]

    def cuts(self) -> Iterator[tuple[int, int]]:
        """From where to where in the global batch each portion of this rank lies."""
        parts = self.accumulate * self.world_size
        for micro in range(self.accumulate):
            part = micro * self.world_size + self.rank
            yield self.global_batch * part // parts, self.global_batch * (part + 1) // parts

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.global_batch

    @property
    def steps_left(self) -> int:
        """Optimizer steps from here to the end of the epoch."""
        return (self.size - self.position) // self.global_batch

    def permutation(self) -> torch.Tensor:
        """All samples, in this epoch's order."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(random_state.derive(self.seed, self.epoch))
        return torch.randperm(self.size, generator=generator)

    def __iter__(self) -> Iterator[Portion]:
        order, cuts = self.permutation(), list(self.cuts())
        for begin in range(self.position, self.size - self.global_batch + 1, self.global_batch):
            for first, last in cuts:
                yield Portion(order[begin + first : begin + last], (self.seed, self.epoch, begin + first))

    def __len__(self) -> int:
        return self.steps_left * self.accumulate


@dataclass(frozen=True)
class Rota:
    """A rank's portions of the test samples: each sample falls to exactly one rank."""

    size: int
    batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[Portion]:
        mine = torch.arange(self.size)[self.rank :: self.world_size]
        return (Portion(part, None) for part in torch.split(mine, self.batch_size) if part.numel())

    def __len__(self) -> int:
        return math.ceil(len(range(self.rank, self.size, self.world_size)) / self.batch_size)


class Portions(Dataset[Any]):
    """A data set that is asked for whole portions, and gives each as one batch."""

    def __init__(self, samples: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.samples = samples
        self.collate = collate

    def __getitems__(self, portion: Portion) -> Any:
        # In memory already: one gather is the batch, where one look-up per sample and a stack cost 20 times as much.
        if type(self.samples) is TensorDataset and self.collate is default_collate:
            return [tensor[portion.indices] for tensor in self.samples.tensors]
        with self._seeded(portion.luck):
            return self.collate(self._look_up(portion.indices.tolist()))

    def _look_up(self, indices: list[int]) -> list[Any]:
        if hasattr(self.samples, "__getitems__"):
            return list(self.samples.__getitems__(indices))
        return [self.samples[index] for index in indices]

    @staticmethod
    def _seeded(luck: tuple[int, ...] | None) -> AbstractContextManager[None]:
        return nullcontext() if luck is None else random_state.seeded(random_state.derive(*luck))


def as_it_is(batch: Any) -> Any:
    """Portions are batches already."""
    return batch


def loader(
    samples: Dataset[Any], portions: Order | Rota, settings: Data, collate: Callable[[list[Any]], Any] | None = None
) -> DataLoader[Any]:
    """Batches of `samples` in the order of `portions`; its workers stay from epoch to epoch."""
    return DataLoader(
        Portions(samples, collate or default_collate),
        batch_sampler=portions,  # type: ignore[arg-type]  # torch hands on whatever it yields
        collate_fn=as_it_is,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        pin_memory=settings.pin_memory and torch.cuda.is_available(),
        # Without one of its own, each new iterator takes a number from the rank's generator: a resumed run would
        # take one more than the unbroken one.
        generator=torch.Generator(),
    )


def size_of(samples: Any, name: str) -> int:
    """How many samples there are."""
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ConfigError(
            f"{name}={type(samples).__name__} has no length or no index: fit needs a map-style Dataset "
            "(__len__ and __getitem__); for a stream, write a loop of your own as in jobs/own_loop.py"
        )
    return len(samples)


def on_disk(make: Callable[[], T], root: Path, files: str) -> T:
    """A data set of files that must be there already; nothing is downloaded. `files`: what belongs where, in words."""
    try:
        return make()
    except (RuntimeError, FileNotFoundError) as error:
        raise ConfigError(
            f"data.root={root}: {files} not found, or damaged, in {root.absolute()}, and nothing is downloaded: "
            "put the files there on every node, or say data.root=/where/they/are"
        ) from error


def global_batch(settings: Data, accumulate: int, world_size: int, even: bool = True) -> int:
    """Samples of one optimizer step over all ranks. `even`: the same for each of them."""
    each = accumulate * world_size
    if settings.global_batch is None:
        return settings.batch_size * each
    if settings.global_batch % each if even else settings.global_batch < each:
        near = max(1, round(settings.global_batch / each)) * each
        raise ConfigError(
            f"data.global_batch={settings.global_batch} can't be split evenly over {world_size} ranks"
            f"{f' x train.accumulate={accumulate}' if accumulate > 1 else ''}: say data.global_batch={near}"
        )
    return settings.global_batch


def order(
    samples: Sequence[Any] | Dataset[Any],
    settings: Data,
    *,
    accumulate: int,
    rank: int,
    world_size: int,
    seed: int,
    even: bool = True,
) -> Order:
    """The order of the training samples; ConfigError if they do not fill one step."""
    size, batch = size_of(samples, "train"), global_batch(settings, accumulate, world_size, even)
    if size < batch:
        fits = size // (accumulate * world_size)
        word = (
            f"data.global_batch={fits * accumulate * world_size}"
            if settings.global_batch
            else f"data.batch_size={fits}"
        )
        raise ConfigError(
            f"{size} training samples do not fill one step of {batch} (batch x train.accumulate={accumulate} x "
            f"{world_size} ranks): say {word if fits else f'scale=1x{max(1, size // accumulate)}'}"
        )
    return Order(size, batch, accumulate, rank, world_size, seed, settings.shuffle)
