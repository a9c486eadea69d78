"""Metrics over the test samples."""

from __future__ import annotations

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
from raydist.settings.config import Backend, Data, Job, Parallel, Train
from raydist.training.evaluation import accuracy, evaluate, same_buffers
from raydist.worker import context
from tests.ranks import run_ranks

GLOO = Job(backend=Backend(name="gloo"))
CPU = torch.device("cpu")


def test_accuracy_is_of_each_sample() -> None:
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(output, torch.tensor([1, 1, 1])).tolist() == [1, 0, 1]


def batches(rank: int, world_size: int) -> list[Any]:
    """Ten samples x = y = 0 … 9 in batches of at most 2, dealt out one by one; then one that does
    not count."""
    mine = torch.arange(10.0)[rank::world_size]
    parts = [*torch.split(mine, 2), torch.full((2,), 99.0)]
    return [
        ([part.unsqueeze(1), part.unsqueeze(1)], number < len(parts) - 1)
        for number, part in enumerate(parts)
    ]


class Shift(nn.Module):
    """Adds one, and notes how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: set[tuple[bool, bool]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.add((self.training, torch.is_grad_enabled()))
        return x + 1


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("pp", 2)])
def test_a_module_that_the_job_froze_stays_frozen(name: str, ranks: int, tmp_path: Path) -> None:
    def trained(job: Job) -> Any:
        norms = [nn.BatchNorm1d(3, momentum=1.0) for _ in range(2)]
        model = nn.Sequential(nn.Linear(3, 3), norms[0], nn.Linear(3, 3), norms[1])
        norms[0].eval()
        samples = TensorDataset(torch.randn(16, 3), torch.randn(16, 3))
        raydist.fit(job, model=model, train=samples, test=samples, loss=F.mse_loss)
        return [(norm.training, norm.running_mean) for norm in norms]

    job = replace(GLOO, data=Data(batch_size=8), parallel=Parallel(name), train=Train(epochs=2))
    results = run_ranks(ranks, job, trained, tmp_path)
    assert [one.error for one in results] == [""] * ranks
    (frozen, kept), (alive, moved) = results[0].value[0], results[-1].value[1]
    assert (frozen, alive) == (False, True)
    assert torch.equal(kept, torch.zeros(3))
    assert not torch.equal(moved, torch.zeros(3))


def test_the_compiled_model_is_evaluated_too(tmp_path: Path) -> None:
    def trained(job: Job) -> set[int]:
        batches = set[int]()

        def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*values: Any) -> Any:
                batches.update(
                    len(each)
                    for each in values
                    if isinstance(each, torch.Tensor) and each.dim() == 2
                )
                return graph.forward(*values)

            return run

        torch.compile = partial(
            torch.compile, backend=noting
        )  # dynamo, without the code generator behind it
        train, test = (TensorDataset(torch.randn(size, 7), torch.randn(size, 7)) for size in (8, 6))
        raydist.fit(job, model=nn.Linear(7, 7), train=train, test=test, loss=F.mse_loss)
        return batches - {7}

    results = run_ranks(
        2, replace(GLOO, data=Data(batch_size=4), train=Train(compile=True)), trained, tmp_path
    )
    assert [one.error for one in results] == ["", ""]
    assert all(
        3 in one.value for one in results
    )  # of 6 test samples each rank has 3; it trains with 4


def test_a_model_that_comes_in_evaluation_mode_is_trained(tmp_path: Path) -> None:
    def trained(job: Job) -> bool:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()  # as pretrained ones come
        samples = TensorDataset(torch.randn(8, 3), torch.randn(8, 3))
        raydist.fit(job, model=model, train=samples, loss=F.mse_loss)
        return all(module.training for module in model.modules())

    (result,) = run_ranks(1, replace(GLOO, data=Data(batch_size=4)), trained, tmp_path)
    assert (result.error, result.value) == ("", True)


def mean_target(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target.mean()


def each_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


@pytest.mark.parametrize("world", [1, 2, 3])
def test_uneven_ranks_and_batches_weigh_by_samples(tmp_path: Path, world: int) -> None:
    def measure(job: Job) -> tuple[dict[str, float], set[tuple[bool, bool]], bool]:
        model = Shift().train()
        metrics: dict[str, Any] = {"mse": F.mse_loss, "mean": mean_target, "each": each_output}
        means = evaluate(
            model, batches(context.rank().rank, world), metrics, context.current().comm, CPU
        )
        return means, model.modes, model.training

    for result in run_ranks(world, GLOO, measure, tmp_path):
        assert result.error == ""
        means, modes, training = result.value
        assert means == pytest.approx({"mse": 1.0, "mean": 4.5, "each": 5.5})
        assert modes == {(False, False)}
        assert training


def test_a_rank_without_samples_counts_nothing(tmp_path: Path) -> None:
    def measure(job: Job) -> dict[str, float]:
        mine = batches(0, 1) if context.rank().rank == 0 else []
        return evaluate(Shift(), mine, {"mean": mean_target}, context.current().comm, CPU)

    assert [result.value for result in run_ranks(2, GLOO, measure, tmp_path)] == [{"mean": 4.5}] * 2


def test_buffers_become_those_of_rank_0(tmp_path: Path) -> None:
    def share(job: Job) -> tuple[Any, ...]:
        rank = context.rank().rank
        model = nn.Module()
        model.register_buffer("real", torch.full((2, 2), 1.0 + rank))
        model.register_buffer("count", torch.tensor(5 + rank))
        model.register_buffer("flag", torch.tensor([rank == 0, rank == 1]))
        model.register_buffer("narrow", torch.full((3,), 1.5 + rank, dtype=torch.bfloat16))
        same_buffers(model, context.current().comm, rank)
        return tuple(
            (name, buffer.dtype, buffer.tolist()) for name, buffer in model.named_buffers()
        )

    one, two = run_ranks(2, GLOO, share, tmp_path)
    assert one.error == two.error == ""
    assert one.value == two.value
    values = [value for _, _, value in one.value]
    assert values == [[[1.0, 1.0], [1.0, 1.0]], 5, [True, False], [1.5, 1.5, 1.5]]


def test_a_model_without_buffers_is_fine() -> None:
    same_buffers(nn.Linear(1, 1), None, 0)  # type: ignore[arg-type]  # there is nothing to send
