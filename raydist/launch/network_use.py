"""Which network a run used, from the counters of its nodes and the output of NCCL. (driver)"""

from __future__ import annotations

from collections.abc import Sequence

from raydist.cluster.placement import Plan
from raydist.launch.opened_nodes import OpenedNodes
from raydist.messages.agent import NetworkUse
from raydist.network import traffic
from raydist.network.facts import Facts
from raydist.shared import kinds


def network_event(
    plan: Plan,
    facts: Sequence[Facts],
    nodes: OpenedNodes,
    replies: Sequence[NetworkUse],
    strict: bool,
) -> tuple[kinds.Network, list[str]]:
    """Return the event about the network, and warnings.

    `facts`, `replies`: of each rank. `strict`: `fabric.strict`.
    """
    of_nodes = [
        traffic.NodeTraffic(
            slot.node.host,
            facts[slot.rank].interface,
            nodes.ports(slot),
            replies[slot.rank].ports or {},
            len(facts[slot.rank].devices),
        )
        for slot in plan.leads
    ]
    index = {slot.node_rank: number for number, slot in enumerate(plan.leads)}
    node_of_rank = [index[slot.node_rank] for slot in plan.slots]
    logs = [reply.nccl for reply in replies]
    return traffic.traffic_event(plan.request.backend, of_nodes, node_of_rank, logs, strict)
