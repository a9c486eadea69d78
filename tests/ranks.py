"""Real ranks for tests: processes that meet at a real store, over gloo.

They are forked by a server without threads: a child of pytest's own process could wait forever for
a lock that one of its threads (the store's, Ray's) held.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
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
from tqdm import tqdm

from raydist.launch import preload
from raydist.node.rendezvous import open_store
from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.kinds import Event, EventJson
from raydist.state.snapshot_layout import LOCK, WORD, blank_page
from raydist.worker import backends, context

# A child of a process that has used OpenMP's threads would wait for them forever.
torch.set_num_threads(1)
# torch's interpreter of graphs has a progress bar. The lock that tqdm makes by itself is a semaphore
# in /dev/shm, which a rank would leave there until this process ends.
tqdm.set_lock(threading.RLock())

SERVER = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).parents[1]
TESTS = ("pytest", "sklearn.datasets", "raydist.tools.plan")
"""Slow imports of the test files whose functions ranks run: they would take 3 s in each rank, so the
server imports them once."""


WAIT_S = 250
"""Limit on the seconds that ranks take: on a busy machine compiling takes minutes."""


def start_server() -> None:
    """Start the server that forks ranks, with torch, what shards a model and what tests import
    already imported."""
    SERVER.set_forkserver_preload(
        ["tests.ranks", *preload.SHARDS, backends.PIPELINE, *TESTS, "tests.rank_server"]
    )
    here = os.getcwd()
    os.chdir(ROOT)  # the server finds this module here
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


@dataclass
class RankResult:
    """The value or the error of one rank, and its events."""

    value: Any = None
    error: str = ""
    events: list[EventJson] = field(default_factory=list)

    def kind(self, kind: str) -> list[EventJson]:
        return [happened for happened in self.events if happened["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step, in order."""
        return [e["values"]["loss"] for e in self.kind("report") if "loss" in e["values"]]


def as_rank(
    job: Job, function: Callable[[Job], Any], run_dir: Path, env: Mapping[str, str]
) -> RankResult:
    """Run the function as a rank in this process: join the others, call it, leave."""
    os.environ.update(env)
    result = RankResult()
    me = context.Rank.from_env({**env, "RAYDIST_RUN_DIR": str(run_dir)})

    def emit(happened: Event) -> None:
        """Note an event. Drop a sharded checkpoint, as a driver whose nodes cannot write does: no
        other process of a test would write it, and rank 0 waits for that."""
        result.events.append(happened.to_json())
        if isinstance(happened, kinds.SaveShards) and (memory := context.current().memory):
            os.pwrite(memory[0], blank_page()[:WORD], LOCK)

    context.enter(context.Context(rank=me, emit=emit, beat=lambda step, phase: None))
    try:
        with backends.join(job.backend.name, job, os.environ):
            result.value = function(job)
    except Exception:
        result.error = traceback.format_exc()
    finally:
        context.enter(None)
    return result


def run_ranks(
    world_size: int,
    job: Job,
    function: Callable[[Job], Any],
    run_dir: Path,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run the function in every rank of a job, and return their results in the order of ranks."""
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
    results = [
        pickle.loads(pipe.recv_bytes())
        if pipe.poll(WAIT_S)
        else RankResult(error=f"no answer in {WAIT_S} s")
        for pipe in pipes
    ]
    for process in processes:
        process.join(20)
        process.kill()
    del store
    return results


def succeeded(results: list[RankResult]) -> list[RankResult]:
    """Return the results; fail if a rank failed."""
    assert [each.error for each in results] == [""] * len(results)
    return results


def _child(pipe: Connection, stderr: Any, work: bytes, env: Mapping[str, str]) -> None:
    os.dup2(stderr.detach(), 2)  # the test captures it
    job, function, run_dir, environ = cloudpickle.loads(work)
    os.environ.clear()
    os.environ.update(environ)
    result = as_rank(job, function, run_dir, env)
    # tensors as bytes: a descriptor is of no use once this process has exited
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    os._exit(0)


def variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher exports to a rank."""
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
