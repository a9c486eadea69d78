"""What nodes did to earlier runs, and who is left out for it."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from raydist.cluster import node_history
from raydist.cluster.node_history import (
    COUNT_S,
    KEEP_S,
    MAX_INCIDENTS,
    NodeIncident,
    avoidable,
    incident_kind,
    incident_text,
    incidents,
    note_incidents,
    read_incidents,
    repeat_offenders,
)
from raydist.cluster.nodes import Node, ResourceRequest, nodes_from_ray
from raydist.cluster.placement import assign_ranks
from raydist.shared.outcome import End, EndKind, Slow
from tests.ranks import SERVER, start_server

NOW = 2e9


def node(number: int, cpus: float = 2) -> Node:
    have = {"CPU": cpus}
    return Node(f"{number:056x}", f"10.0.0.{number}", f"node-{number}", have, have)


def ask(bundles: int, strategy: str = "STRICT_SPREAD") -> ResourceRequest:
    return ResourceRequest("gloo", bundles, ({"CPU": 1.0},) * bundles, 1, strategy, {"CPU": 1.0})


def offence(
    number: int, run: str, what: str = "lost", ago: float = 0.0, cluster: str = "c:1"
) -> NodeIncident:
    return NodeIncident(cluster, f"node-{number}", f"10.0.0.{number}", what, run, NOW - ago)


def end(how: EndKind, message: str = "", preempted: bool = False) -> End:
    return End(1, "node-2", how, NOW, message=message, preempted=preempted)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (end("lost", "The actor died because its node has died. Node Id: 12ab"), "lost"),
        (end("lost", "the actor's node was terminated unexpectedly: health check failed"), "lost"),
        (replace(end("lost", "its agent stopped responding"), silent=True), "lost"),
        (end("lost", "the actor's node was terminated expectedly: received SIGTERM"), ""),
        (end("lost", "its node has died", preempted=True), ""),
        (end("lost", "Task was killed due to the node running low on memory"), ""),
        (end("raised", "CUDA error: uncorrectable ECC error encountered"), "gpu"),
        (end("raised", "CUDA error: an illegal memory access was encountered"), ""),
        (end("raised", "division by zero"), ""),
        (end("killed"), ""),
    ],
)
def test_what_is_a_nodes_fault(how: End, what: str) -> None:
    assert incident_kind(how) == what


def test_each_node_is_blamed_for_its_own_ranks_once_of_a_kind() -> None:
    plan = assign_ranks(ask(3), [node(1), node(2), node(3)])
    slow = [Slow(2, "node-3", 2, 1, 4)] * 2
    new = incidents("c:1", "/runs/a", plan, end("lost", "its node has died"), slow, NOW)
    assert [(each.host, each.ip, each.what) for each in new] == [
        ("node-3", "10.0.0.3", "slow"),
        ("node-2", "10.0.0.2", "lost"),
    ]


def test_once_is_no_reason_and_neither_is_another_cluster_or_long_ago() -> None:
    nodes = [node(1), node(2)]
    for noted in (
        [offence(1, "a")],
        [offence(1, "a"), offence(1, "a", "slow")],
        [offence(1, "a"), offence(1, "b", cluster="c:2")],
        [offence(1, "a"), offence(1, "b", ago=COUNT_S + 1)],
        [offence(1, "a"), offence(3, "b")],
    ):
        assert not repeat_offenders(noted, "c:1", nodes, NOW)
    noted = [offence(2, run) for run in "ab"] + [offence(1, run, "slow") for run in "abc"]
    assert list(repeat_offenders(noted, "c:1", nodes, NOW)) == [node(1).id, node(2).id]


def test_a_node_is_known_again_whether_or_not_it_has_a_namesake() -> None:
    """Machines of one name are named with their addresses, as long as there is more than one."""

    def only(host: str, *ips: str) -> list[Node]:
        plain = [
            {"NodeID": ip, "NodeManagerAddress": ip, "NodeManagerHostname": host, "Alive": True, "Resources": {}}
            for ip in ips
        ]  # fmt: skip
        return nodes_from_ray(plain, {})

    both, one = only("ubuntu", "10.0.0.1", "10.0.0.2"), only("ubuntu", "10.0.0.1")
    noted = [
        NodeIncident("c:1", nodes[0].host, nodes[0].ip, "lost", run, NOW)
        for nodes, run in ((both, "a"), (one, "b"))
    ]
    assert len({each.host for each in noted}) == 2
    assert list(repeat_offenders(noted, "c:1", both, NOW)) == ["10.0.0.1"]
    assert list(repeat_offenders(noted, "c:1", one, NOW)) == ["10.0.0.1"]
    assert not repeat_offenders(noted, "c:1", only("debian", "10.0.0.1"), NOW)


@pytest.mark.parametrize(
    ("resources", "bad", "left_out"),
    [
        (ask(2), [3], [3]),
        (ask(3), [3], []),  # no room without it
        (ask(2), [3, 4], [3]),  # the worst first
        (ask(1), [3, 4], [3, 4]),
        (ask(4, "PACK"), [3], [3]),
        (ask(5, "PACK"), [3], []),
    ],
)
def test_nobody_waits_for_want_of_a_node_that_is_avoided(
    resources: ResourceRequest, bad: list[int], left_out: list[int]
) -> None:
    nodes = [node(number) for number in (1, 2, 3)]
    assert avoidable(resources, nodes, [node(number).id for number in bad if number < 4]) == [
        node(number).id for number in left_out if number < 4
    ]
    busy = [replace(nodes[0], free={"CPU": 0.0}), *nodes[1:]]
    assert avoidable(ask(2), busy, [node(3).id]) == []


def test_its_words() -> None:
    text = incident_text(
        node(7), [offence(7, "a"), offence(7, "b"), offence(7, "b", "slow")], avoided=True
    )
    assert text.startswith(
        "node-7 (10.0.0.7) is avoided: in the last 7 days it was lost in 2 runs, slow in 1 run, "
        "the last"
    )
    assert "scale.avoid=false" in text


def test_the_file_keeps_what_is_new_and_not_too_much(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "nodes.json"
    note_incidents(path, [offence(1, "old", ago=KEEP_S + 1), offence(1, "a")], NOW)
    assert [each.run for each in read_incidents(path)] == ["a"]
    note_incidents(path, [offence(1, str(number)) for number in range(MAX_INCIDENTS)], NOW)
    assert [each.run for each in read_incidents(path)] == [
        str(number) for number in range(MAX_INCIDENTS)
    ]
    assert [left.name for left in path.parent.iterdir() if left.suffix != ".lock"] == ["nodes.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"cluster": 1}]', '{"a": 2}'])
def test_a_broken_file_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    assert read_incidents(path) == []
    note_incidents(path, [offence(1, "a")], NOW)
    assert [each.run for each in read_incidents(path)] == ["a"]


def test_a_place_where_nobody_may_write_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    note_incidents(tmp_path / "file" / "nodes.json", [offence(1, "a")], NOW)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each incident left a file beside it."""
    path = tmp_path / "nodes.json"
    note_incidents(path, [offence(1, "a")], NOW)

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        note_incidents(path, [offence(1, "b")], NOW)
    assert [each.run for each in read_incidents(path)] == ["a"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["nodes.json", "nodes.lock"]


def add(path: Path, run: int) -> None:
    note_incidents(path, [offence(1, str(run))], NOW)


def test_two_runs_at_once_both_have_their_say(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    start_server()
    writers = [SERVER.Process(target=add, args=(path, run)) for run in range(8)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(120)
    assert sorted(each.run for each in read_incidents(path)) == [str(run) for run in range(8)]


HOLD = """
import json, sys, time
import ray
from ray.cluster_utils import Cluster
from raydist.cluster import connect as cluster, node_history as ledger, placement
from raydist.launch import placement_group
from raydist.shared.events import Events, read_kind
from raydist.shared import kinds
from raydist.cluster.node_history import NodeIncident
from raydist.settings import compose
from pathlib import Path
from tests.programs import HEAD
from tests.waiting import wait_until

made = Cluster(initialize_head=True, head_node_args={**HEAD, "num_cpus": 2})
made.add_node(num_cpus=2)
ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
told = {}


def place(name, *words):
    job = compose.compose(["job=digits", *words], claim=False)
    with Events(Path(name)) as events:
        asked = placement.resources_for(job, cluster.alive_nodes(), cluster.node_types())
        with placement_group.placed_group(job, asked, events) as gang:
            told[name] = [node.id for node in gang.plan.nodes]
    told[name + " said"] = [[e.node, e.avoided] for e in read_kind(kinds.Avoid, Path(name))]


all_of_them = sorted(cluster.alive_nodes(), key=lambda node: node.order)
address = ray.get_runtime_context().gcs_address
bad = all_of_them[0]
# two raylets of one machine: one host, one address. What sets them apart here are the addresses of the ledger.
ledger.repeat_offenders = lambda noted, of, nodes, now: {bad.id: list(noted)} if of == address else {}
noted = [NodeIncident(address, bad.host, bad.ip, "lost", run, time.time()) for run in "ab"]
ledger.note_incidents(ledger.history_file(), noted, time.time())
told["bad"] = bad.id
place("one", "scale=1x1")
place("both", "scale=2x1")
place("ignored", "scale=2x2", "scale.avoid=false")

def free():
    return [node.free.get("CPU") for node in cluster.alive_nodes()]


wait_until(lambda: free() == [2.0, 2.0], lambda: str(free()))
told["free"] = free()
print(json.dumps(told))
ray.shutdown()
made.shutdown()
"""


@pytest.mark.ray
def test_ray_places_the_ranks_elsewhere_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import sys

    from tests.conftest import ROOT

    monkeypatch.setenv("RAYDIST_LEDGER", str(tmp_path / "nodes.json"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ended = subprocess.run(
        [sys.executable, "-c", HOLD], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    output = json.loads(ended.stdout.splitlines()[-1])
    assert output["bad"] not in output["one"]
    assert output["one said"] == [[output["bad"], True]]
    assert output["bad"] in output["both"]
    assert output["both said"] == [[output["bad"], False]]
    assert (len(output["ignored"]), output["ignored said"]) == (2, [])
    assert output["free"] == [2.0, 2.0]


def test_it_lies_in_the_cache_of_the_person(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAYDIST_LEDGER")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert node_history.history_file() == tmp_path / "raydist" / "nodes.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert node_history.history_file() == tmp_path / ".cache" / "raydist" / "nodes.json"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # in no password database
    assert node_history.history_file() is None
    assert node_history.read_incidents(None) == []
