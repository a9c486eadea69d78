"""Seconds of whole commands, from the shell until they have exited: a program that does one
all-reduce and ends.

`python -m raydist.tools.launch` beside `python -m torch.distributed.run`. Without Ray, and on a Ray
that is up; each as the first command of a person, and as a further one, for which the fork server
of the one before is still there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial

from bench.measure import alternate, heads, rows_beside

RANKS = (2, 16)
LAUNCH = [sys.executable, "-m", "raydist.tools.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PAUSE_S = 2.0
"""Seconds between two commands, of each kind: nobody types faster, and what the one before has left
ends meanwhile."""


def turn(command: list[str], ranks: int, env: Mapping[str, str]) -> float:
    """Run a command to its end; its seconds."""
    time.sleep(PAUSE_S)
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        began = time.monotonic()
        whole = [*command, f"--nproc-per-node={ranks}", __file__]
        done = subprocess.run(
            whole,
            cwd=folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    return took


def first(ranks: int, env: Mapping[str, str]) -> float:
    """A command for which no server waits."""
    end_servers(env)
    return turn(LAUNCH, ranks, env)


def end_servers(env: Mapping[str, str]) -> None:
    """End the fork servers that commands have left."""
    warm = [sys.executable, "-m", "raydist.tools.warm", "--end"]
    subprocess.run(warm, env={**os.environ, **env}, check=True, stdout=subprocess.DEVNULL)


def main(rounds: int = 3, ranks: tuple[int, ...] = RANKS) -> list[str]:
    """The table's rows."""
    import ray

    os.environ["OMP_NUM_THREADS"] = "1"
    lines = [f"| command, ranks | {heads(('raydist', 'torchrun'), 'raydist')} |", "|---" * 4 + "|"]
    with (
        tempfile.TemporaryDirectory(prefix="b-") as apart,
        tempfile.TemporaryDirectory(prefix="b-") as beside,
    ):
        ray.init(
            "local",
            num_cpus=max(ranks) + 1,
            include_dashboard=True,
            logging_level="ERROR",
            log_to_driver=False,
        )
        alone = {"TMPDIR": apart, "RAY_TMPDIR": apart}  # where no Ray has left its address
        on_ray = {"TMPDIR": beside, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        for count in ranks:
            sides = {
                "no Ray, first": partial(first, count, alone),
                "no Ray, further": partial(turn, LAUNCH, count, alone),
                "Ray up, first": partial(first, count, on_ray),
                "Ray up, further": partial(turn, LAUNCH, count, on_ray),
                "torchrun": partial(turn, TORCHRUN, count, alone),
            }
            print(f"commands, {count} ranks", flush=True)
            found = alternate(sides, rounds)
            lines += [
                f"| {name}, {count} | {cells} |"
                for name, cells in rows_beside(found, "torchrun", "s")
            ]
        for env in (alone, on_ray):
            end_servers(env)
        ray.shutdown()
    return lines


if __name__ == "__main__":  # a rank
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
