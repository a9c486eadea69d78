"""The loss by chunks of the positions: the same losses and gradients as the whole one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Backend, Job, Optim, Parallel, Train
from raydist.shared.errors import ConfigError
from raydist.training.gpt import GPT
from raydist.training.models import SmallCNN, chunked_loss
from raydist.training.token_loss import is_counted
from tests.losses import next_token
from tests.ranks import run_ranks, succeeded
from tests.training.test_parallel import BASE, common_losses, in_memory
from tests.training.test_sharded import memory

SIZES: Any = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 96}
# the steps of sgd depend on the norm of the gradients
TASK = replace(BASE, optim=Optim("sgd", lr=0.5), train=Train(steps=6, grad_norm=True))
DIVISIONS = {
    "ddp": (2, Parallel()),
    "fsdp": (2, Parallel("fsdp")),
}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, some of which are padding: in one row all but the first."""
    made = torch.Generator().manual_seed(3)
    text = torch.randint(256, (2049,), generator=made)
    inputs, targets = text[:2048].view(64, 32), text[1:].view(64, 32).clone()
    targets[torch.rand(64, 32, generator=made) < 0.3] = -100
    targets[5, 1:] = -100
    return inputs, targets


def right(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The share of right tokens of each sample, a metric that needs the scores."""
    assert scores.shape[-1] == 256
    return (scores.argmax(-1) == following).float().mean(1)


def gpt(job: Job) -> Any:
    """Train with tied weights and without; return the results and the scores of some text."""
    found, data = [], TensorDataset(*rows())
    for tied in (True, False):
        torch.manual_seed(0)
        model = GPT(**SIZES, tied=tied)
        figures = raydist.fit(
            job, model=model, train=data, test=data, loss=next_token, metrics={"right": right}
        )
        scores = model(torch.arange(8)[None])
        found.append([*figures.values(), scores.shape[-1]])
    return found


@cache
def trained(folder: Path, division: str, chunks: int, **train: Any) -> Any:
    ranks, parallel = DIVISIONS[division]
    settings = replace(TASK.train, loss_chunks=chunks, **train)
    job = replace(TASK, parallel=parallel, train=settings)
    name = f"{division}-{chunks}-{'-'.join(map(str, train.values()))}"
    results = succeeded(run_ranks(ranks, job, gpt, folder / name))
    return common_losses(results), results[0].value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_losses_are_those_of_the_whole_loss(division: str, folder: Path) -> None:
    losses, found = trained(folder, division, 5)
    wanted, known = trained(folder, division, 1)
    assert losses == pytest.approx(wanted, abs=1e-5)
    for one, other in zip(found, known, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("division", DIVISIONS)
def test_they_are_so_with_bf16_passes_and_a_loss_per_token(division: str, folder: Path) -> None:
    more = {"precision": "bf16", "accumulate": 2, "loss_per": "token", "recompute": "blocks"}
    losses, _ = trained(folder, division, 4, **more)
    wanted, _ = trained(folder, division, 1, **more)
    assert losses == pytest.approx(wanted, abs=0.01)


def test_a_byte_is_never_padding() -> None:
    assert is_counted(torch.tensor([156, 3], dtype=torch.uint8)).tolist() == [True, True]
    assert is_counted(torch.tensor([156, -100])).tolist() == [True, False]


class Named(nn.Module):
    """A model of one's own that names its last layer."""

    def __init__(self, factor: float = 1) -> None:
        super().__init__()
        self.embed, self.last, self.factor = nn.Embedding(256, 16), nn.Linear(16, 256), factor

    def get_output_embeddings(self) -> nn.Module:
        return self.last

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.embed(tokens).tanh())
        return scores if self.factor == 1 else scores * self.factor


@pytest.mark.parametrize("chunks", [2, 7, 100])
def test_the_gradients_are_those_of_the_whole_loss(chunks: int) -> None:
    model, (inputs, targets) = Named(), rows()
    largest: list[int] = []

    def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        largest.append(scores.shape[1])
        return next_token(scores, following)

    found = []

    def note(value: Any) -> None:
        value.backward()
        found.append([value.detach(), *(each.grad for each in model.parameters())])
        model.zero_grad()

    note(next_token(model(inputs), targets))
    with chunked_loss(model, loss, chunks) as by_chunk:
        note(by_chunk(model(inputs), targets))
    assert max(largest) == -(-32 // chunks)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert model(inputs).shape == (64, 32, 256)  # whole again


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    inputs, targets = rows()
    with (
        pytest.raises(ConfigError, match="SmallCNN names no last layer"),
        chunked_loss(SmallCNN(), next_token, 2),
    ):
        pass
    model = Named(0.5)
    with (
        chunked_loss(model, next_token, 2),
        pytest.raises(ConfigError, match="does not return the output of its last layer unchanged"),
    ):
        model(inputs)
    model = Named()
    with (
        chunked_loss(model, next_token, 2) as loss,
        pytest.raises(ConfigError, match="has not one value for each"),
    ):
        loss(model(inputs), targets[:, :-1])
    chunks = replace(TASK, train=Train(steps=1, loss_chunks=2))
    for job, why in (
        (replace(chunks, parallel=Parallel(pp=2, microbatches=2)), "a stage of a pipeline"),
        (replace(chunks, parallel=Parallel(tp=2)), "tp group"),
        (replace(chunks, backend=Backend("gloo", find_unused_parameters=True)), "for unused"),
    ):
        results = run_ranks(2, job, gpt, tmp_path)
        assert all("train.loss_chunks=2" in one.error and why in one.error for one in results)


def in_chunks(job: Job) -> Any:
    torch.manual_seed(0)
    settings = replace(job, train=replace(job.train, loss_chunks=4))
    data = TensorDataset(*rows())
    return raydist.fit(settings, model=GPT(**SIZES, tied=False), train=data, loss=next_token)


def test_it_goes_on_from_memory_to_the_bit(tmp_path: Path) -> None:
    settings, memories = Parallel("fsdp"), [memory() for _ in range(2)]
    job = replace(BASE, parallel=settings, train=replace(BASE.train, steps=6))
    whole = common_losses(succeeded(run_ranks(2, job, in_chunks, tmp_path / "whole")))
    losses = in_memory(memories, tmp_path / "begin", 3, 0, settings, 2, in_chunks)
    assert losses + in_memory(memories, tmp_path / "end", 6, 1, settings, 2, in_chunks) == whole
