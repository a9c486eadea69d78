"""Seconds of a sweep of 12 trials, each a training of two ranks on digits, from the call until all
results are there.

raydist.sweep beside raydist.run in a loop, and beside Ray Tune with Ray Train (a Tune trial calls
TorchTrainer.fit, as Ray's guide says). The training is the same function on all sides: plain torch,
DDP, gloo; its imports are at the top of its file, as in most programs. Ray is up, with CPUs for
four trials at a time on whatever the machine has; Tune gets max_concurrent_trials=4.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raydist
from bench.measure import alternate, heads, row

RATES = [0.001 * 2**number for number in range(12)]
AT_A_TIME, EPOCHS = 4, 4


def training(rate: float, report: Callable[..., None]) -> float:
    """Train on digits on this rank and the others; the last loss."""
    inputs, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets)
    x, y = x[dist.get_rank() :: 2], y[dist.get_rank() :: 2]
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for step in range(0, len(x), 32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[step : step + 32]), y[step : step + 32])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        report(loss=loss.item())
    return loss.item()


def on_raydist(config: Any) -> float:
    return training(config.optim.lr, raydist.report)


def turn_sweep() -> float:
    began = time()
    rates = ",".join(map(str, RATES))
    done = raydist.sweep(on_raydist, f"optim.lr={rates}", *WORDS, "sweep.objective=min:loss")
    assert len(done.results) == len(RATES)
    return time() - began


def turn_serial() -> float:
    began = time()
    for rate in RATES:
        raydist.run(on_raydist, f"optim.lr={rate}", *WORDS)
    return time() - began


WORDS = ("scale=1x2", "backend=gloo", "watch.progress=none")


def trainable(config: Mapping[str, float], folder: str) -> None:
    from ray import train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    def loop(config: Mapping[str, float]) -> None:
        training(config["rate"], lambda **values: train.report(values))

    TorchTrainer(
        loop,
        train_loop_config=dict(config),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=folder, name=f"train-{config['rate']}", callbacks=[TuneReportCallback()]
        ),
    ).fit()


def turn_tune() -> float:
    began = time()
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        # a trial holds next to nothing itself: its workers have room for AT_A_TIME trials, so none
        # waits for another
        wanted = tune.with_resources(partial(trainable, folder=folder), {"CPU": 0.01})
        done = tune.Tuner(
            wanted,
            param_space={"rate": tune.grid_search(RATES)},
            tune_config=tune.TuneConfig(max_concurrent_trials=AT_A_TIME, metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        assert len(done) == len(RATES)
        assert not done.errors, done.errors[0]
        assert all((each.metrics or {}).get("loss") for each in done)
    return time() - began


def main(rounds: int = 1) -> list[str]:
    """The table's rows."""
    import ray

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    ray.init(
        "local",
        num_cpus=2 * AT_A_TIME + 1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    sides = {"raydist.sweep": turn_sweep, "serial": turn_serial, "Ray Tune + Ray Train": turn_tune}
    figures = alternate(sides, rounds)
    ray.shutdown()
    return [
        f"| {heads(figures, 'raydist')} |",
        "|---" * 5 + "|",
        f"| {row(figures, 'raydist', 's')} |",
    ]
