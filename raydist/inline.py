"""No Ray: one rank in this very process, where pdb works; several as plain processes. (driver; the rank too, in one)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from raydist import backends, context, fabric, fabric_findings, records, target
from raydist.config import Job
from raydist.errors import Stopped
from raydist.events import Event, Events
from raydist.group import CLOSE_S, Gang
from raydist.node import probe, rendezvous
from raydist.node.place import make_seat
from raydist.node.wire import HERE
from raydist.parcel import Call
from raydist.placement import Node, Plan
from raydist.result import Attempt, End
from raydist.storage import environment

LOOPBACK = "127.0.0.1"


def this_machine(job: Job) -> Node:
    """This machine as the only node, as Ray would see it, on its loopback address.

    Nobody counts CPUs without Ray: a job may have more ranks than there are, as it may under torchrun.
    """
    ranks = (job.scale.nodes or 1) * (job.scale.per_node or 2)
    have = {"CPU": max(float(os.cpu_count() or 1), ranks * job.scale.cpus)}
    if gpus := probe.count_gpus():
        have["GPU"] = float(gpus)
    return Node(id="here", ip=LOOPBACK, host=socket.gethostname(), total=have, free=have)


def run_here(job: Job, plan: Plan, call: Call | None, events: Events) -> Attempt:
    """The only rank, in this process."""
    facts = probe.look(ip=LOOPBACK, interface=job.fabric.interface, gpus=None)
    store, port = rendezvous.open_store(facts.address)
    (variables,) = fabric.variables(job, plan, (facts,), fabric.Meet(address=facts.address, port=port))
    logs = Path(job.dir).absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    end = End(rank=0, host=plan.seats[0].node.host, how="finished", at=time.time())
    events.say("plan", **plan.as_event())
    fabric_findings.check(job, plan, (facts,), lambda text: events.say("warning", text=text))
    going_on = records.resume(job, 0, plan.world_size, lambda text: events.say("warning", text=text))
    own = {var.name: var.value.replace(HERE, str(logs)) for var in (*variables, *going_on)}
    with environment(own), standing_as_rank(events):
        try:
            with backends.join(plan.ask.backend, job, os.environ):
                context.tell("joined", pid=os.getpid())
                value = target.call(target.load(job.job.target), job) if call is None else call_here(job, call)
            return Attempt(ends=[end], values=(value,))
        except Stopped as stop:
            return Attempt(ends=[end], error=stop)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            context.tell(
                "raised", type=type(error).__name__, message=str(error), traceback=text, step=context.here().step
            )
            told = {"type": type(error).__name__, "message": str(error), "traceback": text, "step": context.here().step}
            return Attempt(ends=[End(**{**vars(end), **told, "how": "raised"})], exceptions={0: error})
        finally:
            del store


def call_here(job: Job, call: Call) -> Any:
    return target.call(call.function, job, *call.args, **call.kwargs)


@contextlib.contextmanager
def standing_as_rank(events: Events) -> Iterator[None]:
    """This process as a rank: what it tells goes straight into the event stream."""
    began: float | None = time.time()

    def emit(happened: Event) -> None:
        nonlocal began
        events.add(happened)
        if began and happened["kind"] == "report" and "step" in happened:
            events.say("phase", name="first step", s=happened["t"] - began)
            began = None

    me = context.Rank.from_env(os.environ)
    context.enter(context.Context(rank=me, emit=emit, beat=lambda step, phase: None))
    try:
        yield
    finally:
        context.enter(None)


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
