"""The fake GPU itself: what programs see of it through torch's CUDA build, NVML and NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fake_gpu import FakeGpus, Gpu, requires_fake_gpus
from tests.fake_gpu.conftest import Machine

pytestmark = [requires_fake_gpus, pytest.mark.slow, pytest.mark.timeout(900)]
ONE = (
    "collectives:nccl",
    "collectives:nccl-legacy",
    "devices",
    "queues",
    "snapshots",
    "snapshots_alongside",
    "kernels",
    "fork",
)
"""The functions of tests/fake_gpu/checks.py that one process runs."""
LOADS = """
import json
import sys
from raydist.node.load import gpu_loads
from raydist.node.nvml import open_nvml
print(json.dumps(gpu_loads(open_nvml())))
assert "ray" not in sys.modules  # a run on one node without Ray has no other NVML
"""


@pytest.fixture(scope="module")
def failures(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What failed in each function."""
    env = FakeGpus(tmp_path_factory.mktemp("machine"), libraries, 2).env()
    command = [sys.executable, "-m", "tests.fake_gpu.checks", *ONE]
    done = subprocess.run(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, timeout=800
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ONE)
def test_torch_runs_on_the_fake_gpus(failures: Mapping[str, str], name: str) -> None:
    assert failures[name] == ""


def test_the_load_of_a_node_shows_its_gpus(machine: Machine) -> None:
    """Also of GPUs in MIG mode, which do not tell how busy they are, and of one that is lost."""
    here = machine(3, Gpu(busy=90, used_mib=1024, total_mib=2048, watts=301, celsius=60))
    here.change(1, Gpu(mig=2))
    here.change(2, Gpu(state="lost"))
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    busy, instances, lost = json.loads(done.stdout)
    whole = {"util": 0.9, "memory": [1 << 30, 2 << 30], "power_w": 301, "temp_c": 60}
    assert busy == whole
    assert (instances["util"], instances["power_w"]) == (None, 120)
    assert set(lost.values()) == {None}
