"""Steps per second of a small CNN on two gloo ranks: raydist with report() at every step beside torchrun without."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import alternate, row

STEPS, WARM, BATCH = 600, 30, 32


def train(told: bool) -> float:
    """On a rank: steps per second after the warm-up."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import raydist

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 7 * 7, 10),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    began = 0.0
    for step in range(STEPS + WARM):
        if step == WARM:
            began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if told:
            raydist.report(step=step + 1, steps=STEPS + WARM, loss=loss.item())
        else:
            loss.item()
    return STEPS / (time.perf_counter() - began)


def turn_raydist() -> float:
    import raydist

    done = raydist.run(train, "scale=1x2", "backend=gloo", "watch.progress=none", args=(True,))
    return min(value for value in done.values if value)


def turn_torchrun() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            __file__,
            folder,
        ]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return min(float(Path(folder, str(rank)).read_text()) for rank in range(2))


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    print("steps", flush=True)
    figures = alternate({"raydist": turn_raydist, "torchrun": turn_torchrun}, rounds)
    ray.shutdown()
    return [
        "| raydist, report() each step | torchrun | raydist / torchrun |",
        "|---|---|---|",
        f"| {row(figures, 'raydist', 'steps/s')} |",
    ]


if __name__ == "__main__":  # a rank of torchrun
    import torch.distributed as dist

    dist.init_process_group("gloo")
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(train(told=False)))
    dist.destroy_process_group()
