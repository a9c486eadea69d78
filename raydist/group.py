"""The gang of seats: open, start, stop, ask; whatever carries them (Ray's actors, or a thread here). (driver)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydist import script, shipping
from raydist.config import Job, as_dict
from raydist.errors import ConfigError, LaunchError
from raydist.events import Events
from raydist.fabric import Meet, Var
from raydist.node.place import make_seat
from raydist.node.probe import Facts
from raydist.placement import Plan

OPEN_S = 300.0
"""Longest wait for a node to import torch: a cold network file system takes minutes."""
CLOSE_S = 2.0
"""Longest wait for seats to let go before their actors are killed."""

Call = Callable[..., "Future[Any]"]
"""(rank, method, *arguments) -> the answer to come."""


class Gang(AbstractContextManager["Gang"]):
    """All seats of a run. One round opens them, one starts the ranks; vigil.py then listens."""

    def __init__(
        self,
        plan: Plan,
        call: Call,
        events: Events,
        gpus: Callable[[], Sequence[Sequence[str] | None]] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`gpus`: each rank's GPUs, where somebody keeps account. `settle`: what can wait until the ranks have met."""
        self.plan = plan
        self.call = call
        self.settle = settle
        self.facts: tuple[Facts, ...] = ()
        self.meet = Meet()
        self._events = events
        self._gpus = gpus

    def open(self, job: Job, modules: Sequence[str], home: dict[str, Any] | None = None) -> None:
        """Round 1: probe every node, warm its fork server, open the store on rank 0's node.

        `home`: a server that is on its way already on the driver's machine, as home.warm offers it.
        """
        began = time.time()
        file = Path(job.dir).absolute() / "rendezvous" if job.init_method == "file" else None
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
        store = "horovod" if job.backend.name == "horovod" else "tcp"
        same = {
            "run": uuid.uuid4().hex[:8], "start": job.start, "modules": list(modules), "env": job.env,
            "interface": job.fabric.interface, "threads": max(1, int(job.scale.cpus)),
            "shared": file and str(file.parent), "home": home,
            "mpirun": job.backend.mpi.mpirun, "secret": secrets.token_hex(32),
        }  # fmt: skip
        asks = [
            {
                **same,
                "rank": seat.rank,
                "node": seat.node.id,
                "ip": seat.node.ip,
                "lead": seat.local_rank == 0,
                "store": store if seat.rank == 0 and file is None else None,
            }
            for seat in self.plan.seats
        ]
        answers = self.every("open", asks, patience=OPEN_S)
        born = max(began, *(answer["born"] for answer in answers))
        self._events.say("phase", name="actors", s=born - began)
        self._events.say("phase", name="warm-up", s=time.time() - born)
        self.facts = tuple(self._facts(answers))
        self._warn(answers)
        self._refuse_blind(answers, file)
        port, secret = answers[0]["store"] or (None, "")
        self.meet = Meet(self.facts[0].address, port, str(file) if file else None, secret)

    def start(self, job: Job, variables: Sequence[Iterable[Var]], call: bytes | None) -> None:
        """Round 2: give every rank its variables, and fork. `call`: a pickled function, if one travels."""
        sent = shipping.root(job)
        program = seen_from(sent or os.getcwd(), job.script)
        paths = [path for path in sys.path if not sent or os.path.abspath(path) != sent]
        cwd = "" if sent else os.getcwd()  # a seat that is told no folder takes its actor's: the copy
        same = {"job": as_dict(job), "cwd": cwd, "script": program, "sys_path": paths}
        envs = [{var.name: var.value for var in own} for own in variables]
        args = [script.fill(job.args, env, job.init_method, self.plan.ask.backend) for env in envs]
        first = program or job.job.target
        specs = [{**same, "rank": i, "env": env, "argv": [first, *args[i]]} for i, env in enumerate(envs)]
        pids = self.every("start", [(spec, call) for spec in specs])
        for seat, pid in zip(self.plan.seats, pids, strict=True):
            self._events.say("began", rank=seat.rank, host=seat.node.host, pid=pid)

    def stop(self, ranks: Iterable[int], grace: float) -> None:
        """End these ranks: SIGTERM, `grace` seconds, SIGKILL. Does not wait; whoever listens hears their ends."""
        for rank in ranks:
            self.call(rank, "stop", grace)

    def every(self, method: str, arguments: Sequence[Any], patience: float = 60.0) -> list[Any]:
        """One call to every seat, all at once; the answers by rank, or a LaunchError that names the first bad seat."""
        calls = [
            self.call(rank, method, *(argument if isinstance(argument, tuple) else (argument,)))
            for rank, argument in enumerate(arguments)
        ]
        wait(calls, timeout=patience, return_when="FIRST_EXCEPTION")
        for seat, answer in zip(self.plan.seats, calls, strict=True):
            if answer.done() and (error := answer.exception()) is not None:
                kind = ConfigError if isinstance(error, ConfigError) else LaunchError
                raise kind(f"rank {seat.rank} on {seat.node.host} ({seat.node.ip}): {cause(error)}") from error
        silent = [seat for seat, answer in zip(self.plan.seats, calls, strict=True) if not answer.done()]
        if silent:
            raise LaunchError(
                f"{len(silent)} of {len(calls)} seats did not answer '{method}' within {patience:g} s, "
                f"the first is rank {silent[0].rank} on {silent[0].node.host} ({silent[0].node.ip})"
            )
        return [answer.result() for answer in calls]

    def __exit__(self, *_: object) -> None:
        wait([self.call(seat.rank, "close") for seat in self.plan.seats], timeout=CLOSE_S)

    def _facts(self, answers: Sequence[dict[str, Any]]) -> Iterator[Facts]:
        """Each rank's facts: those that the lead of its node found, with its own GPUs."""
        gpus = self._gpus() if self._gpus else [None] * len(answers)
        for answer, own in zip(answers, gpus, strict=True):
            if answer["facts"] is not None:
                found = Facts.from_dict(answer["facts"])
            yield replace(found, gpus=own)

    def _warn(self, answers: Sequence[dict[str, Any]]) -> None:
        for seat, answer in zip(self.plan.seats, answers, strict=True):
            if answer["warm"].get("cuda"):
                text = (
                    f"a module imported on {seat.node.host} initialised CUDA, which no fork survives: say start=spawn"
                )
                self._events.say("warning", text=text)

    def _refuse_blind(self, answers: Sequence[dict[str, Any]], file: Path | None) -> None:
        blind = sorted(
            {seat.node.host for seat, answer in zip(self.plan.seats, answers, strict=True) if not answer["sees"]}
        )
        if blind and file:
            raise LaunchError(
                f"init_method=file needs a folder that all nodes see, and {', '.join(blind)} can't see {file.parent}: "
                "say hydra.run.dir=<a shared folder>, or init_method=env"
            )


def seen_from(folder: str, script: str) -> str:
    """A script as seen from a folder, of which other nodes may have a copy elsewhere; `-m module`, a bare name."""
    inside = os.path.relpath(script, folder) if os.path.isabs(script) else ""
    if not inside or inside.startswith(".."):
        return script
    return inside if inside.endswith(".py") else os.path.join(".", inside)


def cause(error: BaseException) -> str:
    """The last line of an error, without the traceback that Ray puts before it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    missing = "No module named 'raydist'" in last
    return last + (": install raydist on every node, for the Python that Ray runs with" if missing else "")


@contextlib.contextmanager
def in_thread(plan: Plan, events: Events) -> Iterator[Gang]:
    """The same seats without Ray: they live in a thread of this process, their ranks are plain processes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="raydist-seats", daemon=True)
    thread.start()
    seats = [make_seat(plan.ask.backend) for _ in plan.seats]

    def call(rank: int, method: str, *args: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(seats[rank], method)(*args), loop)

    try:
        with Gang(plan, call, events) as gang:
            yield gang
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=CLOSE_S)
