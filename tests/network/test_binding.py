"""The CPUs of each rank: what raydist decides on whole machines, and that torchrun would decide the
same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Plan
from raydist.network import binding
from raydist.network.binding import Binding
from raydist.network.facts import Facts
from raydist.node.probe import cpus, hca
from raydist.settings.config import Job, Scale
from raydist.shared.errors import ConfigError
from tests import machines
from tests.machines import Processors

MODES = ("node", "socket", "exclusive", "core-complex")
DGX = replace(machines.dgx(), cpus=Processors())
"""Two NUMA nodes, four GPUs at each. A node has 8 cores in 4 core complexes, and CPUs 0-7,16-23 or
8-15,24-31."""
SUB_NUMA = replace(DGX, cpus=Processors(nodes=2, cores=4))
"""Two sockets of two NUMA nodes each; the GPUs are at nodes 0 and 1, both of socket 0."""
ODD = replace(DGX, cpus=Processors(cores=9, complex=3, allowed="1-16,19-35"))
"""9 cores for 4 GPUs, of which this process may not use all."""


def node(ranks: int, gpus: int = 0) -> Node:
    have = {"CPU": 64.0, **({"GPU": float(gpus)} if gpus else {})}
    return Node("id-1", "10.0.0.1", "node-1", have, have)


def plan_of(ranks: int, gpus: int = 0) -> Plan:
    request = placement.resources_for(Job(scale=Scale(per_node=ranks)), [node(ranks, gpus)])
    return placement.assign_ranks(request, [node(ranks, gpus)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[machines.Box], Path]:
    """The folder of a machine, which is built once."""
    built: list[tuple[machines.Box, Path]] = []

    def folder(box: machines.Box) -> Path:
        for known, path in built:
            if known == box:
                return path
        built.append((box, machines.build(tmp_path_factory.mktemp("box"), box)))
        return built[-1][1]

    return folder


@pytest.fixture
def look(folders: Callable[[machines.Box], Path]) -> Callable[[machines.Box], Facts]:
    def facts(box: machines.Box) -> Facts:
        root = folders(box)
        numa = cpus.read_numa(cpus.allowed_cpus(root), root)
        return Facts(
            "node-1",
            "10.0.0.1",
            "eth0",
            "10.0.0.1",
            numa=numa,
            devices=hca.read_gpus(root),
            cpus=64,
        )

    return facts


def bound(
    facts: Facts,
    mode: str,
    ranks: int = 8,
    gpus: int = 8,
    ids: Sequence[Sequence[str]] | None = None,
) -> Binding:
    """`ids`: the GPUs that Ray gave each rank; None: one after the other."""
    plan = plan_of(ranks, gpus)
    each = ids or [[str(rank)] for rank in range(ranks)]
    own = [replace(facts, gpus=each[rank] if gpus else None) for rank in range(ranks)]
    return binding.bind_node(Job(scale=Scale(numa=mode, per_node=ranks)), plan, own, plan.slots[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("box", [DGX, SUB_NUMA, ODD], ids=["dgx", "sub-numa", "odd"])
def test_torchrun_would_bind_to_the_same_cpus(
    look: Any, folders: Any, monkeypatch: pytest.MonkeyPatch, box: machines.Box, mode: str
) -> None:
    """torch's own code reads the same files, below another root."""
    torchs = pytest.importorskip("torch.numa.binding", reason="this torch has no NUMA binding")
    facts, root = look(box), folders(box)

    def inside(path: Any) -> Any:
        return (
            root / path.lstrip("/") if isinstance(path, str) and path.startswith("/sys") else path
        )

    class Os:
        path = os.path

        @staticmethod
        def listdir(path: str) -> list[str]:
            return os.listdir(inside(path))

    monkeypatch.setattr(torchs, "open", lambda path: inside(path).open(), raising=False)
    monkeypatch.setattr(torchs, "os", Os)
    monkeypatch.setattr(torchs, "_get_device_count", lambda: 8)
    monkeypatch.setattr(
        torchs, "_get_numa_node_index_for_device_index", lambda device_index: device_index // 4
    )
    allowed = {cpu for each in facts.numa for cpu in each.cpus}
    monkeypatch.setattr(torchs, "_get_allowed_cpu_indices_for_current_thread", lambda: allowed)
    options = torchs.NumaOptions(affinity_mode=torchs.AffinityMode(mode))
    theirs = [
        torchs._get_logical_cpus_to_bind_to(device_index=rank, numa_options=options)
        for rank in range(8)
    ]
    assert [set(cpus) for cpus in bound(facts, mode).cpus] == theirs


