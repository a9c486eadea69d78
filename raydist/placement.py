"""(Job, nodes) -> Plan: who sits where, with which rank; or why it can't be. (pure)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raydist import inventory as there
from raydist.config import Job, Scale
from raydist.errors import ConfigError, LaunchError
from raydist.inventory import Ask, Node, NodeType, Shelves, count, nodes_from_ray, slots, types_from_config
from raydist.shortage import missing, never

__all__ = [
    "Ask", "Node", "NodeType", "Plan", "Seat", "ask", "missing", "nodes_from_ray", "reseat", "seat",
    "types_from_config",
]  # fmt: skip

CPU_BACKENDS = ("gloo", "mpi")
"""Those that get a GPU per rank only if scale.gpus says so."""


@dataclass(frozen=True)
class Seat:
    """One rank's place."""

    rank: int
    local_rank: int
    node_rank: int
    local_world_size: int
    bundle: int
    node: Node


@dataclass(frozen=True)
class Plan:
    """Everybody's place, in order of rank: contiguous on each node, nodes in a stable order."""

    ask: Ask
    seats: tuple[Seat, ...]
    spares: tuple[Node, ...] = ()
    """Nodes that are held without ranks."""

    @property
    def world_size(self) -> int:
        return len(self.seats)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in order of node_rank."""
        return tuple(seat.node for seat in self.seats if seat.local_rank == 0)

    def as_event(self) -> dict[str, Any]:
        """The facts of the event `plan`. `gpus` is how many: which ones only the seats know."""
        gpus = self.ask.rank_resources.get("GPU", 0)
        seats = [
            {"rank": seat.rank, "host": seat.node.host, "ip": seat.node.ip, "node": seat.node.id,
             "local_rank": seat.local_rank, "gpus": gpus}
            for seat in self.seats
        ]  # fmt: skip
        beside = [{"host": node.host, "ip": node.ip, "node": node.id} for node in self.spares]
        spares = {"spares": beside} if beside else {}
        return {"backend": self.ask.backend, "world_size": self.world_size, "seats": seats, **spares}


def ask(job: Job, nodes: Sequence[Node], types: Sequence[NodeType] | None = ()) -> Ask:
    """What to ask of Ray for this job; a ConfigError if these nodes, and those to come, can never hold it.

    `types`: what may come; None where nobody knows, so that time will tell.
    """
    scale = job.scale
    chosen, kinds = there.select(nodes, types or (), scale.labels)
    coming = [] if scale.nodes is None else there.still_to_come(kinds, chosen)
    shelves = [*((node.total, 1) for node in chosen), *((kind.resources, more) for kind, more in coming)]
    backend, gpus = choose_backend(job, [have for have, _ in shelves])
    need = rank_resources(scale, gpus)
    if shelves:
        there.check_names(need, [have for have, _ in shelves])
    asked = shape(between(scale, need, chosen), backend, need, shelves)
    if types is not None and not there.holds(asked, shelves):
        raise ConfigError(never(scale, asked, shelves, there.listing(chosen, coming, need)))
    return asked


def choose_backend(job: Job, have: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """The backend, never auto, and the GPUs of one rank."""
    name, gpus, most = job.backend.name, job.scale.gpus, max((each.get("GPU", 0) for each in have), default=0)
    if gpus and gpus > 1 and gpus % 1:
        raise ConfigError(f"scale.gpus={gpus:g}: Ray gives whole GPUs above 1; say scale.gpus={math.ceil(gpus)}")
    if name in ("auto", "script"):
        # NCCL refuses two ranks on one GPU
        name = "nccl" if most and (gpus is None or gpus >= 1) else "gloo"
        return name, gpus if gpus is not None else float(name == "nccl")
    if name == "nccl" and not most:
        where = "the nodes that scale.labels chooses have" if job.scale.labels else "the nodes have"
        instead = "backend=gloo" + (" scale.gpus=0" if gpus else "")
        raise ConfigError(f"backend=nccl: {where} no GPU ({count(len(have), 'node')}); say {instead}")
    if name == "nccl" and gpus is not None and gpus < 1:
        raise ConfigError(f"scale.gpus={gpus:g}: nccl needs a GPU for each rank; say scale.gpus=1, or backend=gloo")
    return name, gpus if gpus is not None else float(name not in CPU_BACKENDS and most > 0)


def rank_resources(scale: Scale, gpus: float) -> dict[str, float]:
    """What one rank takes."""
    for name in ("CPU", "GPU"):
        if name in scale.resources:
            raise ConfigError(
                f"scale.resources.{name}={scale.resources[name]:g}: that has a word of its own; "
                f"say scale.{name.lower()}s={scale.resources[name]:g}"
            )
    return {"CPU": scale.cpus, **({"GPU": gpus} if gpus else {}), **{k: v for k, v in scale.resources.items() if v}}


def between(scale: Scale, need: Mapping[str, float], nodes: Sequence[Node]) -> Scale:
    """With scale.max_nodes: as many nodes as have room now, between the least and the most."""
    if scale.max_nodes is None:
        return scale
    least, most = scale.nodes or 1, scale.max_nodes
    room = sum(slots(node.free, need) >= (scale.per_node or 1) for node in nodes)
    return replace(scale, nodes=max(least, min(most, room)))


def shape(scale: Scale, backend: str, need: Mapping[str, float], shelves: Shelves) -> Ask:
    """The placement group that the words describe, whether it fits or not."""
    strategy, fitting = scale.placement, [fits for have, _ in shelves if (fits := slots(have, need))]
    if scale.nodes is not None:
        nodes, per_node = scale.nodes, scale.per_node or ranks_of_a_node(scale.nodes, need, shelves)
    elif scale.per_node is not None:
        nodes, per_node = sum(fits >= scale.per_node for fits in fitting) or 1, scale.per_node
    elif len(set(fitting)) < 2:
        nodes, per_node = len(fitting) or 1, max(fitting, default=1)
    else:
        # unequal nodes, each with all that it can hold: the bundles of a group are of one size, so one for each rank
        nodes, per_node = sum(fitting), 1
        strategy = "PACK" if strategy == "STRICT_SPREAD" else strategy
    each = per_node if strategy == "STRICT_SPREAD" else 1
    return Ask(
        backend=backend,
        world_size=nodes * per_node,
        bundles=(there.bundle(need, each),) * (nodes * per_node // each + scale.spares),
        ranks_per_bundle=each,
        strategy=strategy,
        rank_resources=need,
        selector=scale.labels,
        spares=scale.spares,
    )


def ranks_of_a_node(nodes: int, need: Mapping[str, float], shelves: Shelves) -> int:
    """Ranks of each node where nobody said: one per GPU; without GPUs two on a node alone, else one per scale.cpus."""
    if "GPU" not in need and nodes == 1:
        return 2
    by = "GPU" if "GPU" in need else "CPU"
    most = sorted((slots(have, {by: need[by]}) for have, more in shelves for _ in range(more)), reverse=True)
    return max(1, most[nodes - 1]) if nodes <= len(most) else max(1, *most[:1])


def seat(asked: Ask, bundle_nodes: Sequence[Node]) -> Plan:
    """Who sits where, once bundle i lies on node bundle_nodes[i]."""
    held: dict[str, list[int]] = {}
    for i, node in enumerate(bundle_nodes):
        held.setdefault(node.id, []).extend([i] * asked.ranks_per_bundle)
    # by node id, not by address: two raylets on one machine are two nodes
    in_order = sorted({node.id: node for node in bundle_nodes}.values(), key=lambda node: node.order)
    used = in_order[: len(in_order) - asked.spares]
    return Plan(asked, seated(used, held), tuple(in_order[len(used) :]))


def seated(in_order: Sequence[Node], held: Mapping[str, Sequence[int]]) -> tuple[Seat, ...]:
    """The seats on these nodes. `held`: by node id the bundle of each of its ranks."""
    seats: list[Seat] = []
    for node_rank, node in enumerate(in_order):
        own = held[node.id]
        seats += [Seat(len(seats) + i, i, node_rank, len(own), bundle, node) for i, bundle in enumerate(own)]
    return tuple(seats)


def regroup(plan: Plan, ready: Mapping[int, Node], least: int, most: int) -> Plan | None:
    """The ranks on the nodes that are ready (by bundle), at least so many nodes and at most so many; None if too few.

    A node that stays keeps its ranks where it can: others take the place of lost ones, then places behind the last.
    """
    per_node = plan.ask.ranks_per_bundle
    before = [(seat.bundle, seat.node.id) for seat in plan.seats if seat.local_rank == 0]
    stay = {bundle for bundle, id in before if bundle in ready and ready[bundle].id == id}
    new = sorted(ready.keys() - stay, key=lambda bundle: (ready[bundle].order, bundle))
    places = [bundle if bundle in stay else new.pop(0) if new else None for bundle, _ in before]
    chosen = [bundle for bundle in [*places, *new] if bundle is not None][:most]
    if len(chosen) < least:
        return None
    held = {ready[bundle].id: [bundle] * per_node for bundle in chosen}
    seats = seated([ready[bundle] for bundle in chosen], held)
    bundles = (plan.ask.bundles[0],) * (len(chosen) + plan.ask.spares)
    left = tuple(node for bundle, node in ready.items() if bundle not in chosen) if plan.ask.spares else ()
    return Plan(replace(plan.ask, world_size=len(seats), bundles=bundles), seats, left)


def reseat(plan: Plan, bundle_nodes: Sequence[Node]) -> Plan:
    """The same ranks in the same bundles, some of which have moved to other nodes: everybody keeps its rank."""
    moved = Plan(plan.ask, tuple(replace(seat, node=bundle_nodes[seat.bundle]) for seat in plan.seats))
    together = {(seat.node_rank, seat.node.id) for seat in moved.seats}
    if len(together) != len({seat.node_rank for seat in moved.seats}):
        raise LaunchError(
            "the ranks of a lost node came back on several nodes, where they can't be one node's ranks any more; "
            "say scale.placement=STRICT_SPREAD"
        )
    return moved
