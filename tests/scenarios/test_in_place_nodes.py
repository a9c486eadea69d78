"""A host is lost and another takes its ranks; the ranks on the other host keep their processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.worker.torch_private import connects_anew
from tests.rig import QUICK_DEATH, Rig, hosts, requires_root
from tests.scenarios.test_restart_nodes import (
    events,
    host_of,
    left,
    losses,
    lost,
    reached,
    result,
    train,
)
from tests.waiting import wait_until

pytestmark = [
    *(pytest.mark.root, pytest.mark.ray, pytest.mark.slow, requires_root),
    pytest.mark.skipif(not connects_anew(), reason="this torch cannot connect ranks anew"),
]
ROOT = Path(__file__).parents[2]
ENV = {**QUICK_DEATH, "PYTHONPATH": str(ROOT)}
PROGRAM = """
import time

import torch
from torch.utils.data import TensorDataset

import raydist


def slow(*_):
    time.sleep(0.05)


def job(config):
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(512, 16, generator=draw), torch.randint(4, (512,), generator=draw)
    )
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    loss = torch.nn.functional.cross_entropy
    raydist.fit(config, train=data, loss=loss, model=model, on_step=slow)
    return [float(each.sum()) for each in model.parameters()]
"""
WORDS = (
    *("scale=2x2", "backend=gloo", "parallel=fsdp", "watch.progress=none", "snapshot.every=1"),
    *("train.steps=100", "data.batch_size=8", "optim=adamw", "checkpoint.every=100000"),
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A head without ranks, and three hosts."""
    with hosts(4) as rig:
        rig.ray_up(cpus=2, head_cpus=0, env=ENV)
        yield rig


@pytest.fixture(scope="module")
def whole(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a fault."""
    folder = tmp_path_factory.mktemp("in-place") / "whole"
    alone = train(rig, folder, ("slow.py", PROGRAM), *WORDS)
    assert alone.wait(150) == 0, (folder / "screen.txt").read_text()
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [2, 0])
def test_ranks_on_the_other_host_keep_their_processes(
    rig: Rig, whole: Path, tmp_path: Path, rank: int
) -> None:
    struck = tmp_path / "struck"
    more = ("restart.in_place=on", "scale.spares=1")
    run = train(rig, struck, ("slow.py", PROGRAM), *WORDS, *more)
    wait_until(lambda: reached(struck, 30), "step 30", 90)
    victim = host_of(rig, struck, rank)
    with lost(rig, victim):
        assert run.wait(150) == 0, (struck / "screen.txt").read_text()
        (back,) = events(struck, "restarted")
        stay = [2, 3] if rank == 0 else [0, 1]
        assert (back.get("kept"), back.get("why_not_kept")) == (stay, None)
        before, after = events(struck, "began")[:4], events(struck, "began")[4:]
        assert [after[each]["pid"] for each in stay] == [before[each]["pid"] for each in stay]
        (end,) = result(struck)["restarts"]
        assert (end["rank"], end["how"]) == (rank, "lost")
        # reports that rank 0 had not sent are lost with its host
        assert losses(struck).items() <= losses(whole).items()
        assert len(losses(struck)) > 90 if rank == 0 else losses(struck) == losses(whole)
        wait_until(lambda: not left(rig), "end of all ranks", 60)
