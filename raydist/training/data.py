"""The order of the samples, and each rank's share of every batch. (rank side)

The order is a function of the seed and of the position in samples, never of the number of ranks:

    epoch e             a permutation of all samples, from (seed, e)
    optimizer step      the next `global_batch` samples of it
    micro-batch         one of `accumulate` equal parts of these
    rank                one of `world_size` equal portions of a micro-batch

If the number of ranks may change while the global batch stays, portions differ by at most one
sample, and each is weighted by its size.

The end of an epoch that does not fill a global batch is dropped, as in most training loops; in the
next epoch's order these are other samples.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from xxhash import xxh3_64_hexdigest

from raydist.settings.config import Data, Job
from raydist.shared.errors import ConfigError
from raydist.state.snapshot_layout import State
from raydist.training.tokenizer import BytePairs as BytePairs
from raydist.training.tokenizer import byte_pairs as byte_pairs
from raydist.training.tokenizer import encode_together as encode_together
from raydist.training.tokens import TokenFiles as TokenFiles
from raydist.worker import random_state

T = TypeVar("T")
TEST = 2**32 - 1
"""In the place of an epoch, in the seed of a portion of the test samples."""


class Portion(NamedTuple):
    """The samples that one rank loads at once."""

    indices: npt.NDArray[np.int64]
    """Their indices, int64, of shape [B], in separate memory.

    Not a tensor: torch.multiprocessing would move its whole storage, here the order of all samples,
    to /dev/shm."""
    seed_key: tuple[int, ...]
    """The key from which the seed of random augmentation is derived."""


@dataclass
class Order:
    """A rank's portions of the training samples from a position on, a DataLoader batch_sampler."""

    size: int
    global_batch: int
    accumulate: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0
    """Samples of this epoch that all ranks together have used."""
    hashes: deque[str] | None = None
    """Checksums of the samples of the steps that were handed out, oldest first; None: they are not
    wanted (`train.check_resume`)."""

    @property
    def portion(self) -> int:
        """Samples of one forward pass on one rank; the larger number if portions differ by one."""
        return math.ceil(self.global_batch / (self.accumulate * self.world_size))

    @property
    def even(self) -> bool:
        """Whether all portions have the same size."""
        return self.global_batch % (self.accumulate * self.world_size) == 0

    @property
    def shares(self) -> list[float]:
        """The weight of each micro-batch of this rank in the average over all ranks."""
        return [(last - first) * self.world_size / self.global_batch for first, last in self.cuts()]

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each portion of this rank in the global batch."""
        parts = self.accumulate * self.world_size
        for micro in range(self.accumulate):
            part = micro * self.world_size + self.rank
            yield self.global_batch * part // parts, self.global_batch * (part + 1) // parts

    @property
    def kind(self) -> str:
        """The kind of the source, one of waits.ADVICE."""
        return "map"

    @property
    def more(self) -> bool:
        """Whether the epoch has another step."""
        return self.steps_left > 0

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.position = 0

    def place(self) -> State:
        """Return the position, which is equal on all ranks, for a kept state."""
        return {"epoch": self.epoch, "position": self.position}

    def own(self) -> State:
        """Return what a kept state needs from this rank in addition."""
        return {}

    def owns(self) -> State:
        """Return what a kept state needs from all ranks. A collective."""
        return {}

    def go_on(self, place: State, own: State | None) -> None:
        """Continue at a position. `own`: what was kept of this rank; None: nothing."""
        self.epoch = place["epoch"]
        self.position = place["position"]

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.global_batch

    @property
    def steps_left(self) -> int:
        """Optimizer steps from `position` to the end of the epoch."""
        return (self.size - self.position) // self.global_batch

    def next_hash(self) -> str | None:
        """Return the checksum of the samples of the next step that was handed out.

        To be called once for each step. None: there is none.
        """
        return (self.hashes.popleft() or None) if self.hashes else None

    def permutation(self) -> torch.Tensor:
        """Return the indices of all samples, in this epoch's order."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(random_state.derive(self.seed, self.epoch))
        return torch.randperm(self.size, generator=generator)

    def __iter__(self) -> Iterator[Portion]:
        order, cuts = self.permutation(), list(self.cuts())
        if self.hashes is not None:
            self.hashes.clear()  # those that an earlier iterator handed out ahead
        for begin in range(self.position, self.size - self.global_batch + 1, self.global_batch):
            if self.hashes is not None:
                step = order[begin : begin + self.global_batch].numpy()
                self.hashes.append(xxh3_64_hexdigest(step.tobytes()))
            for first, last in cuts:
                indices = order[begin + first : begin + last].numpy().copy()
                yield Portion(indices, (self.seed, self.epoch, begin + first))

    def __len__(self) -> int:
        return self.steps_left * self.accumulate


