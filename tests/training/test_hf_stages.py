"""A model of transformers in the stages of a pipeline: as it is, with its own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist
from raydist.settings.config import Backend, Data, Job, Optim, Parallel, Train
from raydist.shared.errors import ConfigError
from raydist.training import hf_stages
from raydist.training.blocks import find_blocks
from raydist.training.stages import cut_model, forget_others, shared
from tests.ranks import run_ranks, succeeded

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
BASE = Job(
    backend=Backend("gloo"),
    data=Data(global_batch=12, shuffle=False),
    optim=Optim("sgd", lr=0.1),
    train=Train(steps=3),
)


def built(kind: str = "Llama", **words: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **words})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


class Rows(torch.utils.data.Dataset[Any]):
    """Samples with padding at their end; the mask and the positions are of the batch."""

    def __init__(self, alike: bool = False) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.columns = {"input_ids": torch.randint(1, 64, (36, 10), generator=drawn)}
        counts = torch.tensor([10 if alike else 4 + row % 7 for row in range(36)])
        mask = torch.arange(10) < counts[:, None]
        self.columns["attention_mask"] = mask.long()
        self.columns["labels"] = self.columns["input_ids"].where(mask, -100)
        self.columns["position_ids"] = torch.arange(10).expand(36, 10) + 1

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> Any:
        return {name: column[index] for name, column in self.columns.items()}


def by_hand(model: Any, rows: Rows) -> tuple[list[float], float]:
    """Return the losses of the same training in one process, and the loss of all rows after it."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for at in range(0, 36, 12):
        loss = model(**{name: each[at : at + 12] for name, each in rows.columns.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, model(**rows.columns).loss.item()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Llama", {}),
        ("Qwen3", {}),
        ("Gemma2", {}),
        ("GPTNeoX", {}),
        ("Mixtral", {}),
        (
            "Granite",
            {"embedding_multiplier": 3.0},
        ),  # what the first block gets is no `inputs_embeds`
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_stages_make_the_output_and_gradients_of_the_model(kind: str, words: Any) -> None:
    model = built(kind, **words)
    batch = Rows().columns
    wanted = model(**batch)
    wanted.loss.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    parts = cut_model(model, find_blocks(model), 3)
    assert {n for part in parts for n in part.state_dict()} == model.state_dict().keys()
    others = {name: each for name, each in batch.items() if name != "input_ids"}
    given: Any = batch["input_ids"]
    for part in parts:
        given = part(given, **others)
    call = hf_stages.call_of(parts[-1])
    assert call is not None
    output = call.output_of(given)
    assert type(output) is type(wanted)
    assert torch.equal(output.logits, wanted.logits)
    output.loss.backward()
    for name, value in model.named_parameters():
        assert torch.equal(value.grad, gradients[name]), name


def test_a_stage_keeps_its_own_parameters_only() -> None:
    model = built(tie_word_embeddings=True)
    with torch.device("meta"):
        empty = built(tie_word_embeddings=True)
    for each in (model, empty):
        parts = cut_model(each, find_blocks(each), 2)
        assert shared(each, parts) == {"model.embed_tokens.weight": (0, 1)}
    parts = cut_model(model, find_blocks(model), 2)
    forget_others(model, parts[0])
    whole = {name for name, value in model.named_parameters() if not value.is_meta}
    assert whole == {name for name, _ in parts[0].named_parameters()}
    assert len(whole) == 1 + 2 * 9


def train(job: Job, **words: Any) -> Any:
    """Train in stages; return what this rank knows of the model then."""
    with torch.device(words.pop("device", "cpu")):
        model = built(**words)
    rows = Rows()
    figures = raydist.fit(job, model=model, train=rows, test=rows)
    output = model(**{name: each[:4] for name, each in rows.columns.items()})
    return figures, output.logits, output["loss"].item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks", "parallel", "more"),
    [
        (
            {"tie_word_embeddings": True},
            3,
            Parallel("pp", schedule="gpipe"),
            {"recompute": "blocks"},
        ),
        (
            {"tie_word_embeddings": True},
            4,
            Parallel("fsdp", pp=2),
            {"accumulate": 3, "recompute": "selective"},
        ),
        ({}, 4, Parallel("tp", tp=2, pp=2), {}),
    ],
    ids=["gpipe", "fsdp", "tp"],
)
def test_the_losses_are_those_of_the_model_in_one_process(
    tmp_path: Path, words: Any, ranks: int, parallel: Parallel, more: Any
) -> None:
    job = replace(BASE, parallel=parallel, train=replace(BASE.train, loss_per="token", **more))

    def run(job: Job) -> Any:
        return train(job, **words)

    results = succeeded(run_ranks(ranks, job, run, tmp_path))
    model = built(**words)
    losses, test_loss = by_hand(model, Rows())
    with torch.no_grad():
        wanted = model(**{name: each[:4] for name, each in Rows().columns.items()})
    for each in results:
        assert each.losses == pytest.approx(losses, rel=1e-5)
        figures, logits, loss = each.value
        assert figures["test_loss"] == pytest.approx(test_loss, rel=1e-5)
        assert loss == pytest.approx(wanted.loss.item(), rel=1e-5)
        torch.testing.assert_close(logits, wanted.logits, rtol=1e-3, atol=1e-3)


def scores_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


class Pairs(Rows):
    """(tokens, mask, what follows): the model gets the first two by their places."""

    def __getitem__(self, index: int) -> Any:
        tokens, mask = self.columns["input_ids"][index], self.columns["attention_mask"][index]
        return tokens, mask, tokens.roll(-1)


@pytest.mark.slow
def test_a_loss_of_the_job_gets_the_output_of_the_model(tmp_path: Path) -> None:
    def run(job: Job) -> Any:
        rows = Pairs()
        return raydist.fit(job, model=built(), train=rows, test=rows, loss=scores_loss)

    two = succeeded(run_ranks(2, replace(BASE, parallel=Parallel("pp")), run, tmp_path / "pp"))
    (one,) = succeeded(run_ranks(1, BASE, run, tmp_path / "one"))
    for each in two:
        assert each.losses == pytest.approx(one.losses, rel=1e-5)
        assert each.value == pytest.approx(one.value, rel=1e-5)


def doubled(model: Any) -> Any:
    """Return a model whose loop changes what goes from block to block."""
    kind = type(model.model)

    class Doubles(kind):  # type: ignore[misc, valid-type]
        def forward(self, inputs_embeds: Any = None, **named: Any) -> Any:
            for block in self.layers:
                inputs_embeds = block(inputs_embeds * 2, **named)
            return inputs_embeds

    model.model.__class__ = Doubles
    return model


def with_adapter(model: Any) -> Any:
    model.model.adapter = nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=64)
            ),
            "GPT2LMHeadModel has no plan of stages",
        ),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(num_layers=2, d_model=8, d_ff=8, num_heads=2, d_kv=4)
            ),
            "T5ForConditionalGeneration has no plan of stages",
        ),
        (lambda: built("Mixtral", output_router_logits=True), "output_router_logits=False"),
        (lambda: with_adapter(built()), "does not say in which stage model.adapter is"),
        (lambda: doubled(built()), "it changes what goes from one to the next"),
    ],
    ids=["gpt2", "t5", "router", "adapter", "between"],
)
def test_a_model_that_is_not_made_for_stages_is_refused(
    make: Callable[[], Any], words: str
) -> None:
    model = make()
    with pytest.raises(ConfigError, match=f"{words}.*; set parallel=fsdp parallel.pp=1"):
        cut_model(model, find_blocks(model), 2)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    model = built()
    call = hf_stages.call_of(cut_model(model, find_blocks(model), 2)[0])
    assert call is not None
    tokens = torch.ones(4, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"4 samples, and num_items has the shape \[\]"):
        call.bind((), {"input_ids": tokens, "num_items": torch.tensor(3)})
    with pytest.raises(ConfigError, match="takes input_ids, and a batch has labels"):
        call.bind((), {"labels": tokens})
    given, others = call.bind((tokens,), {"position_ids": tokens[:1], "return_dict": True})
    assert given is tokens
    assert others["position_ids"].shape == tokens.shape
    assert call.others == {"return_dict": True}


def test_a_causal_model_is_computed_again_without_its_cache(tmp_path: Path) -> None:
    def run(job: Job) -> Any:
        model = built(num_hidden_layers=2)
        raydist.fit(job, model=model, train=Rows())
        return {name: value.detach() for name, value in model.named_parameters()}, model.config

    found = []
    for how in ("none", "blocks"):
        job = replace(BASE, train=Train(steps=2, recompute=how))
        (one,) = succeeded(run_ranks(1, job, run, tmp_path / how))
        found.append(one.value[0])
        assert one.value[1].use_cache is True
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=name)
