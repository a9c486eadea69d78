"""Ray's own autoscaler brings nodes for a job and takes them away: its fake provider, on a host of
the rig."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from raydist.shared.kinds import EventJson
from tests.records import read_events
from tests.rig import Host, hosts, requires_root
from tests.scenarios.test_elastic_run import JOB, WORDS
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(1800), requires_root]
ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PLUS = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}
HEAD = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
CLUSTER: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 2,
    "provider": {
        "type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {"plus": PLUS, "ray.head.default": HEAD},
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.4,
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: [] for name in (
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )},
    "file_mounts_sync_continuously": False,
}  # fmt: skip
"""What ray.cluster_utils.AutoscalingCluster makes of an example that Ray's wheel lacks."""


NEWER = {
    **CLUSTER["provider"], "type": "external", "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID,
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
}  # fmt: skip
"""The same provider for Ray's second autoscaler, by another name: under its own it asks for that
missing example."""
NEWER_ENV = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
}


@contextmanager
def head(config: dict[str, Any], more: dict[str, str]) -> Iterator[Host]:
    """A head of one CPU, whose autoscaler may add two nodes of two CPUs."""
    with hosts(1) as rig:
        (node,) = rig.hosts
        file = Path(node.environment["HOME"]) / "cluster.json"
        file.write_text(json.dumps(config))
        words = [
            f"--autoscaling-config={file}",
            f"--node-ip-address={node.address()}",
            "--port=6379",
            "--num-cpus=1",
        ]
        words += [
            f"--object-store-memory={2**28}",
            f"--temp-dir={node.environment['RAY_TMPDIR']}/ray",
        ]
        env = {
            "PYTHONPATH": str(ROOT),
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            **more,
        }
        node.run(
            [*RAY, "start", "--head", "--disable-usage-stats", "--include-dashboard=false", *words],
            env=env,
        )
        node.environment["RAY_ADDRESS"] = f"{node.address()}:6379"
        yield node


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with head(CLUSTER, {}) as node:
        yield node


def start(host: Host, folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "slow.py").write_text(JOB)
    command = [
        "python",
        "-m",
        "raydist.train",
        f"hydra.run.dir={folder}/run",
        "watch.progress=none",
        *WORDS,
        *words,
    ]
    log = (folder / "screen.txt").open("w")
    return host.popen(command, env={"PYTHONPATH": str(ROOT)}, cwd=folder, stdout=log, stderr=log)


def events(folder: Path, *kinds: str) -> list[EventJson]:
    path = folder / "run" / "events.jsonl"
    return (
        [happened for happened in read_events(path) if happened["kind"] in kinds]
        if path.exists()
        else []
    )


def alive(host: Host, patience: int = 0) -> int:
    """Wait so many seconds for all nodes but one to end; return the number of nodes."""
    code = """
import ray, sys, time
ray.init(logging_level="ERROR")
until = time.monotonic() + float(sys.argv[1])
while (count := sum(node["Alive"] for node in ray.nodes())) > 1 and time.monotonic() < until:
    time.sleep(1)
print(f"alive: {count};")
"""
    output = host.run(["python", "-c", code, str(patience)], timeout=patience + 300).stdout
    (count,) = re.findall(r"alive: (\d+);", output)  # the autoscaler has its say before and after
    return int(count)


def ended(run: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    (folder / "go").touch()
    assert run.wait(400) == 0, (folder / "screen.txt").read_text()
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return result


def refused(host: Host, folder: Path) -> None:
    """A job that no kind of node can hold is, at once."""
    run = start(host, folder, "scale=1x3")
    assert run.wait(300) == 2
    screen = (folder / "screen.txt").read_text()
    assert "can never hold" in screen
    assert "up to 2 more of the autoscaler's type plus with 2 CPU" in screen
    assert "set scale=3x1" in screen


def test_rays_second_autoscaler_is_understood_too(tmp_path: Path) -> None:
    with head({**CLUSTER, "provider": NEWER}, NEWER_ENV) as newer:
        assert any("autoscaler/v2/monitor.py" in line for line in newer.processes().values())
        # On Kubernetes it is in a separate container: that there is one is then all that can be
        # known.
        code = (
            "import ray, raydist.cluster.autoscaler as it; ray.init(logging_level='ERROR'); "
            "print(it.is_active())"
        )
        assert "True" in newer.run(["python", "-c", code], env={"PYTHONPATH": str(ROOT)}).stdout
        refused(newer, tmp_path / "never")
        run = start(newer, tmp_path / "run", "scale=1x2")
        assert ended(run, tmp_path / "run")["world_size"] == 2
        (wait, *_) = events(tmp_path / "run", "wait")
        assert wait["text"].startswith("waiting for 1 more node with 2 CPU: 0 of 1 ready")


def test_a_job_waits_for_nodes_grows_with_them_and_they_go(host: Host, tmp_path: Path) -> None:
    """One that no kind of node can hold has brought none before."""
    refused(host, tmp_path / "never")
    run = start(host, tmp_path / "run", "scale=1..2x2")
    wait_until(lambda: bool(events(tmp_path / "run", "plan")), "plan", 300)
    wait, *_ = events(tmp_path / "run", "wait")
    assert wait["text"].startswith("waiting for 1 more node with 2 CPU: 0 of 1 ready")
    wait_until(lambda: bool(events(tmp_path / "run", "restarted")), "growth", 400)
    sizes = [event["world_size"] for event in events(tmp_path / "run", "plan", "resize")]
    assert sizes == [2, 4]
    assert ended(run, tmp_path / "run")["world_size"] == 4
    assert alive(host, patience=400) == 1
