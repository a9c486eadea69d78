"""The command of deploy/kubernetes/trainjob on hosts that stand for the pods of a TrainJob."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.rig.namespaces import CAPTURED, finish

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
]
RUNTIME = ROOT / "deploy" / "kubernetes" / "trainjob" / "runtime.yaml"
ARGS = ["job=digits", "scale=2x1", "train.steps=5"]
"""Those of the TrainJob."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Two hosts that know the first by the name that JobSet gives to the first pod of a TrainJob
    `digits`."""
    with hosts(2, nics=("eth0",)) as rig:
        for host in rig.hosts:
            for file in (host.folder / "etc/hosts", host.root / "etc/hosts"):  # after a boot, now
                with file.open("a") as names:
                    names.write(f"{rig.hosts[0].address()} digits-node-0-0.digits\n")
        yield rig


def job_of_runtime() -> dict[str, Any]:
    """Return the Job that the runtime makes of a TrainJob."""
    job: dict[str, Any]
    (job,) = yaml.safe_load(RUNTIME.read_text())["spec"]["template"]["spec"]["replicatedJobs"]
    return job


def start(
    rig: Rig, index: int, nodes: int = 2, arguments: Sequence[str] = ARGS, **options: Any
) -> subprocess.Popen[str]:
    """Start the container of a pod as Kubernetes does."""
    job = job_of_runtime()
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    host = rig.hosts[index]
    pod = {
        "POD_IP": host.address(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a" * 64,
        "RAYDIST_RUNS": str(rig.hosts[0].folder / "runs"),  # a volume
    }
    assert pod.keys() == {each["name"] for each in container["env"]}
    # what Trainer adds for `torch`, and a node gives up a silent head in five seconds, not 60
    trainer = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29500",
    }
    env = {**pod, **trainer, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    return host.popen([*container["command"], *arguments], env=env, **{**CAPTURED, **options})


def test_the_pods_of_a_trainjob_train_also_after_the_first_one_was_replaced(rig: Rig) -> None:
    first, second = rig.hosts
    output = second.folder / "output"
    with output.open("w") as file:
        worker = start(rig, 1, stdout=file, stderr=file)  # before the first pod has Ray
    for attempt in (1, 2):
        screen = finish(start(rig, 0), timeout=800).stdout
        results = [*(first.folder / "runs").glob("*/*/result.json")]
        assert len(results) == attempt, f"{screen}\n{output.read_text()}"
        assert {json.loads(each.read_text())["world_size"] for each in results} == {2}
        assert worker.poll() is None, output.read_text()
        first.kill()  # the container ends, with Ray in it
        first.boot()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(300) == 143


def test_the_exit_code_of_a_wrong_setting_is_that_which_is_not_repeated(rig: Rig) -> None:
    done = finish(start(rig, 0, nodes=1, arguments=["trian.steps=5"]), check=False, timeout=800)
    job = job_of_runtime()
    refused, *_ = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert refused["action"] == "FailJob"
    assert done.returncode in refused["onExitCodes"]["values"], done.stdout + done.stderr
