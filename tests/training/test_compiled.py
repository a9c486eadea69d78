"""Compiled models: the same losses as without, one block compiled for all, the loss too. On real gloo
ranks; most of them with dynamo alone, without the code generator behind it, which takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Job, Optim, Parallel, Train
from raydist.training.gpt import GPT
from tests import ranks as rank_processes
from tests.losses import next_token
from tests.ranks import run_ranks, succeeded
from tests.training.test_loss_chunks import right, rows
from tests.training.test_own_loss import Rows
from tests.training.test_parallel import BASE, common_losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TASK = replace(BASE, optim=Optim("sgd", lr=0.5), train=Train(steps=4, grad_norm=True))
SIZES: Any = {"width": 32, "heads": 4, "kv_heads": 2, "hidden": 96}


class Graphs:
    """A backend of torch.compile that notes the operations of each graph, and generates no code."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.runs: list[int] = []
        """How often each of them has run."""

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        number = len(self.made)
        graphs = (each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule))
        self.made.append(" ".join(str(node.target) for each in graphs for node in each.nodes))
        self.runs.append(0)
        forward: Any = torch._dynamo.lookup_backend("aot_eager")(module, inputs)

        def run(*values: Any) -> Any:
            self.runs[number] += 1
            return forward(*values)

        return run

    def use(self) -> None:
        """Have torch.compile use this backend from now on, in this process."""
        given: Any = torch.compile
        torch.compile = lambda *args, **named: given(*args, **named, backend=self)

    def runs_of(self, name: str) -> list[int]:
        """Return how often each graph has run that has an operation with this in its name."""
        found = zip(self.made, self.runs, strict=True)
        return [number for operations, number in found if name in operations]


def gpt(job: Job, layers: int = 2, noting: bool = True) -> tuple[list[float], Graphs, bool]:
    """Train on padded rows; return the figures, the graphs, and whether a call is still compiled."""
    graphs = Graphs()
    if noting:
        graphs.use()
    inputs, targets = rows()
    torch.manual_seed(0)
    model = GPT(layers=layers, **SIZES)
    figures = raydist.fit(
        job,
        model=model,
        train=TensorDataset(inputs, targets),
        test=TensorDataset(inputs[:11], targets[:11]),  # not as many on each rank
        loss=next_token,
        metrics={"right": right},
    )
    before = sum(graphs.runs)
    model(inputs[:2])
    return [*figures.values()], graphs, sum(graphs.runs) > before


@cache
def trained(
    folder: Path, ranks: int, division: str, layers: int = 2, noting: bool = True, **train: Any
) -> tuple[list[float], list[float], Graphs, bool]:
    job = replace(TASK, parallel=Parallel(division), train=replace(TASK.train, **train))
    name = "-".join(map(str, (ranks, division, layers, noting, *train.items())))
    results = run_ranks(ranks, job, lambda job: gpt(job, layers, noting), folder / name)
    return common_losses(succeeded(results)), *results[0].value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize(
    ("ranks", "division", "more"),
    [
        (1, "ddp", {}),
        (1, "ddp", {"compile": True, "accumulate": 2, "loss_per": "token"}),
        (2, "ddp", {"compile": True, "loss_chunks": 5}),
        (2, "ddp", {"loss_chunks": 3, "accumulate": 2, "loss_per": "token", "clip": 0.5}),
        (2, "fsdp", {"loss_chunks": 5, "loss_per": "token", "recompute": "blocks"}),
        (1, "ddp", {"recompute": "selective", "precision": "bf16"}),
    ],
    ids=str,
)
def test_the_losses_are_those_without(
    folder: Path, ranks: int, division: str, more: dict[str, Any]
) -> None:
    given = {"compile": "blocks", **more}
    losses, figures, graphs, _ = trained(folder, ranks, division, **given)
    wanted, known, none, _ = trained(folder, ranks, division, **{**more, "compile": False})
    near = 0.01 if "precision" in more else 1e-5
    assert losses == pytest.approx(wanted, abs=near)
    assert figures == pytest.approx(known, abs=10 * near)
    assert not none.made
    assert graphs.runs_of("scaled_dot_product_attention")
    assert graphs.runs_of("cross_entropy")


