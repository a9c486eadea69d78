"""Texts for a request that the cluster can't hold: what is missing, what to set instead. (pure)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raydist.cluster.nodes import (
    Capacity,
    Node,
    ResourceRequest,
    amounts,
    bundle,
    fit_count,
    holds,
    matches,
    room,
)
from raydist.settings.config import Scale
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.rank_names import counted

ROOM = "waiting for Ray to place the ranks: the cluster has room for all"


def never_fits(
    scale: Scale, request: ResourceRequest, capacity: Capacity, listed: Sequence[str]
) -> ConfigError:
    """Return the error for a request that the cluster can never hold.

    `listed`: lines that describe the cluster's nodes.
    """
    size = f"{scale.nodes}x{request.world_size // scale.nodes}" if scale.nodes else "cluster"
    size += f" scale.spares={request.spares}" if request.spares else ""
    per_node = f" scale.per_node={scale.per_node}" if scale.per_node and not scale.nodes else ""
    labels = f" with {_labels(request)}" if request.selector else ""
    fitting = suggestion(request, capacity)
    lines = [
        f"scale={size}{per_node} requests {describe_request(request)}, which this cluster can "
        "never hold. "
        f"Its nodes{labels}:",
        *(f"    {line}" for line in listed),
        fitting,
    ]
    return ConfigError("\n".join(lines), "scale", size, fitting.partition("set ")[2])


def describe_request(request: ResourceRequest) -> str:
    """Format a request as `2 nodes with 8 GPU, 8 CPU each`."""
    n, resources = len(request.bundles), amounts(request.bundles[0])
    match request.strategy:
        case "STRICT_SPREAD":
            return f"{counted(n, 'node')} with {resources}" + (" each" if n > 1 else "")
        case "STRICT_PACK":
            return f"{counted(n, 'rank')} with {resources} each, all on one node"
    return f"{counted(n, 'rank')} with {resources} each"


def suggestion(request: ResourceRequest, capacity: Capacity) -> str:
    """Return what to set instead: the settings nearest to the request that fit."""
    without_spares = replace(
        request, bundles=request.bundles[: len(request.bundles) - request.spares], spares=0
    )
    if request.spares and holds(without_spares, capacity):
        fits = room(
            request, [(fit_count(have, request.bundles[0]), more) for have, more in capacity]
        )
        return f"set scale.spares={fits - len(without_spares.bundles)}"
    if size := fitting_size(request, request.rank_resources, capacity):
        return f"set {size}"
    lacking = [_lacking(request.rank_resources, have) for have, _ in capacity]
    if not lacking:
        return "start a node first" + (", or leave out scale.labels" if request.selector else "")
    # Not even one rank fits: make it fit the node that lacks the least.
    least = min(lacking, key=lambda each: (sum(not amount for amount in each.values()), len(each)))
    if least.get("CPU") == 0 or any(
        not amount for name, amount in least.items() if name not in ("CPU", "GPU")
    ):
        names = ", ".join(name for name, amount in least.items() if not amount)
        return (
            f"no node has {names} together with the other resources: add such a node, or start "
            "Ray's nodes with more (ray start --num-cpus=N)"
        )
    settings, need = smaller_rank(request, least)
    bundles = (bundle(need, request.ranks_per_bundle),) * len(request.bundles)
    if holds(replace(request, bundles=bundles), capacity):
        return f"set {settings}"
    return f"set {settings} {fitting_size(request, need, capacity)}"


def fitting_size(request: ResourceRequest, need: Mapping[str, float], capacity: Capacity) -> str:
    """Return `scale=2x4` for the most ranks that fit, up to the requested number.

    Empty if not even one fits.
    """
    fits = sorted(
        (fit_count(have, need) for have, more in capacity for _ in range(more)), reverse=True
    )
    if not fits or not fits[0]:
        return ""
    if request.strategy in ("PACK", "SPREAD"):
        return f"scale=1x{min(sum(fits), request.world_size)}"
    nodes = fits if request.strategy == "STRICT_SPREAD" else fits[:1]
    sizes = [(n, min(request.world_size // n, fits[n - 1])) for n in range(1, len(nodes) + 1)]
    best = max(sizes, key=lambda size: (size[0] * size[1], size[0]))
    return f"scale={best[0]}x{best[1]}"


def _lacking(need: Mapping[str, float], have: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of which a node has too little for one rank, with its amounts."""
    return {
        name: have.get(name, 0.0)
        for name, amount in need.items()
        if not fit_count(have, {name: amount})
    }


