"""What a training may be asked for: evaluations by steps, the gradient's norm, steps that are not
finite, schedules. On real gloo ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Backend, Checkpoint, Data, Job, Optim, Parallel, Train
from raydist.worker import context
from tests.ranks import RankResult, run_ranks, succeeded

FEATURES, STEPS = 6, 8
BASE = Job(
    backend=Backend("gloo"),
    data=Data(global_batch=8, shuffle=False),
    optim=Optim("sgd", lr=0.1),
    train=Train(steps=STEPS, grad_norm=True),
    checkpoint=Checkpoint(every=4, keep=9),
    seed=5,
)
BAD = 3
"""The step whose samples are not finite, where there is one."""


class Net(nn.Sequential):
    """Two blocks, so that each kind of division takes it."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(FEATURES, FEATURES) for _ in range(2)))


def samples(bad: int = 0) -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    features = torch.randn(8 * STEPS, FEATURES, generator=drawn)
    labels = (features.sum(dim=1) > 0).long()
    if bad:
        features[8 * (bad - 1)] = math.nan
    return TensorDataset(features, labels)


class Trained:
    """What a training has left on a rank."""

    def __init__(self, job: Job, name: str, bad: int = 0) -> None:
        here = context.current()
        here.rank = replace(here.rank, run_dir=here.rank.run_dir.parent / name)
        here.newest = here.fits = 0  # each training is the first of its run
        self.sizes: list[int] = []
        self.error = ""
        torch.manual_seed(0)
        net, test = Net(), TensorDataset(torch.zeros(40, FEATURES), torch.zeros(40).long())
        measured = {"size": self._count}
        try:
            self.figures = raydist.fit(
                job,
                model=net,
                train=samples(bad),
                test=test,
                loss=F.cross_entropy,
                metrics=measured,
            )
        except raydist.NonFiniteError as error:
            self.error = str(error)
        parts = [each.detach() for each in net.parameters()]
        whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
        self.weights = torch.cat([part.flatten() for part in whole])

    def _count(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(target))
        return torch.zeros(len(target))


def every(job: Job) -> dict[str, Trained]:
    """Train in each way that the tests below look at."""
    train = job.train
    return {
        "plain": Trained(job, "plain"),
        "clipped": Trained(
            replace(job, train=replace(train, clip=0.2, grad_norm=False)), "clipped"
        ),
        "skip": Trained(replace(job, train=replace(train, nan="skip")), "skip", bad=BAD),
        "evaluated": Trained(
            replace(job, train=replace(train, evaluate_steps=3, evaluate_batches=2)), "evaluated"
        ),
        "end": Trained(replace(job, train=replace(train, nan="end")), "end", bad=BAD),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[RankResult]]]:
    """By division: the folder, and what each of two ranks has."""
    found = {}
    for name in ("ddp", "fsdp"):
        folder = tmp_path_factory.mktemp(name)
        job = replace(BASE, parallel=Parallel(name))
        found[name] = folder, succeeded(run_ranks(2, job, every, folder / "run"))
    return found


def reports(result: RankResult, training: int) -> list[dict[str, Any]]:
    """Return the values of the reports of one of the trainings, by its number."""
    found: list[list[dict[str, Any]]] = []
    for happened in result.events:
        if happened["kind"] == "begin":
            found.append([])
        elif happened["kind"] == "report":
            found[-1].append(happened["values"] | {"step": happened["step"]})
    return found[training]


@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_the_norm_of_the_gradient_is_reported(runs: Any, division: str) -> None:
    first, second = (
        [values["grad_norm"] for values in reports(runs[division][1][rank], 0) if "loss" in values]
        for rank in (0, 1)
    )
    net = _net_of_the_first_step()
    assert first[0] == pytest.approx(net, rel=1e-5)
    assert len(first) == STEPS
    assert first == second
    clipped = [values for values in reports(runs[division][1][0], 1) if "loss" in values]
    assert clipped[0]["grad_norm"] == pytest.approx(net, rel=1e-5)  # before clipping
    assert clipped[-1]["loss"] > reports(runs[division][1][0], 0)[STEPS - 1]["loss"]


