"""A driver and a cluster whose Pythons differ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import HEAD, Program

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAJOR, MINOR, PATCH = sys.version_info[:3]
CLUSTER = f"""
import sys
import ray
from ray.cluster_utils import Cluster

# what the head notes in the GCS, and Ray compares with each driver
ray._private.utils.compute_version_info = lambda: (ray.__version__, sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={{**{HEAD!r}, "num_cpus": 2}})
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""
WORDS = ("job=synthetic", "train.steps=2", "scale=1x1")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a Ray whose head has that version of Python."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("cluster", [f"{MAJOR}.{MINOR}.{PATCH + 1}"], indirect=True)
def test_the_heads_python_may_have_another_patch_version(tmp_path: Path, cluster: str) -> None:
    program = Program(tmp_path, *WORDS, address=cluster, alone=True)
    assert program.wait() == 0, program.screen


@pytest.mark.parametrize("cluster", [f"{MAJOR}.{MINOR + 1}.0"], indirect=True)
def test_another_minor_version_is_refused(tmp_path: Path, cluster: str) -> None:
    program = Program(tmp_path, *WORDS, address=cluster, alone=True)
    assert program.wait() == 1, program.screen
    assert f"Python: {MAJOR}.{MINOR + 1}.0" in program.screen
    assert f"Python: {MAJOR}.{MINOR}.{PATCH}" in program.screen
    assert "Traceback" not in program.screen