@dataclass(frozen=True)
class EvalSampler:
    """A rank's portions of the test samples: each sample belongs to exactly one rank."""

    size: int
    batch_size: int
    rank: int
    world_size: int
    together: bool = False
    """Whether all ranks have as many portions as rank 0, because a forward pass needs all ranks.
    The extra portions repeat the first sample."""
    most: int | None = None
    """Limit on the portions."""
    seed: int = 0
    """A sample that draws random numbers draws the same in each evaluation: a worker of a loader
    may have drawn others before, or have been started anew."""

    @property
    def own_portions(self) -> int:
        """Portions of this rank's own samples; the extra portions come after them."""
        own = math.ceil(len(range(self.rank, self.size, self.world_size)) / self.batch_size)
        return own if self.most is None else min(own, self.most)

    def __iter__(self) -> Iterator[Portion]:
        own = np.arange(self.rank, self.size, self.world_size)
        parts = [
            own[first : first + self.batch_size].copy()
            for first in range(0, len(own), self.batch_size)
        ][: self.own_portions]
        parts += [np.array([0])] * (len(self) - len(parts))
        return (Portion(part, (self.seed, TEST, int(part[0]))) for part in parts)

    def __len__(self) -> int:
        return replace(self, rank=0).own_portions if self.together else self.own_portions


def eval_sampler(
    samples: Any, order: Order, together: bool, most: int | None = None
) -> EvalSampler:
    """Return a rank's portions of the test samples, at most `most`.

    They are as large as its training portions. ConfigError: the samples have no length or no index.
    """
    size = size_of(samples, "test")
    return EvalSampler(
        size, order.portion, order.rank, order.world_size, together, most, order.seed
    )


