"""Standby nodes: which are opened, requested again, or left alone. No Ray."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.cluster import drain, placement
from raydist.cluster.nodes import Node
from raydist.launch import standby
from raydist.launch.standby import StandbyNodes
from raydist.messages.agent import Open, Opened
from raydist.messages.server import Warm
from raydist.network import checks_node
from raydist.network.facts import Facts
from raydist.settings.config import Fabric
from raydist.shared.errors import RaydistError
from tests.cluster.test_placement import node
from tests.launch.test_placement_group import NoActors, NotedTurn, RayGroups
from tests.recovery.fake_group import job

REQUEST = Open("", "", (), {}, None, 1, "", "", lead=True, node_id="", node_ip="")


class OpeningActors(NoActors):
    """Actors whose agents open at once, except on these nodes."""

    def __init__(self, plan: placement.Plan, group: Any, failing: Sequence[str]) -> None:
        super().__init__(plan, [group])
        self.failing = [*failing]
        self.opened: list[str] = []

    def start_actor(self, key: tuple[int, int]) -> None:
        """It is there."""

    def kill_bundle(self, bundle: int) -> None:
        """It was there."""

    def send(self, key: tuple[int, int], local_rank: int, request: Open) -> Future[Opened]:
        self.opened.append(request.node_id)
        reply: Future[Opened] = Future()
        if request.node_id in self.failing:
            reply.set_exception(RaydistError("ib0 is down"))
        else:
            facts = Facts(request.node_id, request.node_ip, "eth0", request.node_ip)
            reply.set_result(Opened(facts, 1.0, Warm({}), None, None))
        return reply


def growing(
    monkeypatch: pytest.MonkeyPatch, nodes: list[Node], failing: Sequence[str], **settings: Any
) -> tuple[StandbyNodes, OpeningActors, RayGroups, list[str]]:
    """Return the standby nodes of a run of one to three nodes, that has the first of these."""
    monkeypatch.setattr(drain, "drain_deadlines", dict)
    there, warnings = nodes[:1], list[str]()
    small = job(1)
    ours = replace(small, scale=replace(small.scale, max_nodes=3), **settings)
    plan = placement.assign_ranks(placement.resources_for(small, there), there)
    groups = RayGroups(monkeypatch, [each.id for each in nodes[1:]])
    actors = OpeningActors(plan, groups.add("CREATED", there[0].id), failing)

    def check(joining: Node, reply: Opened) -> None:
        assert reply.facts is not None
        checks_node.check_joining(ours, plan.request, joining, reply.facts)

    events: Any = SimpleNamespace(warn=warnings.append)
    of_run: Any = actors
    made = StandbyNodes(of_run, ours.scale, events, lambda: nodes, check=check)
    made.set_request(REQUEST)
    return made, actors, groups, warnings


def test_a_node_that_does_not_open_is_named_once_and_another_one_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was opened again each second, and nobody was told why the run did not grow."""
    nodes = [node(1), node(2), node(3), node(4)]
    made, actors, groups, warnings = growing(monkeypatch, nodes, [node(2).id])
    for _ in range(4):
        made.refresh()
    assert actors.opened == [node(2).id, node(3).id, node(4).id]
    assert warnings == ["node-2 (10.0.0.2) is not used for this run: ib0 is down"]
    assert made.growth() == "3 nodes now, 1 before"
    assert groups.selectors[-1] == {"ray.io/node-id": "!in(id-1,id-2,id-3)"}


def test_it_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "UNUSABLE_S", -1.0)
    nodes = [node(1), node(2), node(3), node(2)]
    made, actors, _, warnings = growing(monkeypatch, nodes, [node(2).id])
    for _ in range(3):
        made.refresh()
    actors.failing.clear()
    for _ in range(3):
        made.refresh()
    assert (actors.opened[0], actors.opened[-1]) == (node(2).id, node(2).id)
    assert len(warnings) == 1
    assert made.growth() == "3 nodes now, 1 before"


