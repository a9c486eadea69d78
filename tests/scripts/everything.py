"""All that a training may ask of raydist.fit at once, in two trainings of one run: the second one
loses a rank in mid-epoch."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import raydist
from raydist.training.gpt import GPT
from raydist.worker import context

SIZES: Any = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64}
STEPS, BATCH, LENGTH = 12, 16, 12
BAD, KILLED = 4, 7
"""The step whose loss is not finite, and the one after which a rank is killed."""
POISON = 255
"""A label that makes the loss of its batch infinite."""


class Rows(Dataset[Any]):
    """Rows of tokens as dicts of columns."""

    def __init__(self, strike: bool = False) -> None:
        drawn = torch.Generator().manual_seed(1)
        text = torch.randint(250, (STEPS * BATCH, LENGTH + 1), generator=drawn)
        self.tokens, self.labels = text[:, :-1], text[:, 1:].clone()
        self.labels[(BAD - 1) * BATCH, 3] = POISON
        self.strike = strike

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.strike and first and index // BATCH == KILLED and raydist.rank().rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


class Own(GPT):
    """A language model that computes its own loss."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        scores = super().forward(tokens)
        return {"loss": next_token(scores, labels), "scores": scores}


def next_token(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    return loss / (labels != POISON).all()


def job(config: Any) -> list[dict[str, float]]:
    found = []
    for strike in (False, True):
        with torch.device("meta"):
            model, loss = (Own(**SIZES), None)
            if context.current().comm.pipelined:
                model, loss = GPT(**SIZES), next_token
        test = Rows()
        test.tokens, test.labels = test.tokens[:14], test.labels[:14]
        rows = Rows(strike)
        found.append(raydist.fit(config, model=model, train=rows, test=test, loss=loss))
    return found
