"""The levers of speed as variables and as lines of the plan: what raydist sets, and what it leaves
alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.network import levers, variables
from raydist.network.facts import Facts, Gpu, NumaNode
from raydist.network.variables import Rendezvous
from raydist.settings.config import Backend, Job, Optim, Scale, Train

TWO_NODES = tuple(
    NumaNode(number, number, cores=tuple((8 * number + i,) for i in range(8)), caches=())
    for number in range(2)
)
FOUR_GPUS = tuple(Gpu(f"000{i}:00:00.0", numa=i // 2) for i in range(4))


def facts(gpus: int = 0, **more: Any) -> list[Facts]:
    one = Facts(
        "node-1", "10.0.0.1", "eth0", "10.0.0.1", numa=TWO_NODES, devices=FOUR_GPUS, cpus=16
    )
    return [replace(one, gpus=[str(i)] if gpus else None, **more) for i in range(4)]


def look(
    job: Job, gpus: int = 4, **more: Any
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[bool, str]]]:
    """(variables of rank 0 with their reasons, levers with theirs) of a job with four ranks on one
    node."""
    have = {"CPU": 64.0, **({"GPU": float(gpus)} if gpus else {})}
    nodes = [Node("id-1", "10.0.0.1", "node-1", have, have)]
    job = replace(job, scale=replace(job.scale, per_node=4))
    plan = placement.assign_ranks(placement.resources_for(job, nodes), nodes)
    each = facts(gpus, **more)
    own: Sequence[Any] = variables.plan_variables(job, plan, each, Rendezvous("10.0.0.1"))[0]
    listed = levers.levers(job, plan, each, own)
    return {var.name: (var.value, var.reason) for var in own}, {
        each.name: (each.on, each.why) for each in listed
    }


@pytest.mark.parametrize(
    ("scale", "more", "threads"),
    [
        (Scale(), {}, "4"),  # two ranks share the eight cores of a NUMA node
        (Scale(numa="exclusive"), {}, "4"),
        (Scale(numa="none"), {}, "1"),
        (Scale(cpus=3), {}, "3"),  # a word wins
        (Scale(), {"cpus": 8}, "2"),  # the cgroup's quota: eight CPUs for four ranks
        (Scale(), {"environment": {"OMP_NUM_THREADS": "6"}}, "6"),
        (Scale(), {"environment": {"OMP_NUM_THREADS": "1"}}, "1"),
    ],
)
def test_threads_are_the_cores_of_a_rank(scale: Scale, more: dict[str, Any], threads: str) -> None:
    own, listed = look(Job(scale=scale), **more)
    assert own["OMP_NUM_THREADS"][0] == threads
    assert listed["threads"] == (
        threads != "1",
        f"{threads} for each rank: {own['OMP_NUM_THREADS'][1]}",
    )


def test_a_word_about_threads_wins() -> None:
    own, _ = look(Job(env={"OMP_NUM_THREADS": "7"}))
    assert own["OMP_NUM_THREADS"] == ("7", "env.OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("gpus", "names"), [(0, {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}), (4, {*levers.CACHES})]
)
def test_compiled_code_is_kept_where_nobody_said_otherwise(gpus: int, names: set[str]) -> None:
    own, _ = look(Job(), gpus)
    assert {name for name, (value, _) in own.items() if "<your cache" in value} == names
    site = {"TORCHINDUCTOR_CACHE_DIR": "/scratch/inductor"}
    own, _ = look(Job(env={"TRITON_CACHE_DIR": "/mine"}), gpus, environment=site)
    assert own["TORCHINDUCTOR_CACHE_DIR"][0] == "/scratch/inductor"
    assert own["TRITON_CACHE_DIR"][0] == "/mine"


@pytest.mark.parametrize(
    ("job", "gpus", "more", "why"),
    [
        (Job(), 0, {}, "no GPU"),
        (Job(script="train.py"), 4, {}, "share CUDA tensors"),
        (
            Job(env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
            4,
            {},
            "PYTORCH_CUDA_ALLOC_CONF is set",
        ),
        (
            Job(),
            4,
            {"environment": {"PYTORCH_ALLOC_CONF": "backend:native"}},
            "PYTORCH_ALLOC_CONF is set",
        ),
        (
            Job(env={levers.REGISTERS: "1"}),
            4,
            {},
            f"{levers.REGISTERS} is set",
        ),  # NVLS registration
        (Job(), 4, {}, ""),
    ],
)
def test_segments_are_expandable_where_nothing_speaks_against_it(
    job: Job, gpus: int, more: dict[str, Any], why: str
) -> None:
    own, listed = look(replace(job, backend=Backend("auto")), gpus, **more)
    on, reason = listed["expandable segments"]
    assert on == (not why)
    assert why in reason
    ours = [
        name for name in levers.ALLOCATOR if own.get(name, ("",))[0] == "expandable_segments:True"
    ]
    assert ours == ([] if why else ["PYTORCH_ALLOC_CONF"])


@pytest.mark.parametrize(
    ("torch", "name"), [("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"), ("2.14.1", "PYTORCH_ALLOC_CONF")]
)
def test_the_allocator_s_variable_has_the_name_that_this_torch_reads(torch: str, name: str) -> None:
    own, _ = look(Job(), versions={"torch": torch})
    assert own[name][0] == "expandable_segments:True"


def test_the_plan_says_of_each_lever_whether_it_is_on() -> None:
    _, listed = look(Job(train=Train(gc=50, channels_last=True)))
    on = {"NUMA binding", "threads", "freed memory", "compiled code", "expandable segments", "garbage collection",
          "channels-last images"}  # fmt: skip
    assert {name for name, (is_on, _) in listed.items() if is_on} == on
    assert all(f"train.{name}" in listed[lever][1] for name, lever in [("compile=true", "torch.compile"),
               ("precision=bf16", "half precision"), ("gc=50", "garbage collection")])  # fmt: skip
    assert "optim.fused=true" in listed["fused optimizer"][1]  # sgd on a GPU
    for train, deterministic, tf32, search in (
        (Train(), False, False, False),
        (Train(tf32=True), True, True, False),
        (Train(cudnn_search=True), False, False, True),
        (Train(fast=True), False, True, True),
        (Train(fast=True), True, True, False),
    ):
        _, of_gpu = look(Job(train=train, deterministic=deterministic))
        assert (of_gpu["TF32"][0], of_gpu["cuDNN search"][0]) == (tf32, search)
    _, of_cpu = look(Job(train=Train(fast=True)), gpus=0)
    assert not of_cpu["TF32"][0]
    assert not of_cpu["cuDNN search"][0]
    for settings, fused, why in (
        (Optim("adamw"), True, "adamw: the default on GPUs"),
        (Optim("adam", args={"foreach": True}), False, "adam: optim.args chooses another"),
        (Optim("adamw", fused=False), False, "adamw: optim.fused=false"),
        (Optim("adagrad"), False, "adagrad: it rounds the last bits otherwise"),
    ):
        is_on, reason = look(Job(optim=settings))[1]["fused optimizer"]
        assert (is_on, reason.startswith(why)) == (fused, True)
    for job, fused, why in (
        (Job(), True, "sgd: weights have the same bits"),
        (
            Job(optim=Optim("adamw")),
            False,
            "adamw: it rounds the last bits otherwise: optim.fused=true",
        ),
        (Job(optim=Optim("adamw"), train=Train(fast=True)), True, "adamw: train.fast=true"),
        (
            Job(optim=Optim("adamw", fused=False), train=Train(fast=True)),
            False,
            "adamw: optim.fused=false",
        ),
        (
            Job(optim=Optim("rmsprop"), train=Train(fast=True)),
            False,
            "rmsprop: torch has no fused RMSprop",
        ),
    ):
        assert look(job, gpus=0)[1]["fused optimizer"] == (fused, why)
    _, of_script = look(Job(script="train.py", scale=Scale(numa="none")), 0)
    assert {name for name, (is_on, _) in of_script.items() if is_on} == {
        "freed memory",
        "compiled code",
    }
