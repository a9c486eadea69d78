"""Who sits where: how many, on what, in which order; what can never be, and what to type
instead."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.cluster import nodes as there
from raydist.cluster import placement
from raydist.cluster.nodes import Node, NodeType, ResourceRequest, nodes_from_ray, types_from_config
from raydist.cluster.shortage import describe_missing, describe_shortage
from raydist.settings.config import Backend, Data, Job, Parallel, Scale, Train
from raydist.shared.errors import ConfigError


def node(
    i: int, gpu: float = 0, cpu: float = 8, free: dict[str, float] | None = None, **more: Any
) -> Node:
    total = {"CPU": float(cpu), **({"GPU": float(gpu)} if gpu else {}), **more.pop("resources", {})}
    return Node(
        f"id-{i}",
        f"10.0.0.{i}",
        f"node-{i}",
        total,
        total if free is None else free,
        more.get("labels", {}),
    )


def job(backend: str = "auto", **scale: Any) -> Job:
    return Job(scale=Scale(**scale), backend=Backend(name=backend))


GPUS = [node(1, gpu=8, cpu=64), node(2, gpu=8, cpu=64)]
CPUS = [node(1, cpu=4), node(2, cpu=4)]
MIXED = [*GPUS, node(3, gpu=4, cpu=32), node(4, cpu=16)]


@pytest.mark.parametrize(
    ("asking", "nodes", "backend", "world", "strategy", "bundles"),
    [
        # scale=local: the GPUs of the best node, else two ranks
        (job(), CPUS, "gloo", 2, "STRICT_SPREAD", [{"CPU": 2}]),
        (job(), GPUS, "nccl", 8, "STRICT_SPREAD", [{"CPU": 8, "GPU": 8}]),
        (
            job(),
            [node(1, gpu=2), node(2, gpu=4)],
            "nccl",
            4,
            "STRICT_SPREAD",
            [{"CPU": 4, "GPU": 4}],
        ),
        (job("gloo"), GPUS, "gloo", 2, "STRICT_SPREAD", [{"CPU": 2}]),
        (job("gloo", gpus=1), GPUS, "gloo", 8, "STRICT_SPREAD", [{"CPU": 8, "GPU": 8}]),
        (job(gpus=0), GPUS, "gloo", 2, "STRICT_SPREAD", [{"CPU": 2}]),
        (job(gpus=2), GPUS, "nccl", 4, "STRICT_SPREAD", [{"CPU": 4, "GPU": 8}]),
        (job("horovod"), GPUS, "horovod", 8, "STRICT_SPREAD", [{"CPU": 8, "GPU": 8}]),
        (job("horovod"), CPUS, "horovod", 2, "STRICT_SPREAD", [{"CPU": 2}]),
        # NxM
        (job(nodes=2, per_node=8), GPUS, "nccl", 16, "STRICT_SPREAD", [{"CPU": 8, "GPU": 8}] * 2),
        (job(nodes=2, per_node=1), CPUS, "gloo", 2, "STRICT_SPREAD", [{"CPU": 1}] * 2),
        (job(nodes=2), GPUS, "nccl", 16, "STRICT_SPREAD", [{"CPU": 8, "GPU": 8}] * 2),
        (job(nodes=2, cpus=2), CPUS, "gloo", 4, "STRICT_SPREAD", [{"CPU": 4}] * 2),
        (job(nodes=3), MIXED, "nccl", 12, "STRICT_SPREAD", [{"CPU": 4, "GPU": 4}] * 3),
        # ranks that share a GPU: gloo, since NCCL refuses that
        (
            job(nodes=1, per_node=2, gpus=0.5),
            GPUS,
            "gloo",
            2,
            "STRICT_SPREAD",
            [{"CPU": 2, "GPU": 1}],
        ),
        (
            job(nodes=1, per_node=5, gpus=0.4),
            GPUS,
            "gloo",
            5,
            "STRICT_SPREAD",
            [{"CPU": 5, "GPU": 3}],
        ),
        (
            job(nodes=1, per_node=3, gpus=0.4),
            GPUS,
            "gloo",
            3,
            "STRICT_SPREAD",
            [{"CPU": 3, "GPU": 2}],
        ),
        # rank by rank
        (job(nodes=2, per_node=3, placement="PACK"), CPUS, "gloo", 6, "PACK", [{"CPU": 1}] * 6),
        (
            job(nodes=2, per_node=2, placement="STRICT_PACK"),
            CPUS,
            "gloo",
            4,
            "STRICT_PACK",
            [{"CPU": 1}] * 4,
        ),
        (job(nodes=4, per_node=1, placement="SPREAD"), CPUS, "gloo", 4, "SPREAD", [{"CPU": 1}] * 4),
        # scale=cluster
        (job(nodes=None), CPUS, "gloo", 8, "STRICT_SPREAD", [{"CPU": 4}] * 2),
        (job(nodes=None, cpus=3), CPUS, "gloo", 2, "STRICT_SPREAD", [{"CPU": 3}] * 2),
        (job(nodes=None), GPUS, "nccl", 16, "STRICT_SPREAD", [{"CPU": 8, "GPU": 8}] * 2),
        (job(nodes=None), MIXED, "nccl", 20, "PACK", [{"CPU": 1, "GPU": 1}] * 20),
        (
            job(nodes=None, per_node=4),
            MIXED,
            "nccl",
            12,
            "STRICT_SPREAD",
            [{"CPU": 4, "GPU": 4}] * 3,
        ),
        (
            job(nodes=None, per_node=8),
            MIXED,
            "nccl",
            16,
            "STRICT_SPREAD",
            [{"CPU": 8, "GPU": 8}] * 2,
        ),
        (
            job(nodes=None, placement="SPREAD"),
            MIXED,
            "nccl",
            20,
            "SPREAD",
            [{"CPU": 1, "GPU": 1}] * 20,
        ),
        (
            job(nodes=None),
            [node(1, cpu=0), node(2, cpu=3)],
            "gloo",
            3,
            "STRICT_SPREAD",
            [{"CPU": 3}],
        ),
    ],
)
def test_what_is_asked_of_ray(
    asking: Job,
    nodes: list[Node],
    backend: str,
    world: int,
    strategy: str,
    bundles: list[dict[str, float]],
) -> None:
    request = placement.resources_for(asking, nodes)
    assert (request.backend, request.world_size, request.strategy) == (backend, world, strategy)
    assert [dict(bundle) for bundle in request.bundles] == bundles
    assert request.ranks_per_bundle * len(request.bundles) == world


def test_other_resources_and_labels_travel_along() -> None:
    nodes = [
        node(1, resources={"highmem": 2.0}, labels={"zone": "a"}),
        node(2, cpu=64, labels={"zone": "b"}),
    ]
    request = placement.resources_for(
        job(per_node=2, resources={"highmem": 0.5}, labels={"zone": "a"}), nodes
    )
    assert request.bundles == ({"CPU": 2, "highmem": 1.0},)
    assert request.rank_resources == {"CPU": 1, "highmem": 0.5}
    assert request.selector == {"zone": "a"}


def test_labels_decide_whether_there_are_gpus() -> None:
    nodes = [node(1, gpu=8, labels={"zone": "a"}), node(2, labels={"zone": "b"})]
    assert placement.resources_for(job(labels={"zone": "a"}), nodes).backend == "nccl"
    assert placement.resources_for(job(labels={"zone": "!a"}), nodes).backend == "gloo"


@pytest.mark.parametrize(
    ("words", "value", "meant"),
    [("a", "a", True), ("a", "b", False), ("a", None, False), ("!a", "b", True), ("!a", "a", False), ("!a", None, True),
     ("in(a,b)", "b", True), ("in(a, b)", "b", True), ("in(a,b)", "c", False), ("!in(a,b)", "c", True),
     ("!in(a,b)", "a", False), ("in(a,b)", None, False)],
)  # fmt: skip
def test_label_selectors_mean_what_ray_means(words: str, value: str | None, meant: bool) -> None:
    assert there.matches({} if value is None else {"zone": value}, {"zone": words}) is meant


AUTOSCALER = [NodeType("gpu", {"CPU": 32.0, "GPU": 8.0}, 2), NodeType("small", {"CPU": 4.0}, 5)]


def test_the_autoscaler_may_bring_what_is_not_there_yet() -> None:
    head = [node(1, cpu=4)]
    assert placement.resources_for(job(nodes=2, per_node=8), head, AUTOSCALER).backend == "nccl"
    assert placement.resources_for(job(), head, AUTOSCALER).world_size == 8
    assert (
        placement.resources_for(job(nodes=6, per_node=4, gpus=0), head, AUTOSCALER).world_size == 24
    )


def test_every_node_means_those_that_are_there() -> None:
    assert placement.resources_for(job(nodes=None), [node(1, cpu=4)], AUTOSCALER).bundles == (
        {"CPU": 4},
    )


def test_a_type_brings_no_more_than_its_most_those_that_are_there_counted() -> None:
    with pytest.raises(ConfigError, match=r"set scale=2x8"):
        placement.resources_for(job(nodes=3, per_node=8), [node(1)], AUTOSCALER)
    one = node(2, gpu=8, cpu=32, labels={"ray.io/node-group": "gpu"})
    assert (
        placement.resources_for(job(nodes=2, per_node=8), [node(1), one], AUTOSCALER).world_size
        == 16
    )
    with pytest.raises(
        ConfigError, match=r"up to 1 more of the autoscaler's type gpu with 8 GPU, 32 CPU"
    ):
        placement.resources_for(job(nodes=3, per_node=8), [node(1), one], AUTOSCALER)


def test_a_type_whose_labels_nobody_tells_may_have_the_right_ones() -> None:
    wants = job(nodes=1, per_node=4, gpus=0, labels={"market-type": "spot"})
    assert placement.resources_for(wants, [node(1)], AUTOSCALER).world_size == 4
    types = [replace(kind, labels={"market-type": "on-demand"}) for kind in AUTOSCALER]
    with pytest.raises(ConfigError, match=r"scale.labels.market-type=spot: no node"):
        placement.resources_for(wants, [node(1)], types)


@pytest.mark.parametrize(
    ("asking", "nodes", "say"),
    [
        (job("nccl"), CPUS, "no GPU (2 nodes); set backend=gloo"),
        (job("nccl", gpus=0), GPUS, "scale.gpus=1"),
        (job("nccl", gpus=0.5), GPUS, "scale.gpus=1"),
        (job(gpus=1.5), GPUS, "scale.gpus=2"),
        (job(gpus=1), CPUS, "scale.gpus=0"),
        (job(nodes=3, per_node=8), GPUS, "2 nodes with 8 GPU, 64 CPU (node-1, node-2)\nset scale=2x8"),
        (job(nodes=2, per_node=9), GPUS, "requests 2 nodes with 9 GPU, 9 CPU each"),
        (job(nodes=1, per_node=16), GPUS, "scale=2x8"),
        (job(nodes=4, per_node=1, gpus=0), CPUS, "scale=2x2"),
        (job(nodes=2, per_node=3, placement="STRICT_PACK"), CPUS, "all on one node"),
        (job(nodes=2, per_node=3, placement="STRICT_PACK"), CPUS, "scale=1x4"),
        (job(nodes=5, per_node=2, placement="PACK"), CPUS, "requests 10 ranks with 1 CPU each"),
        (job(nodes=5, per_node=2, placement="PACK"), CPUS, "scale=1x8"),
        (job(cpus=16), CPUS, "scale.cpus=2"),
        (job(gpus=16), GPUS, "scale.gpus=8"),
        (job(nodes=None, per_node=5), CPUS, "scale=cluster scale.per_node=5 requests 1 node with 5 CPU"),
        (job(), [], "Its nodes:\n    no node\nstart a node first"),
        (job(), [node(1, cpu=0)], "no node has CPU"),
        (job(resources={"highmen": 1}), [node(1, resources={"highmem": 1.0})], "scale.resources.highmem=1"),
        (job(resources={"fast": 1}), CPUS, "no node has custom resources"),
        (job(resources={"CPU": 2}), CPUS, "scale.cpus=2"),
        (job(resources={"GPU": 2}), CPUS, "scale.gpus=2"),
        (job(resources={"fast": 8}), [node(1, resources={"fast": 3.0})], "scale.resources.fast=3"),
        (job(labels={"zon": "a"}), [node(1, labels={"zone": "a"})], "scale.labels.zone=a"),
        (job(labels={"zone": "us-eats"}), [node(1, labels={"zone": "us-east"})], "scale.labels.zone=us-east"),
        (job(labels={"zone": "in(a"}), [node(1, labels={"zone": "a"})], "!VALUE, in(A,B) and !in(A,B)"),
        (job(labels={"x": "1", "y": "2"}), [node(1, labels={"x": "1", "y": "1"}), node(2, labels={"x": "2", "y": "2"})],
         "scale.labels.x=1 scale.labels.y=2: no node has all"),
        (job(per_node=9, labels={"zone": "a"}), [node(1, labels={"zone": "a"})], "Its nodes with zone=a:"),
    ],
)  # fmt: skip
def test_what_can_never_be_is_refused_with_the_word_to_say(
    asking: Job, nodes: list[Node], say: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        placement.resources_for(asking, nodes)
    assert say == refused.value.suggestion or say in str(refused.value)


def test_many_equal_nodes_are_one_line() -> None:
    many = [node(i, cpu=4) for i in range(1, 41)]
    with pytest.raises(
        ConfigError, match=r"40 nodes with 4 CPU \(node-1, node-2, node-3, node-4 and 36 more\)"
    ):
        placement.resources_for(job(nodes=1, per_node=5), many)


def obey(asking: Job, refused: ConfigError) -> Job:
    """Return the job with the overrides that the error suggests."""
    assert refused.suggestion, refused
    for override in refused.suggestion.split():
        key, _, value = override.partition("=")
        if key == "backend":
            asking = replace(asking, backend=Backend(name=value))
        elif key == "scale":
            nodes, per_node = map(int, value.split("x"))
            asking = replace(asking, scale=replace(asking.scale, nodes=nodes, per_node=per_node))
        else:
            assert key in ("scale.cpus", "scale.gpus"), override
            number = float(value)
            scale = asking.scale
            asking = replace(
                asking,
                scale=replace(scale, cpus=number)
                if key == "scale.cpus"
                else replace(scale, gpus=number),
            )
    return asking


sizes = st.tuples(st.integers(0, 8), st.integers(1, 32))


@settings(max_examples=300, deadline=None)
@given(
    machines=st.lists(sizes, min_size=1, max_size=5),
    backend=st.sampled_from(["auto", "gloo", "nccl"]),
    nodes=st.none() | st.integers(1, 6),
    per_node=st.none() | st.integers(1, 10),
    gpus=st.sampled_from([None, 0, 0.4, 0.5, 1, 2, 4]),
    cpus=st.sampled_from([0.3, 1.0, 3.0, 40.0]),
    strategy=st.sampled_from(["STRICT_SPREAD", "STRICT_PACK", "PACK", "SPREAD"]),
)
def test_whoever_obeys_a_refusal_gets_a_place(
    machines: list[tuple[int, int]],
    backend: str,
    nodes: int | None,
    per_node: int | None,
    gpus: float | None,
    cpus: float,
    strategy: str,
) -> None:
    there = [node(i + 1, gpu, cpu) for i, (gpu, cpu) in enumerate(machines)]
    asking = job(backend, nodes=nodes, per_node=per_node, gpus=gpus, cpus=cpus, placement=strategy)
    for _ in range(4):  # one refusal may follow another: no GPUs, then too many ranks
        try:
            request = placement.resources_for(asking, there)
        except ConfigError as refused:
            asking = obey(asking, refused)
        else:
            assert request.world_size >= 1
            return
    pytest.fail(f"still refused: {asking.scale} on {machines}")


def asked_for(bundles: int, each: int) -> ResourceRequest:
    return ResourceRequest(
        "gloo", bundles * each, ({"CPU": float(each)},) * bundles, each, "PACK", {"CPU": 1.0}
    )


@settings(max_examples=200, deadline=None)
@given(
    lies=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    each=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_ranks_are_contiguous_on_each_node_and_each_is_there_once(
    lies: list[int], each: int, seed: int
) -> None:
    plan = placement.assign_ranks(asked_for(len(lies), each), [node(i) for i in lies])
    assert [slot.rank for slot in plan.slots] == list(range(len(lies) * each))
    node_ranks = [slot.node_rank for slot in plan.slots]
    assert node_ranks == sorted(node_ranks)
    assert set(node_ranks) == set(range(len(set(lies))))
    for slot in plan.slots:
        assert plan.slots[slot.rank - slot.local_rank].local_rank == 0
        assert slot.local_world_size == lies.count(int(slot.node.id[3:])) * each
        assert slot.node.id == f"id-{lies[slot.bundle]}"
    assert all(
        [slot.bundle for slot in plan.slots].count(bundle) == each for bundle in range(len(lies))
    )
    # in whichever order Ray has placed the bundles, each rank is on the same node
    shuffled = random.Random(seed).sample(lies, len(lies))
    again = placement.assign_ranks(asked_for(len(lies), each), [node(i) for i in shuffled])
    assert [slot.node.id for slot in again.slots] == [slot.node.id for slot in plan.slots]


def test_nodes_stand_in_order_of_their_numeric_addresses() -> None:
    ips = ["10.0.0.10", "fd00::1", "10.0.0.9", "a-name", "9.255.0.1"]
    nodes = [replace(node(i), ip=ip) for i, ip in enumerate(ips)]
    plan = placement.assign_ranks(asked_for(5, 1), nodes)
    assert [node.ip for node in plan.nodes] == [
        "9.255.0.1",
        "10.0.0.9",
        "10.0.0.10",
        "fd00::1",
        "a-name",
    ]


def test_two_raylets_on_one_machine_are_two_nodes() -> None:
    twins = [Node(id, "10.0.0.1", "host", {"CPU": 2.0}, {"CPU": 2.0}) for id in ("b", "a")]
    plan = placement.assign_ranks(asked_for(2, 2), twins)
    assert [(slot.node.id, slot.node_rank, slot.local_rank) for slot in plan.slots] == [
        ("a", 0, 0), ("a", 0, 1), ("b", 1, 0), ("b", 1, 1),
    ]  # fmt: skip
    assert [slot.bundle for slot in plan.slots] == [1, 1, 0, 0]


def test_the_plan_as_an_event_says_how_many_gpus_each_has() -> None:
    plan = placement.assign_ranks(
        placement.resources_for(job(per_node=2, gpus=0.5), GPUS), [GPUS[0]]
    )
    facts = plan.as_event()
    assert (facts["backend"], facts["world_size"]) == ("gloo", 2)
    assert facts["slots"][1] == {
        "rank": 1, "host": "node-1", "ip": "10.0.0.1", "node": "id-1", "local_rank": 1, "gpus": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scale", "nodes", "text"),
    [
        ({"nodes": 2, "per_node": 8}, [GPUS[0], node(7, gpu=8, free={"CPU": 64, "GPU": 4})],
         "waiting for 1 more node with 8 GPU, 8 CPU: 1 of 2 ready; node-7 has 8 GPU but 4 are taken"),
        ({"nodes": 2, "per_node": 8}, [GPUS[0]], "waiting for 1 more node with 8 GPU, 8 CPU: 1 of 2 ready"),
        ({"nodes": 2, "per_node": 8}, [], "waiting for 2 more nodes with 8 GPU, 8 CPU: 0 of 2 ready"),
        ({"nodes": 2, "per_node": 8}, GPUS, "waiting for Ray to place the ranks: the cluster has room for all"),
        ({"nodes": 2, "per_node": 8}, [node(i, gpu=8, free={}) for i in range(1, 6)],
         "waiting for 2 more nodes with 8 GPU, 8 CPU: 0 of 2 ready; node-1 has 8 CPU but 8 are taken, 8 GPU but 8 are "
         "taken; node-2 has 8 CPU but 8 are taken, 8 GPU but 8 are taken; node-3 has 8 CPU but 8 are taken, 8 GPU but "
         "8 are taken; 2 more nodes like that"),
        ({"nodes": 1, "per_node": 4, "placement": "PACK", "gpus": 0}, [node(1, cpu=8, free={"CPU": 3})],
         "waiting for room for 1 more rank of 1 CPU: 3 of 4 have it; node-1 has 8 CPU but 5 are taken"),
        ({"nodes": 1, "per_node": 4, "placement": "STRICT_PACK", "gpus": 0}, [node(1, free={"CPU": 3}), node(2, cpu=2)],
         "waiting for one node with room for 4 ranks of 1 CPU: the best has room for 3; node-1 has 8 CPU but 5 are "
         "taken"),
        ({"nodes": 1, "per_node": 1, "gpus": 0, "labels": {"zone": "a"}}, [node(1)],
         "waiting for 1 more node with 1 CPU and labels zone=a: 0 of 1 ready"),
    ],
)  # fmt: skip
def test_what_is_being_waited_for_is_said(
    scale: dict[str, Any], nodes: list[Node], text: str
) -> None:
    known = [replace(each, labels=scale.get("labels", {})) for each in GPUS]
    request = placement.resources_for(job(**scale), known)
    assert describe_shortage(request, nodes) == text


FULL = {"CPU": 0.0}
THREE = [node(1, free=FULL), node(2, free=FULL), node(3)]


@pytest.mark.parametrize(
    ("strategy", "nodes", "held", "text"),
    [
        ("STRICT_SPREAD", THREE[:2], ["id-1", "id-2"],
         "waiting for 1 more node with 8 CPU: 0 of 1 ready"),
        ("STRICT_SPREAD", [*THREE[:2], node(4, free=FULL)], ["id-1", "id-2", "id-3"],
         "waiting for 1 more node with 8 CPU: 0 of 1 ready; node-4 has 8 CPU but 8 are taken"),
        ("STRICT_SPREAD", THREE, ["id-1", "id-2"],
         "waiting for Ray to place the ranks: the cluster has room for all"),
        ("SPREAD", THREE[:2], ["id-1", "id-2", "id-3"],
         "waiting for room for 1 more rank of 8 CPU: 0 of 1 have it"),
        ("PACK", [replace(node(1), total={"CPU": 16.0}, free=FULL), node(4, free=FULL)], ["id-1", "id-2", "id-3"],
         "waiting for room for 2 more ranks of 8 CPU: 0 of 2 have it; "
         "node-1 (without this run) has 8 CPU but 8 are taken; node-4 has 8 CPU but 8 are taken"),
        ("STRICT_SPREAD", THREE, ["", "", ""],
         "waiting for 2 more nodes with 8 CPU: 1 of 3 ready; node-1 has 8 CPU but 8 are taken; "
         "node-2 has 8 CPU but 8 are taken"),
        ("STRICT_SPREAD", THREE, ["id-1", "id-2", "id-3"],
         "waiting for Ray to place the ranks: the cluster has room for all"),
    ],
)  # fmt: skip
def test_what_a_run_holds_itself_is_not_missing(
    strategy: str, nodes: list[Node], held: list[str], text: str
) -> None:
    """It named the nodes of the run as those whose resources are taken."""
    request = replace(
        placement.resources_for(job(nodes=3, per_node=1, cpus=8), [node(1), node(2), node(3)]),
        strategy=strategy,
    )
    assert describe_missing(request, nodes, held) == text


def test_rays_nodes_are_read() -> None:
    nodes = [
        {"NodeID": "aa", "Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "head",
         "Resources": {"CPU": 4.0, "GPU": 1.0, "node:10.0.0.1": 1.0, "node:__internal_head__": 1.0, "memory": 9.0},
         "Labels": {"ray.io/node-id": "aa"}},
        {"NodeID": "bb", "Alive": False, "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "gone",
         "Resources": {}},
    ]  # fmt: skip
    assert nodes_from_ray(nodes, {"aa": {"CPU": 1.0, "node:10.0.0.1": 1.0}}) == [
        Node(
            "aa",
            "10.0.0.1",
            "head",
            {"CPU": 4, "GPU": 1, "memory": 9},
            {"CPU": 1},
            {"ray.io/node-id": "aa"},
        )
    ]


def test_machines_with_the_same_name_are_named_by_their_addresses_too() -> None:
    machines = [
        ("ubuntu", 1, True),
        ("ubuntu", 2, True),
        ("head", 3, True),
        ("head", 4, False),
        ("two", 5, True),
    ]
    nodes = [
        {"NodeID": f"id-{i}", "Alive": alive, "NodeManagerAddress": f"10.0.0.{i}", "NodeManagerHostname": host,
         "Resources": {"CPU": 4.0}}
        for host, i, alive in machines
    ]  # fmt: skip
    second_raylet = {**nodes[-1], "NodeID": "id-6"}
    hosts = {node.id: node.host for node in nodes_from_ray([*nodes, second_raylet], {})}
    assert hosts == {
        "id-1": "ubuntu (10.0.0.1)", "id-2": "ubuntu (10.0.0.2)", "id-3": "head", "id-5": "two", "id-6": "two",
    }  # fmt: skip


def test_the_autoscalers_types_are_read() -> None:
    autoscaler_pb2 = pytest.importorskip("ray.core.generated.autoscaler_pb2")
    config = autoscaler_pb2.ClusterConfig()
    for name, most, resources in [
        ("head", 0, {"CPU": 1}),
        ("gpu", 2, {"CPU": 8, "GPU": 4}),
        ("any", -1, {"CPU": 2}),
    ]:
        group = config.node_group_configs.add(name=name, max_count=most)
        for key, amount in resources.items():
            group.resources[key] = amount
    gpu, endless = types_from_config(config)
    assert (gpu.name, gpu.resources, gpu.most) == ("gpu", {"CPU": 8, "GPU": 4}, 2)
    assert endless.most == there.UNLIMITED
    assert types_from_config(None) == []
    assert types_from_config(SimpleNamespace(node_group_configs=[])) == []


def test_node_types_of_a_cluster_file() -> None:
    gpu = {"resources": {"CPU": 8, "GPU": 4}, "max_workers": 3, "labels": {"zone": "a"}}
    kinds: dict[str, Any] = {
        "head": {"resources": {"CPU": 4}},
        "gpu": gpu,
        "bare": {"resources": {}},
        "cpu": {"resources": {"CPU": 2}},
    }
    config = {"available_node_types": kinds, "head_node_type": "head", "max_workers": 5}
    assert there.types_from_file(config) == [
        NodeType("gpu", {"CPU": 8.0, "GPU": 4.0}, 3, {"zone": "a"}), NodeType("cpu", {"CPU": 2.0}, 5, None)
    ]  # fmt: skip
    kinds["head"]["max_workers"] = 1
    assert [kind.name for kind in there.types_from_file(config)] == ["head", "gpu", "cpu"]
    assert there.types_from_file({**config, "max_workers": 0}) == []
    assert there.types_from_file({}) == []


def test_where_nobody_knows_what_may_come_nothing_is_refused_for_its_size() -> None:
    with pytest.raises(ConfigError, match="can never hold"):
        placement.resources_for(job(nodes=3, per_node=2), [node(1)])
    assert placement.resources_for(job(nodes=3, per_node=2), [node(1)], None).world_size == 6


def test_gpus_may_come_where_nobody_knows_what_may_come() -> None:
    """On Kubernetes a training that began with the head alone was refused, or ran without GPUs."""
    nccl = job("nccl", nodes=2, per_node=8)
    with pytest.raises(ConfigError, match="the nodes have no GPU"):
        placement.resources_for(nccl, [node(1)])
    request = placement.resources_for(nccl, [node(1)], None)
    assert (request.backend, request.bundles[0]["GPU"], request.world_size) == ("nccl", 8, 16)
    with pytest.raises(ConfigError, match="scale=2x8"):  # or it would be one rank on each
        placement.resources_for(job("nccl", nodes=2), [node(1)], None)
    asked = placement.resources_for(job(nodes=2, per_node=8, gpus=1), [node(1)], None)
    assert (asked.backend, asked.bundles[0]["GPU"]) == ("nccl", 8)
    auto = job(nodes=2, per_node=8)
    assert placement.resources_for(auto, [node(1)], None).backend == "gloo"
    assert placement.without_gpus_now(auto, [node(1)])
    assert not placement.without_gpus_now(nccl, [node(1)])
    assert not placement.without_gpus_now(auto, [node(1), node(2, gpu=8)])


def test_an_endless_type_is_no_trouble() -> None:
    endless = [NodeType("any", {"CPU": 2.0}, there.UNLIMITED)]
    assert (
        placement.resources_for(job(nodes=3000, per_node=2), [node(1)], endless).world_size == 6000
    )
    with pytest.raises(ConfigError, match="any number of the autoscaler's type any with 2 CPU"):
        placement.resources_for(job(nodes=2, per_node=9), [node(1)], endless)


@pytest.mark.parametrize(("nodes", "most", "takes"), [(1, 4, 3), (1, 2, 2), (2, 8, 3), (3, 3, 3)])
def test_as_many_nodes_as_have_room_between_two_numbers(nodes: int, most: int, takes: int) -> None:
    there_now = [node(1), node(2), node(3), node(4, free={"CPU": 1.0})]
    assert (
        placement.resources_for(job(nodes=nodes, max_nodes=most, per_node=2), there_now).world_size
        == 2 * takes
    )


def test_the_least_is_waited_for_and_can_not_be_more_than_the_most() -> None:
    busy = [node(1, free={"CPU": 0.0}), node(2, free={"CPU": 0.0})]
    assert placement.resources_for(job(nodes=2, max_nodes=4, per_node=1), busy).world_size == 2


@pytest.mark.parametrize("share", [1 / 7, 1 / 6, 0.66667, 0.3, 0.0001])
def test_ray_can_place_all_ranks_of_a_bundle(share: float) -> None:
    """Ray rounds what a rank requests: seven of 1/7 were more than one GPU, and six started."""
    asking = job("gloo", nodes=1, gpus=share, cpus=share, resources={"disk": share})
    request = placement.resources_for(asking, [node(1, gpu=1, resources={"disk": 1.0})])
    assert request.ranks_per_bundle == int(1 / share + 1e-6)
    for name, amount in request.rank_resources.items():
        units = int(amount * 1e4 + 0.5) * request.ranks_per_bundle
        assert units <= round(request.bundles[0][name] * 1e4), name


@pytest.mark.parametrize(
    ("parallel", "key"),
    [
        (Parallel("fsdp", shard=16), "parallel.shard"),
        (Parallel("hsdp", replicate=2), "parallel.replicate"),
        (Parallel("pp", pp=16), "parallel.pp"),
    ],
)
def test_a_division_has_to_fit_every_size_that_a_run_may_get(parallel: Parallel, key: str) -> None:
    """The run began on two nodes, and ended when a third one joined."""
    elastic = Job(scale=Scale(nodes=2, max_nodes=4), parallel=parallel)
    with pytest.raises(ConfigError) as refused:
        placement.resources_for(elastic, GPUS)
    assert refused.value.key == key
    fixed = replace(elastic, scale=Scale(nodes=2))
    assert placement.resources_for(fixed, GPUS).world_size == 16


@pytest.mark.parametrize(
    ("division", "given", "key"),
    [
        (Parallel("fsdp"), Job(data=Data(global_batch=33)), "data.global_batch"),
        (Parallel(tp=2), Job(train=Train(loss_chunks=4)), "train.loss_chunks"),
    ],
)
def test_what_nodes_decide_is_refused_as_what_is_typed(
    division: Parallel, given: Job, key: str
) -> None:
    """Without scale.per_node each rank refused it, once Ray and all ranks had started."""
    asking = replace(given, scale=Scale(nodes=2), parallel=division)
    with pytest.raises(ConfigError) as refused:
        placement.resources_for(asking, GPUS)
    assert refused.value.key == key


def test_portions_of_an_elastic_run_may_differ_by_a_sample() -> None:
    asking = Job(
        scale=Scale(nodes=1, max_nodes=2), parallel=Parallel("fsdp"), data=Data(global_batch=33)
    )
    assert placement.resources_for(asking, GPUS).world_size == 16


def test_backend_script_is_nccl_where_there_are_gpus() -> None:
    assert placement.resources_for(job("script", nodes=1), GPUS).backend == "nccl"
    assert placement.resources_for(job("script", nodes=1), CPUS).backend == "gloo"


@pytest.mark.parametrize(
    ("job", "none"),
    [
        (Job(script="train.py"), True),
        (Job(script="train.py", scale=Scale(per_node=8, gpus=1)), True),
        (Job(), False),
        (Job(script="train.py", scale=Scale(nodes=2)), False),
        (Job(script="train.py", scale=Scale(nodes=None)), False),
        (Job(script="train.py", scale=Scale(max_nodes=2)), False),
        (Job(script="train.py", scale=Scale(spares=1)), False),
        (Job(script="train.py", scale=Scale(gpus=0.5)), False),
        (Job(script="train.py", scale=Scale(labels={"market-type": "spot"})), False),
        (Job(script="train.py", scale=Scale(resources={"highmem": 1})), False),
        (Job(script="train.py", pip=["einops"]), False),
        (Job(script="train.py", working_dir="."), False),
    ],
)
def test_only_a_program_on_one_node_needs_no_ray(job: Job, none: bool) -> None:
    assert placement.needs_no_ray(job) is none
