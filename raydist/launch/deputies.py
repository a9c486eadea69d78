"""Has the nodes of a run tell, in the driver's place, if the driver's machine is lost. (driver)"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from raydist.cluster import connect
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Plan
from raydist.messages.deputy import Deputize, Duty, Raylet
from raydist.messages.request import Transport
from raydist.shared.errors import last_line
from raydist.shared.events import Events


class Deputies:
    """The deputies of a run, one on each machine except the driver's own."""

    def __init__(self, duty: Duty, events: Events) -> None:
        """`duty`: what is the same for all of them."""
        self._duty = duty
        self._events = events

    def appoint(self, plan: Plan, call: Transport) -> None:
        """Have the nodes of an attempt start their deputies, without waiting for that."""
        try:
            (own,) = (node for node in connect.alive_nodes() if node.id == connect.own_node())
            duties = duties_of(self._duty, own, plan.nodes, connect.raylets(), time.time())
        except Exception as error:  # Ray does not answer: the run itself will say so
            self._warn("the nodes do", last_line(error))
            return
        for slot in plan.slots:
            if slot.local_rank == 0 and (duty := duties.get(slot.node.id)):
                reply = call(slot.rank, Deputize(duty))
                reply.add_done_callback(partial(self._note, slot.node.host))

    def _note(self, host: str, reply: Future[None]) -> None:
        """Warn about a deputy that did not start; a node that was lost is noticed elsewhere."""
        if not reply.cancelled() and isinstance(error := reply.exception(), OSError):
            self._warn(f"{host} does", last_line(error))

    def _warn(self, who: str, why: str) -> None:
        self._events.warn(f"{who} not tell anybody if the driver's machine is lost: {why}")


def duties_of(
    common: Duty,
    driver: Node,
    nodes: Iterable[Node],
    raylets: Mapping[str, tuple[str, int]],
    now: float,
) -> dict[str, Duty]:
    """Return the duty of each node that has one, by the node's id.

    `driver`: the driver's node. `raylets`: addresses by id. `now`: in seconds since the epoch.
    Nodes of the same address are one machine, of which one node has a duty; none on the driver's.
    """
    machines: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda node: node.order):
        if node.ip != driver.ip and node.id in raylets:
            machines.setdefault(node.ip, node)
    shared = replace(
        common,
        driver=Raylet(driver.host, *raylets[driver.id]),
        nodes=tuple(Raylet(node.host, *raylets[node.id]) for node in machines.values()),
        elapsed_s=max(0.0, now - common.began),
    )
    return {node.id: replace(shared, own=place) for place, node in enumerate(machines.values())}
