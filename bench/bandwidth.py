"""Bus bandwidth of all_reduce on two gloo ranks: tools.bandwidth beside a plain torch loop under
torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import BACKEND, RANKS, SMALL, alternate, heads, join_torchrun, rank_device, row

SIZE = 256 << 20 if BACKEND == "nccl" and not SMALL else 8 << 20
ITERS, WARM = (2, 1) if SMALL else (100, 5)


def turn_raydist() -> float:
    words = ["--ops", "all_reduce", "--min", str(SIZE), "--max", str(SIZE), "--iters", str(ITERS)]
    command = [
        sys.executable,
        "-m",
        "raydist.tools.bandwidth",
        "--json",
        *words,
        f"--warmup={WARM}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "RAYDIST_RUNS": folder}
        place = ["group=inline", f"scale=1x{RANKS}", f"backend={BACKEND}"]
        done = subprocess.run(
            [*command, *place], check=True, capture_output=True, text=True, env=env
        )
    return float(json.loads(done.stdout)["rows"][0]["busbw"])


def turn_torch() -> float:
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
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, capture_output=True, env=env)
        return min(float(Path(folder, str(rank)).read_text()) for rank in range(RANKS))


def loop() -> float:
    """On a rank of torchrun: GB/s of bus bandwidth, as nccl-tests reckons it."""
    import torch
    import torch.distributed as dist

    join_torchrun()
    numbers = torch.zeros(SIZE // 4, device=rank_device())
    for _ in range(WARM):
        dist.all_reduce(numbers)
    dist.barrier()
    numbers.sum().item()  # a GPU has only queued the all-reduces
    began = time.perf_counter()
    for _ in range(ITERS):
        dist.all_reduce(numbers)
    numbers.sum().item()
    took = (time.perf_counter() - began) / ITERS
    dist.destroy_process_group()
    return SIZE / took / 1e9 * 2 * (RANKS - 1) / RANKS


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    print("bandwidth", flush=True)
    sides = {"raydist": turn_raydist, "plain torch": turn_torch}
    figures = alternate(sides, rounds)
    return [
        f"| {heads(sides, 'raydist')} |",
        "|---|---|---|",
        f"| {row(figures, 'raydist', 'GB/s')} |",
    ]


if __name__ == "__main__":  # a rank of torchrun
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(loop()))