def _net_of_the_first_step() -> float:
    """Return the norm of the first step's gradient, computed in one process."""
    torch.manual_seed(0)
    net, (features, labels) = Net(), samples().tensors
    F.cross_entropy(net(features[:8]), labels[:8]).backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in net.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_a_step_that_is_not_finite_changes_no_weight(runs: Any, division: str) -> None:
    results = runs[division][1]
    skipped, plain = reports(results[0], 2), reports(results[0], 0)
    losses = [values["loss"] for values in skipped if "loss" in values]
    assert [math.isnan(loss) for loss in losses] == [step == BAD for step in range(1, STEPS + 1)]
    assert losses[: BAD - 1] == [values["loss"] for values in plain[: BAD - 1]]
    (warning,) = results[0].kind("warning")
    assert warning["text"].startswith(f"step {BAD}: the loss is nan, the gradient's norm nan")
    weights = [result.value["skip"].weights for result in results]
    assert bool(weights[0].isfinite().all())
    assert torch.equal(*weights)
    assert results[1].kind("warning") == []


def test_fp16_goes_on_after_a_step_that_changed_no_weight(tmp_path: Path) -> None:
    train = replace(BASE.train, nan="skip", precision="fp16")
    job = replace(BASE, train=train)
    results = succeeded(run_ranks(2, job, lambda job: Trained(job, "skip", BAD), tmp_path / "run"))
    losses = [values["loss"] for values in reports(results[0], 0) if "loss" in values]
    assert [math.isnan(loss) for loss in losses] == [step == BAD for step in range(1, STEPS + 1)]
    weights = [result.value.weights for result in results]
    assert bool(weights[0].isfinite().all())
    assert torch.equal(*weights)


def test_fp16_trains_with_an_optimizer_that_is_not_fused_after_all(tmp_path: Path) -> None:
    """Its kernels take no sparse gradients, and torch's scaler left it to them to unscale."""

    def train(job: Job, fused: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Embedding(8, 2, sparse=True)
        rows = torch.arange(8)
        job = replace(job, optim=Optim("sgd", lr=0.5, fused=fused))
        raydist.fit(
            job,
            model=model,
            train=TensorDataset(rows, rows),
            loss=lambda output, target: (output.sum(1) - target).square().mean(),
        )
        return model.weight.flatten().tolist()

    job = Job(
        backend=Backend("gloo"),
        data=Data(batch_size=8),
        train=Train(steps=3, precision="fp16"),
    )
    fused, plain = (
        succeeded(run_ranks(1, job, partial(train, fused=fused), tmp_path / str(fused)))[0].value
        for fused in (True, False)
    )
    assert fused == plain


@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_a_training_that_ends_at_such_a_step_leaves_its_batches(runs: Any, division: str) -> None:
    folder, results = runs[division]
    for rank, result in enumerate(results):
        path = folder / "end" / "nan" / f"step-{BAD:08d}" / f"rank-{rank}.pt"
        assert result.value["end"].error == (
            f"step {BAD}: the loss is nan, the gradient's norm nan (train.nan=end); "
            f"torch.load reads its batches in {path}"
        )
        ((features, _),) = torch.load(path, weights_only=True)
        begin = 8 * (BAD - 1) + 4 * rank
        torch.testing.assert_close(
            features, samples(BAD).tensors[0][begin : begin + 4], equal_nan=True
        )


@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_evaluations_by_steps_and_on_some_batches(runs: Any, division: str) -> None:
    results = runs[division][1]
    told = [values["step"] for values in reports(results[0], 3) if "test_loss" in values]
    assert told == [3, 6, 8]
    # by epochs: 8 steps are one
    assert [v["step"] for v in reports(results[0], 0) if "test_loss" in v] == [8]
    for result in results:
        assert result.value["evaluated"].sizes == [4, 4] * 3
        assert result.value["plain"].sizes == [4] * 5
        assert torch.equal(result.value["evaluated"].weights, result.value["plain"].weights)
