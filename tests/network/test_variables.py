"""Each rank's variables: their values, their reasons, and what is never overruled."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Plan
from raydist.launch.start_requests import common_request, rank_requests
from raydist.network import rdma, variables
from raydist.network.facts import Gpu
from raydist.network.names import RANK_FOLDER, EnvVar
from raydist.network.variables import Rendezvous
from raydist.node.gpu_faults import own_gpus
from raydist.node.probe import Facts
from raydist.settings.config import Backend, Fabric, Job, Restart, Scale
from raydist.shared.errors import ConfigError
from raydist.worker.context import Rank

MEET = Rendezvous(address="10.0.0.1", port=41234)


def node(i: int, gpu: float = 0) -> Node:
    have = {"CPU": 16.0, **({"GPU": gpu} if gpu else {})}
    return Node(f"id-{i}", f"10.0.0.{i}", f"node-{i}", have, have)


def facts(
    i: int, interface: str = "eth0", gpus: tuple[str, ...] | None = None, **more: Any
) -> Facts:
    return Facts(f"node-{i}", f"10.0.0.{i}", interface, f"10.0.0.{i}", gpus=gpus, **more)


def job(**more: Any) -> Job:
    return Job(name="digits", dir="/runs/digits/2026", **{"backend": Backend("gloo"), **more})


def plan(*nodes: Node, **scale: Any) -> Plan:
    request = placement.resources_for(Job(scale=Scale(nodes=len(nodes), **scale)), nodes)
    return placement.assign_ranks(request, nodes)


def planned(
    settings: Job, where: Plan, *each: Facts, meet: Rendezvous = MEET
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the values and the reasons, by rank. `each` has the facts of every rank."""
    result = variables.plan_variables(settings, where, each, meet)
    for own in result:
        assert len({var.name for var in own}) == len(own), "a variable is there twice"
        assert all(var.reason for var in own)
    return [{v.name: v.value for v in own} for own in result], [
        {v.name: v.reason for v in own} for own in result
    ]


@pytest.mark.parametrize(
    ("torch", "environment", "size"),
    [
        ("2.8.0+cu128", {}, "2000"),
        ("2.8.0+cu128", {"TORCH_FR_BUFFER_SIZE": "50"}, "50"),
        ("2.14.1", {}, None),
        ("", {}, None),
    ],
)
def test_torch_records_collectives_and_no_more_of_gloo_than_reports_need(
    torch: str, environment: dict[str, str], size: str | None
) -> None:
    one = facts(1, versions={"torch": torch}, environment=environment)
    values, _ = planned(job(backend=Backend("nccl")), plan(node(1), per_node=1), one)
    assert values[0].get("TORCH_FR_BUFFER_SIZE") == size
    values, _ = planned(job(), plan(node(1), per_node=1), one)
    assert values[0].get("TORCH_FR_BUFFER_SIZE") == environment.get("TORCH_FR_BUFFER_SIZE", "32")


def test_the_words_of_torchrun_on_uneven_nodes() -> None:
    request = placement.resources_for(
        Job(scale=Scale(nodes=1, per_node=3, placement="PACK")), [node(1), node(2)]
    )
    uneven = placement.assign_ranks(request, [node(2), node(1), node(2)])
    values, _ = planned(job(), uneven, facts(1), facts(2), facts(2))
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_RANK",
             "ROLE_WORLD_SIZE", "ROLE_NAME"]  # fmt: skip
    assert [[own[name] for name in names] for own in values] == [
        ["0", "0", "0", "1", "3", "2", "0", "3", "default"],
        ["1", "0", "1", "2", "3", "2", "1", "3", "default"],
        ["2", "1", "1", "2", "3", "2", "2", "3", "default"],
    ]


def test_everything_that_torchrun_exports_is_there() -> None:
    """The names are read from torch's own launcher, so that a new one is noticed."""
    import inspect
    import re

    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    source = inspect.getsource(LocalElasticAgent)
    exported = set(re.findall(r'"([A-Z_]+)": (?:str|spec|worker)', source)) | {"LOCAL_RANK"}
    (values,), _ = planned(job(), plan(node(1), per_node=1), facts(1))
    assert len(exported) > 10
    assert exported <= set(values)


