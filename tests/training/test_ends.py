"""The embedding and the head of a divided model, which are groups of their own: the same training,
and what is gathered between the passes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import raydist
from raydist.settings.config import Job, Parallel
from raydist.training.blocks import find_blocks, find_ends
from raydist.training.gpt import GPT
from tests.losses import next_token
from tests.ranks import run_ranks, succeeded
from tests.training.test_parallel import BASE, common_losses, in_memory, lines_of_bytes
from tests.training.test_sharded import memory

STEPS = 6
TASK = replace(BASE, train=replace(BASE.train, steps=STEPS))
SIZES: Any = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 96}
DIVISIONS = {
    "ddp": Parallel(),
    "hsdp": Parallel("hsdp", shard=2),
    "tp": Parallel(shard=2, tp=2),
}


def gpt(job: Job, tied: bool = False) -> list[bool]:
    """Train a GPT; return which of its parts are gathered when the last loss is computed."""
    torch.manual_seed(0)
    model = GPT(**SIZES, tied=tied)
    whole: list[bool] = []

    def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        parts = [model.embedding, *model.blocks, model.head or model.embedding]
        whole[:] = (not any(isinstance(x, DTensor) for x in each.parameters()) for each in parts)
        return next_token(scores, following)

    raydist.fit(job, model=model, train=lines_of_bytes(), loss=loss)
    return whole


@cache
def trained(folder: Path, name: str) -> tuple[list[float], list[bool]]:
    """Train on four ranks; return the losses, and which parts are gathered."""
    job = replace(TASK, parallel=DIVISIONS[name])
    results = succeeded(run_ranks(4, job, gpt, folder / name))
    return common_losses(results), results[0].value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


@pytest.mark.parametrize("name", ["hsdp", "tp"])
def test_the_losses_are_those_of_ddp_with_less_gathered(name: str, folder: Path) -> None:
    losses, whole = trained(folder, name)
    wanted, _ = trained(folder, "ddp")
    assert losses == pytest.approx(wanted, abs=1e-5)
    if name != "tp":  # there a gathered weight is a part of a layer
        assert whole == [False, False, False, False, True]  # the head


def test_without_a_head_of_its_own_the_last_block_stays_gathered(tmp_path: Path) -> None:
    job = replace(TASK, parallel=Parallel("fsdp"), train=replace(TASK.train, steps=1))
    results = succeeded(run_ranks(2, job, partial(gpt, tied=True), tmp_path))
    assert results[0].value == [True, False, False, True, True]


def test_it_goes_on_from_memory_to_the_bit(folder: Path, tmp_path: Path) -> None:
    settings, memories = DIVISIONS["hsdp"], [memory() for _ in range(4)]
    whole, _ = trained(folder, "hsdp")
    losses = in_memory(memories, tmp_path / "begin", 3, 0, settings, 4, gpt)
    assert losses + in_memory(memories, tmp_path / "end", STEPS, 1, settings, 4, gpt) == whole


class Shared(GPT):
    """Its head has the weight of the embedding, as models of transformers do it."""

    def __init__(self) -> None:
        super().__init__(**SIZES, tied=False)
        assert self.head is not None
        self.head.weight = self.embedding.weight


def test_only_what_is_used_at_one_time_is_a_group_of_its_own() -> None:
    def ends(model: nn.Module) -> Any:
        return find_ends(model, find_blocks(model))

    model = GPT(**SIZES, tied=False)
    assert ends(model) == (model.embedding, model.head)
    assert ends(GPT(**SIZES)) == ends(Shared()) == (None, None)
    assert ends(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == (None, None)
