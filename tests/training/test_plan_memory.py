"""The plan's memory is the peak that torch's MemTracker measures in real trainings."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Job, Optim, Parallel, Target, Train
from raydist.settings.mesh import mesh_shape
from raydist.training.gpt import GPT
from raydist.training.memory import memory_of
from raydist.worker.torch_private import fake_tensors
from tests.losses import next_token
from tests.ranks import run_ranks, succeeded
from tests.training.test_parallel import BASE

SIZES: Any = {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "hidden": 352, "tied": False}


def training(
    vocab: int, samples: int, context: int, optim: Optim | None = None, **train: Any
) -> Job:
    """Two steps of a model with this vocabulary. `samples`: of all ranks in a step."""
    return replace(
        BASE,
        model=SIZES | {"vocab": vocab},
        data=replace(BASE.data, global_batch=samples),
        job=Target(args={"context": context}),
        optim=optim or BASE.optim,
        train=Train(steps=2, **train),
    )


TRAININGS = {
    "activations": training(256, 16, 128),
    "vocabulary": training(8192, 16, 64),
    "gradients": training(256, 4, 16),
    "embedding": training(8192, 4, 16),
    "sgd": training(256, 16, 64, Optim("sgd")),
    "accumulated": training(256, 32, 64, accumulate=2),
    "bf16": training(256, 16, 128, precision="bf16"),
    "bf16 vocabulary": training(8192, 16, 64, precision="bf16"),
    "chunks": training(8192, 16, 64, loss_chunks=8),
    "bf16 chunks": training(8192, 16, 64, loss_chunks=8, precision="bf16"),
    "blocks": training(256, 32, 128, recompute="blocks"),
    "selective": training(256, 16, 128, recompute="selective"),
}
DIVISIONS = {
    "fsdp": (2, Parallel("fsdp"), list(TRAININGS)),
    "hsdp": (4, Parallel("hsdp", shard=2), ["gradients"]),
    "pp": (2, Parallel("pp", pp=2), ["activations", "vocabulary"]),
    "tp": (2, Parallel(tp=2), ["vocabulary"]),
    "fsdp pp": (4, Parallel("fsdp", pp=2), ["vocabulary", "gradients"]),
}


class NoModules:
    """Knows no modules. torch's own, which tells what belongs to which, allows one pass of each, and
    no pipeline."""

    is_bw = False

    def _ignore(self, *_: Any) -> None: ...

    register_user_hooks = clear_user_hooks = __enter__ = __exit__ = _ignore


def peak(job: Job) -> int:
    """Train on this rank and return the bytes of all tensors at the peak."""
    tracker: Any = MemTracker()
    tracker._mod_tracker = NoModules()
    with tracker:
        text = torch.zeros(job.data.global_batch or 0, job.job.args["context"], dtype=torch.uint8)
        data = TensorDataset(text, text)
        raydist.fit(job, model=GPT(**job.model), train=data, loss=next_token)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@cache
def measured(division: str, folder: Path) -> dict[str, int]:
    """Return the peak of the rank with the most, by training."""
    ranks, parallel, names = DIVISIONS[division]

    def train(job: Job) -> list[int]:
        return [peak(replace(TRAININGS[name], parallel=job.parallel)) for name in names]

    job = replace(BASE, parallel=parallel)
    results = succeeded(run_ranks(ranks, job, train, folder / division))
    peaks = zip(*(one.value for one in results), strict=True)
    return dict(zip(names, map(max, peaks), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def planned(name: str, division: str) -> dict[str, int]:
    ranks, parallel, _ = DIVISIONS[division]
    job = replace(TRAININGS[name], parallel=parallel)
    with fake_tensors():
        return memory_of(GPT(**job.model), job, mesh_shape(parallel, ranks, ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("division", "name"),
    [
        (division, name)
        for division, (_, _, names) in DIVISIONS.items()
        for name in names
        if division != "tp"
    ],
)
def test_the_plan_is_the_measured_peak(division: str, name: str, folder: Path) -> None:
    plan = planned(name, division)
    real = measured(division, folder)[name]
    assert sum(plan.values()) == pytest.approx(real, rel=0.1), plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "bf16 "])
def test_chunks_of_the_loss_take_less_memory(name: str, folder: Path) -> None:
    real, scores = measured("fsdp", folder), 8 * 64 * 8192 * 4  # bytes of a rank's, in fp32
    assert real[f"{name}chunks"] < real[f"{name}vocabulary"] - 1.5 * scores


@pytest.mark.slow
def test_ranks_of_a_tp_group_have_at_most_that(folder: Path) -> None:
    assert measured("tp", folder)["vocabulary"] < sum(planned("vocabulary", "tp").values())
