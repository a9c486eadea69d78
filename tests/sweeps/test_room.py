"""Room for a trial on a cluster whose nodes come and go."""

from __future__ import annotations

import pytest

from raydist.cluster import connect
from raydist.cluster.nodes import Node, NodeType
from raydist.launch.gangs import Gangs
from raydist.settings.config import Backend, Job, Scale
from raydist.sweeps import room

LABELS = {"zone": "a"}
HEAD = Node("1", "10.0.0.1", "head", {"CPU": 8}, {"CPU": 8})
GPUS = NodeType("gpus", {"CPU": 8, "GPU": 8, "licence": 1}, 2, LABELS)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[NodeType]:
    """A cluster of one node, which nobody uses; return what its autoscaler may add."""
    types = [GPUS]
    monkeypatch.setattr(connect, "alive_nodes", lambda: [HEAD])
    monkeypatch.setattr(connect, "node_types", lambda: types)
    monkeypatch.setattr(room, "placed_resources", dict)
    return types


@pytest.mark.parametrize(
    "job",
    [
        Job(backend=Backend(name="nccl"), scale=Scale(nodes=1, per_node=8)),
        Job(scale=Scale(nodes=1, per_node=2, resources={"licence": 0.5})),
        Job(scale=Scale(nodes=1, per_node=2, labels=LABELS)),
    ],
    ids=["gpus", "resource", "label"],
)
def test_a_trial_waits_for_nodes_that_the_autoscaler_has_yet_to_add(
    job: Job, cluster: list[NodeType]
) -> None:
    room.check_can_ever_fit(job)
    assert room.find_room(job, Gangs(), alone=True) == job
    waits = room.find_room(job, Gangs(), alone=False)
    assert waits is not None
    assert waits.scale.wait_s == room.PATIENCE_S
    cluster.clear()  # and so have the nodes that the check has seen
    assert room.find_room(job, Gangs(), alone=False) is None
    assert room.find_room(job, Gangs(), alone=True) == job
