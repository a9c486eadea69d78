"""Ray's token authentication, where the cluster and the command disagree about it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import HEAD, Program

pytestmark = pytest.mark.ray

CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={{**{HEAD!r}, "num_cpus": 2}})
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@pytest.fixture
def without_tokens() -> Iterator[str]:
    """The address of a Ray that was started without token authentication."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.stdin.close()
    assert process.wait(60) == 0


def test_a_cluster_without_tokens_is_named(
    tmp_path: Path, without_tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("job=synthetic", "train.steps=2", "scale=1x1")
    refused = Program(tmp_path, *words, address=without_tokens, alone=True)
    assert refused.wait() == 1, refused.screen
    assert f"error: the Ray at {without_tokens} was started with RAY_AUTH_MODE=disabled" in (
        refused.screen
    )
    assert "Traceback" not in refused.screen
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as the message says
    alike = Program(tmp_path, *words, address=without_tokens, alone=True)
    assert alike.wait() == 0, alike.screen
