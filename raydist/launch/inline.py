"""group=inline, without Ray: one rank in this process, for pdb, or several processes. (driver)"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from raydist.cluster.nodes import Node
from raydist.cluster.placement import Plan
from raydist.launch import run_storage
from raydist.launch.hosts import Hosts
from raydist.launch.limits import CLOSE_S
from raydist.launch.mailbox import Mail, Mailbox
from raydist.launch.payload import RemoteCall
from raydist.launch.vitals import Pace, Vitals
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.request import AnyReply, Request, Transport
from raydist.network import binding, checks_node
from raydist.network import variables as network_variables
from raydist.network.names import RANK_FOLDER
from raydist.node import cache_folder, probe, rendezvous
from raydist.node.actor import AgentHost
from raydist.node.load import LoadReader
from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.errors import LaunchError, Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from raydist.shared.outcome import Attempt, End, Slow
from raydist.state.object_store import environment
from raydist.worker import backends, context, target
from raydist.worker.context import exception_facts

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "::1")
"""The addresses of this machine for its own processes, the preferred one first."""


def inline_node(job: Job) -> Node:
    """Return this machine as the only node, as Ray would see it, on its loopback address.

    Without Ray nothing limits ranks by CPUs: a job may have more ranks than CPUs, as under
    torchrun.
    """
    ranks = (job.scale.nodes or 1) * (job.scale.per_node or 2)
    have = {"CPU": max(float(os.cpu_count() or 1), ranks * job.scale.cpus)}
    if gpus := probe.gpus_of_driver():
        have["GPU"] = float(gpus)
    return Node(id="here", ip=loopback(), host=socket.gethostname(), total=have, free=have)


def loopback() -> str:
    """Return this machine's loopback address: that of IPv6 where it has no other."""
    known = {address for own in probe.interfaces().values() for address in own}
    for address in LOOPBACK:
        if address in known:
            return address
    raise LaunchError(
        f"{socket.gethostname()} has no loopback address, by which the ranks of one machine find "
        "each other: ip link set dev lo up"
    )


def run_here(job: Job, plan: Plan, call: RemoteCall | None, events: Events) -> Attempt:
    """Run the only rank in this process."""
    facts = probe.read_facts(ip=plan.slots[0].node.ip, interface=job.fabric.interface, gpus=None)
    store, port = rendezvous.open_store(facts.address)
    (variables,) = network_variables.plan_variables(
        job, plan, (facts,), network_variables.Rendezvous(address=facts.address, port=port)
    )
    logs = Path(job.dir).absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    end = End(rank=0, host=plan.slots[0].node.host, how="finished", at=time.time())
    events.add(kinds.Plan(**plan.as_event()))
    checks_node.check_nodes(job, plan, (facts,), events.warn)
    resume = run_storage.RunCheckpoints(job).variables(events.warn)
    env = cache_folder.fill_in(
        {var.name: var.value.replace(RANK_FOLDER, str(logs)) for var in (*variables, *resume)}
    )
    (cpus,) = binding.bind_all(job, plan, (facts,))
    with (
        environment(env),
        bound(cpus),
        rank_context(events) as pace,
        Vitals(events, pace, plan, load_reader()),
    ):
        try:
            with backends.join(plan.request.backend, job, os.environ):
                context.emit_event(kinds.Joined(rank=context.rank().rank, pid=os.getpid()))
                value = (
                    target.call_function(target.load_target(job.job.target), job)
                    if call is None
                    else call_here(job, call)
                )
            return Attempt(ends=[end], values=(value,))
        except Stopped as stop:
            return Attempt(ends=[end], error=stop)
        except SystemExit as exit_:  # ends the rank, and not the caller of raydist.run
            return Attempt(ends=[exit_end(end, exit_)], values=(None,))
        except Exception as error:
            exception = exception_facts(error)
            context.emit_event(kinds.Raised(rank=context.rank().rank, **exception))
            return Attempt(ends=[replace(end, how="raised", **exception)], exceptions={0: error})
        finally:
            del store


