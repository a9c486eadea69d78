"""(Job, nodes) -> Plan: each rank's node and numbers, or an error if the nodes lack room. (pure)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raydist.cluster import nodes as cluster_nodes
from raydist.cluster.nodes import (
    Capacity,
    Node,
    NodeType,
    ResourceRequest,
    distribute,
    fit_count,
    matches,
)
from raydist.cluster.shortage import never_fits
from raydist.settings.config import Job, Scale
from raydist.settings.mesh import check_division, divides
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.rank_names import counted

CPU_BACKENDS = ("gloo", "mpi")
"""Backends that use GPUs only if scale.gpus requests them."""


@dataclass(frozen=True)
class Slot:
    """The position of one rank."""

    rank: int
    local_rank: int
    node_rank: int
    local_world_size: int
    bundle: int
    """Index of the rank's bundle in the placement group."""
    node: Node


@dataclass(frozen=True)
class Plan:
    """The slots of all ranks in order of rank.

    Ranks of a node are contiguous; nodes are in order of address.
    """

    request: ResourceRequest
    slots: tuple[Slot, ...]
    spares: tuple[Node, ...] = ()
    """Nodes that are reserved without ranks."""

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @cached_property
    def leads(self) -> tuple[Slot, ...]:
        """The first slot of each node, in order of node_rank."""
        return tuple(slot for slot in self.slots if slot.local_rank == 0)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in order of node_rank."""
        return tuple(slot.node for slot in self.leads)

    @property
    def bundle_nodes(self) -> list[Node]:
        """The node of each bundle with ranks."""
        return list({slot.bundle: slot.node for slot in self.slots}.values())

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the event `plan`.

        `gpus` is a number: only the agents know the GPU ids.
        """
        gpus = self.request.rank_resources.get("GPU", 0)
        slots = [
            {
                "rank": slot.rank,
                "host": slot.node.host,
                "ip": slot.node.ip,
                "node": slot.node.id,
                "local_rank": slot.local_rank,
                "gpus": gpus,
            }
            for slot in self.slots
        ]
        spares = [{"host": node.host, "ip": node.ip, "node": node.id} for node in self.spares]
        event = {"backend": self.request.backend, "world_size": self.world_size, "slots": slots}
        return event | ({"spares": spares} if spares else {})


def needs_no_ray(job: Job) -> bool:
    """Report whether the job needs only one machine, and gains nothing from Ray.

    Such a job is a program on one node.
    """
    scale = job.scale
    one_node = scale.nodes == 1 and scale.max_nodes is None and not scale.spares
    by_ray = (
        scale.labels
        or scale.resources
        or scale.gpus not in (None, 0, 1)
        or job.pip
        or job.working_dir
    )
    return bool(job.script) and one_node and not by_ray


def resources_for(
    job: Job, nodes: Sequence[Node], types: Sequence[NodeType] | None = ()
) -> ResourceRequest:
    """Return the resources that a job requests from Ray.

    ConfigError: the cluster can never provide them. `types`: node types that the autoscaler may
    add; None if they are unknown, so that no request is refused.
    """
    scale = job.scale
    chosen, kinds = cluster_nodes.select_nodes(nodes, types or (), scale.labels)
    coming = [] if scale.nodes is None else cluster_nodes.still_to_come(kinds, chosen)
    capacity = capacity_of(chosen, coming)
    backend, gpus = choose_backend(job, [have for have, _ in capacity], unknown=types is None)
    need = rank_resources(scale, gpus)
    if types is None and need.get("GPU") and scale.per_node is None:
        check_gpus_are_there(scale, capacity)
    if capacity:
        cluster_nodes.check_resource_names(need, [have for have, _ in capacity])
    if job.queue.enabled is not False and job.queue.shrink:
        # It grows once it runs, as long as no other run waits.
        sized = replace(scale, nodes=scale.nodes or 1)
    else:
        sized = scale_between(scale, need, chosen)
    request = resource_request(sized, backend, need, capacity)
    if types is not None and not cluster_nodes.holds(request, capacity):
        raise never_fits(scale, request, capacity, cluster_nodes.listing(chosen, coming, need))
    check_parallel(job, request)
    return request


