"""Alternating turns, medians, ratios: a machine that drifts then drifts under both sides."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BACKEND, RANKS = os.environ.get("BENCH_BACKEND", "gloo"), int(os.environ.get("BENCH_RANKS", "2"))
"""What ranks use, and their number; bench/gpu.py sets them, for the programs that a bench starts
too."""
SMALL = "FAKE_GPU" in os.environ
"""Whether the GPUs are those of tests/fake_gpu: each bench then does little, only to run."""
Turn = Callable[[], float]
"""One measured turn; its figure."""


def join_torchrun() -> None:
    """On a rank of torchrun: join the process group."""
    import torch
    import torch.distributed as dist

    if BACKEND == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKEND)


def rank_device() -> torch.device:
    """On a rank: its GPU with nccl, otherwise the CPU."""
    import torch
    import torch.distributed as dist

    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def alternate(sides: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Every side once per round, in turn; the figures of each. A first turn of each side is thrown
    away, except where figures are without meaning (`SMALL`)."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(int(SMALL), rounds + 1):
        for name, turn in sides.items():
            figure = turn()
            print(
                f"  {'warm-up' if number == 0 else f'round {number}'}: {name} {figure:.3f}",
                flush=True,
            )
            if number:
                figures[name].append(figure)
    return figures


def row(figures: Mapping[str, list[float]], ours: str, unit: str) -> str:
    """A line of a Markdown table: the median of each side, then the ratio of ours to each of the
    others', pair by pair.

    Every side whose name begins like `ours` is ours.
    """
    cells = [f"{statistics.median(values):.2f} {unit}" for values in figures.values()]
    for mine in (name for name in figures if name.startswith(ours)):
        for theirs in (name for name in figures if not name.startswith(ours)):
            ratios = [
                one / other for one, other in zip(figures[mine], figures[theirs], strict=True)
            ]
            cells.append(f"{statistics.median(ratios):.3f}")
    return " | ".join(cells)


def rows_beside(
    figures: Mapping[str, list[float]], theirs: str, unit: str
) -> list[tuple[str, str]]:
    """Each other side with its line beside `theirs`, as row() makes it."""
    return [
        (mine, row({mine: figures[mine], theirs: figures[theirs]}, mine, unit))
        for mine in figures
        if mine != theirs
    ]


def heads(sides: Iterable[str], ours: str) -> str:
    """The line above such lines."""
    names = list(sides)
    pairs = [
        f"{mine} / {theirs}"
        for mine in names
        if mine.startswith(ours)
        for theirs in names
        if not theirs.startswith(ours)
    ]
    return " | ".join([*names, *pairs])


def machine() -> str:
    """Where the figures come from."""
    model = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    name = next(
        (
            line.split(":", 1)[1].strip()
            for line in model.splitlines()
            if line.startswith("Model name")
        ),
        "?",
    )
    import ray
    import torch

    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}"
    )
    return f"{os.cpu_count()} x {name}, {versions}"
