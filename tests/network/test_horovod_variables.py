"""Horovod's variables: held against Horovod's own arithmetic, on even and uneven nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan, Slot
from raydist.network import variables
from raydist.network.names import EnvVar
from raydist.network.variables import Rendezvous
from raydist.node.probe import Facts
from raydist.settings.config import Backend, Fabric, Horovod, Job
from raydist.settings.validate import validate
from raydist.shared.errors import ConfigError

HOSTS = "HOROVOD_HOSTNAME", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"
HERE = Facts(hostname="a", ip="10.0.0.1", interface="eth0", address="10.0.0.1")
MEET = Rendezvous(address="10.0.0.1", port=41234, secret="open-sesame")


def plan(*ranks_of_nodes: int, backend: str = "horovod") -> Plan:
    """Return nodes with so many ranks each."""
    slots: list[Slot] = []
    for node_rank, count in enumerate(ranks_of_nodes):
        node = Node(
            id=f"n{node_rank}", ip=f"10.0.0.{node_rank + 1}", host="same-name", total={}, free={}
        )
        slots += [
            Slot(
                rank=len(slots) + i,
                local_rank=i,
                node_rank=node_rank,
                local_world_size=count,
                bundle=0,
                node=node,
            )
            for i in range(count)
        ]
    return Plan(ResourceRequest(backend, len(slots), (), 1, "PACK", {"CPU": 1}), tuple(slots))


def job(**settings: Any) -> Job:
    return Job(backend=Backend(name="horovod", horovod=Horovod(**settings)), dir="/runs/one")


def planned(
    settings: Job, where: Plan, facts: Facts = HERE, meet: Rendezvous = MEET
) -> list[dict[str, EnvVar]]:
    return [
        {v.name: v for v in own}
        for own in variables.plan_variables(settings, where, [facts] * where.world_size, meet)
    ]


def values(settings: Job, *ranks_of_nodes: int) -> list[dict[str, str]]:
    return [
        {n: v.value for n, v in own.items()} for own in planned(settings, plan(*ranks_of_nodes))
    ]


@pytest.mark.parametrize(
    "nodes", [(1,), (2,), (3, 3), (1, 1, 1), (4, 2), (2, 4), (1, 3, 2), (8, 8, 7, 8)]
)
def test_places_are_those_that_horovod_itself_would_give(nodes: tuple[int, ...]) -> None:
    own = pytest.importorskip("horovod.runner.common.util.hosts", reason="Horovod is not built")
    slots = own.get_host_assignments(
        [own.HostInfo(f"node-{i}", n) for i, n in enumerate(nodes)], sum(nodes)
    )
    wanted = [
        {
            "HOROVOD_HOSTNAME": s.hostname, "HOROVOD_RANK": str(s.rank), "HOROVOD_SIZE": str(s.size),
            "HOROVOD_LOCAL_RANK": str(s.local_rank), "HOROVOD_LOCAL_SIZE": str(s.local_size),
            "HOROVOD_CROSS_RANK": str(s.cross_rank), "HOROVOD_CROSS_SIZE": str(s.cross_size),
        }
        for s in slots
    ]  # fmt: skip
    assert [{name: env[name] for name in wanted[0]} for env in values(job(), *nodes)] == wanted


def test_nodes_of_one_name_are_different_hosts() -> None:
    assert Counter(env["HOROVOD_HOSTNAME"] for env in values(job(), 2, 1)) == {
        "node-0": 2,
        "node-1": 1,
    }


def test_every_rank_gets_the_door_and_its_secret_and_no_store_of_torch() -> None:
    for env in values(job(), 2, 2):
        assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1:41234/open-sesame"
        assert env["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "41234"
        assert env["HOROVOD_CONTROLLER"] == env["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert "MASTER_PORT" not in env
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_the_secret_is_in_no_picture_of_where_ranks_meet() -> None:
    assert "open-sesame" not in repr(MEET)


def test_a_lone_rank_meets_nobody() -> None:
    (env,) = planned(job(), plan(1), meet=Rendezvous("10.0.0.1", 41234))
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in env
    assert env["HOROVOD_SIZE"].value == "1"


def test_the_interface_is_each_nodes_own() -> None:
    where, facts = plan(1, 1), [HERE, replace(HERE, interface="ens7", ip="10.0.0.2")]
    env = variables.plan_variables(job(), where, facts, MEET)
    names = [next(v.value for v in own if v.name == "HOROVOD_GLOO_IFACE") for own in env]
    assert names == ["eth0", "ens7"]


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"fusion_mb": 0.5}, "HOROVOD_FUSION_THRESHOLD", "524288"),
        ({"fusion_mb": 0}, "HOROVOD_FUSION_THRESHOLD", "0"),
        ({"cycle_ms": 0.25}, "HOROVOD_CYCLE_TIME", "0.25"),
        ({"log_level": "debug"}, "HOROVOD_LOG_LEVEL", "debug"),
        ({"stall_warn_s": 7}, "HOROVOD_STALL_CHECK_TIME_SECONDS", "7"),
        ({"stall_fail_s": 70}, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "70"),
        ({"stall_warn_s": 0}, "HOROVOD_STALL_CHECK_DISABLE", "1"),
        ({"timeline": True}, "HOROVOD_TIMELINE", "/runs/one/horovod-timeline.json"),
        ({"autotune": True}, "HOROVOD_AUTOTUNE", "1"),
        ({"autotune": True}, "HOROVOD_AUTOTUNE_LOG", "/runs/one/horovod-autotune.csv"),
    ],
)
def test_a_setting_becomes_horovods_variable_with_its_reason(
    settings: Any, name: str, value: str
) -> None:
    (env, _) = planned(job(**settings), plan(2))
    assert env[name].value == value
    assert env[name].reason.startswith("backend.horovod.")


def test_what_is_not_asked_for_is_not_there() -> None:
    (env, _) = values(job(), 2)
    assert not {"HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_STALL_CHECK_DISABLE"} & env.keys()
    assert not {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"} & env.keys(), (
        "what is set can't be tuned"
    )
    (env, _) = values(job(stall_warn_s=0), 2)
    assert "HOROVOD_STALL_CHECK_TIME_SECONDS" not in env


@pytest.mark.parametrize(("timeout_s", "expected"), [(600.0, "600"), (0.2, "1"), (29.6, "30")])
def test_the_timeout_is_that_of_all_backends_in_whole_seconds(
    timeout_s: float, expected: str
) -> None:
    settings = Job(backend=Backend(name="horovod", timeout_s=timeout_s))
    assert values(settings, 2)[0]["HOROVOD_GLOO_TIMEOUT_SECONDS"] == expected


def test_the_sites_own_settings_stand_but_not_its_places() -> None:
    site = {"HOROVOD_CYCLE_TIME": "9", "HOROVOD_RANK": "17", "HOROVOD_CONTROLLER": "mpi"}
    (env, _) = planned(job(cycle_ms=2), plan(2), replace(HERE, environment=site))
    assert env["HOROVOD_CYCLE_TIME"].value == "9"
    assert "env.HOROVOD_CYCLE_TIME=2" in env["HOROVOD_CYCLE_TIME"].reason
    assert env["HOROVOD_RANK"].value == "0"
    assert env["HOROVOD_CONTROLLER"].value == "gloo"


def test_what_a_person_types_wins_over_all() -> None:
    settings = replace(job(), env={"HOROVOD_CYCLE_TIME": "3"})
    (env, _) = planned(settings, plan(2), replace(HERE, environment={"HOROVOD_CYCLE_TIME": "9"}))
    assert env["HOROVOD_CYCLE_TIME"].value == "3"


def test_the_interface_asked_for_is_horovods_too() -> None:
    settings = replace(job(), fabric=Fabric(interface="ib0"))
    (env, _) = planned(settings, plan(2), replace(HERE, interface="ib0"))
    assert env["HOROVOD_GLOO_IFACE"].value == "ib0"


def test_other_backends_get_nothing_of_it() -> None:
    where = plan(2, backend="gloo")
    env = planned(Job(backend=Backend(name="gloo")), where)
    assert not [name for name in env[0] if name.startswith("HOROVOD")]
    assert env[0]["MASTER_PORT"].value == "41234"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([[0, 3]], r"\[0, 3\] has rank 3.* 0 to 2"),
        ([[0, 1], [2, 0, 1]], r"\[2, 0, 1\].*hvd.global_process_set"),
    ],
)
def test_process_sets_that_these_ranks_can_not_form_are_refused(
    sets: list[list[int]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(job(process_sets=sets), plan(3))


@pytest.mark.parametrize(
    ("settings", "key", "value", "suggestion"),
    [
        (job(process_sets=[[]]), "process_sets", [], "process_sets=[[0,1],[2,3]]"),
        (job(process_sets=[[0, 0]]), "process_sets", [0, 0], "process_sets=[[0,1],[2,3]]"),
        (job(process_sets=[[-1, 0]]), "process_sets", [-1, 0], "process_sets=[[0,1],[2,3]]"),
        (job(stall_fail_s=60), "stall_fail_s", 60, "stall_fail_s=120"),
        (job(op="max"), "op", "max", ""),
        (job(compression="bf16"), "compression", "bf16", "compression=fp16"),
        (job(log_level="warn"), "log_level", "warn", "log_level=warning"),
        (job(groups=0), "groups", 0, "groups=1"),
        (job(cycle_ms=0), "cycle_ms", 0, "cycle_ms=1"),
    ],
)
def test_what_can_not_be_right_is_refused_before_anything_starts(
    settings: Job, key: str, value: object, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(settings)
    error, prefix = refused.value, "backend.horovod."
    assert (error.key, error.value) == (prefix + key, value)
    assert error.suggestion == (suggestion and prefix + suggestion)


def test_horovod_has_no_other_rendezvous() -> None:
    with pytest.raises(ConfigError) as refused:
        validate(replace(job(), init_method="file"))
    assert (refused.value.key, refused.value.suggestion) == ("init_method", "init_method=env")


@pytest.mark.parametrize(
    "settings", [{}, {"stall_fail_s": 0}, {"stall_warn_s": 0}, {"process_sets": [[0, 1], [1]]}]
)
def test_what_is_right_is_let_through(settings: Any) -> None:
    validate(job(**settings))
