"""Seconds that a program somebody has already takes, from the command until its first all-reduce on
all ranks.

raydist.tools.launch and raydist.run beside torchrun; with Horovod beside horovodrun, with mpi4py
beside mpirun. The program is the same file, unchanged; the first call of a process has to wait for
torch, each further one finds a fork server that has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.measure import alternate, heads, row

RANKS = (2, 16)
TORCH = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(time.time()))
dist.destroy_process_group()
"""
HOROVOD = """
import os, sys, time, torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1))
open(os.path.join(sys.argv[1], str(hvd.rank())), "w").write(str(time.time()))
"""
MPI = """
import os, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.allreduce(1)
open(os.path.join(sys.argv[1], str(MPI.COMM_WORLD.rank)), "w").write(str(time.time()))
"""


def until_all(program: str, ranks: int, launch: Callable[[Path, str], None]) -> float:
    """Seconds from now until the last of the ranks has written its time. `launch`: given the
    program and its folder."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(program)
        began = time.time()
        launch(script, folder)
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def by_run(backend: str, ranks: int, script: Path, folder: str) -> None:
    """In this process: what a notebook or a sweep does."""
    from raydist.flow import run_job
    from raydist.settings import compose

    words = [f"script={script}", f"args={folder}", f"backend={backend}", f"scale=1x{ranks}"]
    run_job(compose.compose([*words, "watch.progress=none", "watch.output=none"], claim=True))


def by_command(command: Sequence[str], script: Path, folder: str) -> None:
    """A program of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script), folder], check=True, capture_output=True, env=env)


def table(
    program: str, ours: str, backend: str, others: dict[str, str], rounds: int, ranks: Sequence[int]
) -> list[str]:
    """Rows of one kind of program. `ours`, `others`: commands, with {ranks} for their number."""
    lines: list[str] = []
    for count in ranks:
        print(f"scripts, {backend}, {count} ranks", flush=True)
        commands = {"raydist, command": ours, **others}
        ways = {
            name: partial(by_command, text.format(ranks=count).split())
            for name, text in commands.items()
        }
        every: dict[str, Callable[[Path, str], None]] = {
            "raydist": partial(by_run, backend, count),
            **ways,
        }
        sides = {name: partial(until_all, program, count, way) for name, way in every.items()}
        if not lines:
            lines = [
                f"| ranks | {heads(sides, 'raydist')} |",
                "|---" * (1 + len(sides) + 2 * len(others)) + "|",
            ]
        lines.append(f"| {count} | {row(alternate(sides, rounds), 'raydist', 's')} |")
    return lines


def main(rounds: int = 3, ranks: tuple[int, ...] = RANKS) -> list[str]:
    """The tables' rows."""
    import ray

    ray.init(
        "local",
        num_cpus=max(ranks) + 1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    python = sys.executable
    torchrun = {
        "torchrun": f"{python} -m torch.distributed.run --standalone --nproc-per-node={{ranks}}"
    }
    launch = f"{python} -m raydist.tools.launch --nproc-per-node={{ranks}}"
    lines = table(TORCH, launch, "script", torchrun, rounds, ranks)
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    if horovodrun := shutil.which("horovodrun", path=path):
        others = {"horovodrun": f"{python} {horovodrun} --gloo -np {{ranks}} {python}"}
        lines += [
            "",
            *table(HOROVOD, f"{launch} backend=horovod", "horovod", others, rounds, ranks),
        ]
    if mpirun := shutil.which("mpirun", path=path):
        others = {"mpirun": f"{mpirun} --allow-run-as-root --oversubscribe -np {{ranks}} {python}"}
        lines += ["", *table(MPI, f"{launch} backend=mpi", "mpi", others, rounds, ranks)]
    ray.shutdown()
    del os.environ["RAY_ADDRESS"]
    return lines
