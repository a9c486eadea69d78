"""What tests share: one local Ray cluster for the whole run, and programs run as a person would run them."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ray's token authentication stays on, with a token of the tests' own: never the person's ~/.ray.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ["RUNTIME_ENV_RETRY_TIMES"] = "1"  # a package that is not there is not there at a third try
os.environ.pop("RAY_ADDRESS", None)
_cache = tempfile.TemporaryDirectory(prefix="raydist-test-cache-")
os.environ["RAYDIST_LEDGER"] = f"{_cache.name}/nodes.json"  # what a test does to a node is nothing to remember
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node with 4 CPUs, whose address programs of a test get as RAY_ADDRESS."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def on_ray(ray_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process connected to the cluster, in an empty folder of its own."""
    import ray

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    if not ray.is_initialized():
        ray.init(address=ray_address, logging_level="ERROR", log_to_driver=False)
    return tmp_path


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """The command that runs a module of this environment."""
    return [sys.executable, "-m"]
