"""Runs a job's file as a program, with python or torchrun. (rank side)

For example `python jobs/digits.py …`, `torchrun jobs/digits.py …`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from raydist.settings import slurm
from raydist.settings.config import Job
from raydist.settings.run_folder import run_folder
from raydist.shared import env_names, kinds
from raydist.shared.errors import RaydistError
from raydist.shared.kinds import Event
from raydist.state import object_store, run_checkpoints
from raydist.worker import backends, context, garbage, target, torch_private

PATH_BYTES = 4096
"""PATH_MAX of Linux."""


def main(function: Callable[..., Any]) -> Any:
    """Run a job's function in this process, with the settings of its command line.

    Returns what the function returns. For the last line of a job's file, under `if __name__ ==
    "__main__":`. The settings are those of `raydist train`. The rank is that of torchrun's
    variables; without them it is rank 0 of 1.

    - `function`: called with `config=` if it has a parameter of that name, and with `job.args` as
      keyword arguments.

    A RaydistError is printed as one line, and ends the process with its exit code (2 for a wrong
    setting). Any other exception is raised. In a process group it is printed instead, and the
    process ends with exit code 1, because a failed rank must not wait for the others.
    """
    try:
        return run_standalone(function, standalone_job(function, sys.argv[1:]))
    except RaydistError as error:
        print(f"error: {error}", file=sys.stderr)
        end_program(error.exit_code)
    except Exception:
        if not in_group():
            raise
        traceback.print_exc()
        end_program(1)


def in_group() -> bool:
    """Report whether this rank has joined a process group and not left it."""
    import torch.distributed as dist

    return dist.is_initialized()


def end_program(code: int) -> NoReturn:
    """End with this exit code, in a process group too.

    There Python's own exit waits for gloo's threads or aborts.
    """
    if not in_group():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def standalone_job(function: Callable[..., Any], overrides: list[str]) -> Job:
    """Return the Job of these overrides, with the function as its target.

    `backend=auto` becomes a backend that this machine has.
    """
    import torch

    from raydist.settings.compose import compose

    slurm.check_task(os.environ)
    job = compose(
        overrides, target=f"{Path(function.__code__.co_filename).absolute()}:{function.__name__}"
    )
    if job.scale.gpus == 0:
        # What the launcher gives to ranks without GPUs; torch has not looked for any yet.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if job.backend.name != "auto":
        return job
    return replace(
        job, backend=replace(job.backend, name="nccl" if torch.cuda.is_available() else "gloo")
    )


def run_standalone(function: Callable[..., Any], job: Job) -> Any:
    """Join the other ranks, call the function, leave."""
    rank = context.Rank.from_env(os.environ)
    if rank.world_size > 1:
        # torch's optimizers import it in their first step. If that happens while a DDP model
        # exists, the process group is never freed, and gloo's threads may abort this process as it
        # exits ("terminate called without an active …").
        torch_private.import_dynamo()
    context.enter(
        context.Context(rank=rank, emit=printer(job.watch.every_s), beat=lambda step, phase: None)
    )
    try:
        with (
            object_store.environment(job.env),  # before gloo and NCCL read theirs
            backends.join(job.backend.name, job, os.environ) as comm,
            in_run_folder(job, comm),
        ):
            if rank.world_size > 1 and job.train.gc:
                garbage.collect_together(job.train.gc)
            return target.call_function(function, job)
    finally:
        context.enter(None)


def rank0_folder(job: Job, comm: backends.Comm) -> Path:
    """Return rank 0's run folder on all ranks: each has composed one with the time in its name."""
    import torch

    if folder := os.environ.get(env_names.RUN_DIR):
        return Path(folder)
    raw = os.fsencode(Path(job.dir).absolute())
    padded = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return Path(os.fsdecode(comm.gather(padded)[0].numpy().tobytes().rstrip(b"\0")))


@contextmanager
def in_run_folder(job: Job, comm: backends.Comm) -> Iterator[None]:
    """Set the run folder of this rank, and the variables of the checkpoint to resume from.

    A collective.
    """
    import torch

    current, run_dir = context.current(), rank0_folder(job, comm)
    current.rank = replace(current.rank, run_dir=run_dir)
    variables: dict[str, str] = {}
    if env_names.RESUME not in os.environ:
        run = run_folder(replace(job, dir=str(run_dir)))
        start = run_checkpoints.find_resume(job.resume, run, context.warn)
        folder = run_checkpoints.folder_for(run, start)
        variables = {env_names.RESUME: str(start or ""), env_names.CHECKPOINTS: str(folder)}
        comm.gather(torch.zeros(1))  # all ranks have looked before one of them saves
    with object_store.environment(variables):
        yield


def printer(every_s: float) -> Callable[[Event], None]:
    """Return a function that prints rank 0's events.

    It prints one step every `every_s` seconds and the last one, all other events at once.
    """
    last = time.monotonic() - every_s

    def emit(event: Event) -> None:
        nonlocal last
        if isinstance(event, kinds.OfRank | kinds.Warning) and event.rank:
            return
        if isinstance(event, kinds.Report) and event.step != event.values.get("steps", event.step):
            if time.monotonic() - last < every_s:
                return
            last = time.monotonic()
        if line := context.event_line(event):
            print(line, flush=True)

    return emit
