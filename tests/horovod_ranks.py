"""Real Horovod ranks for tests: forked processes with the variables that raydist plans, and a real
rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan, Slot
from raydist.network import horovod
from raydist.node.rendezvous_http import serving
from raydist.settings.config import Job
from tests import ranks
from tests.ranks import RankResult

requires_horovod = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not built: raydist horovod build"
)


def run_horovod(
    world_size: int,
    job: Job,
    function: Callable[[Job], Any],
    run_dir: Path,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run the function in every rank of a Horovod job, like run_ranks for torch's backends."""
    node = Node(id="here", ip="127.0.0.1", host="here", total={}, free={})
    slots = tuple(Slot(rank, rank, 0, world_size, 0, node) for rank in range(world_size))
    plan = Plan(ResourceRequest("horovod", world_size, (), world_size, "PACK", {}), slots)
    plain = ranks.variables

    with serving("127.0.0.1") as door:
        place, _, secret = door.partition("/")
        address, _, port_ = place.partition(":")

        def variables(rank: int, world_size: int, port: int) -> dict[str, str]:
            lines = (
                *horovod.slot_lines(plan, slots[rank]),
                *horovod.rendezvous_lines(address, port_, secret),
                *horovod.horovod_settings(job, "lo"),
            )
            return plain(rank, world_size, port) | {name: value for name, value, _ in lines}

        with mock.patch.object(ranks, "variables", variables):
            return ranks.run_ranks(world_size, job, function, run_dir, env)
