"""Horovod started by raydist, by `horovodrun --gloo` and by horovod.ray's RayExecutor: launch, and
steps per second."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import alternate, heads, row
from bench.steps import BATCH, STEPS, WARM

Job = Callable[[], float]
RAYDIST, HOROVODRUN, EXECUTOR = "raydist", "horovodrun", "RayExecutor"


def first_all_reduce() -> float:
    """On a rank: the time at which its first all-reduce had returned."""
    import horovod.torch as hvd
    import torch

    hvd.allreduce(torch.ones(1))
    return time.time()


def train() -> float:
    """On a rank: steps per second of the CNN of bench/steps.py after the warm-up."""
    import horovod.torch as hvd
    import torch
    from torch import nn

    import raydist

    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 10),
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        named_parameters=net.named_parameters(),
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    report: Callable[..., Any] = (
        raydist.report if "raydist.worker.main" in sys.modules else lambda **_: None
    )
    began = 0.0
    for step in range(STEPS + WARM):
        if step == WARM:
            began = time.perf_counter()
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        report(step=step + 1, steps=STEPS + WARM, loss=loss.item())
    return STEPS / (time.perf_counter() - began)


JOBS: dict[str, Job] = {"launch": first_all_reduce, "steps": train}


def by_raydist(job: str, ranks: int) -> list[float]:
    import raydist

    done = raydist.run(JOBS[job], f"scale=1x{ranks}", "backend=horovod", "watch.progress=none")
    return [value for value in done.values if value is not None]


def by_horovodrun(job: str, ranks: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(ranks)]
        command = [*run, sys.executable, "-m", "bench.horovod", job, folder]
        subprocess.run(command, check=True, capture_output=True)
        return [float(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def by_executor(job: str, ranks: int) -> list[float]:
    from horovod.ray import RayExecutor

    # With the interface given it needs not look for one, which takes it seconds more.
    settings = RayExecutor.create_settings(timeout_s=60, nics={"lo"})
    executor = RayExecutor(settings, num_workers=ranks, cpus_per_worker=1)
    executor.start()
    try:
        found: list[float] = executor.run(initialised, args=[job])
        return found
    finally:
        executor.shutdown()


def initialised(job: str) -> float:
    """What the other two leave to the script: Horovod's init, and the job."""
    import horovod.torch as hvd

    hvd.init()
    return JOBS[job]()


def seconds(start: Callable[[str, int], list[float]], ranks: int) -> float:
    """From the call until the last rank's first all-reduce had returned."""
    began = time.time()
    return max(start("launch", ranks)) - began


def steps_per_second(start: Callable[[str, int], list[float]], ranks: int) -> float:
    """Of the slowest rank."""
    return min(start("steps", ranks))


def main(rounds: int = 3, ranks: Sequence[int] = (2, 4, 8)) -> list[str]:
    """The rows of both tables."""
    import ray

    ray.init(
        "local",
        num_cpus=max(ranks) + 1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    starts = {RAYDIST: by_raydist, HOROVODRUN: by_horovodrun, EXECUTOR: by_executor}
    head = f"| {heads(starts, RAYDIST)} |"
    lines = [f"| launch, ranks {head}", "|---|---|---|---|---|---|"]
    for count in ranks:
        print(f"launch, {count} ranks", flush=True)
        sides = {name: partial(seconds, start, count) for name, start in starts.items()}
        lines.append(f"| {count} | {row(alternate(sides, rounds), RAYDIST, 's')} |")
    print("steps, 2 ranks", flush=True)
    sides = {name: partial(steps_per_second, start, 2) for name, start in starts.items()}
    lines += ["", f"| steps, ranks {head}", "|---|---|---|---|---|---|"]
    lines.append(f"| 2 | {row(alternate(sides, rounds), RAYDIST, 'steps/s')} |")
    ray.shutdown()
    return lines


if __name__ == "__main__":  # a rank of horovodrun
    import horovod.torch as hvd

    found = initialised(sys.argv[1])
    Path(sys.argv[2], str(hvd.rank())).write_text(str(found))