def check_gpus_are_there(scale: Scale, capacity: Capacity) -> None:
    """Raise ConfigError if no node has a GPU: as many ranks as it has GPUs would be one."""
    if not any(have.get("GPU") for have, _ in capacity):
        cause = "no node has a GPU now, and Ray does not say how many those have that may come"
        size = f"scale={scale.nodes or 'NODES'}x8"
        raise ConfigError.of("scale.per_node", None, cause, size)


def capacity_of(nodes: Sequence[Node], coming: Sequence[tuple[NodeType, int]]) -> Capacity:
    """Return the resources of these nodes, and of those that may come: each type and its number."""
    return [
        *((node.total, 1) for node in nodes),
        *((kind.resources, more) for kind, more in coming),
    ]


def check_parallel(job: Job, request: ResourceRequest) -> None:
    """Raise ConfigError if `parallel=` does not fit these ranks, or those of another size.

    Ranks of a node are consecutive, as tp needs them. With scale.max_nodes every size counts.
    """
    if not divides(job.parallel):
        return
    per_node = request.ranks_per_bundle
    if request.strategy != "STRICT_SPREAD" and (
        job.parallel.tp or job.parallel.name in ("tp", "hsdp")
    ):
        cause = "it needs equal numbers of ranks on all nodes"
        key, value = (
            ("parallel.tp", job.parallel.tp) if job.parallel.tp else ("parallel", job.parallel.name)
        )
        raise ConfigError.of(
            key, value, cause, "scale.placement=STRICT_SPREAD scale.per_node=N", "parallel=fsdp"
        )
    sizes = [request.world_size]
    if job.scale.max_nodes is not None:
        least = job.scale.nodes or 1
        sizes = [nodes * per_node for nodes in range(least, job.scale.max_nodes + 1)]
    for ranks in sizes:
        check_division(job, ranks, per_node)


def choose_backend(
    job: Job, have: Sequence[Mapping[str, float]], unknown: bool = False
) -> tuple[str, float]:
    """Return (backend, GPUs of one rank). The backend is never auto.

    `have`: resources of each node. `unknown`: whether nodes may come of which nothing is known:
    they may have GPUs, but only for a job that asks for them.
    """
    name = job.backend.name
    gpus = job.scale.gpus
    most = max((each.get("GPU", 0) for each in have), default=0)
    if gpus and gpus > 1 and gpus % 1:
        cause = "above 1 Ray assigns whole GPUs only"
        raise ConfigError.of("scale.gpus", f"{gpus:g}", cause, f"scale.gpus={math.ceil(gpus)}")
    if name in ("auto", "script"):
        # NCCL refuses two ranks on one GPU.
        may_have = most or (unknown and gpus)
        name = "nccl" if may_have and (gpus is None or gpus >= 1) else "gloo"
        return name, gpus if gpus is not None else float(name == "nccl")
    if name == "nccl" and not most and not unknown:
        where = "the nodes that scale.labels selects have" if job.scale.labels else "the nodes have"
        instead = "backend=gloo" + (" scale.gpus=0" if gpus else "")
        raise ConfigError.of(
            "backend", "nccl", f"{where} no GPU ({counted(len(have), 'node')})", instead
        )
    if name == "nccl" and gpus is not None and gpus < 1:
        cause = "nccl requires one GPU for each rank"
        raise ConfigError.of("scale.gpus", f"{gpus:g}", cause, "scale.gpus=1", "backend=gloo")
    has = most > 0 or name == "nccl"
    return name, gpus if gpus is not None else float(name not in CPU_BACKENDS and has)


def without_gpus_now(job: Job, nodes: Sequence[Node]) -> bool:
    """Return whether a job gets no GPUs only because no node has one now."""
    left_to_us = job.backend.name in ("auto", "script") and job.scale.gpus is None
    chosen = [node for node in nodes if matches(node.labels, job.scale.labels)]
    return left_to_us and not any(node.total.get("GPU") for node in chosen)


