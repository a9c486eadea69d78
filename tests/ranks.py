"""Real ranks for tests: processes that meet at a real store, over gloo.

They are forked by a server without threads: a child of pytest's own process could wait for ever for
a lock that one of its threads (the store's, Ray's) held.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer imports it, 1 s in each rank
from ray import cloudpickle

from raydist.launch import preload
from raydist.node.rendezvous import open_store
from raydist.settings.config import Job
from raydist.shared.events import Event
from raydist.state.snapshot_layout import LOCK, WORD, blank_page
from raydist.worker import backends, context

# A child of a process that has used OpenMP's threads would wait for them forever.
torch.set_num_threads(1)

SERVER = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).parents[1]
TESTS = ("pytest", "sklearn.datasets", "raydist.tools.plan")
"""What files of tests import that ranks run a function of: 3 s in each rank, if the server had not
done it."""


def start_server() -> None:
    """The server has imported before the first rank is asked for: torch, what shards a model, what
    tests import."""
    SERVER.set_forkserver_preload(
        ["tests.ranks", *preload.SHARDS, backends.PIPELINE, *TESTS, "tests.rank_server"]
    )
    here = os.getcwd()
    os.chdir(ROOT)  # where it finds this module
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


@dataclass
class Told:
    """What one rank came to."""

    value: Any = None
    error: str = ""
    events: list[Event] = field(default_factory=list)

    def kind(self, kind: str) -> list[Event]:
        return [happened for happened in self.events if happened["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """The loss of each step, in order."""
        return [e["values"]["loss"] for e in self.kind("report") if "loss" in e["values"]]


def as_rank(
    job: Job, function: Callable[[Job], Any], run_dir: Path, env: Mapping[str, str]
) -> Told:
    """This process as a rank: joins, calls, leaves."""
    os.environ.update(env)
    told = Told()
    me = context.Rank.from_env({**env, "RAYDIST_RUN_DIR": str(run_dir)})

    def emit(happened: Event) -> None:
        """Note an event. A sharded checkpoint is dropped, as by a driver whose nodes cannot write:
        no other process of a test would write it, and rank 0 waits for that."""
        told.events.append(happened)
        if happened["kind"] == "save_shards" and (memory := context.current().memory):
            os.pwrite(memory[0], blank_page()[:WORD], LOCK)

    context.enter(context.Context(rank=me, emit=emit, beat=lambda step, phase: None))
    try:
        with backends.join(job.backend.name, job, os.environ):
            told.value = function(job)
    except Exception:
        told.error = traceback.format_exc()
    finally:
        context.enter(None)
    return told


def run_ranks(
    world_size: int,
    job: Job,
    function: Callable[[Job], Any],
    run_dir: Path,
    env: Mapping[str, str] | None = None,
) -> list[Told]:
    """What every rank of a job came to; a rank that failed has its traceback in `error`."""
    store, port = open_store("127.0.0.1")
    start_server()
    work = cloudpickle.dumps((job, function, run_dir, dict(os.environ)))
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = SERVER.Pipe(duplex=False)
        slot = variables(rank, world_size, port) | dict(env or {})
        process = SERVER.Process(target=_child, args=(there, DupFd(2), work, slot))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    told = [
        pickle.loads(pipe.recv_bytes()) if pipe.poll(100) else Told(error="no answer in 100 s")
        for pipe in pipes
    ]
    for process in processes:
        process.join(20)
        process.kill()
    del store
    return told


def _child(pipe: Connection, stderr: Any, work: bytes, env: Mapping[str, str]) -> None:
    os.dup2(stderr.detach(), 2)  # where the test looks for it
    job, function, run_dir, environ = cloudpickle.loads(work)
    os.environ.clear()
    os.environ.update(environ)
    told = as_rank(job, function, run_dir, env)
    pipe.send_bytes(
        pickle.dumps(told)
    )  # tensors as bytes, not as descriptors of a process that is gone
    pipe.close()
    os._exit(0)


def variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher exports to a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