@pytest.mark.parametrize(
    ("mode", "first", "last", "cores"),
    [
        ("node", [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)], 2),
        ("socket", [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)], 2),
        ("exclusive", [0, 1, 16, 17], [14, 15, 30, 31], 2),
        ("core-complex", [0, 1, 16, 17], [14, 15, 30, 31], 2),
        ("auto", [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)], 2),
        ("none", None, None, 0),
    ],
)
def test_eight_gpus_at_two_numa_nodes(
    look: Any, mode: str, first: Any, last: Any, cores: int
) -> None:
    result = bound(look(DGX), mode)
    assert result.cores == cores
    assert ([*result.cpus[0]], [*result.cpus[7]]) == (first, last) if first else not result.cpus


@pytest.mark.parametrize(
    ("box", "ranks", "gpus", "mode", "why"),
    [
        (DGX, 8, 8, "node", "2 NUMA nodes, with GPUs at each node"),
        (replace(DGX, cpus=Processors(nodes=2, cores=4), gpus=tuple((pci, i // 4 * 3) for i, (pci, _) in
                 enumerate(DGX.gpus))), 8, 8, "socket", "4 NUMA nodes, with GPUs at each socket"),
        # all four at node 0: half of the CPUs would be idle
        (DGX, 4, 4, "none", "not at every socket"),
        (DGX, 4, 0, "none", "no GPU whose NUMA node is known"),
        (replace(DGX, gpus=tuple((pci, -1) for pci, _ in DGX.gpus)), 8, 8, "none", "no GPU whose NUMA node is known"),
        (replace(DGX, cpus=Processors(sockets=1)), 8, 8, "none", "node-1 has one NUMA node"),
    ],
)  # fmt: skip
def test_by_default_no_cpu_is_left_out(
    look: Any, box: machines.Box, ranks: int, gpus: int, mode: str, why: str
) -> None:
    result = bound(look(box), "auto", ranks, gpus)
    assert (result.mode, bool(result.cpus)) == (mode, mode != "none")
    assert why in result.why


def test_ranks_without_gpus_are_spread_and_share_the_cores(look: Any) -> None:
    result = bound(look(DGX), "node", ranks=3, gpus=0)
    assert [cpus[0] for cpus in result.cpus] == [0, 0, 8]
    assert result.cores == 4  # two ranks have the 8 cores of node 0, one those of node 1


@pytest.mark.parametrize(
    ("ids", "firsts"),
    [
        ([["6"], ["1"]], [0, 8]),  # ranks take the GPUs of the job in order
        ([[f"GPU-00{i}4:00:00.0"] for i in (5, 2)], [0, 8]),
        ([["4", "5"], ["6", "7"]], [8, 8]),
        ([["MIG-1"], ["MIG-2"]], [0, 8]),  # nothing is known: spread
    ],
)
def test_the_gpus_are_those_that_ray_gave(
    look: Any, ids: list[list[str]], firsts: list[int]
) -> None:
    assert [cpus[0] for cpus in bound(look(DGX), "node", 2, 8, ids).cpus] == firsts


def test_more_ranks_than_cores_cannot_be_exclusive(look: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"scale.numa=exclusive: NUMA node 0 of node-1 has 8 cores for 20 ranks"
    ):
        bound(look(DGX), "exclusive", ranks=40, gpus=0)


def test_mpirun_binds_its_ranks_itself(look: Any) -> None:
    plan = plan_of(2)
    of_mpi = replace(plan, request=replace(plan.request, backend="mpi"))
    assert binding.bind_all(Job(), of_mpi, [look(DGX)] * 2) == [None, None]


@pytest.mark.parametrize("mode", ["auto", "node"])
def test_raydist_plan_does_not_know_the_gpus_that_ray_assigns(look: Any, mode: str) -> None:
    """It said that the job has no GPU whose NUMA node is known."""
    ids = [["<the 8 GPUs that Ray assigns>"]] * 8
    assert bound(look(DGX), mode, ids=ids) == Binding("not known before Ray assigns the GPUs")
