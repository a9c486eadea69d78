"""The plan of a cluster whose nodes are not all as good: the run begins where the plan said."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster.node_history import NodeIncident
from tests.conftest import ROOT
from tests.records import read_events
from tests.rig import Host, Rig, hosts, requires_root

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(900), requires_root]
JOB = "import raydist\n\ndef job(config):\n    raydist.report(step=1, loss=1.0)\n"
BUSY = """
import sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(address=sys.argv[1])

@ray.remote(num_cpus=1, lifetime="detached", name="busy")
class Busy:
    def begun(self):
        return True

there = NodeAffinitySchedulingStrategy(sys.argv[2], soft=False)
ray.get(Busy.options(scheduling_strategy=there).remote().begun.remote())
"""
DRAIN = [
    "--reason",
    "DRAIN_NODE_REASON_PREEMPTION",
    "--reason-message",
    "spot",
    "--deadline-remaining-seconds",
    "600",
]


def planned(host: Host, *words: str) -> Any:
    """Return the output of `python -m raydist.tools.plan WORD… --json` on a host."""
    argv = ["python", "-m", "raydist.tools.plan", *words, "--json"]
    return json.loads(host.run(argv, env={"PYTHONPATH": str(ROOT)}).stdout)


def note_incidents(host: Host, bad: Host, address: str) -> None:
    """Have the node history of a host's user hold two runs that lost this node."""
    noted = [
        NodeIncident(address, bad.name, bad.address(), "lost", run, time.time())
        for run in ("one", "two")
    ]
    path = host.folder / "home/.cache/raydist/nodes.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([asdict(each) for each in noted]))


def hosts_of(slots: list[dict[str, Any]]) -> list[str]:
    return [slot["host"] for slot in slots]


def drain(rig: Rig, host: Host) -> str:
    """Have Ray drain a host that still has work: an idle one would leave at once. Returns the
    cluster's address."""
    first = rig.hosts[0]
    everywhere = planned(first, "scale=cluster")
    (node,) = {slot["node"] for slot in everywhere["slots"] if slot["host"] == host.name}
    address = f"{first.address()}:6379"
    first.run(["python", "-c", BUSY, address, node])
    first.run(["ray", "drain-node", "--address", address, "--node-id", node, *DRAIN])
    return address


def test_a_run_begins_on_the_nodes_that_the_plan_has_named(tmp_path: Path) -> None:
    with hosts(3, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2)
        first, second, third = rig.hosts
        note_incidents(first, first, drain(rig, second))
        plan = planned(first, "scale=1x1")
        assert hosts_of(plan["slots"]) == [third.name]
        assert f"Ray drains {second.name}" in plan["nodes"]
        (offender,) = plan["offenders"]
        assert (offender["avoided"], offender["text"].split()[0]) == (True, first.name)
        job = first.folder / "home/job.py"
        job.write_text(JOB)
        argv = [
            "python",
            "-m",
            "raydist.train",
            "job=job.py",
            "scale=1x1",
            "backend=gloo",
            "hydra.run.dir=run",
        ]
        first.run(argv, env={"PYTHONPATH": str(ROOT)}, cwd=job.parent)
        (begun,) = [
            each for each in read_events(job.parent / "run/events.jsonl") if each["kind"] == "plan"
        ]
        assert hosts_of(begun["slots"]) == [third.name]
        # all that the cluster has: without the node that goes, and there is no room to avoid the
        # other
        plan = planned(first, "scale=cluster")
        assert set(hosts_of(plan["slots"])) == {first.name, third.name}
        assert [each["avoided"] for each in plan["offenders"]] == [False]
