"""The actors of a worker group, on a real Ray."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.launch import actors
from raydist.launch.actors import Actors
from raydist.shared.errors import LaunchError
from tests.cluster.test_placement import node
from tests.recovery.fake_group import job

pytestmark = pytest.mark.ray


class Answering:
    """An actor that does not wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def gpus(self) -> tuple[str, ...]:
        time.sleep(self.seconds)
        return ("0",)


def test_actors_that_do_not_start_in_time_are_named(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch waited for them without end."""
    import ray

    there = [node(1), node(2)]
    group = object.__new__(Actors)
    group.plan = placement.assign_ranks(placement.resources_for(job(2), there), there)
    make = ray.remote(num_cpus=0)(Answering)
    quick, slow = make.remote(0.0), make.remote(600.0)
    group._actors, group._gpus = {(0, 0): quick, (1, 0): quick}, {}
    assert group.gpus() == [("0",), ("0",)]
    group._actors, group._gpus = {(0, 0): quick, (1, 0): slow}, {}
    monkeypatch.setattr(actors, "OPEN_S", 2.0)
    with pytest.raises(
        LaunchError, match=r"^1 of 2 actors did not start within 2.01 s, on node-2$"
    ):
        group.gpus()
    for each in (quick, slow):
        ray.kill(each)


def test_an_actor_that_ray_has_killed_since_is_not_asked_for_its_gpus(on_ray: Path) -> None:
    """One without an agent, for lack of memory: the next replacement of a node ended the run."""
    import ray

    there = [node(1), node(2), node(3)]
    group: Any = object.__new__(Actors)
    group.plan = placement.assign_ranks(placement.resources_for(job(3), there), there)
    make = ray.remote(num_cpus=0)(Answering)
    idle, lost, new = make.remote(0.0), make.remote(0.0), make.remote(0.0)
    other = make.remote(0.0)
    group._actors, group._gpus = {(0, 0): idle, (1, 0): lost, (2, 0): other}, {}
    group._boxes = dict.fromkeys(group._actors)
    assert group.gpus() == [("0",)] * 3
    ray.kill(idle)
    group.kill_bundle(1)
    assert (1, 0) not in group._gpus
    group._actors[1, 0] = new
    assert group.gpus() == [("0",)] * 3
    for each in (new, other):
        ray.kill(each)


def test_actors_of_a_bundle_are_killed_while_another_thread_starts_some() -> None:
    """The nodes that join are prepared in a thread, in which a dictionary that changed size was the
    end of it."""
    group = object.__new__(Actors)
    group._actors = {(0, rank): None for rank in range(2000)}
    over = threading.Event()

    def start_others() -> None:
        while not over.is_set():
            if group._actors.pop((1, 0), 0) == 0:  # Python changes threads at the end of a round
                group._actors[1, 0] = None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=start_others)
    thread.start()
    try:
        for _ in range(50):
            group.kill_bundle(2)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
