"""The answers of NCCL's RAS as lines about a hang, and who gets a port for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from raydist.network.names import RAS_PORT
from raydist.network.ras import ADDRESS, describe_ras
from raydist.settings.config import Backend
from tests.network.test_variables import facts, job, node, plan, planned

FINE = {
    "init_state": 0,
    "async_error": 0,
    "finalize_called": False,
    "destroy_flag": False,
    "abort_flag": False,
}
FILE = "logs/nccl-ras.txt"


def communicator(counts: Mapping[int, Mapping[str, int]], **more: Any) -> dict[str, Any]:
    """Return a communicator. `counts`: by process; `more`: other fields."""
    ranks = [
        {"rank": i, "host": "10.0.0.1", "pid": pid, "status": FINE, "collective_counts": own}
        for i, (pid, own) in enumerate(counts.items())
    ]
    return {"size": len(ranks), "ranks": ranks, "missing_ranks": [], **more}


def answer_of(*communicators: Mapping[str, Any]) -> str:
    return json.dumps({"nccl_version": "2.30.7", "communicators": communicators})


def rank_of(host: str, pid: int) -> int | None:
    """Processes 100, 101, … are ranks 0, 1, …"""
    return pid - 100 if 100 <= pid < 200 else None


def described(*communicators: Mapping[str, Any]) -> list[str]:
    lines = describe_ras(answer_of(*communicators), rank_of, FILE)
    assert all(line.startswith("NCCL's RAS: ") for line in lines)
    return [line.removeprefix("NCCL's RAS: ") for line in lines]


def test_ranks_that_lag_are_named_by_collective_the_largest_communicator_first() -> None:
    pair = communicator(
        {101: {"Broadcast": 3, "AllReduce": 7}, 103: {"Broadcast": 2, "AllReduce": 7}}
    )
    four = communicator({100 + i: {"AllReduce": 61 if i != 1 else 60} for i in range(4)})
    assert described(pair, four) == [
        "communicator of ranks 0-3: AllReduce: ranks 0, 2-3 launched 61, rank 1 launched 60",
        "communicator of ranks 1, 3: Broadcast: rank 1 launched 3, rank 3 launched 2",
    ]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"async_error": 6}, "rank 1 reported an error (remote process error)"),
        ({"init_state": 42}, "rank 1 reported an error (number 42)"),
        ({"init_state": 7}, "rank 1 did not initialise it yet"),
        ({"abort_flag": True, "destroy_flag": True}, "rank 1 aborted it"),
        ({"destroy_flag": True}, "rank 1 left it"),
        ({"finalize_called": True}, "rank 1 left it"),
    ],
)
def test_what_is_odd_of_a_rank_is_named(status: Mapping[str, Any], said: str) -> None:
    found = communicator({100: {"AllReduce": 7}, 101: {"AllReduce": 7}})
    found["ranks"][1]["status"] = {**FINE, **status}
    assert described(found) == [f"communicator of ranks 0-1: {said}"]


@pytest.mark.parametrize(
    ("unresponsive", "dead", "said"),
    [
        (True, False, "gave no answer"),
        (True, True, "gave no answer for a minute or more"),
        (False, False, "left it, or did not come yet"),
    ],
)
def test_ranks_that_are_missing_are_named(unresponsive: bool, dead: bool, said: str) -> None:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    missing = [{"host": "10.0.0.2", "pid": pid, "status": status} for pid in (101, 102)]
    found = communicator({100: {"AllReduce": 7}}, size=3, missing_ranks=missing)
    assert described(found) == [f"communicator of ranks 0-2: ranks 1-2 {said}"]


def test_processes_that_are_no_ranks_own_are_named_by_their_number() -> None:
    found = communicator({7: {"AllReduce": 1}, 101: {"AllReduce": 2}})
    assert described(found) == [
        "communicator of rank 1, process 7 on 10.0.0.1: AllReduce: rank 1 launched 2, "
        "process 7 on 10.0.0.1 launched 1"
    ]


def test_equal_ranks_are_a_finding_too() -> None:
    found = communicator({100: {"AllReduce": 7}, 101: {"AllReduce": 7}})
    equal = "in each communicator all ranks launched equally many collectives"
    assert described(found) == [equal]
    assert described() == ["no rank has a communicator"]


def test_of_many_lines_the_first_are_shown() -> None:
    odd = [communicator({100 + i: {"AllReduce": 1}, 150: {"AllReduce": 2}}) for i in range(20)]
    lines = described(*odd)
    assert len(lines) == 8
    assert lines[-1] == f"13 more such lines: {FILE}"


TEXT = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  {status}

Errors
======

Warnings
========

{warnings}"""
"""Of versions before 2.28 (src/ras/client_support.cc), shortened."""


