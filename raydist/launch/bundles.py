"""The placement groups of a run: one for each of its nodes, with the bundles there. (driver)

Ray (2.60) gives a lost bundle of a group another node by itself. While no node has room, it retries
without a pause, and places no other group of the cluster meanwhile
(github.com/ray-project/ray/issues/65147, pull/65007): the runs of everybody else wait. So the group
of a lost node is removed, and another one created.

Ray places all bundles of one group at once, or none, but not all of several groups. So a run that
waits for room does so with one group of all bundles; then groups on the same nodes replace it,
unless somebody else is faster.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from raydist.cluster.connect import own_actor
from raydist.cluster.nodes import Node, ResourceRequest
from raydist.shared import signals

NAME = "raydist-"
"""Prefix of the names of placement groups that an actor has created."""
NODE_ID = "ray.io/node-id"
"""The label with a node's id, which Ray sets."""

MANY = 256
"""Groups from which one call for all of the cluster is taken, which has those of ended runs too."""

Groups = dict[int, tuple[Any, int]]
"""By bundle of a run: its placement group, and its index in that group."""
Seen = dict[int, tuple[str, str]]
"""By bundle: the state of its placement group in Ray's table, and the id of its node or nothing."""


def group_name() -> str:
    """Return a name that tells remove_orphans() which actor created the group.

    Empty in a driver: its groups end with it.
    """
    actor = own_actor()
    return f"{NAME}{uuid.uuid4().hex[:8]}-of-{actor}" if actor else ""


def create_group(
    request: ResourceRequest, bundles: int, elsewhere: Collection[str] = (), node: str = ""
) -> Any:
    """Create a placement group of the first `bundles` bundles.

    `elsewhere`: ids of nodes that it must not use. `node`: the id of the only one that it may use.
    """
    from ray.util.placement_group import placement_group

    labels = {
        **({NODE_ID: f"!in({','.join(sorted(elsewhere))})"} if elsewhere else {}),
        **request.selector,
        **({NODE_ID: node} if node else {}),
    }
    return placement_group(
        [dict(bundle) for bundle in request.bundles[:bundles]],
        strategy=request.strategy,
        name=group_name(),
        **({"bundle_label_selector": [labels] * bundles} if labels else {}),
    )


def create_on_one_node(
    request: ResourceRequest,
    bundles: Sequence[int],
    elsewhere: Collection[str] = (),
    node: str = "",
) -> Groups:
    """Create a placement group of these bundles, all on one node.

    `elsewhere` and `node`: as in create_group.
    """
    strategy = "STRICT_PACK" if len(bundles) > 1 else request.strategy
    group = create_group(replace(request, strategy=strategy), len(bundles), elsewhere, node)
    return {bundle: (group, index) for index, bundle in enumerate(bundles)}


def create_on(request: ResourceRequest, nodes: Sequence[str], groups: Groups) -> None:
    """Create a placement group on each of these nodes; add each to `groups` at once.

    `nodes`: the id of the node of each bundle.
    """
    with signals.passed_to(lambda _: None):  # a Ctrl-C would leave one that nobody knows
        for node in dict.fromkeys(nodes):
            there = [bundle for bundle, id in enumerate(nodes) if id == node]
            groups |= create_on_one_node(request, there, node=node)


def see_bundles(groups: Groups) -> Seen:
    """Ask Ray for the state and the node of each bundle."""
    from ray.util.placement_group import placement_group_table

    own = {group.id.hex(): group for group, _ in groups.values()}
    tables = (
        placement_group_table()
        if len(own) > MANY
        else {id: placement_group_table(group) for id, group in own.items()}
    )
    found: Seen = {}
    for bundle, (group, index) in groups.items():
        table = tables[group.id.hex()]
        found[bundle] = table["state"], table["bundles_to_node_id"].get(index, "")
    return found


def placed_on(seen: Seen, nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node of each bundle that is on one of these."""
    by_id = {node.id: node for node in nodes}
    placed = {}
    for bundle, (state, node) in seen.items():
        if state != "REMOVED" and node in by_id:
            placed[bundle] = by_id[node]
    return placed


def lost_bundles(groups: Groups, seen: Seen) -> list[int]:
    """Return the bundles whose node Ray has declared dead, and that have no other one.

    Not those of a group that still has bundles on other nodes: Ray gives them a node.
    """
    lost = {bundle for bundle, each in seen.items() if each == ("RESCHEDULING", "")}
    in_use = {id(groups[bundle][0]) for bundle in groups.keys() - lost}
    return [bundle for bundle in sorted(lost) if id(groups[bundle][0]) not in in_use]


def drop_bundle(groups: Groups, bundle: int) -> None:
    """Forget a bundle, and remove its placement group if that has no other one of the run."""
    from ray.util.placement_group import remove_placement_group

    if not is_shared(groups, bundle):
        remove_placement_group(groups[bundle][0])  # first: a Ctrl-C may come in between
    del groups[bundle]


def is_shared(groups: Groups, bundle: int) -> bool:
    """Return whether the placement group of a bundle has another bundle of the run.

    Then the bundle can't be given back: Ray frees only whole groups.
    """
    group, _ = groups[bundle]
    return any(other is group for each, (other, _) in groups.items() if each != bundle)


def drop_bundles(groups: Groups) -> None:
    """Remove all placement groups."""
    with signals.passed_to(lambda _: None):  # a Ctrl-C would leave the rest in a notebook
        for bundle in list(groups):
            drop_bundle(groups, bundle)
