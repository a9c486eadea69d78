"""What a run's hosts tell the cluster's queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.cluster.queue.turn import Turn
from raydist.launch import placement_group
from raydist.launch.placement_group import RayHosts
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
    """Actors that only have a plan."""

    def __init__(self, plan: placement.Plan) -> None:
        self.plan = plan

    def replace(self, lost: Sequence[int], plan: placement.Plan) -> None:
        self.plan = plan


def test_the_queue_knows_the_node_that_replaces_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other runs then waited for room that no run seemed to hold, and gave up."""
    there = [node(1), node(2)]
    request = placement.resources_for(job(2), there)
    plan = placement.assign_ranks(request, there)
    hosts: Any = object.__new__(RayHosts)
    hosts._job, hosts._held, hosts._events = job(2), None, None
    hosts.standby, hosts.turn = None, NotedTurn()
    hosts._actors = NoActors(plan)
    found = [there[0], replace(node(3), ip=there[1].ip)]
    monkeypatch.setattr(placement_group, "wait_until_placed", lambda *args: found)
    hosts.replace_nodes([1])
    assert hosts.turn.held == {found[0].id: 1, found[1].id: 1}
