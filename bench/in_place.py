"""Seconds from the SIGKILL of one of 4 ranks until the next step is done: only that rank is forked
(restart.in_place), or all of them are; and what it costs a run in which nothing fails.

With DDP, with FSDP, the same with compiled code (the new rank compiles, the others have theirs),
and in a loop of one's own with raydist.Recoverable. The model is a language model of
two small blocks.
"""

from __future__ import annotations

import mmap
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import raydist
from bench.measure import alternate, heads, row
from bench.recovery import STEPS, recovery, strike

RANKS = 4
BATCH = 8
EVEN_RANKS, BLOCK, WARM, PAIRS = 2, 20, 8, 40
"""Of two runs in which nothing fails, and which take turns: ranks of each, one for each core; steps
of a block; blocks that are not timed; pairs of blocks in a round."""


def training_parts() -> tuple[Any, Any]:
    """Return the model, and the tokens of all samples."""
    import torch

    from raydist.training.gpt import GPT

    model = GPT(vocab=64, layers=2, width=32, heads=2, kv_heads=1, hidden=64)
    return model, torch.randint(64, (4096, 17))


def fitted(config: Any, note: Callable[[int], object]) -> None:
    """On a rank: raydist's own loop; a step is noted when it is done."""
    from torch.utils.data import TensorDataset

    from tests.losses import next_token

    model, tokens = training_parts()
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    raydist.fit(
        config, train=data, loss=next_token, model=model, on_step=lambda step, _: note(step)
    )


def own_loop(config: Any, note: Callable[[int], object]) -> None:
    """On a rank: the same in a loop of one's own."""
    import torch

    from tests.losses import next_token

    model, tokens = training_parts()
    optimizer = torch.optim.AdamW(model.parameters())
    training = raydist.Recoverable(config, model=model, optimizer=optimizer)
    for step in training.steps(config.train.steps):
        note(step - 1)  # the first time that a step is made after a failure does not count
        with training.step():
            chosen = tokens[torch.randint(4096, (BATCH,))]
            next_token(training.model(chosen[:, :-1]), chosen[:, 1:]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    note(config.train.steps)


Loop = Callable[[Any, Callable[[int], object]], None]
CASES: dict[str, tuple[Loop, tuple[str, ...]]] = {
    "ddp": (fitted, ("parallel=ddp",)),
    "fsdp": (fitted, ("parallel=fsdp",)),
    "ddp, train.compile=blocks": (fitted, ("parallel=ddp", "train.compile=blocks")),
    "ddp, train.compile=true": (fitted, ("parallel=ddp", "train.compile=true")),
    "fsdp, train.compile=true": (fitted, ("parallel=fsdp", "train.compile=true")),
    "a loop of one's own": (own_loop, ("parallel=ddp",)),
}


WORDS = (
    "group=inline",
    "backend=gloo",
    "watch.progress=none",
    f"data.batch_size={BATCH}",
    "checkpoint.every=100000",
)


def struck(config: Any, loop: Loop, folder: str) -> None:
    """On a rank: train; the last rank is killed once."""
    me = raydist.rank()
    loop(config, lambda step: strike(Path(folder), step, me.rank, me.world_size))


def timed(config: Any, loop: Loop, folder: str, side: int) -> list[float]:
    """On a rank: train in turns with the other side's run; return the seconds of each block."""
    turns, seconds = Turns(Path(folder) / "turns", side), list[float]()
    began = time.perf_counter()

    def note(step: int) -> None:
        nonlocal began
        if step and step % BLOCK == 0:
            seconds.append(time.perf_counter() - began)
            turns.end(step // BLOCK)
            if step < config.train.steps:
                turns.wait(step // BLOCK)
            began = time.perf_counter()

    loop(config, note)
    return seconds[WARM:]


class Turns:
    """How many blocks of steps each rank of two runs has made, in a file that all of them map."""

    def __init__(self, path: Path, side: int) -> None:
        with path.open("r+b") as file:
            self.made = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self.side = side
        self.own = side * EVEN_RANKS + raydist.rank().rank

    def end(self, made: int) -> None:
        """Note that this rank has made so many blocks."""
        self.made[self.own] = made

    def wait(self, made: int) -> None:
        """Wait until all ranks of the other side have made as many; the first side is ahead."""
        other = (1 - self.side) * EVEN_RANKS
        while min(self.made[other : other + EVEN_RANKS]) < made + self.side:
            time.sleep(0.001)


def turn(loop: Loop, *words: str) -> float:
    """One run; the seconds from the signal until the next step on rank 0."""
    more = (f"scale=1x{RANKS}", f"train.steps={STEPS}", "snapshot.every=1")
    with tempfile.TemporaryDirectory() as folder:
        raydist.run(struck, *WORDS, *more, *words, loop=loop, folder=folder)
        return recovery(Path(folder))


def even_pairs(loop: Loop, rounds: int) -> dict[str, list[float]]:
    """Two runs in which nothing fails, block by block in turns; their steps per second."""
    steps = (WARM + PAIRS * rounds) * BLOCK
    more = (f"scale=1x{EVEN_RANKS}", f"train.steps={steps}", "snapshot.every=1")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "turns").write_bytes(bytes(2 * EVEN_RANKS * 8))
        runs = {
            side: raydist.submit(
                timed,
                *WORDS,
                *more,
                f"restart.in_place={how}",
                f"hydra.run.dir={folder}/{how}",
                loop=loop,
                folder=folder,
                side=number,
            )
            for number, (side, how) in enumerate({"in place": "auto", "off": "off"}.items())
        }
        blocks = {side: run.result().values[0] or [] for side, run in runs.items()}
    return {side: [BLOCK / seconds for seconds in each] for side, each in blocks.items()}


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
    return [*lines, "", *even(rounds)]


def even(rounds: int) -> list[str]:
    """The rows of runs in which nothing fails."""
    sides = ("in place", "off")
    lines = [f"| nothing fails | {heads(sides, 'in place')} | 95% of it |", "|---" * 5 + "|"]
    for name, loop in {"raydist.fit": fitted, "raydist.Recoverable": own_loop}.items():
        print(f"in_place: {name}, nothing fails", flush=True)
        figures = even_pairs(loop, rounds)
        least, most = interval(*figures.values())
        cells = row(figures, "in place", "steps/s")
        lines.append(f"| {name} | {cells} | {least:.3f} to {most:.3f} |")
    return lines


def interval(some: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Where the median of the ratios lies 19 times of 20, by drawing pairs again (bootstrap)."""
    ratios = [one / other for one, other in zip(some, others, strict=True)]
    drawn = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000))
    return drawn[25], drawn[974]
