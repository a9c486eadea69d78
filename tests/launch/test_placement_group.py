"""How lost nodes are replaced, and what the cluster's queue is told of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster import drain, placement
from raydist.cluster.queue.turn import Turn
from raydist.launch import bundles, placement_group
from raydist.launch.bundles import Groups
from raydist.launch.placement_group import RayHosts
from raydist.settings.config import Scale
from raydist.shared.events import Events
from tests.cluster.test_placement import node
from tests.recovery.fake_group import job


class NotedTurn(Turn):
    """A turn that keeps the room that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Mapping[str, int] = {}

    def note_size(self, held: Mapping[str, int], spare: Sequence[str]) -> None:
        self.held = dict(held)


class NoActors:
    """Actors that only have a plan, and its placement groups."""

    def __init__(self, plan: placement.Plan, groups: Sequence[Any]) -> None:
        self.plan = plan
        self.groups: Groups = {bundle: (group, 0) for bundle, group in enumerate(groups)}

    def replace(self, lost: Sequence[int], plan: placement.Plan) -> None:
        self.plan = plan


class GroupId(str):
    """The id of a placement group."""

    def hex(self) -> str:
        return self


class RayGroups:
    """What Ray knows of placement groups: places each new one on the next of these nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, next_nodes: Sequence[str]) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.selectors: list[Any] = []
        self.removed: list[str] = []
        self._next = [*next_nodes]
        ray_groups = importlib.import_module("ray.util.placement_group")
        monkeypatch.setattr(ray_groups, "placement_group", self.create)
        monkeypatch.setattr(
            ray_groups,
            "placement_group_table",
            lambda one=None: self.tables if one is None else self.tables[one.id],
        )
        monkeypatch.setattr(
            ray_groups, "remove_placement_group", lambda it: self.removed.append(it.id)
        )
        monkeypatch.setattr(bundles, "own_actor", lambda: "")

    def add(self, state: str, *nodes: str) -> Any:
        id = GroupId(f"group-{len(self.tables)}")
        group = SimpleNamespace(id=id, wait=lambda s: state == "CREATED")
        self.tables[group.id] = {"state": state, "bundles_to_node_id": dict(enumerate(nodes))}
        return group

    def create(self, each: Any, strategy: str, name: str, bundle_label_selector: Any = ()) -> Any:
        self.selectors += bundle_label_selector
        nodes = [self._next.pop(0) for _ in each[: len(self._next)]]
        return self.add("CREATED", *nodes) if nodes else self.add("PENDING", *[""] * len(each))


def hosts_of(plan: placement.Plan, scale: int, *groups: Any) -> Any:
    hosts: Any = object.__new__(RayHosts)
    hosts._job, hosts._events = job(scale), None
    hosts.standby, hosts.turn = None, NotedTurn()
    hosts._actors = NoActors(plan, groups)
    return hosts


def test_the_queue_knows_the_node_that_replaces_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other runs then waited for room that no run seemed to hold, and gave up."""
    there = [node(1), node(2)]
    plan = placement.assign_ranks(placement.resources_for(job(2), there), there)
    groups = RayGroups(monkeypatch, [node(3).id])
    hosts = hosts_of(plan, 2, groups.add("CREATED", there[0].id), groups.add("RESCHEDULING", ""))
    monkeypatch.setattr(placement_group, "alive_nodes", lambda: [there[0], node(3)])
    hosts.replace_nodes([1])
    assert hosts.turn.held == {there[0].id: 1, node(3).id: 1}
    assert groups.selectors == [{"ray.io/node-id": f"!in({there[0].id})"}]
    assert groups.removed == ["group-1"]


def test_two_lost_nodes_are_not_replaced_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [node(1), node(2), node(3)]
    plan = placement.assign_ranks(placement.resources_for(job(3), there), there)
    groups = RayGroups(monkeypatch, [node(4).id, node(4).id, node(5).id])
    lost, kept = (groups.add(*each) for each in (("RESCHEDULING", ""), ("CREATED", there[1].id)))
    hosts = hosts_of(plan, 3, lost, kept, groups.add("RESCHEDULING", ""))
    monkeypatch.setattr(placement_group, "alive_nodes", lambda: [there[1], node(4), node(5)])
    hosts.replace_nodes([0, 2])
    assert [each.id for each in hosts._actors.plan.nodes] == [node(4).id, there[1].id, node(5).id]
    assert groups.removed == ["group-0", "group-2", "group-4"]
    assert groups.selectors[-1] == {"ray.io/node-id": f"!in({there[1].id},{node(4).id})"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_several_nodes_has_a_group_on_each_of_those_that_ray_has_found(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray places no other group while it seeks a place for a part of one."""
    there = [node(1), node(2)][:ranks]
    groups = RayGroups(monkeypatch, [each.id for each in there] * 2)
    monkeypatch.setattr(placement_group, "remaining_nodes", list)  # it must wait for them
    monkeypatch.setattr(placement_group, "alive_nodes", lambda: there)
    monkeypatch.setattr(placement_group, "own_actor", lambda: "")
    request, events = placement.resources_for(job(ranks), there), cast("Events", None)
    held, nodes, _ = placement_group.groups_in_turn(job(ranks), request, "", events, Turn())
    assert nodes == there
    ids = [group.id for group, _ in held.values()]
    if ranks == 1:  # it is lost as a whole
        assert (ids, groups.removed, groups.selectors) == (["group-0"], [], [])
    else:
        assert (ids, groups.removed) == (["group-1", "group-2"], ["group-0"])
        assert groups.selectors == [{"ray.io/node-id": each.id} for each in there]


def test_nodes_that_have_just_been_taken_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [node(1), node(2)]
    groups = RayGroups(monkeypatch, [])
    monkeypatch.setattr(placement_group, "alive_nodes", lambda: there)
    request, ids = placement.resources_for(job(2), there), [each.id for each in there]
    assert placement_group.place_on(request, ids, -1.0, lambda: None) is None
    assert groups.removed == ["group-0", "group-1"]


def test_the_room_of_a_drained_node_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that had left one waited ten minutes, as "the cluster has room for all"."""
    there = [node(1), node(2), node(3)]
    monkeypatch.setattr(drain, "drain_deadlines", lambda: {node(2).id: 0.0, node(3).id: 0.0})
    assert placement_group.nodes_to_wait_for(there, []) == there[:1]
    assert placement_group.nodes_to_wait_for(there, [node(3).id]) == [there[0], there[2]]


def test_the_ranks_of_a_lost_node_wait_for_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scale.placement=PACK the free places of several nodes counted together."""
    there = [node(1, cpu=4), node(2, cpu=4)]
    packed = replace(job(2), scale=Scale(nodes=2, per_node=4, placement="PACK"))
    request = placement.resources_for(packed, there)
    plan = placement.assign_ranks(request, [there[0]] * 4 + [there[1]] * 4)
    hosts = hosts_of(plan, 2, *range(8))
    half = [node(each, free={"CPU": 2.0}) for each in (3, 4)]
    full = node(1, cpu=4, free={"CPU": 0.0})
    monkeypatch.setattr(placement_group, "alive_nodes", lambda: [full, *half])
    monkeypatch.setattr(drain, "drain_deadlines", dict)
    text = hosts._describe_missing(dict.fromkeys(range(4), there[0]))
    assert text.startswith("waiting for one node with room for 4 ranks of 1 CPU: the best has ")
