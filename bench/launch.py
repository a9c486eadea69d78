"""Seconds from the call until the first all-reduce has returned on all ranks, Ray being up already.

raydist.run beside Ray Train's TorchTrainer and torchrun, 2 to 16 ranks on this machine: as the
first call of a program that is connected to Ray, which has to import all that it needs, and as a
further one (a notebook, --multirun).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.measure import BACKEND, alternate, heads, join_torchrun, rank_device, row

RANKS = (2, 4, 8, 16)


def first_all_reduce() -> float:
    """On a rank: the time at which its first all-reduce had returned."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(one := torch.ones(1, device=rank_device()))
    one.item()  # a GPU has only queued it
    return time.time()


def turn_raydist(ranks: int) -> float:
    began = time.time()
    import raydist

    done = raydist.run(
        first_all_reduce, f"scale=1x{ranks}", f"backend={BACKEND}", "watch.progress=none"
    )
    return max(value for value in done.values if value) - began


def turn_first(whose: str, ranks: int) -> float:
    """The same as the first call of a program that is connected to Ray already, as this one is."""
    command = [sys.executable, "-m", "bench.launch", "first", whose, str(ranks)]
    return float(subprocess.run(command, check=True, capture_output=True).stdout.split()[-1])


def turn_ray_train(ranks: int) -> float:
    began = time.time()
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:

        def loop() -> None:
            from ray import train

            at = first_all_reduce()
            Path(folder, str(train.get_context().get_world_rank())).write_text(str(at))

        TorchTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=ranks),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def turn_torchrun(ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        began = time.time()
        subprocess.run(
            [*command, __file__, folder],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def main(rounds: int = 3, ranks: tuple[int, ...] = RANKS) -> list[str]:
    """The table's rows."""
    import ray

    ray.init(
        "local",
        num_cpus=max(ranks) + 1,
        include_dashboard=True,
        logging_level="ERROR",
        log_to_driver=False,
    )
    os.environ["RAY_ADDRESS"] = (
        ray.get_runtime_context().gcs_address
    )  # for the programs of turn_first
    again = {"raydist": turn_raydist, "Ray Train": turn_ray_train, "torchrun": turn_torchrun}
    first = {name: partial(turn_first, name) for name in CALLS} | {"torchrun": turn_torchrun}
    lines = []
    for kind, turns in {"a further call": again, "the first call": first}.items():
        lines += ["", f"| {kind}, ranks | {heads(turns, 'raydist')} |", "|---" * 6 + "|"]
        for count in ranks:
            print(f"launch, {kind}, {count} ranks", flush=True)
            sides = {name: partial(turn, count) for name, turn in turns.items()}
            lines.append(f"| {count} | {row(alternate(sides, rounds), 'raydist', 's')} |")
    ray.shutdown()
    del os.environ["RAY_ADDRESS"]
    return lines[1:]


CALLS = {"raydist": turn_raydist, "Ray Train": turn_ray_train}


def main_first(whose: str, ranks: int) -> None:
    """A program of turn_first."""
    import ray

    ray.init(logging_level="ERROR", log_to_driver=False)
    print(CALLS[whose](ranks))


if __name__ == "__main__" and sys.argv[1] == "first":
    from bench import launch  # by its name: the function travels to the ranks

    launch.main_first(sys.argv[2], int(sys.argv[3]))
elif __name__ == "__main__":  # a rank of torchrun
    import torch.distributed as dist

    join_torchrun()
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(first_all_reduce()))
    dist.destroy_process_group()
