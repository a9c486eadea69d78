"""Nodes that the cluster takes away with a word before: a real cluster of several nodes, really
drained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import drain as cluster_drain
from raydist.cluster.drain import DrainNotice
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Slot
from tests.conftest import ROOT
from tests.programs import HEAD, Program
from tests.scenarios.test_restart_run import WORDS

JOB = (
    "import raydist\nfrom tests import faults\n\ndef job(config):\n    return "
    "faults.training(config, pause=0.02)\n"
)
LEFT_S = 60


def notice_of(draining: dict[str, float], *nodes: str) -> DrainNotice | None:
    """Return the notice to a gang with one rank on each of these nodes, at 100 seconds."""
    alive = [
        Node(id=name, ip=f"10.0.0.{i}", host=f"host-{name}", total={}, free={})
        for i, name in enumerate(nodes)
    ]
    return cluster_drain.drain_notice(
        [Slot(i, 0, i, 1, i, node) for i, node in enumerate(alive)], draining, 100.0
    )


def test_only_nodes_of_the_gang_are_of_interest() -> None:
    assert notice_of({}, "a", "b") is None
    assert notice_of({"c": 130.0}, "a", "b") is None


def test_the_nearest_deadline_counts() -> None:
    notice = notice_of({"a": 160.0, "b": 130.0, "c": 101.0}, "a", "b")
    assert notice == DrainNotice((0, 1), ("host-a", "host-b"), 30.0)
    assert notice.text == "Ray drains host-a, host-b: it takes them away in 30 s"
    assert notice.share_s == pytest.approx(10)


def test_without_a_deadline_the_usual_one_is_taken_for_granted() -> None:
    notice = notice_of({"b": 0.0}, "a", "b")
    assert notice == DrainNotice((1,), ("host-b",), None)
    assert notice.text == "Ray drains host-b: it takes it away"
    assert notice.share_s == pytest.approx(cluster_drain.USUAL_S / 3)


def test_a_deadline_that_is_over_leaves_no_time() -> None:
    notice = notice_of({"a": 90.0}, "a")
    assert notice is not None
    assert (notice.left_s, notice.share_s) == (0.0, 0.0)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs, and three nodes of one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**HEAD, "num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def drain(address: str, node: str) -> None:
    """What `ray drain-node` does."""
    import ray._raylet
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    deadline = int((time.time() + LEFT_S) * 1000)
    accepted, why = ray._raylet.GcsClient(address=address).drain_node(
        node, DRAIN_NODE_REASON_PREEMPTION, "spot", deadline
    )
    assert accepted, why


@pytest.mark.ray
def test_a_drained_node_is_left_in_time_at_no_budget_and_no_step_is_lost(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "slow.py").write_text(JOB)
    # hardly ever a snapshot: the step after which all ranks stop is kept
    words = (
        "job=slow.py",
        "scale=2x1",
        *WORDS,
        "train.epochs=12",
        "snapshot.every=1000",
        "checkpoint.every=100000",
    )
    run = Program(tmp_path, *words, "restart.max=1", address=cluster.address)
    run.wait_for_step(20)
    (first,) = run.events("plan")
    left = first["slots"][1]["node"]
    drain(cluster.address, left)
    assert run.wait() == 0, run.screen

    notice, after = run.events("notice")[0], run.events("plan")[1]
    assert (notice["ranks"], 0 < notice["s"] <= LEFT_S) == ([1], True)
    assert left not in {slot["node"] for slot in after["slots"]}
    (back,) = run.events("restarted")
    assert back["number"] == 1
    assert back["repeated"] == 0  # all ranks have stopped after the same step
    (end,) = run.result()["restarts"]
    assert (end["rank"], end["how"], end["preempted"]) == (1, "drained", True)
    assert [happened["reason"] for happened in run.events("stop")] == ["its nodes are drained"]
    assert run.events("saved")[0]["step"] == run.events("failure")[0]["reached"] - back["repeated"]
    page = (run.run_dir / "blame-1.txt").read_text()
    for word in (
        "left its node: Ray drains",
        "nothing has failed",
        "restart 1: all ranks",
        " + save ",
    ):
        assert word in page
    assert run.leftovers() == []
