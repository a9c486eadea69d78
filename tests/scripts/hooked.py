"""A training with hooks, a step of its own and a stream as test data, twice: the second one loses a
rank in a hook."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import raydist

STEPS, BATCH, TESTS, KILLED = 8, 8, 11, 5
"""The last one is the step in whose hook a rank is killed."""


class Rows(IterableDataset[Any]):
    """The first samples as a stream, with noise."""

    def __iter__(self) -> Iterator[Any]:
        for features, labels in zip(*(each[:TESTS] for each in tensors()), strict=True):
            yield features + torch.randn(1), labels


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, features: torch.Tensor) -> Any:
        return self.dropout(self.layer(features))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    features = torch.randn(STEPS * BATCH, 6, generator=drawn)
    return features, (features.sum(dim=1) > 0).long()


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    features, labels = batch
    return F.cross_entropy(model(features) + model(-features), labels)


def note(name: str, strike: bool, step: int, values: Any) -> None:
    """Write a line for each call, to the file of this rank."""
    me = raydist.rank()
    numbers = " ".join(f"{key}={float(value).hex()}" for key, value in values.items())
    with (me.run_dir / f"{name}-{strike}-{me.rank}.txt").open("a") as file:
        file.write(f"{step} {numbers}\n")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if strike and first and name == "step" and step == KILLED and me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def job(config: Any) -> None:
    for strike in (False, True):
        torch.manual_seed(0)
        raydist.fit(
            config,
            model=nn.Sequential(Block(), Block()),
            train=TensorDataset(*tensors()),
            test=Rows(),
            train_step=train_step,
            on_step=partial(note, "step", strike),
            on_evaluate=partial(note, "evaluation", strike),
        )
