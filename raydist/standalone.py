"""A job's file as a program of its own: `python jobs/digits.py …`, `torchrun jobs/digits.py …`. (rank side)"""

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

from raydist import backends, checkpoint, context, storage, target
from raydist.config import Job
from raydist.errors import RaydistError
from raydist.events import Event

LONGEST_PATH = 4096


def main(function: Callable[..., Any]) -> Any:
    """Run a job's function on this rank: the command line has the same words as `python -m raydist.train`.

    torchrun's variables say which rank this is; without them it is the only one. Gives back what the function returns.
    """
    try:
        return run_rank(function, settings(function, sys.argv[1:]))
    except RaydistError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(error.exit_code)
    except Exception:
        if not in_group():
            raise
        traceback.print_exc()
        leave(1)


def in_group() -> bool:
    """Whether this rank failed among others, whose group it has not left."""
    import torch.distributed as dist

    return dist.is_initialized()


def leave(code: int) -> NoReturn:
    """End with this code, also from within a group: there Python's own end waits for gloo's threads, or aborts."""
    if not in_group():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def settings(function: Callable[..., Any], words: list[str]) -> Job:
    """The Job that the words say, with the function's file as its target and a backend that this machine has."""
    import torch

    from raydist.words.compose import compose

    job = compose(words, target=f"{Path(function.__code__.co_filename).absolute()}:{function.__name__}")
    if job.backend.name != "auto":
        return job
    return replace(job, backend=replace(job.backend, name="nccl" if torch.cuda.is_available() else "gloo"))


def run_rank(function: Callable[..., Any], job: Job) -> Any:
    """Join the other ranks, call the function, leave."""
    me = context.Rank.from_env(os.environ)
    context.enter(context.Context(rank=me, emit=printer(job.watch.every_s), beat=lambda step, phase: None))
    try:
        with backends.join(job.backend.name, job, os.environ) as comm, standing_in(job, rank0_folder(job, comm)):
            return target.call(function, job)
    finally:
        context.enter(None)


def rank0_folder(job: Job, comm: backends.Comm) -> Path:
    """One run folder for all: each rank has made up its own, with the second in its name."""
    import torch

    if named := os.environ.get("RAYDIST_RUN_DIR"):
        return Path(named)
    raw = os.fsencode(Path(job.dir).absolute())
    padded = torch.zeros(LONGEST_PATH, dtype=torch.uint8)
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return Path(os.fsdecode(comm.gather(padded)[0].numpy().tobytes().rstrip(b"\0")))


@contextmanager
def standing_in(job: Job, run_dir: Path) -> Iterator[None]:
    """This rank in its run folder, and with the checkpoint that it is to go on from."""
    here = context.here()
    here.rank = replace(here.rank, run_dir=run_dir)
    told: dict[str, str] = {}
    if "RAYDIST_RESUME" not in os.environ:
        folder = storage.run_folder(replace(job, dir=str(run_dir)))
        with storage.environment(job.env):
            found = checkpoint.find(job.resume, folder, lambda text: context.tell("warning", text=text))
        told |= {"RAYDIST_RESUME": str(found or ""), "RAYDIST_CHECKPOINTS": str(folder / "checkpoints")}
    with storage.environment(told):
        yield


def printer(every_s: float) -> Callable[[Event], None]:
    """Prints what rank 0 tells: of steps one every `every_s` seconds and the last, all else at once."""
    last = time.monotonic() - every_s

    def emit(happened: Event) -> None:
        nonlocal last
        values = happened.get("values", {})
        if happened["rank"] != 0 or happened["kind"] not in ("report", "saved", "warning"):
            return
        if "steps" in values and happened.get("step") != values["steps"]:
            if time.monotonic() - last < every_s:
                return
            last = time.monotonic()
        print(context.line(happened), flush=True)

    return emit
