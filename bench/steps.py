"""Steps per second on two gloo ranks: raydist with report() at every step beside torchrun without.

A small CNN; on GPUs (bench/gpu.py) ResNet-50 in bf16.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import BACKEND, RANKS, SMALL, alternate, join_torchrun, rank_device, row

if TYPE_CHECKING:
    import torch
    from torch import nn

STEPS, WARM, BATCH = (6, 2, 4) if SMALL else (600, 30, 32)


def train(reports: bool) -> float:
    """On a rank: steps per second after the warm-up."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import raydist

    torch.manual_seed(0)
    device = rank_device()
    net, images = network(device)
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = images.to(device), torch.randint(10, (len(images),), device=device)
    began = 0.0
    for step in range(STEPS + WARM):
        if step == WARM:
            began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if reports:
            raydist.report(step=step + 1, steps=STEPS + WARM, loss=loss.item())
        else:
            loss.item()
    return STEPS / (time.perf_counter() - began)


def network(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """The model, and a batch of images for it."""
    import torch
    from torch import nn

    if device.type == "cuda" and not SMALL:
        from torchvision.models import resnet50

        images = torch.randn(64, 3, 224, 224).to(memory_format=torch.channels_last)
        return resnet50(num_classes=10).to(memory_format=torch.channels_last), images
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
    return net, torch.randn(BATCH, 1, 28, 28)


def turn_raydist() -> float:
    import raydist

    done = raydist.run(
        train, f"scale=1x{RANKS}", f"backend={BACKEND}", "watch.progress=none", args=(True,)
    )
    return min(value for value in done.values if value)


def turn_torchrun() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            __file__,
            folder,
        ]
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return min(float(Path(folder, str(rank)).read_text()) for rank in range(RANKS))


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    import ray

    ray.init(
        "local", num_cpus=RANKS, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
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

    join_torchrun()
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(train(reports=False)))
    dist.destroy_process_group()
