"""Seconds from the SIGKILL of one of 4 ranks until the next step is done: only that rank is forked
(restart.in_place), or all of them are.

With DDP, with FSDP, with DDP whose blocks are compiled (the new rank compiles them, the others have
their code), and in a loop of one's own with raydist.Recoverable. The model is a language model of
two small blocks.
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
BATCH = 8


def training_parts() -> tuple[Any, Any, Any]:
    """Return the model, the tokens of all samples, and the loss."""
    import torch

    from raydist.training.gpt import GPT

    def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())

    model = GPT(vocab=64, layers=2, width=32, heads=2, kv_heads=1, hidden=64)
    return model, torch.randint(64, (4096, 17)), loss


def note(folder: str, step: int) -> None:
    strike(Path(folder), step, raydist.rank().rank, raydist.rank().world_size)


def fitted(config: Any, folder: str) -> None:
    """On a rank: raydist's own loop; a step is noted when it is done."""
    from torch.utils.data import TensorDataset

    model, tokens, loss = training_parts()
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    raydist.fit(
        config, train=data, loss=loss, model=model, on_step=lambda step, _: note(folder, step)
    )


def own_loop(config: Any, folder: str) -> None:
    """On a rank: the same in a loop of one's own."""
    import torch

    model, tokens, loss = training_parts()
    optimizer = torch.optim.AdamW(model.parameters())
    training = raydist.Recoverable(config, model=model, optimizer=optimizer)
    for step in training.steps(STEPS):
        note(folder, step - 1)  # the first time that a step is made after a failure does not count
        with training.step():
            chosen = tokens[torch.randint(4096, (BATCH,))]
            loss(training.model(chosen[:, :-1]), chosen[:, 1:]).backward()
            optimizer.step()


CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ddp": (fitted, ("parallel=ddp",)),
    "fsdp": (fitted, ("parallel=fsdp",)),
    "ddp, train.compile=blocks": (fitted, ("parallel=ddp", "train.compile=blocks")),
    "a loop of one's own": (own_loop, ("parallel=ddp",)),
}


def turn(job: Any, *words: str) -> float:
    """One run; the seconds from the signal until the next step on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        raydist.run(
            job,
            f"scale=1x{RANKS}",
            "group=inline",
            "backend=gloo",
            "watch.progress=none",
            f"train.steps={STEPS}",
            f"data.batch_size={BATCH}",
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
    for name, (job, words) in CASES.items():
        print(f"in_place: {name}", flush=True)
        sides = {
            side: partial(turn, job, *words, f"restart.in_place={how}")
            for side, how in hows.items()
        }
        lines.append(f"| {name} | {row(alternate(sides, rounds), 'in place', 's')} |")
    return lines
