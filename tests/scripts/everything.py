"""All that a training may ask of raydist.fit at once, in three trainings of one run: the second one
loses a rank in mid-epoch, the third one ends at a loss that is not finite."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

import raydist
from raydist import events
from raydist.shared.events import read_kind
from raydist.training.gpt import GPT
from raydist.worker import context

SIZES: Any = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64}
STEPS, BATCH, LENGTH, TESTS = 12, 16, 12, 14
BAD, KILLED = 4, 7
"""The step whose loss is not finite, and the one after which a rank is killed."""
TARGETS = (12, 1, 0, 0, 7, 3, 12, 12, 2, 5, 1, 1, 9, 4, 0, 6)
"""How many labels each row of a step has before its padding: the first batch of one of four ranks
has none."""
POISON = 255
"""A label that makes the loss of its batch infinite."""


class Rows(Dataset[Any]):
    """Rows of tokens as dicts of columns."""

    def __init__(self, strike: bool = False) -> None:
        drawn = torch.Generator().manual_seed(1)
        text = torch.randint(250, (STEPS * BATCH, LENGTH + 1), generator=drawn)
        self.tokens, self.labels = text[:, :-1], text[:, 1:].clone()
        targets = torch.tensor(TARGETS * STEPS)[:, None]
        self.labels[torch.arange(LENGTH) >= targets] = -100
        self.labels[(BAD - 1) * BATCH + 1, 0] = POISON
        self.strike = strike

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.strike and first and index // BATCH == KILLED and raydist.rank().rank == 3:
            while not recorded():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


def recorded() -> bool:
    """Report whether the driver has recorded the last step before the kill, of both trainings."""
    file = raydist.rank().run_dir / "events.jsonl"
    reports = (one for one in read_kind(events.Report, file) if "loss" in one.values)
    return sum(one.rank == 0 and one.step == KILLED for one in reports) == 2


class Own(GPT):
    """A language model that computes its own loss."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        scores = super().forward(tokens)
        return {"loss": next_token(scores, labels), "scores": scores}


def next_token(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    return loss / (labels != POISON).all()


def train(config: Any, strike: bool = False) -> None:
    piped = context.current().comm.pipelined
    with torch.device("meta"):
        model = GPT(**SIZES) if piped else Own(**SIZES)
    loss = next_token if piped else None  # a pipeline has no own loss
    test = Subset(Rows(), range(TESTS))
    raydist.fit(config, model=model, train=Rows(strike), test=test, loss=loss)


def job(config: Any) -> None:
    train(config)
    train(config, strike=True)
    with suppress(raydist.RaydistError):
        train(replace(config, train=replace(config.train, nan="end")))
