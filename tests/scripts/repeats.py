"""A training that is killed, or waits to be stopped, after its tenth step, in its first attempt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import raydist
from raydist import events
from raydist.shared.events import read_kind
from raydist.worker import context

STEP = 10
SAMPLES = 256


class Samples(IterableDataset[Any]):
    """The same samples as a stream."""

    def __iter__(self) -> Iterator[Any]:
        yield from tensors()


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 10, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (SAMPLES,), generator=generator))


def recorded() -> bool:
    """Return whether the driver has recorded the tenth step of rank 0."""
    file = raydist.rank().run_dir / "events.jsonl"
    return any(one.rank == 0 and one.step == STEP for one in read_kind(events.Report, file))


def job(
    config: Any, end: str = "", stream: bool = False, noise: bool = False, dropout: float = 0.2
) -> None:
    """Train for fourteen steps.

    - `end`: what happens after ten steps: kill (of rank 1), wait (until the run is stopped).
    - `noise`: each loss has a part that depends on the time.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 3))
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if end and first and context.current().step == STEP:
            while not recorded() or end == "wait":
                time.sleep(0.05)
            if raydist.rank().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        found = nn.functional.cross_entropy(output, target)
        return found * (1 + 1e-3 * (time.time() % 1)) if noise else found

    raydist.fit(config, train=Samples() if stream else tensors(), loss=loss, model=model)
