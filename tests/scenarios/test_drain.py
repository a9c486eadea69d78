"""Nodes that the cluster takes away with a word before: the notice; test_elastic_run really drains
some."""

from __future__ import annotations

import time

import pytest

from raydist.cluster import drain as cluster_drain
from raydist.cluster.drain import DrainNotice
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Slot

LEFT_S = 180


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


def drain(address: str, node: str) -> None:
    """What `ray drain-node` does."""
    import ray._raylet
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    deadline = int((time.time() + LEFT_S) * 1000)
    accepted, why = ray._raylet.GcsClient(address=address).drain_node(
        node, DRAIN_NODE_REASON_PREEMPTION, "spot", deadline
    )
    assert accepted, why
