"""Nodes, node types of the autoscaler, resource requests, and whether a request fits. (pure)"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.shared.errors import ConfigError, nearest
from raydist.shared.rank_names import counted, joined_names

UNLIMITED = 10_000
"""Replaces the -1 that KubeRay gives a node type without a limit."""


@dataclass(frozen=True)
class Node:
    """One node of the Ray cluster, as Ray reports it."""

    id: str
    """Ray's node id, in hex."""
    ip: str
    """The node's address in Ray."""
    host: str
    """The node's host name, unique in the cluster: see `nodes_from_ray`."""
    total: Mapping[str, float]
    """All resources of the node: CPU, GPU, and others."""
    free: Mapping[str, float]
    """Resources that are not reserved now."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: numeric address, then id.

        It is the same in each process and after a restart.
        """
        try:
            address = ipaddress.ip_address(self.ip)
        except ValueError:
            return (9, 0, self.ip, self.id)
        return (address.version, int(address), "", self.id)


@dataclass(frozen=True)
class NodeType:
    """A node type that the autoscaler may add."""

    name: str
    resources: Mapping[str, float]
    most: int
    """The maximum number of nodes of this type in the cluster."""
    labels: Mapping[str, str] | None = None
    """None if Ray does not report them."""

    def may_match(self, selector: Mapping[str, str]) -> bool:
        """Report whether a node of this type may fit a label selector of Ray."""
        return self.labels is None or matches(self.labels, selector)


