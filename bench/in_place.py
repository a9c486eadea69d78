"""Seconds from the SIGKILL of one of 4 ranks until the next step is done: only that rank is forked
(restart.in_place), or all of them are.

With DDP, with FSDP, and with DDP whose blocks are compiled: the new rank compiles them, the others
have their code. The model is a language model of two small blocks.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import raydist
from bench.measure import alternate, heads, row
from bench.recovery import STEPS, recovery, strike

RANKS = 4
CASES = {
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp",),
    "ddp, train.compile=blocks": ("parallel=ddp", "train.compile=blocks"),
}


def job(config: Any, folder: str) -> None:
    """On a rank: raydist's own loop; a step is noted when it is done."""
    import torch
    from torch.utils.data import TensorDataset

    from raydist.training.gpt import GPT

    tokens = torch.randint(64, (4096, 17))
    model = GPT(vocab=64, layers=2, width=32, heads=2, kv_heads=1, hidden=64)

    def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())

    def on_step(step: int, values: Any) -> None:
        strike(Path(folder), step, raydist.rank().rank, raydist.rank().world_size)

    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    raydist.fit(config, train=data, loss=loss, model=model, on_step=on_step)


def turn(*words: str) -> float:
    """One run; the seconds from the signal until the next step on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        raydist.run(
            job,
            f"scale=1x{RANKS}",
            "group=inline",
            "backend=gloo",
            "watch.progress=none",
            f"train.steps={STEPS}",
            "data.batch_size=8",
            "snapshot.every=1",
            "checkpoint.every=100000",
            *words,
            folder=folder,
        )
        return recovery(Path(folder))


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    hows = {"in place": "on", "all forked": "off"}
    lines = [f"| 4 ranks | {heads(hows, 'in place')} |", "|---" * 4 + "|"]
    for name, words in CASES.items():
        print(f"in_place: {name}", flush=True)
        sides = {
            side: partial(turn, *words, f"restart.in_place={how}") for side, how in hows.items()
        }
        lines.append(f"| {name} | {row(alternate(sides, rounds), 'in place', 's')} |")
    return lines