def test_one_block_is_compiled_for_all_and_the_loss(folder: Path) -> None:
    _, _, few, after = trained(folder, 1, "ddp", compile="blocks")
    _, _, many, _ = trained(folder, 1, "ddp", layers=5, compile="blocks")
    assert len(many.made) == len(few.made)
    of_loss, of_block = few.runs_of("cross_entropy"), few.runs_of("scaled_dot_product_attention")
    assert of_loss[0] == 4  # once for each step; others are of evaluations
    assert of_block[0] == 2 * 4
    assert many.runs_of("scaled_dot_product_attention")[0] == 5 * 4
    assert not after, "the model is compiled after fit"


def test_generated_code_gives_the_same_losses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank: each rank generates it anew. Without what only costs time here: programs that
    try which vectors the CPU has, and processes beside the rank that compile."""
    monkeypatch.setattr(rank_processes, "WAIT_S", 750)  # the longest of all
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    more = {"accumulate": 2, "loss_per": "token"}
    losses, figures, _, _ = trained(folder, 1, "fsdp", 2, False, compile="blocks", **more)
    wanted, known, _, _ = trained(folder, 1, "fsdp", **more)
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert figures == pytest.approx(known, abs=1e-4)


def own_loss(job: Job) -> tuple[dict[str, float], Graphs, bool]:
    """Train a Llama with its own loss, and as a job's own step; return what is different."""
    import transformers  # here: the other ranks of this file would import it too

    graphs = Graphs()
    graphs.use()
    inputs, labels = rows()
    shape = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=10,  # more than dynamo compiles one function for
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(shape)
    own: Any = model.loss_function
    data = Columns(inputs, labels)
    figures = raydist.fit(job, model=model, train=data, test=data)
    same = model.loss_function is own and model.config.use_cache is True
    return figures, graphs, same


class Columns(Rows):
    """Samples as a model of transformers takes them."""

    def __getitem__(self, index: int) -> Any:
        tokens, labels = (tensor[index] for tensor in self.tensors)
        return {"input_ids": tokens, "labels": labels}


def own_step(job: Job) -> tuple[dict[str, float], Graphs, bool]:
    """Train a GPT by a step of the job's own."""
    graphs = Graphs()
    graphs.use()
    torch.manual_seed(0)

    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        return next_token(model(batch[0]), batch[1])

    data, model = TensorDataset(*rows()), GPT(layers=10, **SIZES)
    return raydist.fit(job, model=model, train=data, test=data, train_step=train_step), graphs, True


@pytest.mark.parametrize("training", [own_loss, own_step])
def test_losses_that_are_not_fits_go_on_too(tmp_path: Path, training: Callable[[Job], Any]) -> None:
    job = replace(TASK, train=replace(TASK.train, loss_per="token"))
    compiled = replace(job, train=replace(job.train, compile="blocks"))
    results = succeeded(run_ranks(1, compiled, training, tmp_path / "compiled"))
    wanted = succeeded(run_ranks(1, job, training, tmp_path / "plain"))
    assert common_losses(results) == pytest.approx(common_losses(wanted), abs=1e-5)
    figures, graphs, same = results[0].value
    assert figures == pytest.approx(wanted[0].value[0], abs=1e-5)
    assert same, "the model is not as it was"
    # all ten blocks, in each of the four steps
    assert graphs.runs_of("scaled_dot_product_attention")[0] == 10 * 4
    assert bool(graphs.runs_of("cross_entropy")) == (training is own_loss)


@pytest.mark.parametrize(
    ("model", "suggestion"),
    [(nn.Linear(2, 2), "parallel.blocks=CLASS"), (GPT(layers=2, **SIZES), "parallel.blocks=Block")],
)
def test_blocks_that_a_model_lacks_are_refused(
    tmp_path: Path, model: nn.Module, suggestion: str
) -> None:
    def refused(job: Job) -> str:
        with pytest.raises(raydist.ConfigError) as error:
            raydist.fit(job, model=model, train=TensorDataset(*rows()), loss=F.mse_loss)
        return error.value.suggestion or ""

    named = replace(TASK, parallel=Parallel(blocks="Blok" if isinstance(model, GPT) else ""))
    job = replace(named, train=Train(steps=4, compile="blocks"))
    (result,) = succeeded(run_ranks(1, job, refused, tmp_path))
    assert result.value.startswith(suggestion)