def test_the_text_of_older_versions_is_shown_in_its_words() -> None:
    lag = (
        "#0-0 (00000000000000af) MISMATCH\n  Communicator ranks have different AllReduce operation "
        "counts\n  3 ranks have launched up to operation 61\n  Rank 1 has launched up to operation "
        "60 -- GPU 1 managed by process 101 on node 10.0.0.1\n\n"
    )
    mismatch = describe_ras(TEXT.format(status="MISMATCH", warnings=lag), rank_of, FILE)
    assert mismatch == [f"NCCL's RAS: {line.strip()}" for line in lag.splitlines() if line]
    fine = describe_ras(TEXT.format(status="OK", warnings=""), rank_of, FILE)
    assert fine == ["NCCL's RAS: it sees no error, and no mismatch between ranks"]


@pytest.mark.parametrize(
    "text",
    [
        "HTTP/1.1 400 Bad Request",
        "{}",
        "[]",
        '{"communicators": [{}]}',
        '{"communicators": 3}',
        answer_of(communicator({100: {"AllReduce": 7}}))[:-20],
        '{"communicators": [{"size": 2, "ranks": [1], "missing_ranks": []}]}',
    ],
)
def test_an_answer_that_is_not_understood_is_referred_to(text: str) -> None:
    assert describe_ras(text, rank_of, FILE) == [
        f"NCCL's RAS: {FILE} has its answer, which raydist does not understand"
    ]


def address_of(nccl: str = "", env: Mapping[str, str] | None = None, **more: Any) -> str | None:
    """Return the address planned for a rank of two with GPUs."""
    here = facts(1, gpus=("0", "1"), versions={"nccl": nccl}, **more)
    settings = job(backend=Backend("nccl"), env=dict(env or {}))
    values, _ = planned(settings, plan(node(1, gpu=2), per_node=2), here, here)
    assert values[0].get(ADDRESS) == values[1].get(ADDRESS)
    return values[0].get(ADDRESS)


def test_ranks_with_gpus_get_a_port_of_their_own_unless_one_is_chosen() -> None:
    own = f"127.0.0.1:{RAS_PORT}"
    assert [address_of(), address_of("2.30.7"), address_of("2.24.3")] == [own] * 3
    assert address_of("2.23.4") is None
    theirs = "localhost:28028"
    assert address_of(env={ADDRESS: theirs}) == theirs
    assert address_of(environment={ADDRESS: theirs}) == theirs
    assert address_of(nccl_conf={ADDRESS: (theirs, "/etc/nccl.conf")}) == theirs
    assert address_of(env={"NCCL_RAS_ENABLE": "0"}) is None
    assert address_of(environment={"NCCL_RAS_ENABLE": "0"}) is None
    assert address_of(nccl_conf={"NCCL_RAS_ENABLE": ("0", "/etc/nccl.conf")}) is None
    assert address_of(env={"NCCL_RAS_ENABLE": "1"}, environment={"NCCL_RAS_ENABLE": "0"}) == own


def test_a_single_rank_and_ranks_without_gpus_get_none() -> None:
    one, _ = planned(job(backend=Backend("nccl")), plan(node(1, gpu=1), per_node=1), facts(1))
    cpu, _ = planned(job(), plan(node(1), per_node=2), facts(1), facts(1))
    assert ADDRESS not in {**one[0], **cpu[0]}
