"""Bus bandwidth of all_reduce on two gloo ranks: tools.bandwidth beside a plain torch loop under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import alternate, heads, row

SIZE, ITERS, WARM = 8 << 20, 100, 5


def turn_raydist() -> float:
    words = ["--ops", "all_reduce", "--min", str(SIZE), "--max", str(SIZE), "--iters", str(ITERS)]
    command = [sys.executable, "-m", "raydist.tools.bandwidth", "--json", *words, f"--warmup={WARM}"]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "RAYDIST_RUNS": folder}
        place = ["group=inline", "scale=1x2", "backend=gloo"]
        done = subprocess.run([*command, *place], check=True, capture_output=True, text=True, env=env)
    return float(json.loads(done.stdout)["rows"][0]["busbw"])


def turn_torch() -> float:
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
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, capture_output=True, env=env)
        return min(float(Path(folder, str(rank)).read_text()) for rank in range(2))


def loop() -> float:
    """On a rank of torchrun: GB/s; of two ranks busbw is algbw."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    numbers = torch.zeros(SIZE // 4)
    for _ in range(WARM):
        dist.all_reduce(numbers)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ITERS):
        dist.all_reduce(numbers)
    took = (time.perf_counter() - began) / ITERS
    dist.destroy_process_group()
    return SIZE / took / 1e9


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    print("bandwidth", flush=True)
    sides = {"raydist": turn_raydist, "plain torch": turn_torch}
    figures = alternate(sides, rounds)
    return [f"| {heads(sides, 'raydist')} |", "|---|---|---|", f"| {row(figures, 'raydist', 'GB/s')} |"]


if __name__ == "__main__":  # a rank of torchrun
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(loop()))
