"""Seconds from the call until the first all-reduce has returned on all ranks, Ray being up already.

raydist.run beside Ray Train's TorchTrainer and torchrun, 2 to 16 ranks on this machine. The first call of a program has
to wait for torch; each further one (a notebook, --multirun) finds a fork server that has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.measure import alternate, heads, row

RANKS = (2, 4, 8, 16)


def first_all_reduce() -> float:
    """On a rank: the time at which its first all-reduce had returned."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    return time.time()


def turn_raydist(ranks: int) -> float:
    import raydist

    began = time.time()
    done = raydist.run(first_all_reduce, f"scale=1x{ranks}", "backend=gloo", "watch.progress=none")
    return max(value for value in done.values if value) - began


def turn_first(ranks: int) -> float:
    """The first call of a program that is connected to Ray already, as this one is."""
    done = subprocess.run([sys.executable, "-m", "bench.launch", "first", str(ranks)], check=True, capture_output=True)
    return float(done.stdout.split()[-1])


def turn_ray_train(ranks: int) -> float:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:

        def loop() -> None:
            from ray import train

            at = first_all_reduce()
            Path(folder, str(train.get_context().get_world_rank())).write_text(str(at))

        began = time.time()
        TorchTrainer(
            loop, scaling_config=ScalingConfig(num_workers=ranks), run_config=RunConfig(storage_path=folder)
        ).fit()
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def turn_torchrun(ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        began = time.time()
        subprocess.run(
            [*command, __file__, folder], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def main(rounds: int = 3, ranks: tuple[int, ...] = RANKS) -> list[str]:
    """The table's rows."""
    import ray

    ray.init(num_cpus=max(ranks) + 1, include_dashboard=True, logging_level="ERROR", log_to_driver=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for the programs of turn_first
    turns = {"raydist": turn_raydist, "raydist, first call": turn_first,
             "Ray Train": turn_ray_train, "torchrun": turn_torchrun}  # fmt: skip
    lines = [f"| ranks | {heads(turns, 'raydist')} |", "|---" * 9 + "|"]
    for count in ranks:
        print(f"launch, {count} ranks", flush=True)
        sides = {name: partial(turn, count) for name, turn in turns.items()}
        lines.append(f"| {count} | {row(alternate(sides, rounds), 'raydist', 's')} |")
    ray.shutdown()
    del os.environ["RAY_ADDRESS"]
    return lines


def main_first(ranks: int) -> None:
    """A program of turn_first."""
    import ray

    ray.init(logging_level="ERROR", log_to_driver=False)
    print(turn_raydist(ranks))


if __name__ == "__main__" and sys.argv[1] == "first":
    from bench import launch  # by its name: the function travels to the ranks

    launch.main_first(int(sys.argv[2]))
elif __name__ == "__main__":  # a rank of torchrun
    import torch.distributed as dist

    dist.init_process_group("gloo")
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(first_all_reduce()))
    dist.destroy_process_group()
