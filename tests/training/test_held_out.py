"""Streams as test data: each sample counts once, whatever the division. On real gloo ranks."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import raydist
from raydist.settings.config import Data, Job, Parallel
from tests.ranks import RankResult, run_ranks, succeeded
from tests.training.test_hooks import BASE, BATCH, Net, by_hand, once, tensors

DIVISIONS = {
    "ddp": Parallel("ddp"),
    "tp": Parallel("fsdp", tp=2),
    "pp": Parallel("ddp", pp=2),
}
JOB = replace(BASE, train=replace(BASE.train, accumulate=1))
SIZES = {"one left": BATCH + 1, "worker": 3 * BATCH - 5, "limited": 2 * BATCH}
"""How many samples count: the last one is alone on its rank; some ranks have one more in the last
batch, and a worker loads them; the stream is infinite."""


class Lines(IterableDataset[Any]):
    """The first samples as a stream; without a size an infinite one."""

    def __init__(self, size: int | None = None, noise: float = 0) -> None:
        self.size = size
        self.noise = noise

    def __iter__(self) -> Iterator[Any]:
        features, labels = tensors()
        for number in count() if self.size is None else range(self.size):
            place = number % len(labels)
            yield features[place] + self.noise * torch.randn(1), labels[place]


class Own(IterableDataset[Any]):
    """A stream that divides itself."""

    def __iter__(self) -> Iterator[Any]:
        me = raydist.rank()
        features, labels = tensors()
        return iter([*zip(features, labels, strict=True)][me.rank :: me.world_size])


class Measured:
    """What a training has measured, and the samples that its metrics have got on this rank."""

    def __init__(self, job: Job, test: Any) -> None:
        self.targets = Counter[int]()
        self.tests: list[Any] = []
        metrics: Any = {"target": self._note}
        samples: Any = TensorDataset(*tensors())
        self.result = raydist.fit(
            job,
            model=Net(),
            train=samples,
            test=test,
            loss=F.cross_entropy,
            metrics=metrics,
            on_evaluate=lambda step, values: self.tests.append((step, values)),
        )

    def _note(self, output: Tensor, target: Tensor) -> Tensor:
        self.targets.update(target.tolist())
        return target.float()


def every(job: Job) -> dict[str, Measured]:
    # As in a rank of a run: these here come from a fork server, whose start would be the worker's.
    multiprocessing.set_start_method("fork", force=True)
    some = replace(job, train=replace(job.train, evaluate_batches=2))
    ahead = replace(job, data=replace(job.data, workers=1))
    return {
        "one left": Measured(job, Lines(SIZES["one left"])),
        "worker": Measured(ahead, Lines(SIZES["worker"])),
        "limited": Measured(some, Lines()),
    }


@pytest.fixture(scope="module", params=DIVISIONS)
def results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[RankResult]]:
    """What each of four ranks has got under a division."""
    folder = tmp_path_factory.mktemp(request.param)
    job = replace(JOB, parallel=DIVISIONS[request.param])
    return request.param, succeeded(run_ranks(4, job, every, folder))


def test_each_sample_of_a_stream_counts_once(results: Any) -> None:
    division, ranks = results
    for name, size in SIZES.items():
        seen = sum((rank.value[name].targets for rank in ranks), Counter[int]())
        # Two evaluations; the two ranks of a tp group compute the same samples.
        times = 4 if division == "tp" else 2
        known = Counter(tensors()[1][:size].tolist())
        assert seen == Counter({label: number * times for label, number in known.items()}), name
        _, losses = by_hand(once, size)
        for rank in ranks:
            tests = rank.value[name].tests
            assert [step for step, _ in tests] == [2, 4]
            found = [values["test_loss"] for _, values in tests]
            assert found == pytest.approx(losses, abs=1e-5), name


def test_a_stream_draws_the_same_random_numbers_in_each_evaluation(tmp_path: Path) -> None:
    def measured(job: Job) -> Any:
        still = replace(job, optim=replace(job.optim, lr=1e-30))
        noisy, plain = Measured(still, Lines(21, noise=1.0)), Measured(still, Lines(21))
        return noisy.tests, plain.tests, noisy.result["loss"], plain.result["loss"]

    for rank in succeeded(run_ranks(2, JOB, measured, tmp_path)):
        ((_, first), (_, second)), ((_, plain), _), loss, known = rank.value
        assert first == second
        assert first["test_loss"] != plain["test_loss"]
        assert loss == known


def test_a_stream_that_divides_itself_is_refused(tmp_path: Path) -> None:
    def refused(job: Job) -> None:
        Measured(job, Own())

    for rank in run_ranks(2, JOB, refused, tmp_path):
        assert "ConfigError: test=Own gives different samples on different ranks" in rank.error


def test_a_loader_is_no_test_data(tmp_path: Path) -> None:
    def refused(job: Job) -> None:
        Measured(job, torch.utils.data.DataLoader(Lines(4)))

    (rank,) = run_ranks(1, replace(JOB, data=Data(batch_size=4)), refused, tmp_path)
    assert "ConfigError: test=DataLoader has no length or no index: it must be" in rank.error
