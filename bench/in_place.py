"""Seconds from the SIGKILL of one of 4 ranks until the next step is done: only that rank is forked
(restart.in_place), or all of them are.

With DDP and with FSDP. The same job and the same figure as in bench/recovery.py.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import raydist
from bench.measure import alternate
from bench.recovery import STEPS, by_raydist, recovery

RANKS = 4
CASES = {
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp", "parallel.blocks=Linear"),
}


def turn(*words: str) -> float:
    """One run; the seconds from the signal until the next step on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        raydist.run(
            by_raydist,
            f"scale=1x{RANKS}",
            "group=inline",
            "backend=gloo",
            "watch.progress=none",
            f"train.steps={STEPS}",
            "snapshot.every=1",
            "checkpoint.every=100000",
            *words,
            folder=folder,
        )
        return recovery(Path(folder))


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    lines = ["| 4 ranks | in place | all forked | in place / all forked |", "|---" * 4 + "|"]
    for name, words in CASES.items():
        print(f"in_place: {name}", flush=True)
        sides: dict[str, Callable[[], float]] = {
            how: partial(turn, *words, f"restart.in_place={how}") for how in ("on", "off")
        }
        figures = alternate(sides, rounds)
        here, anew = (statistics.median(figures[how]) for how in ("on", "off"))
        ratio = statistics.median(
            one / other for one, other in zip(figures["on"], figures["off"], strict=True)
        )
        lines.append(f"| {name} | {here:.2f} s | {anew:.2f} s | {ratio:.3f} |")
    return lines
