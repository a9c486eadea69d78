"""A model on meta: the same values wherever they are made, and on all ranks that have the same
part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Backend, Checkpoint, Data, Job, Optim, Parallel, Train
from raydist.shared.errors import ConfigError
from raydist.training.gpt import GPT
from raydist.training.meta import make_values, on_meta
from tests.ranks import run_ranks, succeeded

CPU = torch.device("cpu")


class Ties(nn.Module):
    """Two modules share a weight, as the first and the last layer of many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def empty(kind: type[nn.Module] = GPT, **words: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(**words)


def small(tied: bool = True) -> nn.Module:
    return empty(GPT, layers=3, width=16, heads=2, kv_heads=2, hidden=32, tied=tied)


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_that_are_made_one_by_one_have_the_values_of_the_whole_model(tied: bool) -> None:
    whole, parts = small(tied), small(tied)
    make_values(whole, [*whole.modules()], CPU, 3)
    blocks: Any = parts.get_submodule("blocks")
    inside = {inner for block in blocks for inner in block.modules()}
    torch.manual_seed(8)  # whatever was drawn before
    for block in reversed(blocks):
        make_values(parts, [*block.modules()], CPU, 3)
    assert on_meta(parts)
    make_values(parts, [each for each in parts.modules() if each not in inside], CPU, 3)
    assert not on_meta(parts)
    values = dict(whole.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in parts.named_parameters())
    other = small(tied)
    make_values(other, [*other.modules()], CPU, 4)
    assert not torch.equal(other.get_parameter("embedding.weight"), values["embedding.weight"])
    ups = [values[f"blocks.{index}.feed_forward.up.weight"] for index in range(3)]
    assert not torch.equal(ups[0], ups[1])
    if not tied:
        assert not torch.equal(values["head.weight"], values["embedding.weight"])


def test_modules_that_share_a_weight_still_share_it() -> None:
    model: Any = empty(Ties)
    make_values(model, [*model.modules()], CPU, 3)
    assert model.head.weight is model.embedding.weight
    assert not model.head.weight.is_meta


def test_a_module_that_cannot_make_its_values_is_named() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Module())
    model[1].register_buffer("waves", torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match="Module is on meta and has no reset_parameters"):
        make_values(model, [*model.modules()], CPU, 3)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape)


@pytest.mark.slow
def test_models_of_transformers_make_their_values_in_their_own_way() -> None:
    whole = llama()
    with torch.device("meta"):
        model, again = llama(), llama()
    make_values(model, [*model.modules()], CPU, 3)
    make_values(again, [*again.modules()], CPU, 3)
    for (name, value), same in zip(model.named_parameters(), again.parameters(), strict=True):
        known = whole.get_parameter(name)
        assert torch.equal(value, same)
        assert value.mean().item() == pytest.approx(known.mean().item(), abs=0.01), name
        assert value.std().item() == pytest.approx(known.std().item(), abs=0.002), name
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


@pytest.mark.slow
def test_a_model_of_transformers_that_cannot_make_its_values_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model, again = llama(), llama()
    kind = next(each for each in type(model).__mro__ if "_init_weights" in vars(each))
    with monkeypatch.context() as patched:
        patched.setattr(kind, "_init_weights", lambda self, module: None)
        with pytest.raises(ConfigError, match="_init_weights makes no values for Embedding"):
            make_values(model, [*model.modules()], CPU, 3)
        patched.delattr(kind, "_init_weights")
        with pytest.raises(ConfigError, match="is on meta and has no reset_parameters"):
            make_values(again, [*again.modules()], CPU, 3)


class Draws(nn.Linear):
    """It seeds by itself, by the rank: as GPUs of another kind, it draws other numbers than the
    same seed elsewhere."""

    def reset_parameters(self) -> None:
        torch.manual_seed(raydist.rank().rank)
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)


@pytest.mark.parametrize("settings", [Parallel("hsdp", shard=2), Parallel("fsdp", tp=2)])
def test_ranks_with_the_same_part_have_the_same_values(settings: Parallel, tmp_path: Path) -> None:
    def values_of(job: Job) -> Any:
        with torch.device("meta"):
            model: Any = nn.Sequential(*(Draws(8, 8) for _ in range(4)))
        model.tp_plan = {"1": "colwise_rep"}
        data = TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8))
        raydist.fit(
            job,
            model=model,
            train=data,
            loss=lambda given, wanted: (given - wanted).square().mean(),
        )
        own = [(name, value) for name, value in model.named_parameters() if not value.is_meta]
        return {
            name: (value.full_tensor().detach(), value.to_local().detach()) for name, value in own
        }

    job = Job(
        backend=Backend("gloo"),
        data=Data(global_batch=4),
        optim=Optim("sgd", lr=1e-30),
        train=Train(steps=1),
    )
    job = replace(job, checkpoint=Checkpoint(every=100), parallel=settings)
    values = [one.value for one in succeeded(run_ranks(4, job, values_of, tmp_path))]
    assert {*values[0]} | {*values[-1]} == {
        f"{index}.{kind}" for index in range(4) for kind in ("weight", "bias")
    }
    for name in values[0]:
        # what a rank has of the whole, and the whole as each rank puts it together
        assert all(
            torch.equal(values[0][name][0], each[name][0]) for each in values if name in each
        )
