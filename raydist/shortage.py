"""The words for too few nodes: what was asked, what is there, what to say instead, what is awaited. (pure)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from raydist.config import Scale
from raydist.inventory import Ask, Node, Shelves, amounts, bundle, count, holds, matches, room, slots


def never(scale: Scale, asked: Ask, shelves: Shelves, listed: Sequence[str]) -> str:
    """The words of the refusal: what was asked, what is there, what to say instead."""
    size = f"{scale.nodes}x{asked.world_size // scale.nodes}" if scale.nodes else "cluster"
    size += f" scale.spares={asked.spares}" if asked.spares else ""
    per_node = f" scale.per_node={scale.per_node}" if scale.per_node and not scale.nodes else ""
    labels = f" with {_labels(asked)}" if asked.selector else ""
    return "\n".join(
        [
            f"scale={size}{per_node} asks for {described(asked)}, which this cluster can never hold. There is{labels}:",
            *(f"    {line}" for line in listed),
            instead(asked, shelves),
        ]
    )


def described(asked: Ask) -> str:
    """`2 nodes with 8 GPU, 8 CPU each`."""
    n, what = len(asked.bundles), amounts(asked.bundles[0])
    match asked.strategy:
        case "STRICT_SPREAD":
            return f"{count(n, 'node')} with {what}" + (" each" if n > 1 else "")
        case "STRICT_PACK":
            return f"{count(n, 'rank')} with {what} each, all on one node"
    return f"{count(n, 'rank')} with {what} each"


def instead(asked: Ask, shelves: Shelves) -> str:
    """The words that would fit, nearest to what was asked."""
    needed = replace(asked, bundles=asked.bundles[: len(asked.bundles) - asked.spares], spares=0)
    if asked.spares and holds(needed, shelves):
        left = room(asked, [(slots(have, asked.bundles[0]), more) for have, more in shelves]) - len(needed.bundles)
        return f"say scale.spares={left}"
    if size := fitting_size(asked, asked.rank_resources, shelves):
        return f"say {size}"
    short = [_short(asked.rank_resources, have) for have, _ in shelves]
    if not short:
        return "start a node first" + (", or leave out scale.labels" if asked.selector else "")
    # not even one rank fits: be content with the node that lacks the least
    least = min(short, key=lambda lacking: (sum(not have for have in lacking.values()), len(lacking)))
    if least.get("CPU") == 0 or any(not have for name, have in least.items() if name not in ("CPU", "GPU")):
        lacking = ", ".join(name for name, have in least.items() if not have)
        return (
            f"no node has {lacking} beside the rest: add one, or start Ray's nodes with more (ray start --num-cpus=N)"
        )
    words, need = smaller_rank(asked, least)
    fits = holds(replace(asked, bundles=(bundle(need, asked.ranks_per_bundle),) * len(asked.bundles)), shelves)
    return f"say {words}" if fits else f"say {words} {fitting_size(asked, need, shelves)}"


def fitting_size(asked: Ask, need: Mapping[str, float], shelves: Shelves) -> str:
    """`scale=2x4`: the most ranks that fit, of those that were asked for; empty if not one does."""
    fits = sorted((slots(have, need) for have, more in shelves for _ in range(more)), reverse=True)
    if not fits or not fits[0]:
        return ""
    if asked.strategy in ("PACK", "SPREAD"):
        return f"scale=1x{min(sum(fits), asked.world_size)}"
    nodes = fits if asked.strategy == "STRICT_SPREAD" else fits[:1]
    sizes = [(n, min(asked.world_size // n, fits[n - 1])) for n in range(1, len(nodes) + 1)]
    best = max(sizes, key=lambda size: (size[0] * size[1], size[0]))
    return f"scale={best[0]}x{best[1]}"


def _short(need: Mapping[str, float], have: Mapping[str, float]) -> dict[str, float]:
    """What a node has of those resources of which it has too little for one rank."""
    return {name: have.get(name, 0.0) for name, amount in need.items() if not slots(have, {name: amount})}


def smaller_rank(asked: Ask, least: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The words for a rank that is content with `least`, and its resources."""
    need, words = dict(asked.rank_resources), []
    for name, have in least.items():
        if name == "CPU":  # ranks can share a CPU, so that all of them have a place
            need[name] = max(math.floor(have / asked.ranks_per_bundle * 100) / 100, 0.01)
            words.append(f"scale.cpus={need[name]:g}")
        elif name == "GPU" and asked.backend == "nccl" and have < 1:
            del need[name]
            words.append("backend=gloo scale.gpus=0")
        elif name == "GPU":
            need[name] = float(math.floor(have)) if have > 1 else have
            words.append(f"scale.gpus={need[name]:g}")
        else:
            need[name] = have
            words.append(f"scale.resources.{name}={have:g}")
    return " ".join(words), {name: amount for name, amount in need.items() if amount}


def missing(asked: Ask, nodes: Sequence[Node]) -> str:
    """What is being waited for, in words: `waiting for 1 more node with 8 GPU, 8 CPU: 1 of 2 there; …`."""
    chosen = sorted((node for node in nodes if matches(node.labels, asked.selector)), key=lambda node: node.order)
    n, ready = len(asked.bundles), room(asked, [(slots(node.free, asked.bundles[0]), 1) for node in chosen])
    what = amounts(asked.bundles[0]) + (f" and labels {_labels(asked)}" if asked.selector else "")
    taken = [text for node in chosen if (text := _taken(node, asked))]
    if ready >= n:
        return "waiting for Ray to place the ranks: there is room for all"
    more = {
        "STRICT_SPREAD": f"{n - ready} more {'node' if n - ready == 1 else 'nodes'} with {what}: {ready} of {n} there",
        "STRICT_PACK": f"one node with room for {n} ranks of {what}: the best has room for {ready}",
    }.get(asked.strategy, f"room for {count(n - ready, 'more rank')} of {what}: {ready} of {n} have it")
    folded = taken[:3] + ([f"{count(len(taken) - 3, 'more node')} like that"] if len(taken) > 3 else [])
    return "; ".join([f"waiting for {more}", *folded])


def _labels(asked: Ask) -> str:
    return ", ".join(f"{key}={words}" for key, words in asked.selector.items())


def _taken(node: Node, asked: Ask) -> str:
    """`node-7 has 8 GPU but 4 are taken`, for a node that would do, or do for more, if it were free."""
    need, most = asked.bundles[0], 1 if asked.strategy == "STRICT_SPREAD" else len(asked.bundles)
    fits = min(most, slots(node.total, need))
    short = [name for name, amount in need.items() if slots(node.free, {name: amount}) < fits]
    held = {name: node.total[name] - node.free.get(name, 0) for name in short}
    told = ", ".join(f"{node.total[name]:g} {name} but {_are(n)} taken" for name, n in held.items())
    return told and f"{node.host} has {told}"


def _are(n: float) -> str:
    return f"{n:g} {'is' if n == 1 else 'are'}"
