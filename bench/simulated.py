"""Nodes of a large run in one process: their actor is the real one, their ranks only tell what
ranks tell. (bench)"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from subprocess import Popen
from typing import Any

from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan, assign_ranks
from raydist.launch.inline import LocalHosts
from raydist.launch.mailbox import Mail
from raydist.messages.agent import (
    Examine,
    FindUnreachablePaths,
    GetLoad,
    GetNews,
    IsOpen,
    Open,
    Opened,
    ProcessId,
    RankActivity,
    RankEnd,
    RankNews,
    StartRank,
    StopRank,
)
from raydist.messages.request import Answer, AnyReply, NodeRequest, Request
from raydist.messages.server import OpenStore, StoreAddress, Warm
from raydist.network.facts import Facts
from raydist.node import actor
from raydist.node.actor import AgentHost
from raydist.shared import kinds
from raydist.shared.kinds import Event

STEP_S = 0.1
"""Seconds of a step; rank 0 reports each."""
STACK = (
    "Thread 0x00007f0000000000 (most recent call first):\n"
    + '  File "/job/train.py", line 10 in step\n' * 40
)


@dataclass
class Orders:
    """What the driver has told the simulation."""

    frozen_at: float = 0.0
    """The ranks stand still since then, on the monotonic clock; 0: they do not."""
    hasty: float = 0.0
    """Seconds of an interval between two answers instead of those of the driver, if not 0."""
    stopped: list[float] = field(default_factory=list)
    """When each agent was told to stop its rank."""


ORDERS = Orders()


class SimulatedAgent:
    """Answers as the agent of a rank that makes a step in STEP_S."""

    def __init__(self) -> None:
        self.rank, self.started, self.reported_step = -1, 0.0, 0
        self.end: RankEnd | None = None
        self.due = asyncio.Event()
        """There is news that the driver should have now."""

    def tell_now(self) -> None:
        """As the agent's."""
        self.due.set()

    async def handle(self, request: Request[Any]) -> Any:
        """The reply of a healthy agent."""
        match request:
            case Open():
                self.rank = request.rank
                facts = (
                    Facts(request.node_id, request.node_ip, "eth0", request.node_ip)
                    if request.lead
                    else None
                )
                store = StoreAddress(29500, "") if request.store else None
                return Opened(facts, time.time(), Warm(), store, {} if request.lead else None)
            case OpenStore():
                return StoreAddress(29500, "")
            case FindUnreachablePaths():
                return {}
            case IsOpen():
                return True
            case StartRank():
                self.rank, self.started, self.reported_step, self.end = (
                    request.rank,
                    time.monotonic(),
                    0,
                    None,
                )
                self.due.clear()
                return ProcessId(1000 + self.rank, 1)
            case GetNews():
                return await self.news(ORDERS.hasty or request.patience)
            case Examine():
                await asyncio.sleep(0.6)
                state = "T" if self.rank == 5 else "S"
                return RankActivity(1000 + self.rank, state, 0.0, STACK, (), self.beat())
            case StopRank():
                ORDERS.stopped.append(time.monotonic())
                self.over(RankEnd(0, signal.SIGKILL, time.time(), stop_requested=True))
            case GetLoad():
                return {
                    "cpu": 0.5,
                    "memory": (1 << 34, 1 << 38),
                    "gpus": [],
                    "ports": {"mlx5_0/1": (1 << 40, 1 << 40)},
                }
        return None

    def over(self, end: RankEnd) -> None:
        """The rank ends."""
        if self.end is None:
            self.end = end
            self.due.set()

    def step(self) -> int:
        """Steps so far."""
        return int(((ORDERS.frozen_at or time.monotonic()) - self.started) / STEP_S)

    def beat(self) -> tuple[int, str, float]:
        """The heartbeat."""
        now = time.time()
        return (
            self.step(),
            "forward",
            now - (time.monotonic() - ORDERS.frozen_at if ORDERS.frozen_at else 0.0),
        )

    async def news(self, patience: float) -> RankNews:
        """What the rank tells."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.due.wait(), patience)
        if self.end is None:
            self.due.clear()
        events: list[Event] = []
        if not self.reported_step:
            events += [
                kinds.Joined(rank=self.rank, pid=1000 + self.rank),
                kinds.Begin(rank=self.rank),
            ]
        step = max(self.step(), self.reported_step + 1) if ORDERS.hasty else self.step()
        first = self.reported_step + 1 if self.rank == 0 else step  # of other ranks only the newest
        for each in range(max(first, 1), step + 1):
            events.append(
                kinds.Report(rank=self.rank, step=each, values={"loss": 0.123456789, "lr": 0.001})
            )
        self.reported_step = max(step, 1)
        beat = self.beat()
        return RankNews(
            [each.to_json() for each in events],
            b"",
            b"",
            beat,
            time.time() - beat[2],
            (step, 0.05, STEP_S),
            0.0,
            self.end,
            sent=time.time(),
        )


def serve(address: str) -> None:
    """The process of the simulation."""
    actor.make_agent = lambda backend: SimulatedAgent()  # type: ignore[assignment, return-value]
    loop, connection = asyncio.new_event_loop(), Client(address)
    nodes: dict[int, AgentHost] = {}
    tasks = set()

    async def answer(number: int, node: int, requests: Sequence[NodeRequest]) -> None:
        answers = await nodes.setdefault(node, AgentHost("gloo")).exchange(requests)
        connection.send_bytes(pickle.dumps((number, answers)))

    def order(number: int, name: str, value: Any) -> None:
        agents = [agent for node in nodes.values() for agent in node._agents.values()]
        if name == "kill":
            next(agent for agent in agents if agent.rank == value).over(  # type: ignore[attr-defined]
                RankEnd(0, signal.SIGKILL, time.time())
            )
            ORDERS.stopped.clear()
        elif name == "freeze":
            ORDERS.frozen_at = time.monotonic() if value else 0.0
        elif name == "hasty":
            ORDERS.hasty = value
        connection.send_bytes(pickle.dumps((number, (time.monotonic(), list(ORDERS.stopped)))))

    def read() -> None:
        while connection.poll():
            try:
                number, node, requests = pickle.loads(connection.recv_bytes())
            except EOFError:  # the driver has failed
                loop.stop()
                return
            if isinstance(node, str):
                order(number, node, requests)
            else:
                task = loop.create_task(answer(number, node, requests))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), read)
    loop.run_forever()


class Simulation:
    """The driver's end: the exchange of each node, and orders to the simulation."""

    def __init__(self, folder: str) -> None:
        with Listener(f"{folder}/nodes", "AF_UNIX") as listener:
            self.process = Popen([sys.executable, "-m", "bench.simulated", f"{folder}/nodes"])
            self._connection: Connection[Any, Any] = listener.accept()
        self._lock = threading.Lock()
        self._replies: dict[int, Future[Any]] = {}
        self.calls, self.sent = 0, 0
        """Messages to the nodes, and bytes of these."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                number, reply = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            self._replies.pop(number).set_result(reply)

    def ask(self, node: int | str, what: Any) -> Future[Any]:
        """Send requests to a node, or an order to the simulation."""
        with self._lock:
            self.calls += 1
            number, reply = self.calls, Future[Any]()
            self._replies[number] = reply
            packet = pickle.dumps((number, node, what))
            self.sent += len(packet)
            self._connection.send_bytes(packet)
        return reply

    def exchange(self, node: int) -> Callable[[Sequence[NodeRequest]], Future[Sequence[Answer]]]:
        """As AgentHost.exchange of this node."""
        return lambda requests: self.ask(node, requests)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(10)


def many_nodes(nodes: int, ranks: int) -> Plan:
    """A plan of that many nodes with `ranks` ranks each."""
    each = [
        Node(f"id-{i:04}", f"10.0.{i // 250}.{i % 250 + 1}", f"node-{i:04}", {}, {})
        for i in range(nodes)
    ]
    return assign_ranks(
        ResourceRequest("gloo", nodes * ranks, ({},) * nodes, ranks, "STRICT_SPREAD", {}), each
    )


class SimulatedHosts(LocalHosts):
    """Sends requests to the simulated agents as launch.actors does to real ones."""

    def __init__(self, plan: Plan, simulation: Simulation, mail: Mail) -> None:
        self._slots = plan.slots
        self._boxes = [mail.box(simulation.exchange(node)) for node in range(len(plan.nodes))]

    def call(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        slot = self._slots[rank]
        return self._boxes[slot.node_rank].send(slot.local_rank, request)


if __name__ == "__main__":
    serve(sys.argv[1])
