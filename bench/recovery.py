"""Seconds from the SIGKILL of one of 2 ranks until the next step is done: raydist beside torchrun
and Ray Train.

All train the same small network, and go on as each does by itself: raydist from its snapshot in
memory, with all ranks forked again and with the killed one alone (restart.in_place), torchrun and
Ray Train from a checkpoint that is saved after each step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# at the top, as a job's file has it: the fork server then has what raydist.fit needs
import raydist
from bench.measure import BACKEND, RANKS, alternate, heads, join_torchrun, rank_device, row

STEPS, STRUCK, TRIES, PATIENCE_S = 60, 30, 20, 60.0


def strike(folder: Path, step: int, rank: int, ranks: int) -> None:
    """Note that a step is done; once, after some of them, the last rank is killed."""
    with (folder / f"{rank}.times").open("a") as times:
        times.write(f"{time.time()} {step}\n")
    # a GPU's steps may be reported two at a time
    if rank == ranks - 1 and step >= STRUCK and not (folder / "killed").exists():
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def recovery(folder: Path) -> float:
    """From the signal to the end of the next step that was not done before, on rank 0."""
    killed = float((folder / "killed").read_text())
    done = [line.split() for line in (folder / "0.times").read_text().splitlines()]
    return min(float(at) for at, step in done if int(step) > STRUCK and float(at) > killed) - killed


def by_raydist(config: Any, folder: str) -> None:
    """On a rank: raydist's own loop."""
    import torch
    from torch.utils.data import TensorDataset

    from raydist.worker import context

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if step := context.current().step:
            strike(Path(folder), step, raydist.rank().rank, raydist.rank().world_size)
        return torch.nn.functional.cross_entropy(output, target)

    data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    raydist.fit(config, train=data, loss=loss, model=network())


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def by_hand(
    folder: Path, save: Callable[[dict[str, Any]], None], found: dict[str, Any] | None
) -> None:
    """On a rank: a loop in plain torch that saves after each step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = rank_device()
    net = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    begin = 0
    if found is not None:
        net.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        begin = found["step"]
    for step in range(begin + 1, STEPS + 1):
        images, labels = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        save({"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        strike(folder, step, dist.get_rank(), dist.get_world_size())


def turn_raydist(*more: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"scale=1x{RANKS}",
            f"backend={BACKEND}",
            "watch.progress=none",
            f"train.steps={STEPS}",
        )
        raydist.run(
            by_raydist, *words, "snapshot.every=1", "checkpoint.every=100000", *more, folder=folder
        )
        return recovery(Path(folder))


def turn_in_place() -> float:
    return turn_raydist("restart.in_place=auto")


def turn_torchrun() -> float:
    """With as many restarts as it needs: often its new ranks find the killed ones' gloo addresses
    in the kept store.

    It is stopped after `PATIENCE_S`, which then is the figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
        ]
        command += [f"--max-restarts={TRIES}", __file__, folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        null = subprocess.DEVNULL
        try:
            subprocess.run(
                command, stdout=null, stderr=null, env=env, check=True, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            return PATIENCE_S
        return recovery(Path(folder))


def turn_ray_train() -> float:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1))
        ranks = ScalingConfig(num_workers=RANKS, use_gpu=BACKEND == "nccl")
        TorchTrainer(lambda: plain(Path(folder)), scaling_config=ranks, run_config=run).fit()
        return recovery(Path(folder))


def plain(folder: Path) -> None:
    """On a rank of the others: where its states lie, and the newest of them."""
    import torch
    import torch.distributed as dist

    path = folder / "state.pt"
    found = torch.load(path, weights_only=True) if path.exists() else None

    def save(state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            torch.save(state, folder / "beside.pt")
            (folder / "beside.pt").rename(path)

    by_hand(folder, save, found)


def main(rounds: int = 3) -> list[str]:
    """The table's rows."""
    import ray

    ray.init(
        "local",
        num_cpus=RANKS + 1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    print("recovery", flush=True)
    turns = {
        "raydist": turn_raydist,
        "raydist in place": turn_in_place,
        "torchrun": turn_torchrun,
        "Ray Train": turn_ray_train,
    }
    lines = [
        f"| {heads(turns, 'raydist')} |",
        "|---" * 8 + "|",
        f"| {row(alternate(turns, rounds), 'raydist', 's')} |",
    ]
    ray.shutdown()
    return lines


if __name__ == "__main__":  # a rank of torchrun
    import torch.distributed as dist

    join_torchrun()
    plain(Path(sys.argv[1]))
    dist.barrier()
    os._exit(
        0
    )  # leaving gloo's group by destroy_process_group was seen to hang here after a restart