def test_the_facts_of_a_node_are_read_once_however_many_ranks_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 1,024 ranks it took 16 s of the driver's time, at each attempt."""
    read, own = list[str](), rdma.device_settings

    def counted(job: Job, node: Facts, nodes: int) -> Any:
        read.append(node.hostname)
        return own(job, node, nodes)

    monkeypatch.setattr(rdma, "device_settings", counted)
    each = [facts(i) for i in (1, 2) for _ in range(8)]
    values, _ = planned(job(), plan(node(1), node(2), per_node=8), *each)
    assert len(values) == 16
    assert read == ["node-1", "node-2"]


def test_where_the_ranks_meet() -> None:
    ours = replace(job(), restart=Restart(max=3))
    (first, second), _ = planned(ours, plan(node(1), per_node=2), facts(1), facts(1))
    for own in (first, second):
        assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("10.0.0.1", "41234")
        assert own["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # torch takes this very word
        assert own["TORCHELASTIC_RUN_ID"] == "digits_2026"
        assert (own["TORCHELASTIC_RESTART_COUNT"], own["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "3")
        assert own["RAYDIST_RUN_DIR"] == "/runs/digits/2026"
        assert "RAYDIST_RENDEZVOUS_FILE" not in own


@pytest.mark.parametrize(
    ("backend", "ranks", "waits"), [("gloo", 2, True), ("gloo", 1, False), ("nccl", 2, False)]
)
def test_ranks_of_gloo_wait_until_all_have_connected(backend: str, ranks: int, waits: bool) -> None:
    settings = replace(job(), backend=replace(job().backend, name=backend))
    values, _ = planned(settings, plan(node(1), per_node=ranks), *[facts(1)] * ranks)
    assert [own.get("TORCH_DIST_INIT_BARRIER") == "1" for own in values] == [waits] * ranks


def test_where_the_ranks_meet_in_a_file() -> None:
    settings = job(init_method="file")
    (own,), _ = planned(
        settings,
        plan(node(1), per_node=1),
        facts(1),
        meet=Rendezvous("10.0.0.1", file="/shared/rendezvous"),
    )
    assert own["RAYDIST_RENDEZVOUS_FILE"] == "/shared/rendezvous"
    assert not {"MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(own)


def test_a_port_that_is_not_open_yet_says_so() -> None:
    (own,), _ = planned(job(), plan(node(1), per_node=1), facts(1), meet=Rendezvous("10.0.0.1"))
    assert own["MASTER_PORT"] == variables.LATER


def test_the_interface_may_differ_from_node_to_node() -> None:
    values, reasons = planned(
        job(), plan(node(1), node(2), per_node=1), facts(1, "eth0"), facts(2, "ens3")
    )
    assert [own["GLOO_SOCKET_IFNAME"] for own in values] == ["eth0", "ens3"]
    assert [own["NCCL_SOCKET_IFNAME"] for own in values] == ["=eth0", "=ens3"]
    assert "10.0.0.2" in reasons[1]["GLOO_SOCKET_IFNAME"]


def test_an_interface_that_was_asked_for_is_the_reason() -> None:
    settings = job(fabric=Fabric(interface="ib0"))
    (own,), (why,) = planned(settings, plan(node(1), per_node=1), facts(1, "ib0"))
    assert own["GLOO_SOCKET_IFNAME"] == "ib0"
    assert why["NCCL_SOCKET_IFNAME"].startswith("fabric.interface")


@pytest.mark.parametrize(
    ("held", "visible"),
    [
        ([("1",), ("0",)], "0,1"),
        ([("10",), ("9",)], "9,10"),
        ([("3", "2"), ("1", "0")], "0,2,1,3"),
        ([("0",), ("0",)], "0"),
        ([("GPU-b",), ("GPU-a",)], "GPU-a,GPU-b"),
    ],
)
def test_all_ranks_of_a_node_see_all_its_gpus_in_one_order(
    held: list[tuple[str, ...]], visible: str
) -> None:
    where = plan(node(1, gpu=8), per_node=2, gpus=1)
    # Ray's own mask on the actor is no setting of the site
    each = [facts(1, gpus=own, environment={"CUDA_VISIBLE_DEVICES": own[0]}) for own in held]
    values, _ = planned(job(), where, *each)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in values] == [visible, visible]


@pytest.mark.parametrize("backend", ["nccl", "horovod", "mpi"])
@pytest.mark.parametrize(
    "held",
    [
        [("0",), ("1",), ("2",)],
        [("5",), ("3",)],
        [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")],
        [("10", "9", "8"), ("3", "2", "1")],
        [("MIG-b",), ("MIG-a",)],
    ],
    ids=str,
)
def test_a_program_that_takes_the_gpu_of_its_local_rank_gets_the_intended_one(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[str, ...]], backend: str
) -> None:
    """nccl2 without `device_id` takes LOCAL_RANK modulo the GPUs that it sees; "Duplicate GPU
    detected" otherwise."""
    where = plan(node(1, gpu=12), per_node=len(held), gpus=len(held[0]))
    where = replace(where, request=replace(where.request, backend=backend))
    each = [facts(1, gpus=own, versions={"nccl": "2.30.7"}) for own in held]
    values, _ = planned(job(backend=Backend(backend)), where, *each)
    taken = []
    for own in values:
        visible = own["CUDA_VISIBLE_DEVICES"].split(",")
        seen = visible[:1] if visible[0].startswith("MIG") else visible  # CUDA's rule
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: len(seen))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        device = Rank.from_env(own).device
        assert device.index == int(own["LOCAL_RANK"]) % len(seen)
        assert own.get("HOROVOD_LOCAL_RANK", own["LOCAL_RANK"]) == own["LOCAL_RANK"]
        taken.append({seen[place] for place in range(device.index, len(seen), len(held))})
    if len(held[0]) > 1:  # neighbours are of one rank
        count = len(held[0])
        ordered = sorted(int(gpu) for own in held for gpu in own)
        assert taken == [
            {str(gpu) for gpu in ordered[i : i + count]} for i in range(0, len(ordered), count)
        ]
    assert sum(map(len, taken)) == len(set().union(*taken))


def test_each_rank_has_a_mig_instance_of_its_own() -> None:
    """CUDA uses only the first instance of a list: all ranks of a node shared one slice."""
    each = [facts(1, gpus=own) for own in (("MIG-b",), ("MIG-a",))]
    values, _ = planned(job(), plan(node(1, gpu=8), per_node=2, gpus=1), *each)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in values] == ["MIG-b", "MIG-a"]


def test_without_ray_each_rank_has_one_of_the_mig_instances_that_are_visible() -> None:
    each = [facts(1, environment={"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})] * 2
    values, _ = planned(job(), plan(node(1, gpu=2), per_node=2, gpus=1), *each)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in values] == ["MIG-a", "MIG-b"]


@pytest.mark.parametrize(
    ("held", "known", "nccl", "expected"),
    [
        (("MIG-a", "MIG-b"), True, "2.30.7", "1"),
        (("MIG-a", "MIG-c"), True, "2.30.7", None),  # each on a separate GPU
        (("MIG-a", "MIG-c"), True, "2.28.3", None),
        (
            ("MIG-a", "MIG-b"),
            True,
            "2.28.3",
            "ranks on node-1 have MIG instances of one GPU, which NCCL 2.28.3 refuses",
        ),
        (("MIG-a", "MIG-b"), True, "", "1"),
        (("MIG-a", "MIG-b"), False, "2.30.7", "1"),
        (("MIG-a", "MIG-b"), False, "2.28.3", None),  # unknown: NCCL itself reports it
        (("MIG-a",), True, "2.28.3", None),
        (("0", "1"), True, "2.30.7", None),
    ],
)
def test_nccl_admits_ranks_on_mig_instances_of_one_gpu_or_the_run_is_refused(
    held: tuple[str, ...], known: bool, nccl: str, expected: str | None
) -> None:
    gpus = (Gpu("0000:1b:00.0", uuid="GPU-x", instances=("MIG-a", "MIG-b")), Gpu("0000:1c:00.0", uuid="GPU-y",
            instances=("MIG-c",))) if known else ()  # fmt: skip
    each = [facts(1, gpus=(own,), devices=gpus, versions={"nccl": nccl}) for own in held]
    where, settings = plan(node(1, gpu=8), per_node=len(held), gpus=1), job(backend=Backend("nccl"))
    if expected not in ("1", None):
        with pytest.raises(ConfigError, match=re.escape(str(expected))) as refused:
            planned(settings, where, *each)
        assert "backend=gloo" in str(refused.value)
        return
    values, _ = planned(settings, where, *each)
    assert [own.get("NCCL_MULTI_RANK_GPU_ENABLE") for own in values] == [expected] * len(held)


def test_gpus_are_counted_as_ray_does_and_amds_have_their_own_variable() -> None:
    each = [facts(1, gpus=own, versions={"torch": "2.15.0+rocm7.1"}) for own in (("1",), ("0",))]
    values, _ = planned(job(), plan(node(1, gpu=8), per_node=2, gpus=1), *each)
    seen = [
        (own["HIP_VISIBLE_DEVICES"], own["CUDA_VISIBLE_DEVICES"], own["CUDA_DEVICE_ORDER"])
        for own in values
    ]
    assert seen == [("0,1", "0,1", "PCI_BUS_ID")] * 2
    each = [facts(1, gpus=("0",), environment={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})]
    (own,), _ = planned(job(), plan(node(1, gpu=8), per_node=1, gpus=1), *each)
    assert own["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"  # the site's
    assert "HIP_VISIBLE_DEVICES" not in own


def test_each_node_has_its_own_gpus() -> None:
    where = plan(node(1, gpu=2), node(2, gpu=2), per_node=2)
    each = [
        facts(1, gpus=("0",)),
        facts(1, gpus=("1",)),
        facts(2, gpus=("5",)),
        facts(2, gpus=("4",)),
    ]
    values, _ = planned(job(), where, *each)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in values] == ["0,1", "0,1", "4,5", "4,5"]


@pytest.mark.parametrize(
    ("gpus", "held", "own"),
    [
        (1, (("1",), ("0",)), [["0"], ["1"]]),
        (2, (("0", "1"), ("2", "3")), [["0", "1"], ["2", "3"]]),
        (0.5, (("0",), ("0",)), [["0"], ["0"]]),
        (0, ((), ()), [[], []]),
    ],
)
def test_the_agent_of_a_rank_watches_all_of_its_gpus(
    gpus: float, held: tuple[tuple[str, ...], ...], own: list[list[str]]
) -> None:
    """Of two it watched the first."""
    settings, where = job(), plan(node(1, gpu=4), per_node=2, gpus=gpus)
    each = [facts(1, gpus=ids) for ids in held]
    variables_of_each = variables.plan_variables(settings, where, each, MEET)
    nodes: Any = SimpleNamespace(left_on=lambda slot: ())
    common = common_request(settings, has_call=False, keep=False, saving=False)
    requests = rank_requests(common, settings, where, each, variables_of_each, nodes)
    assert [own_gpus(request.env, request.gpus) for request in requests] == own


def test_gpus_that_raydist_has_not_assigned_are_taken_in_turn() -> None:
    ranks = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    eight = {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}
    assert own_gpus(ranks) == ["1"]
    assert own_gpus(ranks, 2) == ["1", "3"]
    assert (own_gpus(ranks | eight), own_gpus(ranks | eight, 2)) == (["6"], ["6", "4"])
    assert own_gpus({**ranks, "CUDA_VISIBLE_DEVICES": "MIG-a"}, 2) == ["MIG-a"]


def test_a_job_without_gpus_sees_none_and_one_that_nobody_counted_for_sees_all() -> None:
    (own,), _ = planned(
        job(),
        plan(node(1, gpu=2), per_node=1, gpus=0),
        facts(1, environment={"CUDA_VISIBLE_DEVICES": "1"}),
    )
    assert own["CUDA_VISIBLE_DEVICES"] == ""
    (own,), _ = planned(job(), plan(node(1, gpu=2), per_node=1), facts(1, gpus=None))
    assert "CUDA_VISIBLE_DEVICES" not in own


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, "1"), (1.0, "1"), (3.9, "3"), (4, "4")])
def test_threads_follow_the_cpus(cpus: float, threads: str) -> None:
    (own,), _ = planned(job(scale=Scale(cpus=cpus)), plan(node(1), per_node=1), facts(1))
    assert own["OMP_NUM_THREADS"] == threads