def smaller_rank(
    request: ResourceRequest, least: Mapping[str, float]
) -> tuple[str, dict[str, float]]:
    """Return settings for a rank that fits the amounts `least`, and its resources."""
    need, settings = dict(request.rank_resources), []
    for name, have in least.items():
        if name == "CPU":  # ranks can share a CPU, so that all of them fit
            need[name] = max(math.floor(have / request.ranks_per_bundle * 100) / 100, 0.01)
            settings.append(f"scale.cpus={need[name]:g}")
        elif name == "GPU" and request.backend == "nccl" and have < 1:
            del need[name]
            settings.append("backend=gloo scale.gpus=0")
        elif name == "GPU":
            need[name] = float(math.floor(have)) if have > 1 else have
            settings.append(f"scale.gpus={need[name]:g}")
        else:
            need[name] = have
            settings.append(f"scale.resources.{name}={have:g}")
    return " ".join(settings), {name: amount for name, amount in need.items() if amount}


def gave_up(patience: float, reason: str) -> LaunchError:
    """Return the error of a run that has waited for nodes. `reason`: what is missing."""
    return LaunchError(f"gave up after {patience:g} s (scale.wait_s): {reason}")


def describe_shortage(request: ResourceRequest, nodes: Sequence[Node]) -> str:
    """Describe what a run waits for.

    Example: `waiting for 1 more node with 8 GPU, 8 CPU: 1 of 2 has room; ...`.
    """
    chosen = sorted(
        (node for node in nodes if matches(node.labels, request.selector)),
        key=lambda node: node.order,
    )
    n = len(request.bundles)
    ready = room(request, [(fit_count(node.free, request.bundles[0]), 1) for node in chosen])
    if ready >= n:
        return ROOM
    resources = amounts(request.bundles[0]) + (
        f" and labels {_labels(request)}" if request.selector else ""
    )
    match request.strategy:
        case "STRICT_SPREAD":
            missing = f"{counted(n - ready, 'more node')} with {resources}: {ready} of {n} ready"
        case "STRICT_PACK":
            missing = (
                f"one node with room for {n} ranks of {resources}: the best has room for {ready}"
            )
        case _:
            missing = (
                f"room for {counted(n - ready, 'more rank')} of {resources}: {ready} of {n} have it"
            )
    busy = [text for node in chosen if (text := _occupied(node, request))]
    folded = busy[:3] + (
        [f"{counted(len(busy) - 3, 'more node')} like that"] if len(busy) > 3 else []
    )
    return "; ".join([f"waiting for {missing}", *folded])


def describe_missing(request: ResourceRequest, nodes: Sequence[Node], held: Iterable[str]) -> str:
    """Describe what a run waits for that already holds a bundle on each of these nodes, by id.

    It waits for bundles in place of those on nodes that are gone. Resources that the run itself
    holds do not count as taken by others.
    """
    alive = {node.id for node in nodes}
    kept = [node_id for node_id in held if node_id in alive]
    missing = request.bundles[len(kept) :]
    if not missing:
        return ROOM
    if request.strategy == "STRICT_SPREAD":
        others = [node for node in nodes if node.id not in kept]
    else:
        others = [_of_others(node, request.bundles[0], kept.count(node.id)) for node in nodes]
    return describe_shortage(replace(request, bundles=missing, spares=0), others)


def _of_others(node: Node, held: Mapping[str, float], times: int) -> Node:
    """Return a node without the resources of the bundles that a run holds there."""
    if not times:
        return node
    total = {name: round(n - times * held.get(name, 0), 4) for name, n in node.total.items()}
    return replace(node, total=total, host=f"{node.host} (without this run)")


def _labels(request: ResourceRequest) -> str:
    return ", ".join(f"{key}={value}" for key, value in request.selector.items())


def _occupied(node: Node, request: ResourceRequest) -> str:
    """Return `node-7 has 8 GPU but 4 are taken`.

    Empty for a node that would hold no more bundles if it were free.
    """
    need = request.bundles[0]
    most = 1 if request.strategy == "STRICT_SPREAD" else len(request.bundles)
    fits = min(most, fit_count(node.total, need))
    short = [name for name, amount in need.items() if fit_count(node.free, {name: amount}) < fits]
    taken = {name: node.total[name] - node.free.get(name, 0) for name in short}
    text = ", ".join(
        f"{node.total[name]:g} {name} but {n:g} {'is' if n == 1 else 'are'} taken"
        for name, n in taken.items()
    )
    return text and f"{node.host} has {text}"
