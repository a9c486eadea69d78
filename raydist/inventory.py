"""What there is and what is asked: nodes, kinds of node the autoscaler could bring, whether a gang fits. (pure)"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.errors import ConfigError, suggest

UNLIMITED = 10_000
"""Stands for the -1 with which KubeRay says that a kind of node may come as often as asked."""
HOSTS_NAMED = 4


@dataclass(frozen=True)
class Node:
    """One node of the Ray cluster, as Ray tells it."""

    id: str
    """Ray's node id, in hex."""
    ip: str
    """The address that Ray knows the node by."""
    host: str
    """Its host name."""
    total: Mapping[str, float]
    """All its resources: CPU, GPU, and others."""
    free: Mapping[str, float]
    """Those that nobody holds now."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts nodes by numeric address, then id: the same order whoever looks, and after a restart."""
        try:
            address = ipaddress.ip_address(self.ip)
        except ValueError:
            return (9, 0, self.ip, self.id)
        return (address.version, int(address), "", self.id)


@dataclass(frozen=True)
class NodeType:
    """A kind of node that the autoscaler could bring."""

    name: str
    resources: Mapping[str, float]
    most: int
    """How many of them there may be in all."""
    labels: Mapping[str, str] | None = None
    """None where nobody tells: Ray's autoscaler keeps them to itself."""


