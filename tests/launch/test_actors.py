"""The actors of a worker group, on a real Ray."""

from __future__ import annotations

import time
from pathlib import Path

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


def test_actors_that_do_not_start_in_time_are_named(on_ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch waited for them without end."""
    import ray

    there = [node(1), node(2)]
    group = object.__new__(Actors)
    group.plan = placement.assign_ranks(placement.resources_for(job(2), there), there)
    make = ray.remote(num_cpus=0)(Answering)
    quick, slow = make.remote(0.0), make.remote(600.0)
    group._actors = {(0, 0): quick, (1, 0): quick}
    assert group.gpus() == [("0",), ("0",)]
    group._actors = {(0, 0): quick, (1, 0): slow}
    monkeypatch.setattr(actors, "OPEN_S", 0.5)
    with pytest.raises(LaunchError, match=r"^1 of 2 actors did not start within 0.507 s, on node-2$"):
        group.gpus()
    for each in (quick, slow):
        ray.kill(each)