class Portions(Dataset[Any]):
    """A data set that returns a whole portion as one batch."""

    def __init__(self, samples: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.samples = samples
        self.collate = collate

    def __getitems__(self, portion: Portion) -> Any:
        # One gather makes the batch; a look-up for each sample and a stack would take 20 times as
        # long.
        if type(self.samples) is TensorDataset and self.collate is default_collate:
            indices = torch.from_numpy(portion.indices)
            return [tensor[indices] for tensor in self.samples.tensors]
        with random_state.seeded(random_state.derive(*portion.seed_key)):
            return self.collate(self._samples(portion.indices.tolist()))

    def _samples(self, indices: list[int]) -> list[Any]:
        if hasattr(self.samples, "__getitems__"):
            return list(self.samples.__getitems__(indices))
        return [self.samples[index] for index in indices]


def keep_batch(batch: Any) -> Any:
    """Return a batch unchanged: a portion is already collated."""
    return batch


def loader(
    samples: Dataset[Any],
    portions: Order | EvalSampler,
    settings: Data,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> DataLoader[Any]:
    """Return a DataLoader of `samples` in the order of `portions`, with persistent workers."""
    return DataLoader(
        Portions(samples, collate),
        batch_sampler=portions,  # type: ignore[arg-type]  # torch passes its items on, whatever their type
        collate_fn=keep_batch,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        pin_memory=settings.pin_memory and torch.cuda.is_available() and not on_device(samples),
        multiprocessing_context=worker_start(settings.workers),
        # Without its own generator each new iterator would draw a number from the rank's generator,
        # and a resumed run would draw one more than an uninterrupted one.
        generator=torch.Generator(),
    )


def on_device(samples: Any) -> bool:
    """Report whether a data set has its tensors on a GPU: torch raises if it is to pin them."""
    if isinstance(samples, Subset):
        return on_device(samples.dataset)
    tensors = samples.tensors if isinstance(samples, TensorDataset) else ()
    return any(each.device.type != "cpu" for each in tensors)


def worker_start(workers: int) -> str | None:
    """Return how loader workers start: forked, unless the program has chosen a start method.

    None: use the program's choice, or there are no workers. Python's default is forkserver from
    3.14 on, which only takes samples that can be pickled.
    """
    return "fork" if workers and multiprocessing.get_start_method(allow_none=True) is None else None


def indexed(samples: Any) -> bool:
    """Report whether it is a map-style data set: it has a length and an index."""
    # torch's IterableDataset inherits an index method that raises
    own_index = not isinstance(samples, IterableDataset) and hasattr(samples, "__getitem__")
    return own_index and hasattr(samples, "__len__")


def size_of(samples: Any, name: str) -> int:
    """Return the number of samples. `name`: the data set's name in messages.

    ConfigError: the data set has no length or no index.
    """
    if not indexed(samples):
        others = "(IterableDataset)" if name == "test" else "or a loader (__iter__)"
        raise ConfigError(
            f"{name}={type(samples).__name__} has no length or no index: it must be a map-style "
            f"Dataset (__len__ and __getitem__), or a stream {others}"
        )
    return len(samples)


def on_disk(make: Callable[[], T], root: Path, files: str) -> T:
    """Make a data set of files; nothing is downloaded.

    - `make`: makes it, as `lambda: torchvision.datasets.MNIST(root)`.
    - `root`: the folder of the files.
    - `files`: the files it needs, as the error describes them.

    Returns what `make` returns. ConfigError: it raised RuntimeError or FileNotFoundError, since
    files are missing.
    """
    try:
        return make()
    except (RuntimeError, FileNotFoundError) as error:
        cause = (
            f"{files} not found, or damaged, in {root.absolute()} on this node, and nothing "
            "is downloaded"
        )
        raise ConfigError.of("data.root", str(root), cause, "data.root=/path/to/files") from error


def global_batch(settings: Data, accumulate: int, world_size: int, even: bool = True) -> int:
    """Return the samples of one optimizer step over all ranks.

    `even`: ranks must have equal portions; otherwise ConfigError.
    """
    each = accumulate * world_size
    if settings.global_batch is None:
        return settings.batch_size * each
    if settings.global_batch % each if even else settings.global_batch < each:
        near = max(1, round(settings.global_batch / each)) * each
        passes = f" x train.accumulate={accumulate}" if accumulate > 1 else ""
        cause = f"it cannot be split evenly over {world_size} ranks{passes}"
        raise ConfigError.of(
            "data.global_batch", settings.global_batch, cause, f"data.global_batch={near}"
        )
    return settings.global_batch


def order(
    samples: Sequence[Any] | Dataset[Any], job: Job, rank: int = 0, world_size: int = 1
) -> Order:
    """Return the order of the training samples.

    `rank`, `world_size`: among the ranks that get different samples. ConfigError: the samples do
    not fill one step.
    """
    settings = job.data
    accumulate = job.train.accumulate
    even = job.scale.max_nodes is None
    size, batch = size_of(samples, "train"), global_batch(settings, accumulate, world_size, even)
    if size < batch:
        fits = size // (accumulate * world_size)
        cause = (
            f"{size} training samples do not fill a step of {batch} "
            f"(train.accumulate={accumulate}, {world_size} ranks)"
        )
        key, value = (
            ("data.global_batch", batch)
            if settings.global_batch
            else ("data.batch_size", settings.batch_size)
        )
        right = f"{key}={fits * accumulate * world_size if settings.global_batch else fits}"
        raise ConfigError.of(
            key, value, cause, right if fits else f"scale=1x{max(1, size // accumulate)}"
        )
    found = Order(size, batch, accumulate, rank, world_size, job.seed, settings.shuffle)
    found.hashes = deque() if job.train.check_resume else None
    return found
