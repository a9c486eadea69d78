"""Nodes go and come while a job runs: it goes on with fewer, then with more, or a spare takes over. Real Ray nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist import checkpoint
from tests.leftovers import folders_of, gone
from tests.programs import Program

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent
JOB = """
import os, time, torch, raydist
from torch import nn
from torch.utils.data import TensorDataset

def job(config):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(256, 10, generator=generator), torch.randint(3, (256,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(10, 3)  # convex: what rounding does to it dies away

    def loss(output, target):
        time.sleep(0 if os.path.exists("go") else 0.1)
        return nn.functional.cross_entropy(output, target)

    raydist.fit(config, model=model, train=TensorDataset(inputs, targets), loss=loss)
"""
WORDS = ("job=slow.py", "watch.progress=none", "train.steps=1000", "seed=5", "checkpoint.every=100000",
         "data.global_batch=32", "optim=sgd", "optim.lr=0.002")  # fmt: skip
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 500}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Nodes of one CPU each; the first is the driver's."""
    from ray.cluster_utils import Cluster

    path, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), str(ROOT)
    args = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK}
    made = Cluster(initialize_head=True, head_node_args=args)
    yield made
    made.shutdown()
    os.environ.pop("PYTHONPATH")
    if path is not None:
        os.environ["PYTHONPATH"] = path


def start(folder: Path, cluster: Any, *words: str) -> Program:
    folder.mkdir()
    (folder / "slow.py").write_text(JOB)
    return Program(folder, *WORDS, *words, address=cluster.address)


def ended(run: Program) -> dict[str, torch.Tensor]:
    """The weights of a run that is told to make haste."""
    (run.folder / "go").touch()
    assert run.wait() == 0, run.screen
    assert gone(str(run.tmp)) == []
    assert folders_of(run.tmp) == []
    model: dict[str, torch.Tensor] = checkpoint.load(Path(run.result()["checkpoint"]))["model"]
    return model


def sizes(run: Program) -> list[int]:
    return [event["world_size"] for event in run.events("plan", "resize")]


def resized(run: Program, *wanted: int) -> None:
    """Return once the run has had these sizes, and goes on in the last of them."""
    run.until(lambda: sizes(run) == list(wanted), f"size {wanted[-1]}")
    run.until(lambda: len(run.events("restarted")) == len(wanted) - 1, "step after that")


@pytest.fixture(scope="module")
def whole(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What an unbroken run of one size ends with."""
    return ended(start(tmp_path_factory.mktemp("whole") / "run", cluster, "scale=1x1"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two runs have seen the same samples: sums in another order differ in the last bits."""
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in {**one, **other})


def test_a_run_goes_on_with_fewer_nodes_and_with_more(
    cluster: Any, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    second, third = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
    run = start(tmp_path / "run", cluster, "scale=1..3x1")
    run.until_step(10)
    assert sizes(run) == [3]
    cluster.remove_node(third)
    resized(run, 3, 2)
    again = cluster.add_node(num_cpus=1)
    resized(run, 3, 2, 3)
    assert same(ended(run), whole)
    lost, grown = run.events("restarted")
    assert (lost["resized"], grown["resized"], grown["repeated"]) == (False, True, 0)
    assert len(run.result()["restarts"]) == 1
    steps = [event["step"] for event in run.events("report") if event["rank"] == 0 and "loss" in event["values"]]
    assert len(steps) - len(set(steps)) <= lost["repeated"]
    cluster.remove_node(second)
    cluster.remove_node(again)
