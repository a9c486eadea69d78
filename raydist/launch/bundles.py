"""The placement groups of a run's bundles, and which bundles have lost their node. (driver)

Ray (2.60) gives a lost bundle another node by itself. While no node has room, it retries without a
pause, and places no other group of the cluster meanwhile (github.com/ray-project/ray/issues/65147,
pull/65007): the runs of everybody else wait. It does not if no node could ever hold the bundle. So
each bundle of a group on several nodes names its node, and raydist requests another group in place
of what was lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from raydist.cluster.connect import own_actor
from raydist.cluster.nodes import Node, ResourceRequest

NAME = "raydist-"
"""Prefix of the names of placement groups that an actor has created."""
NODE_ID = "ray.io/node-id"
"""The label with a node's id, which Ray sets."""

Groups = MutableMapping[int, tuple[Any, int]]
"""By bundle of a run: its placement group, and its index in that group."""


def group_name() -> str:
    """Return a name that tells remove_orphans() which actor created the group.

    Empty in a driver: its groups end with it.
    """
    actor = own_actor()
    return f"{NAME}{uuid.uuid4().hex[:8]}-of-{actor}" if actor else ""


def create_group(
    request: ResourceRequest,
    bundles: int,
    elsewhere: Collection[str] = (),
    nodes: Sequence[str] = (),
) -> Any:
    """Create a placement group of the first `bundles` bundles.

    `elsewhere`: ids of nodes that it must not use. `nodes`: the id of each bundle's node; then it
    gets no other one.
    """
    from ray.util.placement_group import placement_group

    out = {NODE_ID: f"!in({','.join(sorted(elsewhere))})"} if elsewhere else {}
    labels = [
        {**out, **request.selector, **({NODE_ID: nodes[bundle]} if nodes else {})}
        for bundle in range(bundles)
    ]
    return placement_group(
        [dict(bundle) for bundle in request.bundles[:bundles]],
        strategy=request.strategy,
        name=group_name(),
        **({"bundle_label_selector": labels} if any(labels) else {}),
    )


def create_on_one_node(
    request: ResourceRequest, bundles: int, elsewhere: Collection[str] = ()
) -> Any:
    """Create a placement group whose bundles are all on one node, none of `elsewhere`.

    It is lost with that node as a whole, so it need not name the node in advance.
    """
    strategy = "STRICT_PACK" if bundles > 1 else request.strategy
    return create_group(replace(request, strategy=strategy), bundles, elsewhere)


def placed_on(groups: Groups, nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node of each bundle that is on one of these."""
    by_id = {node.id: node for node in nodes}
    tables = _tables(groups)
    return {
        bundle: by_id[id]
        for bundle, (group, index) in groups.items()
        if tables[group.id]["state"] != "REMOVED"
        and (id := tables[group.id]["bundles_to_node_id"].get(index)) in by_id
    }


def lost_bundles(groups: Groups) -> list[int]:
    """Return the bundles whose node Ray has declared dead, and that have no other one."""
    tables = _tables(groups)
    return [
        bundle
        for bundle, (group, index) in groups.items()
        if tables[group.id]["state"] == "RESCHEDULING"
        and not tables[group.id]["bundles_to_node_id"].get(index)
    ]


def drop_bundle(groups: Groups, bundle: int) -> None:
    """Forget a bundle, and remove its placement group if that has no other one of the run."""
    from ray.util.placement_group import remove_placement_group

    group, _ = groups.pop(bundle)
    if all(other is not group for other, _ in groups.values()):
        remove_placement_group(group)


def drop_bundles(groups: Groups) -> None:
    """Remove all placement groups."""
    for bundle in list(groups):
        drop_bundle(groups, bundle)


def _tables(groups: Groups) -> dict[Any, Any]:
    """Return Ray's entry of each placement group, by the group's id."""
    from ray.util.placement_group import placement_group_table

    found = {group.id: group for group, _ in groups.values()}
    return {id: placement_group_table(group) for id, group in found.items()}