def exit_end(end: End, exit_: SystemExit) -> End:
    """Return how a rank ended that called `sys.exit`, as if it had a process of its own."""
    if (event := context.exit_event(exit_)) is None:
        return end
    context.emit_event(event)
    if event.code:
        return replace(end, how="exited", code=event.code, step=event.step)
    return replace(end, how="raised", **exception_facts(exit_))


@contextlib.contextmanager
def bound(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Bind this thread, and those that it starts, to these CPUs inside the block.

    None: leave the binding as it is.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def call_here(job: Job, call: RemoteCall) -> Any:
    return target.call_function(call.function, job, *call.args, **call.kwargs)


def load_reader() -> Transport:
    """Return a transport that answers GetLoad about this machine, without an agent."""
    reader = LoadReader()

    def read(rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        reply: Future[Any] = Future()
        reply.set_result(reader.read())
        return reply

    return read


@contextlib.contextmanager
def rank_context(events: Events) -> Iterator[Callable[[], dict[int, Pace]]]:
    """Make this process a rank whose events go straight into the event stream; yield its pace."""
    began: float | None = time.time()
    newest = 0

    def beat(step: int, phase: int) -> None:
        nonlocal newest
        newest = step

    def emit(event: Event) -> None:
        nonlocal began
        events.add(event)
        if began and isinstance(event, kinds.Report) and event.step is not None:
            events.add(kinds.Phase(name="first step", s=event.t - began))
            began = None

    rank = context.Rank.from_env(os.environ)
    context.enter(context.Context(rank=rank, emit=emit, beat=beat))
    try:
        yield lambda: {0: (newest, 0.0, 0.0)} if newest else {}
    finally:
        context.enter(None)


class LocalHosts(Hosts):
    """This machine, without Ray: no other machine is known."""

    standby = None
    ray_stays = False

    def __init__(self, box: Mailbox) -> None:
        """`box`: of the requests to all agents."""
        self._box = box

    def call(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        return self._box.send(rank, request)

    def gpus(self) -> None:
        return None

    def start_other_actors(self) -> None:
        """Do nothing: there are no other actors."""

    def replace_nodes(self, lost: Sequence[int]) -> Plan:
        raise LaunchError(
            f"rank {lost[0]} can't be started again here, and there is no other machine"
        )

    def draining(self) -> Mapping[str, float]:
        return {}

    def wanted_by(self) -> str:
        return ""

    def record_attempt(self, cause: End | None, slow: Sequence[Slow]) -> None:
        """Record nothing: there is no other node to prefer."""

    def reachable(self, node_ids: Collection[str]) -> set[str]:
        return set(node_ids)

    def leave_out(self, node_ids: Collection[str]) -> None:
        """Do nothing: there is no other machine."""

    def put(self, call: bytes) -> bytes:
        return call

    def on_node(self, rank: int, look: Callable[..., T | None], *args: Any) -> Future[T | None]:
        """Return None: the agents live as long as this process."""
        nothing: Future[T | None] = Future()
        nothing.set_result(None)
        return nothing


@contextlib.contextmanager
def in_thread(plan: Plan, events: Events) -> Iterator[WorkerGroup]:
    """Yield a worker group without Ray.

    Its agents live in a thread of this process, and its ranks are plain processes.
    """
    actor = AgentHost(plan.request.backend)
    with loop_in_thread() as loop, Mail() as mail:
        box = mail.box(
            lambda requests: asyncio.run_coroutine_threadsafe(actor.exchange(requests), loop)
        )

        with WorkerGroup(plan, LocalHosts(box), events) as group:
            yield group


@contextlib.contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a thread, and cancel its unfinished tasks at the end."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        loop.run_forever()
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))

    thread = threading.Thread(target=serve, name="raydist-agents", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=CLOSE_S)