def rank_resources(scale: Scale, gpus: float) -> dict[str, float]:
    """Return the resources of one rank, in Ray's unit of a ten-thousandth.

    Rounded down: Ray rounds each rank's to the nearest, and their sum would exceed the bundle.
    """
    for name in ("CPU", "GPU"):
        if name in scale.resources:
            amount = f"{scale.resources[name]:g}"
            cause, right = "it has a separate setting", f"scale.{name.lower()}s={amount}"
            raise ConfigError.of(f"scale.resources.{name}", amount, cause, right)
    amounts = {"CPU": scale.cpus, "GPU": gpus, **scale.resources}
    return {name: math.floor(each * 1e4 + 1e-6) / 1e4 for name, each in amounts.items() if each}


def scale_between(scale: Scale, need: Mapping[str, float], nodes: Sequence[Node]) -> Scale:
    """Return the scale with `nodes` set, if scale.max_nodes is set.

    `nodes` becomes the number of nodes with room now, between scale.nodes and scale.max_nodes.
    """
    if scale.max_nodes is None:
        return scale
    ready = sum(fit_count(node.free, need) >= (scale.per_node or 1) for node in nodes)
    return replace(scale, nodes=elastic_size(scale, ready))


def elastic_size(scale: Scale, ready: int) -> int:
    """Return the number of nodes of an elastic run where so many nodes have room."""
    assert scale.max_nodes is not None
    return max(scale.nodes or 1, min(scale.max_nodes, ready))


def resource_request(
    scale: Scale, backend: str, need: Mapping[str, float], capacity: Capacity
) -> ResourceRequest:
    """Return the placement group that the settings describe, whether or not it fits.

    `need`: resources of one rank.
    """
    strategy = scale.placement
    fitting = [fits for have, _ in capacity if (fits := fit_count(have, need))]
    if scale.nodes is not None:
        nodes = scale.nodes
        per_node = scale.per_node or default_ranks_per_node(scale.nodes, need, capacity)
    elif scale.per_node is not None:
        nodes, per_node = sum(fits >= scale.per_node for fits in fitting) or 1, scale.per_node
    elif len(set(fitting)) < 2:
        nodes, per_node = len(fitting) or 1, max(fitting, default=1)
    else:
        # The nodes are unequal, each with all ranks that it can hold. Bundles of a group are equal
        # here: one for each rank.
        nodes, per_node = sum(fitting), 1
        strategy = "PACK" if strategy == "STRICT_SPREAD" else strategy
    ranks_per_bundle = per_node if strategy == "STRICT_SPREAD" else 1
    bundles = nodes * per_node // ranks_per_bundle + scale.spares
    return ResourceRequest(
        backend=backend,
        world_size=nodes * per_node,
        bundles=(cluster_nodes.bundle(need, ranks_per_bundle),) * bundles,
        ranks_per_bundle=ranks_per_bundle,
        strategy=strategy,
        rank_resources=need,
        selector=scale.labels,
        spares=scale.spares,
    )


def default_ranks_per_node(nodes: int, need: Mapping[str, float], capacity: Capacity) -> int:
    """Return the ranks of each node if scale.per_node is not set.

    There is one per GPU. Without GPUs there are 2 on a single node; on several nodes scale.cpus
    decides.
    """
    if "GPU" not in need and nodes == 1:
        return 2
    by = "GPU" if "GPU" in need else "CPU"
    fits = sorted(
        (fit_count(have, {by: need[by]}) for have, more in capacity for _ in range(more)),
        reverse=True,
    )
    return max(1, fits[nodes - 1]) if nodes <= len(fits) else max(1, *fits[:1])


def choose_nodes(request: ResourceRequest, nodes: Sequence[Node]) -> list[str] | None:
    """Return the id of the node of each bundle, where it fits now; None if there is no room."""
    fits = {
        node.id: fit_count(node.free, request.bundles[0])
        for node in nodes
        if matches(node.labels, request.selector)
    }
    return distribute(request, fits)


def assign_ranks(request: ResourceRequest, bundle_nodes: Sequence[Node]) -> Plan:
    """Return the plan once Ray has placed bundle i on node bundle_nodes[i]."""
    bundles_of: dict[str, list[int]] = {}
    for i, node in enumerate(bundle_nodes):
        bundles_of.setdefault(node.id, []).extend([i] * request.ranks_per_bundle)
    # By node id, not by address: two raylets on one machine are two nodes.
    in_order = sorted(
        {node.id: node for node in bundle_nodes}.values(), key=lambda node: node.order
    )
    used = in_order[: len(in_order) - request.spares]
    return Plan(request, _slots(used, bundles_of), tuple(in_order[len(used) :]))


