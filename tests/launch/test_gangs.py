"""Gangs that later runs of a sweep use again: no Ray."""

from __future__ import annotations

import importlib
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan
from raydist.cluster.queue.turn import Turn, TurnPassed
from raydist.launch.actors import Actors
from raydist.launch.bundles import Groups
from raydist.launch.gangs import Gang, Gangs
from raydist.launch.placement_group import placed_group
from raydist.messages.request import Request
from raydist.shared.errors import Stopped
from raydist.shared.events import Events
from tests.launch.test_worker_group import JOB, two_nodes


class IdleActors:
    """Actors that answer each request with nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.started: list[int] = []
        self.groups: Groups = {0: ("first", 0), 1: ("second", 0)}

    def by_node(self) -> Counter[str]:
        return Counter()

    def start(self, ranks: Iterable[int]) -> None:
        self.started += ranks

    def kill_all(self) -> None:
        """There are none."""

    def call(self, rank: int, request: Request[Any]) -> Future[Any]:
        reply: Future[Any] = Future()
        reply.set_result(None)
        return reply


class OneGang(Gangs):
    """Gives this gang to the next run, whatever it requests."""

    def __init__(self, gang: Gang) -> None:
        super().__init__()
        self.gang = gang

    def take(self, request: ResourceRequest, options: Any) -> Gang:
        return self.gang


def test_a_gang_that_lost_a_node_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next trial would number the ranks in another order than the nodes' agents do."""
    import ray

    actors, removed = IdleActors(two_nodes()), list[object]()
    context = SimpleNamespace(gcs_address="10.0.0.9:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    ray_groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(ray_groups, "remove_placement_group", removed.append)
    request = two_nodes().request
    gangs = OneGang(Gang(request, {}, cast("Actors", actors)))
    for lost in (False, True):
        with (
            Events(tmp_path / "events.jsonl") as events,
            placed_group(JOB, request, events, gangs=gangs),
        ):
            if lost:
                actors.groups[1] = "instead", 0
        assert gangs.has(request) is not lost
        assert removed == (["first", "instead"] if lost else [])
        gangs._free.clear()


def test_a_paused_run_gives_a_gang_back_before_its_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    class Paused(Turn):
        """Of a run that is paused while it is placed, and then cancelled."""

        def note_placement(self, nodes: Sequence[Node]) -> None:
            raise TurnPassed

        def wait(self) -> None:
            raise Stopped(signal.SIGTERM)

    removed: list[object] = []
    plan = two_nodes()
    actors = IdleActors(plan)
    context = SimpleNamespace(gcs_address="10.0.0.9:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "remove_placement_group", removed.append)
    gangs = OneGang(Gang(plan.request, {}, cast("Actors", actors)))
    with (
        Events(tmp_path / "events.jsonl") as events,
        pytest.raises(Stopped),
        placed_group(JOB, plan.request, events, Paused(), gangs),
    ):
        pass
    assert (actors.started, removed) == ([], ["first", "second"])