def nodes_from_ray(
    ray_nodes: Iterable[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> list[Node]:
    """Return the nodes of `ray.nodes()` that are alive. `free`: available resources by node id.

    Machines with equal host names, such as cloned images, are named `ubuntu (10.0.0.7)`, with their
    addresses, because clocks, loads and lost nodes are identified by name. Nodes with the same
    address are one machine.
    """
    alive = [node for node in ray_nodes if node["Alive"]]
    machines = {(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in alive}
    named = Counter(host for host, _ in machines)
    return [
        Node(
            id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            host=_unique_name(node["NodeManagerHostname"], node["NodeManagerAddress"], named),
            total=_countable(node["Resources"]),
            free=_countable(free.get(node["NodeID"], {})),
            labels=node.get("Labels") or {},
        )
        for node in alive
    ]


def _unique_name(host: str, ip: str, named: Mapping[str, int]) -> str:
    """Return the name of a machine. `named`: how many machines have each host name."""
    return f"{host} ({ip})" if named[host] > 1 else host


def plain_name(host: str, ip: str) -> str:
    """Return a machine's own host name, whether or not there were others of that name."""
    return host.removesuffix(f" ({ip})")


def _countable(resources: Mapping[str, float]) -> dict[str, float]:
    # node:10.0.0.1 and node:__internal_head__ only pin work to one node.
    return {
        name: float(amount) for name, amount in resources.items() if not name.startswith("node:")
    }


def types_from_config(config: Any) -> list[NodeType]:
    """Return the node types of the autoscaler's ClusterConfig message.

    `config`: None without an autoscaler.
    """
    return [
        NodeType(
            group.name, dict(group.resources), UNLIMITED if group.max_count < 0 else group.max_count
        )
        for group in (config.node_group_configs if config else ())
        if group.resources and group.max_count
    ]


def types_from_file(config: Mapping[str, Any]) -> list[NodeType]:
    """Return the node types of a cluster.yaml.

    The head's own type has no workers unless it sets max_workers.
    """
    head, limit = config.get("head_node_type"), config.get("max_workers")
    types = []
    for name, kind in (config.get("available_node_types") or {}).items():
        most = kind.get("max_workers")
        most = (0 if name == head else UNLIMITED) if most is None else int(most)
        most = most if limit is None else min(most, int(limit))
        if most > 0 and kind.get("resources"):
            resources = {key: float(n) for key, n in kind["resources"].items()}
            types.append(NodeType(name, resources, most, kind.get("labels")))
    return types


def still_to_come(types: Iterable[NodeType], nodes: Iterable[Node]) -> list[tuple[NodeType, int]]:
    """Return each type of which the autoscaler may still add nodes, with their number."""
    groups = [node.labels.get("ray.io/node-group") for node in nodes]
    return [(kind, more) for kind in types if (more := kind.most - groups.count(kind.name)) > 0]


Capacity = Sequence[tuple[Mapping[str, float], int]]
"""(resources of a node, number of such nodes that exist or may come)."""


@dataclass(frozen=True)
class ResourceRequest:
    """The placement group that a job requests from Ray."""

    backend: str
    """gloo, nccl, ...; never auto."""
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
    """Bundles without ranks."""


def fit_count(have: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Return how often the resources `need` fit into `have`."""
    return min(
        (_fit_count(name, have.get(name, 0), amount) for name, amount in need.items() if amount),
        default=0,
    )


def _fit_count(name: str, have: float, amount: float) -> int:
    if name == "GPU" and amount < 1:
        # A share of a GPU is on one GPU: 2 GPUs hold four ranks of 0.4 each, not five.
        return math.floor(have) * _floor(1 / amount) + _floor(have % 1 / amount)
    return _floor(have / amount)


def _floor(ratio: float) -> int:
    # 0.3 / 0.1 is slightly less than 3, and Ray counts in ten-thousandths.
    return math.floor(ratio + 1e-6)


def bundle(need: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Return the resources of `ranks` ranks together. `need`: resources of one rank."""
    resources = {name: round(amount * ranks, 4) for name, amount in need.items()}
    if resources.get("GPU", 0) > 1 > need["GPU"]:
        resources["GPU"] = float(math.ceil(ranks / _floor(1 / need["GPU"])))
    return resources


def holds(request: ResourceRequest, capacity: Capacity) -> bool:
    """Report whether nodes that are otherwise empty hold all bundles.

    The result is exact, because all bundles are equal.
    """
    fits = [(fit_count(have, request.bundles[0]), more) for have, more in capacity]
    return room(request, fits) >= len(request.bundles)


def room(request: ResourceRequest, fits: Sequence[tuple[int, int]]) -> int:
    """Return the number of bundles that fit at once under the request's strategy.

    `fits`: (bundles on a node, number of nodes).
    """
    match request.strategy:
        case "STRICT_SPREAD":
            return sum(more for bundles, more in fits if bundles)
        case "STRICT_PACK":
            return max((bundles for bundles, _ in fits), default=0)
    return sum(bundles * more for bundles, more in fits)


def distribute(request: ResourceRequest, fits: Mapping[str, int]) -> list[str] | None:
    """Return the id of the node of each bundle; None if there is no room for all.

    `fits`: by id, how many bundles a node can hold. As Ray's strategies do, the emptiest nodes come
    first, and PACK uses as few nodes as possible.
    """
    bundles = len(request.bundles)
    if room(request, [(count, 1) for count in fits.values()]) < bundles:
        return None
    emptiest = sorted(fits, key=lambda id: -fits[id])
    if "SPREAD" in request.strategy:
        turns = range(max(fits.values()))
        found = [id for turn in turns for id in emptiest if fits[id] > turn]
    else:
        found = [id for id in emptiest for _ in range(fits[id])]
    return found[:bundles]


_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SELECTOR = re.compile(rf"!?(?:in\({_VALUE}(?:, ?{_VALUE})*\)|{_VALUE})")


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Report whether a node with these labels fits a label selector of Ray.

    The selector has v, !v, in(a,b) or !in(a,b) for each key.
    """
    return all(_matches(labels.get(key), pattern) for key, pattern in selector.items())


def _matches(value: str | None, pattern: str) -> bool:
    listed = re.fullmatch(r"!?in\((.*)\)", pattern)
    values = re.split(", ?", listed[1]) if listed else [pattern.removeprefix("!")]
    return (value in values) != pattern.startswith("!")


def select_nodes(
    nodes: Sequence[Node], types: Sequence[NodeType], selector: Mapping[str, str]
) -> tuple[list[Node], list[NodeType]]:
    """Return the nodes and node types that the selector selects; ConfigError if it selects none."""
    for key, pattern in selector.items():
        if not _SELECTOR.fullmatch(pattern):
            right = f"scale.labels.{key}={re.sub(r'[^A-Za-z0-9_.-]', '', pattern) or 'VALUE'}"
            cause = "Ray's selectors are VALUE, !VALUE, in(A,B) and !in(A,B)"
            raise ConfigError.of(f"scale.labels.{key}", pattern, cause, right)
    chosen, kinds = selected(nodes, types, selector)
    if nodes and not chosen and not kinds:
        raise _unmatched(nodes, selector)
    return chosen, kinds


def selected(
    nodes: Sequence[Node], types: Sequence[NodeType], selector: Mapping[str, str]
) -> tuple[list[Node], list[NodeType]]:
    """Return the nodes and node types that a correct selector selects, perhaps none."""
    chosen = [node for node in nodes if matches(node.labels, selector)]
    return chosen, [kind for kind in types if kind.may_match(selector)]


def _unmatched(nodes: Sequence[Node], selector: Mapping[str, str]) -> ConfigError:
    for key, pattern in selector.items():
        if any(matches(node.labels, {key: pattern}) for node in nodes):
            continue
        name, cause = f"scale.labels.{key}", "no node has this label"
        if values := {node.labels[key] for node in nodes if key in node.labels}:
            guess = nearest(pattern.removeprefix("!"), values, f"{name}=")
            return ConfigError.of(name, pattern, cause, guess=guess, known=values)
        keys = {each for node in nodes for each in node.labels} - {"ray.io/node-id"}
        close = nearest(key, keys, "scale.labels.")
        return ConfigError.of(
            name, pattern, cause, guess=close and f"{close}={pattern}", known=keys
        )
    every = " ".join(f"scale.labels.{key}={pattern}" for key, pattern in selector.items())
    return ConfigError.of(
        "scale.labels", dict(selector), "no node has all of them; leave one out", text=every
    )


def check_resource_names(need: Mapping[str, float], have: Iterable[Mapping[str, float]]) -> None:
    """Raise ConfigError for a resource that no node has, with a similar name as suggestion."""
    known = {name for resources in have for name in resources}
    for name in need.keys() - known - {"CPU", "GPU"}:
        custom = known - {"CPU", "GPU", "memory", "object_store_memory"}
        close = nearest(name, custom, "scale.resources.")
        guess, amount = close and f"{close}={need[name]:g}", f"{need[name]:g}"
        cause = "no node has this resource" if custom else "no node has custom resources"
        raise ConfigError.of(f"scale.resources.{name}", amount, cause, guess=guess, known=custom)


def amounts(resources: Mapping[str, float]) -> str:
    """Format amounts as `8 GPU, 64 CPU`: GPUs first, then CPUs, then custom resources."""
    order = sorted(resources, key=lambda name: (name != "GPU", name != "CPU", name))
    return ", ".join(f"{resources[name]:g} {name}" for name in order) or "nothing"


def listing(
    nodes: Sequence[Node], types: Iterable[tuple[NodeType, int]], names: Iterable[str]
) -> list[str]:
    """List the cluster's amounts of the resources `names`, with one line for equal nodes.

    A line is `2 nodes with 8 GPU (gpu-1, gpu-2)`.
    """
    shown = {"CPU", "GPU", *names}
    hosts_with: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.order):
        hosts_with.setdefault(_shown(node.total, shown), []).append(node.host)
    lines = [
        f"{counted(len(hosts), 'node')} with {resources} ({joined_names(hosts)})"
        for resources, hosts in hosts_with.items()
    ]
    for kind, more in types:
        number = "any number" if more > UNLIMITED // 2 else f"up to {more} more"
        lines.append(
            f"{number} of the autoscaler's type {kind.name} with {_shown(kind.resources, shown)}"
        )
    return lines or ["no node"]


def _shown(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return amounts({name: resources[name] for name in names if resources.get(name)})
