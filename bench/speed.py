"""Levers that keep the meaning: AdamW's part of a step, and raydist.fit beside the DDP loop of
PyTorch's tutorial."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.measure import alternate, heads, row, rows_beside

STEPS, WARM = 40, 6
CASES = (("resnet18", 8), ("gpt", 8), ("gpt", 2))
"""Model, samples of a rank in a step: images of 3 x 32 x 32, or 128 tokens."""
SIDES = ("train.fast=true", "train.fast=true train.compile=true", "train.fast=false", "tutorial")
"""The words for raydist.fit, and the tutorial's loop."""


def made(name: str, batch: int) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """(model, samples of two ranks, loss)"""
    import torch
    import torchvision
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    from raydist.training.gpt import GPT
    from tests.losses import next_token

    torch.manual_seed(0)
    samples = 2 * batch * (STEPS + WARM)
    if name == "gpt":
        tokens = torch.randint(256, (samples, 129), dtype=torch.uint8)
        data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        return GPT("1m"), data, next_token
    data = TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))
    return torchvision.models.resnet18(num_classes=10), data, F.cross_entropy


def optimizer_step(name: str, fused: bool) -> float:
    """Milliseconds of AdamW's step, the median; one thread."""
    import torch

    torch.set_num_threads(1)
    model, _, _ = made(name, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    took = []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - began)
    return statistics.median(took[WARM:]) * 1e3


class Timed:
    """A loss that notes when it is called."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss, self.calls = loss, list[float]()

    def __call__(self, output: Any, target: Any) -> Any:
        self.calls.append(time.perf_counter())
        return self.loss(output, target)

    @property
    def steps_per_s(self) -> float:
        return (len(self.calls) - 1 - WARM) / (self.calls[-1] - self.calls[WARM])


def by_fit(config: Any, name: str, batch: int) -> float:
    """On a rank: steps per second of raydist.fit."""
    import raydist

    model, data, loss = made(name, batch)
    timed = Timed(loss)

    def note(step: int, values: Any) -> None:
        timed.calls.append(time.perf_counter())

    # not the loss: it may be compiled
    raydist.fit(config, model=model, train=data, loss=loss, on_step=note)
    return timed.steps_per_s


def by_tutorial(name: str, batch: int) -> float:
    """On a rank: steps per second of the loop in PyTorch's DDP tutorial (multigpu.py), with
    AdamW."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    module, data, loss = made(name, batch)
    timed, model = Timed(loss), DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches: Any = DataLoader(
        data, batch, pin_memory=True, shuffle=False, sampler=DistributedSampler(data)
    )
    for source, targets in batches:
        optimizer.zero_grad()
        timed(model(source), targets).backward()
        optimizer.step()
    return timed.steps_per_s


def turn(side: str, name: str, batch: int) -> float:
    """Steps per second of the slower rank."""
    import raydist

    words = ["scale=1x2", "backend=gloo", "watch.progress=none"]
    if side == "tutorial":
        done = raydist.run(by_tutorial, *words, args=(name, batch))
    else:
        words += [
            f"data.batch_size={batch}",
            "optim=adamw",
            "optim.lr=0.001",
            "train.epochs=1",
            *side.split(),
        ]
        done = raydist.run(by_fit, *words, name=name, batch=batch)
    return min(value for value in done.values if value)


def main(rounds: int) -> list[str]:
    import ray

    lines = []
    for name in dict(CASES):
        steps = {
            "raydist, fused": partial(optimizer_step, name, True),
            "default": partial(optimizer_step, name, False),
        }
        figures = alternate(steps, rounds)
        lines += [
            f"| AdamW's step | {heads(figures, 'raydist')} |",
            f"| {name} | {row(figures, 'raydist', 'ms')} |",
            "",
        ]
    ray.init(
        "local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    lines += ["| raydist.fit | raydist | tutorial | raydist / tutorial |", "|---" * 4 + "|"]
    for name, batch in CASES:
        found = alternate({side: partial(turn, side, name, batch) for side in SIDES}, rounds)
        lines += [
            f"| {name}, {batch}, {side} | {cells} |"
            for side, cells in rows_beside(found, "tutorial", "steps/s")
        ]
    ray.shutdown()
    return lines