def nodes_from_ray(told: Iterable[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> list[Node]:
    """The living nodes of `ray.nodes()`; `free` is what `available_resources_per_node()` says, by node id."""
    return [
        Node(
            id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            host=node["NodeManagerHostname"],
            total=_countable(node["Resources"]),
            free=_countable(free.get(node["NodeID"], {})),
            labels=node.get("Labels") or {},
        )
        for node in told
        if node["Alive"]
    ]


def _countable(resources: Mapping[str, float]) -> dict[str, float]:
    # node:10.0.0.1 and node:__internal_head__ pin work to one node: they are names more than resources
    return {name: float(amount) for name, amount in resources.items() if not name.startswith("node:")}


def types_from_config(config: Any) -> list[NodeType]:
    """The node types of the autoscaler's ClusterConfig, None where there is no autoscaler."""
    return [
        NodeType(group.name, dict(group.resources), UNLIMITED if group.max_count < 0 else group.max_count)
        for group in (config.node_group_configs if config else ())
        if group.resources and group.max_count
    ]


def types_from_file(config: Mapping[str, Any]) -> list[NodeType]:
    """The node types of a cluster.yaml. The head's own may come again only if it says so."""
    head, every = config.get("head_node_type"), config.get("max_workers")
    found = []
    for name, kind in (config.get("available_node_types") or {}).items():
        most = kind.get("max_workers")
        most = (0 if name == head else UNLIMITED) if most is None else int(most)
        most = most if every is None else min(most, int(every))
        if most > 0 and kind.get("resources"):
            found.append(
                NodeType(name, {key: float(n) for key, n in kind["resources"].items()}, most, kind.get("labels"))
            )
    return found


def still_to_come(types: Iterable[NodeType], nodes: Iterable[Node]) -> list[tuple[NodeType, int]]:
    """The types, each with how many more of it could come beside those that are there."""
    there = [node.labels.get("ray.io/node-group") for node in nodes]
    return [(kind, more) for kind in types if (more := kind.most - there.count(kind.name)) > 0]


Shelves = Sequence[tuple[Mapping[str, float], int]]
"""What a node holds, and how many nodes like it there are or could be."""


@dataclass(frozen=True)
class Ask:
    """What is asked of Ray: one placement group, the gang."""

    backend: str
    """gloo, nccl, …: never auto."""
    world_size: int
    bundles: tuple[Mapping[str, float], ...]
    """Resources of each bundle of the placement group."""
    ranks_per_bundle: int
    strategy: str
    rank_resources: Mapping[str, float]
    """Resources of one rank: CPU, GPU, others."""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Ray label selector of every bundle."""
    spares: int = 0
    """Bundles beside those of the ranks."""


def slots(have: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How often `need` fits into `have`."""
    return min((_times(name, have.get(name, 0), amount) for name, amount in need.items() if amount), default=0)


def _times(name: str, have: float, amount: float) -> int:
    if name == "GPU" and amount < 1:
        # a share of a GPU lies on one GPU: of 2 GPUs four ranks can have 0.4 each, not five
        return math.floor(have) * _floor(1 / amount) + _floor(have % 1 / amount)
    return _floor(have / amount)


def _floor(ratio: float) -> int:
    # 0.3 / 0.1 is a little less than 3, and Ray counts in ten-thousandths
    return math.floor(ratio + 1e-6)


def bundle(need: Mapping[str, float], ranks: int) -> dict[str, float]:
    """The resources of so many ranks together."""
    every = {name: round(amount * ranks, 4) for name, amount in need.items()}
    if every.get("GPU", 0) > 1 > need["GPU"]:
        every["GPU"] = float(math.ceil(ranks / _floor(1 / need["GPU"])))
    return every


def holds(asked: Ask, shelves: Shelves) -> bool:
    """Whether the nodes could hold all bundles if nobody else had anything; exact, since all bundles are equal."""
    fits = [(slots(have, asked.bundles[0]), more) for have, more in shelves]
    return room(asked, fits) >= len(asked.bundles)


def room(asked: Ask, fits: Sequence[tuple[int, int]]) -> int:
    """How many of the bundles have room at once, as the strategy wants them. `fits`: (bundles, nodes like this)."""
    match asked.strategy:
        case "STRICT_SPREAD":
            return sum(more for room, more in fits if room)
        case "STRICT_PACK":
            return max((room for room, _ in fits), default=0)
    return sum(room * more for room, more in fits)


_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SELECTOR = re.compile(rf"!?(?:in\({_VALUE}(?:, ?{_VALUE})*\)|{_VALUE})")


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that the selector means, in Ray's words: v, !v, in(a,b), !in(a,b)."""
    return all(_matches(labels.get(key), words) for key, words in selector.items())


def _matches(value: str | None, words: str) -> bool:
    listed = re.fullmatch(r"!?in\((.*)\)", words)
    meant = re.split(", ?", listed[1]) if listed else [words.removeprefix("!")]
    return (value in meant) != words.startswith("!")


def select(
    nodes: Sequence[Node], types: Sequence[NodeType], selector: Mapping[str, str]
) -> tuple[list[Node], list[NodeType]]:
    """The nodes and types that the labels mean; a ConfigError if they can't mean any."""
    for key, words in selector.items():
        if not _SELECTOR.fullmatch(words):
            raise ConfigError(
                f"scale.labels.{key}={words}: Ray's selectors are VALUE, !VALUE, in(A,B) and !in(A,B); "
                f"say scale.labels.{key}={re.sub(r'[^A-Za-z0-9_.-]', '', words) or 'VALUE'}"
            )
    chosen = [node for node in nodes if matches(node.labels, selector)]
    kinds = [kind for kind in types if kind.labels is None or matches(kind.labels, selector)]
    if nodes and not chosen and not kinds:
        raise ConfigError(_unmatched(nodes, selector))
    return chosen, kinds


def _unmatched(nodes: Sequence[Node], selector: Mapping[str, str]) -> str:
    for key, words in selector.items():
        if not any(matches(node.labels, {key: words}) for node in nodes):
            return f"scale.labels.{key}={words}: no node has it; {_label_hint(key, words, nodes)}"
    every = " ".join(f"scale.labels.{key}={words}" for key, words in selector.items())
    return f"{every}: no node has all of them; leave one out"


def _label_hint(key: str, words: str, nodes: Iterable[Node]) -> str:
    known = {k: v for node in nodes for k, v in node.labels.items()}
    if key not in known:
        return suggest(key, (k for k in known if k != "ray.io/node-id"), prefix="scale.labels.")
    return suggest(words.removeprefix("!"), {n.labels[key] for n in nodes if key in n.labels}, f"scale.labels.{key}=")


def check_names(need: Mapping[str, float], have: Iterable[Mapping[str, float]]) -> None:
    """Refuse a resource that nothing has any of, if one of a like name is there."""
    known = {name for resources in have for name in resources}
    for name in need.keys() - known - {"CPU", "GPU"}:
        custom = known - {"CPU", "GPU", "memory", "object_store_memory"}
        hint = suggest(name, custom, prefix="scale.resources.") if custom else "no node has resources of its own"
        raise ConfigError(f"scale.resources.{name}={need[name]:g}: no node has it; {hint}")


def amounts(resources: Mapping[str, float]) -> str:
    """`8 GPU, 64 CPU`: the GPUs first, then the CPUs, then what has a name of its own."""
    order = sorted(resources, key=lambda name: (name != "GPU", name != "CPU", name))
    return ", ".join(f"{resources[name]:g} {name}" for name in order) or "nothing"


def listing(nodes: Sequence[Node], types: Iterable[tuple[NodeType, int]], names: Iterable[str]) -> list[str]:
    """What is there of the resources `names`, equal nodes as one line: `2 nodes with 8 GPU, 64 CPU (gpu-1, gpu-2)`."""
    shown = {"CPU", "GPU", *names}
    equal: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.order):
        equal.setdefault(_shown(node.total, shown), []).append(node.host)
    lines = [f"{count(len(hosts), 'node')} with {what} ({_folded(hosts)})" for what, hosts in equal.items()]
    for kind, more in types:
        how_many = "any number" if more > UNLIMITED // 2 else f"up to {more} more"
        lines.append(f"{how_many} of the autoscaler's type {kind.name} with {_shown(kind.resources, shown)}")
    return lines or ["no node"]


def _shown(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return amounts({name: resources[name] for name in names if resources.get(name)})


def _folded(hosts: Sequence[str]) -> str:
    more = len(hosts) - HOSTS_NAMED
    return ", ".join(hosts[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def count(n: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {what}" + ("" if n == 1 else "s")
