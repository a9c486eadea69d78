"""A model that ranks have divided is made again what it was, and divided once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from raydist.settings.config import Backend, Job
from raydist.training.blueprint import Blueprint, indivisible
from raydist.training.outlive import buffer_sizes, resized
from raydist.worker.groups import new_mesh
from tests.ranks import run_ranks, succeeded

GLOO = Job(backend=Backend(name="gloo"))


class Model(nn.Module):
    """It has shared parameters, layers that keep a list of their own, and a buffer not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8, bias=False)
        self.lstm = nn.LSTM(8, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.into.weight
        self.into.weight.requires_grad_(False)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.cache: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache = self.into(inputs)
        outputs: torch.Tensor = self.out(self.lstm(self.cache)[0])
        return outputs


def divided_twice(job: Job) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    values = {name: each.clone() for name, each in model.state_dict().items()}
    inputs = torch.randn(3, 2, 8)
    wanted = model(inputs)
    model.calls.zero_()
    model.cache = None
    blueprint = Blueprint(model)
    seen: dict[str, Any] = {"why not": indivisible(model), "outputs": []}
    for _ in range(3):
        mesh = new_mesh("cpu", shard=2)
        fully_shard(model.lstm, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parameters: Any = model.named_parameters()
        for name, value in parameters:
            whole = DTensor.from_local(values[name], mesh, run_check=False)
            value.data.copy_(whole.redistribute(mesh, value.placements))
        outputs = model(inputs)
        outputs.sum().backward()
        seen["outputs"].append(torch.equal(outputs, wanted))
        blueprint.restore()
    seen["plain"] = not isinstance(model, FSDPModule) and type(model.lstm) is nn.LSTM
    seen["keys"] = [*model.state_dict()] == [*values]
    seen["zero"] = all(not each.any() and each.grad is None for each in model.parameters())
    seen["shared"] = model.into.weight is model.out.weight and not model.out.weight.requires_grad
    seen["calls"], seen["cache"] = model.calls.item(), model.cache
    return seen


def test_a_model_is_divided_again_and_again(tmp_path: Path) -> None:
    for result in succeeded(run_ranks(2, GLOO, divided_twice, tmp_path)):
        assert result.value == {
            "why not": "",
            "outputs": [True] * 3,
            "plain": True,
            "keys": True,
            "zero": True,
            "shared": True,
            "calls": 0.0,
            "cache": None,
        }


def test_a_new_rank_joins_only_if_its_buffers_are_those_of_the_others() -> None:
    def model() -> nn.Module:
        made = nn.Linear(2, 2)
        made.register_buffer("table", torch.zeros(3))
        return made

    same, grown, retyped, more = model(), model(), model(), model()
    grown.table = torch.zeros(4)
    retyped.table = torch.zeros(3, dtype=torch.float64)
    more.register_buffer("cache", torch.zeros(1), persistent=False)
    assert [resized(each, buffer_sizes(model())) for each in (same, grown, retyped, more)] == [
        "",
        "the buffer table of the model has changed its size",
        "the buffer table of the model has changed its type",
        "the model has a new buffer cache",
    ]
