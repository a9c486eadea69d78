"""When a node is taken for cut off: what the driver and a witness must have found."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.cluster import connect
from raydist.launch.standby import Witness
from raydist.recovery import cut_monitor, deadlines
from raydist.recovery.cut_monitor import CutMonitor, NodesCut
from tests.waiting import wait_until

NODES = [SimpleNamespace(id=name, host=name, ip=f"10.0.0.{i}") for i, name in enumerate("dwl")]
"""The driver's, the witness's, the lost one."""
LOST = ("10.0.0.2", 1)


class Cluster:
    """Three nodes, of which the last one has the only rank."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []
        self.reached = {LOST}
        self.cut: list[NodesCut] = []
        (slot,) = slots = [SimpleNamespace(rank=0, node=NODES[2])]
        standby = SimpleNamespace(
            remains_without=lambda suspects: True,
            witnesses=lambda: [Witness(NODES[1], self._ask)],  # type: ignore[arg-type]
        )
        self.group: Any = SimpleNamespace(
            plan=SimpleNamespace(slots=slots, world_size=1, leads=[slot]),
            hosts=SimpleNamespace(standby=standby),
            call=lambda *_: None,
        )

    def _ask(self, request: Any) -> Future[Any]:
        assert request.addresses == (LOST,)
        self.asked.append(Future())
        return self.asked[-1]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(connect, "raylets", lambda: {node.id: (node.ip, 1) for node in NODES})
    monkeypatch.setattr(connect, "own_node", lambda: "d")
    monkeypatch.setattr(
        cut_monitor, "reached_addresses", lambda addresses, within_s: made.reached & {*addresses}
    )
    monkeypatch.setattr(deadlines, "suspect_after", lambda ranks: 0.3)
    for name in ("LOOK_S", "AGAIN_S", "WITNESS_S"):
        monkeypatch.setattr(cut_monitor, name, 0.02)
    return made


def test_an_answer_of_a_busy_witness_counts_when_it_comes(cluster: Cluster) -> None:
    """A witness whose CPUs are busy may take ten seconds for each answer."""
    with CutMonitor(cluster.group, cluster.cut.append) as monitor:
        time.sleep(0.1)  # the addresses are found
        cluster.reached = set()
        monitor.note_call(0)
        wait_until(lambda: cluster.asked)
        time.sleep(0.3)
        assert len(cluster.asked) == 1
        assert not cluster.cut
        cluster.asked[0].set_result(set())
        wait_until(lambda: cluster.cut)
    assert cluster.cut[0].nodes == {"l"}


def test_a_late_answer_counts_no_more_once_the_node_has_answered(cluster: Cluster) -> None:
    with CutMonitor(cluster.group, cluster.cut.append) as monitor:
        time.sleep(0.1)
        cluster.reached = set()
        monitor.note_call(0)
        wait_until(lambda: cluster.asked)
        monitor.note_answer(0)
        time.sleep(0.2)  # it looks again
        cluster.asked[0].set_result(set())
        monitor.note_call(0)
        wait_until(lambda: len(cluster.asked) == 2)
        assert not cluster.cut
