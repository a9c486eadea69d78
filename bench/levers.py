"""Levers of speed on two gloo ranks: the first compiled step of a second start, and collections at
the same step."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from bench.measure import alternate, row

STEPS, OBJECTS = 300, 1_000_000


def first_step(width: int) -> float:
    """On a rank: seconds of the first step of a compiled model."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
    ]
    model = torch.compile(nn.Sequential(*layers))
    began = time.perf_counter()
    model(torch.randn(16, width)).sum().backward()
    return time.perf_counter() - began


def steps(every: int) -> tuple[float, float]:
    """On a rank with many objects: (mean, 99th percentile) of the seconds of a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    kept: list[Any] = [[i] for i in range(OBJECTS)]
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, took = torch.randn(64, 256), []
    shift = torch.distributed.get_rank() * 2500  # ranks do not allocate alike
    for step in range(STEPS):
        began = time.perf_counter()
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        at = (step * 10_000 + shift) % OBJECTS
        kept[at : at + 10_000] = [
            [i] for i in range(min(10_000, OBJECTS - at))
        ]  # as a cache of samples
        took.append(time.perf_counter() - began)
    took = took[20:]
    return statistics.mean(took), sorted(took)[int(len(took) * 0.99)]


def start(width: int) -> float:
    import raydist

    done = raydist.run(
        first_step, "scale=1x2", "backend=gloo", "watch.progress=none", args=(width,)
    )
    return max(value for value in done.values if value)


def collect(every: int) -> tuple[float, float]:
    import raydist

    done = raydist.run(
        steps,
        "scale=1x2",
        "backend=gloo",
        "watch.progress=none",
        f"train.gc={every}",
        args=(every,),
    )
    return done.values[0] or (0.0, 0.0)


def main(rounds: int) -> list[str]:
    lines = []
    firsts, seconds = [], []
    for _ in range(rounds + 1):
        width = random.randrange(100, 999)  # of which no cache knows anything
        firsts.append(start(width))
        seconds.append(start(width))
        print(f"  first start {firsts[-1]:.2f} s, second {seconds[-1]:.2f} s", flush=True)
    starts = {"raydist, second start": seconds[1:], "first start": firsts[1:]}
    lines += [
        "first compiled step | second start | first start | second / first",
        row(starts, "raydist", "s"),
        "",
    ]
    tails: dict[str, list[float]] = {"raydist, train.gc=50": [], "train.gc=0": []}

    def turn(name: str, every: int) -> float:
        mean, tail = collect(every)
        tails[name].append(tail * 1e3)
        return mean * 1e3

    means = alternate(
        {
            "raydist, train.gc=50": lambda: turn("raydist, train.gc=50", 50),
            "train.gc=0": lambda: turn("train.gc=0", 0),
        },
        rounds,
    )
    tails = {name: values[1:] for name, values in tails.items()}
    lines += ["step | train.gc=50 | train.gc=0 | ratio", f"mean: {row(means, 'raydist', 'ms')}"]
    return [*lines, f"99th percentile: {row(tails, 'raydist', 'ms')}"]