def test_a_node_whose_network_does_not_suit_the_run_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks had been stopped so that they go on with that node; then the run was over."""
    nodes = [node(1), node(2), node(3)]
    made, _, _, warnings = growing(monkeypatch, nodes, [], fabric=Fabric(hca=["mlx5_0"]))
    for _ in range(3):
        made.refresh()
    assert made.growth() == ""
    assert len(warnings) == 2
    assert "is not used for this run: fabric.hca=mlx5_0" in warnings[0]


def test_a_run_below_its_minimum_requests_a_node_while_another_run_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had waited until `scale.wait_s`, beside a free node that did nothing for the other run."""
    nodes = [node(1), node(2)]
    made, actors, groups, _ = growing(monkeypatch, nodes, [])
    monkeypatch.setattr(made, "turn", SimpleNamespace(may_grow=lambda: False))
    made.refresh()
    assert actors.opened == []  # it has its minimum
    groups.tables["group-0"] = {"state": "RESCHEDULING", "bundles_to_node_id": {0: ""}}
    for _ in range(2):
        made.refresh(running=False)
    assert (groups.removed, actors.opened) == (["group-0"], [node(2).id])


def test_bundles_with_ranks_stay_when_a_node_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks were killed, if their node was draining: it counted as one without a node."""
    monkeypatch.setattr(standby, "UNUSABLE_S", -1.0)
    nodes = [node(1), node(2), node(3), node(2)]
    made, actors, groups, _ = growing(monkeypatch, nodes, [node(2).id])
    made.refresh()
    grown = placement.resize_plan(actors.plan, {0: nodes[0], 2: nodes[2]}, 1, 2)
    assert grown is not None
    actors.plan = grown
    del nodes[2]  # it is draining
    for _ in range(3):
        made.refresh()
    assert groups.tables["group-2"]["bundles_to_node_id"] == {0: node(3).id}
    assert "group-2" not in groups.removed


def test_a_node_whose_actor_alone_was_lost_is_not_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run that waits gets nodes only by `queue.shrink`."""
    nodes = [node(1), node(2)]
    made, actors, groups, _ = growing(monkeypatch, nodes, [])
    made.refresh()
    grown = placement.resize_plan(actors.plan, {0: nodes[0], 1: nodes[1]}, 1, 2)
    assert grown is not None
    actors.plan = grown
    monkeypatch.setattr(made, "turn", SimpleNamespace(may_grow=lambda: False))
    made._lost_bundles.add((1, node(2).id))
    made.refresh(running=False)
    assert "group-1" not in groups.removed


def test_a_node_that_is_drained_is_given_back_once_it_has_no_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray ends such a node when nothing is reserved there, and the run requested no other one."""
    nodes = [node(1), node(2), node(3)]
    made, _, groups, _ = growing(monkeypatch, nodes, [])
    for _ in range(2):
        made.refresh()
    del nodes[1]
    made.refresh()
    assert groups.removed == []  # it is cut off, and may come back
    monkeypatch.setattr(drain, "drain_deadlines", lambda: {node(2).id: 0.0})
    made.refresh(running=False)
    assert groups.removed == []  # ranks may be assigned anew, and their state be there
    made.refresh()
    assert groups.removed == ["group-1"]
    assert groups.selectors[-1] == {"ray.io/node-id": "!in(id-1,id-3)"}
    assert made.growth() == "2 nodes now, 1 before"


def test_the_queue_knows_the_spares_that_a_run_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs beside it were asked to make way for room that it held."""
    nodes = [node(1), node(2)]
    made, _, groups, _ = growing(monkeypatch, nodes, [])
    made._scale = replace(made._scale, nodes=1, max_nodes=None, spares=1)
    made._min = made._max = 1
    made.turn = turn = NotedTurn()
    made.refresh()
    assert turn.held == {"id-1": 1}
    made.refresh()
    assert turn.held == {"id-1": 1, "id-2": 1}
    del nodes[1]
    made.refresh()
    assert turn.held == {"id-1": 1, "id-2": 1}  # it is cut off, and still reserved
    groups.tables["group-1"] = {"state": "RESCHEDULING", "bundles_to_node_id": {0: ""}}
    made.refresh()
    assert turn.held == {"id-1": 1}