def _slots(in_order: Sequence[Node], bundles_of: Mapping[str, Sequence[int]]) -> tuple[Slot, ...]:
    """Return the slots on these nodes.

    `bundles_of`: by node id, the bundle of each of its ranks.
    """
    slots: list[Slot] = []
    for node_rank, node in enumerate(in_order):
        bundles = bundles_of[node.id]
        slots += [
            Slot(len(slots) + i, i, node_rank, len(bundles), bundle, node)
            for i, bundle in enumerate(bundles)
        ]
    return tuple(slots)


def resize_plan(plan: Plan, ready: Mapping[int, Node], least: int, most: int) -> Plan | None:
    """Return a plan for `least` to `most` of the ready nodes (bundle -> node).

    None if fewer than `least` are ready. A node that stays keeps its ranks if possible: new nodes
    first take the ranks of lost nodes, then ranks after the last.
    """
    per_node = plan.request.ranks_per_bundle
    before = [(slot.bundle, slot.node.id) for slot in plan.leads]
    stay = {bundle for bundle, id in before if bundle in ready and ready[bundle].id == id}
    new = sorted(ready.keys() - stay, key=lambda bundle: (ready[bundle].order, bundle))
    replaced = [bundle if bundle in stay else new.pop(0) if new else None for bundle, _ in before]
    chosen = [bundle for bundle in [*replaced, *new] if bundle is not None][:most]
    if len(chosen) < least:
        return None
    slots = _slots(
        [ready[bundle] for bundle in chosen],
        {ready[bundle].id: [bundle] * per_node for bundle in chosen},
    )
    bundles = (plan.request.bundles[0],) * (len(chosen) + plan.request.spares)
    spares = (
        tuple(node for bundle, node in ready.items() if bundle not in chosen)
        if plan.request.spares
        else ()
    )
    return Plan(replace(plan.request, world_size=len(slots), bundles=bundles), slots, spares)


def numbered_alike(before: Plan, after: Plan) -> bool:
    """Return whether there are as many ranks, and those on nodes that stay keep their numbers."""
    if before.world_size != after.world_size:
        return False
    nodes = {node.id for node in before.nodes}
    pairs = zip(before.slots, after.slots, strict=True)
    return all(
        old.node.id == new.node.id and old.local_rank == new.local_rank
        for old, new in pairs
        if new.node.id in nodes
    )


def with_bundles(request: ResourceRequest, bundles: int) -> ResourceRequest:
    """Return the request with another number of bundles, which are all equal."""
    if bundles == len(request.bundles):
        return request
    ranks = (bundles - request.spares) * request.ranks_per_bundle
    return replace(request, world_size=ranks, bundles=request.bundles[:1] * bundles)


def with_possible_spares(
    request: ResourceRequest, nodes: Sequence[Node], types: Sequence[NodeType] | None
) -> ResourceRequest:
    """Return the request without those of its spares that the cluster cannot hold now.

    The node may be lost for which a spare was meant. `types`: as in resources_for.
    """
    if types is None:
        return request
    chosen, kinds = cluster_nodes.selected(nodes, types, request.selector)
    capacity = capacity_of(chosen, cluster_nodes.still_to_come(kinds, chosen))
    while request.spares and not cluster_nodes.holds(request, capacity):
        request = replace(request, bundles=request.bundles[:-1], spares=request.spares - 1)
    return request


def replace_nodes(plan: Plan, bundle_nodes: Mapping[int, Node]) -> Plan:
    """Return the same ranks in the same bundles, some of which are on other nodes now.

    Each rank keeps its number.
    """
    moved = Plan(
        plan.request, tuple(replace(slot, node=bundle_nodes[slot.bundle]) for slot in plan.slots)
    )
    nodes = {(slot.node_rank, slot.node.id) for slot in moved.slots}
    if len(nodes) != len({slot.node_rank for slot in moved.slots}):
        raise LaunchError(
            f"scale.placement={plan.request.strategy}: Ray has placed the ranks of a lost node "
            "on several nodes, but "
            "they share one node's numbers; set scale.placement=STRICT_SPREAD"
        )
    return moved