def test_what_the_site_has_set_stands_and_is_told() -> None:
    site = {"NCCL_SOCKET_IFNAME": "=bond0", "OMP_NUM_THREADS": "12"}
    values, reasons = planned(
        job(), plan(node(1), node(2), per_node=1), facts(1, environment=site), facts(2)
    )
    assert (values[0]["NCCL_SOCKET_IFNAME"], values[0]["OMP_NUM_THREADS"]) == ("=bond0", "12")
    why = reasons[0]["NCCL_SOCKET_IFNAME"]
    assert "node-1" in why
    assert "env.NCCL_SOCKET_IFNAME==eth0" in why
    # only on that node, and only what was set there
    assert values[0]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert values[1]["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_what_ray_has_set_to_the_same_is_no_news() -> None:
    _, (why,) = planned(
        job(), plan(node(1), per_node=1), facts(1, environment={"OMP_NUM_THREADS": "1"})
    )
    assert why["OMP_NUM_THREADS"] == "scale.cpus=1"


def test_ncclls_own_file_stands_too_but_below_the_environment() -> None:
    conf = {
        "NCCL_SOCKET_IFNAME": ("bond", "/etc/nccl.conf"),
        "GLOO_SOCKET_IFNAME": ("eth0", "/etc/nccl.conf"),
    }
    where = plan(node(1), per_node=1)
    (own,), (why,) = planned(job(), where, facts(1, nccl_conf=conf))
    assert own["NCCL_SOCKET_IFNAME"] == "bond"
    assert "/etc/nccl.conf on node-1" in why["NCCL_SOCKET_IFNAME"]
    assert "env.NCCL_SOCKET_IFNAME==eth0" in why["NCCL_SOCKET_IFNAME"]
    assert "env." not in why["GLOO_SOCKET_IFNAME"]  # the same value: no override is offered
    (own,), _ = planned(
        job(), where, facts(1, nccl_conf=conf, environment={"NCCL_SOCKET_IFNAME": "ib0"})
    )
    assert own["NCCL_SOCKET_IFNAME"] == "ib0"


def test_what_the_person_types_wins_over_all() -> None:
    settings = job(env={"NCCL_SOCKET_IFNAME": "=eth7", "MASTER_PORT": "1", "FLAGS": "-v"})
    site = facts(1, environment={"NCCL_SOCKET_IFNAME": "=bond0"})
    values, reasons = planned(settings, plan(node(1), per_node=2), site, site)
    for own, why in zip(values, reasons, strict=True):
        assert (own["NCCL_SOCKET_IFNAME"], own["MASTER_PORT"], own["FLAGS"]) == ("=eth7", "1", "-v")
        assert why["NCCL_SOCKET_IFNAME"] == "env.NCCL_SOCKET_IFNAME"


def log_of(
    settings: Job, here: Facts, nodes: int = 1, gpu: float = 8
) -> dict[str, tuple[str, str]]:
    """NCCL's own log in rank 0's variables, with the reasons."""
    where = plan(*(node(i + 1, gpu=gpu) for i in range(nodes)), per_node=1)
    every = variables.plan_variables(
        settings, where, [here, *(facts(i + 1) for i in range(1, nodes))], MEET
    )
    return {
        var.name: (var.value, var.reason) for var in every[0] if var.name.startswith("NCCL_DEBUG")
    }


def test_nccls_log_is_requested_for_its_reader_and_never_lands_in_the_ranks_log() -> None:
    nccl = job(backend=Backend("nccl"))
    several = log_of(nccl, facts(1), nodes=2)
    assert {name: value for name, (value, _) in several.items()} == {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": f"{RANK_FOLDER}/rank-0.nccl"}  # fmt: skip

    assert log_of(nccl, facts(1)) == {}
    strict = log_of(replace(nccl, fabric=Fabric(strict=True)), facts(1))
    assert strict["NCCL_DEBUG"][0] == "INFO"
    assert "fabric.strict" in strict["NCCL_DEBUG"][1]
    assert log_of(nccl, facts(1, environment={"NCCL_DEBUG": "WARN"}), nodes=2) == {}


def test_debug_has_a_file_of_its_own_on_any_job_and_the_sites_stands() -> None:
    aloud = job(fabric=Fabric(debug=True))
    log = log_of(aloud, facts(1), gpu=0)
    assert log["NCCL_DEBUG"][0] == "INFO"
    assert "fabric.debug" in log["NCCL_DEBUG"][1]
    assert "NET" in log["NCCL_DEBUG_SUBSYS"][0].split(",")
    assert log["NCCL_DEBUG_FILE"][0] == f"{RANK_FOLDER}/rank-0.nccl"
    site = log_of(aloud, facts(1, environment={"NCCL_DEBUG_FILE": "/var/log/nccl.%p"}), gpu=0)
    assert (site["NCCL_DEBUG"][0], site["NCCL_DEBUG_FILE"][0]) == ("INFO", "/var/log/nccl.%p")


def test_values_are_text_whatever_yaml_made_of_them() -> None:
    settings = replace(job(), env={"DEPTH": 3})  # type: ignore[dict-item]
    (own,) = variables.plan_variables(settings, plan(node(1), per_node=1), [facts(1)], MEET)
    assert EnvVar("DEPTH", "3", "env.DEPTH") in own


def test_variables_are_in_one_order_on_every_rank() -> None:
    settings = job(env={"B": "1", "A": "2", "C": "3"})
    first, second = variables.plan_variables(
        settings, plan(node(1), per_node=2), [facts(1)] * 2, MEET
    )
    assert [var.name for var in first] == [var.name for var in second]
    assert [var.name for var in first][-3:] == ["B", "A", "C"]


def test_nccl_writes_down_its_network_where_gpus_talk_between_nodes() -> None:
    two = plan(node(1, gpu=1), node(2, gpu=1), per_node=1)
    settings = job(backend=Backend("nccl"))
    names = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}
    values, _ = planned(settings, two, facts(1, gpus=("0",)), facts(2, gpus=("0",)))
    assert [own["NCCL_DEBUG"] for own in values] == ["INFO", "INFO"]
    assert [own["NCCL_DEBUG_FILE"].rpartition("/")[2] for own in values] == [
        "rank-0.nccl",
        "rank-1.nccl",
    ]

    theirs = [facts(i, gpus=("0",), environment={"NCCL_DEBUG": "WARN"}) for i in (1, 2)]
    values, _ = planned(settings, two, *theirs)
    assert not names & set(values[0])
    values, _ = planned(
        job(backend=Backend("nccl"), env={"NCCL_DEBUG": "TRACE"}), two, facts(1), facts(2)
    )
    assert names & set(values[0]) == {"NCCL_DEBUG"}
    for elsewhere in (plan(node(1, gpu=1), per_node=1), plan(node(1), per_node=1)):
        values, _ = planned(settings, elsewhere, facts(1))
        assert not names & set(values[0])
