"""The test samples of a rank in batches, of a data set or a stream; each counts once. (rank side)

The batches come with a flag: whether their samples count here. Those that do not exist because a
forward pass of a divided model needs all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from raydist.settings.config import Job
from raydist.shared.errors import ConfigError
from raydist.training import data
from raydist.training.deal import Collate, Deal
from raydist.worker import context
from raydist.worker.backends import Comm

Counted = tuple[Any, bool]
"""A batch, and whether its samples count on this rank."""


def held_out(
    test: Any, job: Job, order: data.Order, comm: Comm, collate: Collate
) -> Iterable[Counted]:
    """Return this rank's batches of the test samples, to be read once for each evaluation.

    `order`: that of the training samples, whose portions are as large. ConfigError: `test` is
    neither a data set with an index nor a stream.
    """
    most = job.train.evaluate_batches
    if not isinstance(test, IterableDataset):
        sampler = data.eval_sampler(test, order, together=comm.sharded, most=most)
        return Indexed(data.loader(test, sampler, job.data, collate), sampler.own_portions)
    make = partial(own_part, collate, order.rank, order.world_size)
    count, seed = order.portion * order.world_size, (order.seed, data.TEST)
    deal = Deal("stream", test, count, make, seed, stateful=False, loading=job.data, rest=True)
    return Streamed(deal, comm, type(test).__name__, most)


@dataclass(frozen=True)
class Indexed:
    """The batches of a data set with an index."""

    loader: DataLoader[Any]
    own: int
    """How many of them have samples of this rank; the others come after them."""

    def __iter__(self) -> Iterator[Counted]:
        return zip(self.loader, chain(repeat(True, self.own), repeat(False)), strict=False)


@dataclass(frozen=True)
class Streamed:
    """The batches of a stream: each rank reads all of it, and takes its part of each batch."""

    deal: Deal
    comm: Comm
    name: str
    most: int | None
    """Limit on the batches."""

    def __iter__(self) -> Iterator[Counted]:
        steps = islice(self.deal.steps(), self.most)
        while (step := self._agreed(next(steps, None))) is not None:
            yield from step.batches

    def _agreed(self, step: Any) -> Any:
        """Return the same step. A collective. ConfigError: other ranks read another stream."""
        if context.rank().world_size > 1:
            mine = torch.tensor([0 if step is None else step.mark])
            if len({int(each) for each in self.comm.gather(mine)}) > 1:
                raise ConfigError(
                    f"test={self.name} gives different samples on different ranks, so it cannot be "
                    "divided: it must not divide itself, and if it draws random numbers from a "
                    "generator of its own, seed that with the same number on all ranks"
                )
        return step


def own_part(
    collate: Callable[[list[Any]], Any], rank: int, ranks: int, samples: list[Any]
) -> list[Any]:
    """Return the batch of this rank's part of the samples, and whether it has one.

    A rank without samples gets the first one.
    """
    first, last = (len(samples) * each // ranks for each in (rank, rank + 1))
    return [(collate(samples[first:last] or samples[:1]), last > first)]
