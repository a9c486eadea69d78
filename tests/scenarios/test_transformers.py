"""A model of transformers as it is, with its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import raydist
from tests import faults
from tests.faults import Fault, kill
from tests.programs import Program
from tests.scenarios.test_restart_run import losses

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

ROWS = """
import torch
import raydist
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
)

class Rows(torch.utils.data.Dataset):
    def __init__(self, padded=False):
        self.tokens = torch.randint(64, (32, 12), generator=torch.Generator().manual_seed(1))
        self.labels = self.tokens.clone()
        if padded:
            counts = torch.tensor([2, 2, 4, 5, 12, 12, 6, 1] * 4)
            self.labels[torch.arange(12) >= counts[:, None]] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}
"""
JOB = (
    ROWS
    + """
def job(config):
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    return raydist.fit(config, model=model, train=Rows(padded=True), test=Rows(padded=True))
"""
)
TUNE = (
    ROWS
    + """
def job(config):
    with torch.device("meta"):
        model = LlamaForCausalLM(SHAPE)
    figures = raydist.fit(config, model=model, train=Rows())
    raydist.models.save_weights(model, "tuned")
    return figures
"""
)
WORDS = (
    "job=mine.py",
    "group=inline",
    "backend=gloo",
    "train.steps=4",
    "data.global_batch=8",
    "data.shuffle=false",
    "optim=torch.optim.SGD",
    "optim.lr=0.1",
)


def by_hand(model: Any, rows: Any) -> tuple[float, float]:
    """Return the last loss of the same training in one process, and the loss on the test rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, labels in zip(rows.tokens.split(8), rows.labels.split(8), strict=True):
        loss = model(input_ids=batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return loss.item(), model(input_ids=rows.tokens, labels=rows.labels).loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "division",
    [
        "tp scale=1x2",
        "fsdp parallel.pp=2 scale=1x4",
    ],
)
def test_an_unmodified_model_trains(tmp_path: Path, division: str) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    more = "train.accumulate=2", "train.loss_per=token"
    program = Program(tmp_path, *WORDS, *f"parallel={division}".split(), *more)
    assert program.wait() == 0, program.screen
    names: dict[str, Any] = {}
    exec(ROWS, names)
    torch.manual_seed(0)
    loss, test_loss = by_hand(transformers.LlamaForCausalLM(names["SHAPE"]), names["Rows"](True))
    metrics = program.result()["metrics"]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["test_loss"] == pytest.approx(test_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("division", "tied"),
    [
        ("ddp scale=1x2", False),
        ("fsdp scale=1x2", False),
        ("fsdp parallel.pp=2 scale=1x4", True),
    ],
)
def test_a_pretrained_model_is_tuned_and_given_back(
    tmp_path: Path, division: str, tied: bool
) -> None:
    names: dict[str, Any] = {}
    exec(ROWS, names)
    names["SHAPE"].tie_word_embeddings = tied
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(names["SHAPE"])
    model.save_pretrained(tmp_path / "pretrained")
    (tmp_path / "mine.py").write_text(TUNE + f"SHAPE.tie_word_embeddings = {tied}\n")
    words = (*WORDS, *f"parallel={division}".split(), "train.weights=pretrained")
    program = Program(tmp_path, *words)
    assert program.wait() == 0, program.screen
    rows = names["Rows"]()
    loss, _ = by_hand(model, rows)
    assert program.result()["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert program.events("warning") == []
    saved, given = (
        {name for file in (tmp_path / folder).glob("*.safetensors") for name in load_file(file)}
        for folder in ("tuned", "pretrained")
    )
    assert saved == given
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert type(tuned) is transformers.LlamaForCausalLM
    with torch.no_grad():
        found, known = (each(rows.tokens).logits for each in (tuned, model))
    torch.testing.assert_close(found, known, atol=1e-3, rtol=1e-3)


def tuned(config: Any, struck: tuple[Fault, ...] = ()) -> dict[str, Any]:
    """Train a model with dropout and a tied layer; return its final state to the last bit."""
    faults.add_faults(*struck)
    names: dict[str, Any] = {}
    exec(ROWS, names)
    names["SHAPE"].update({"tie_word_embeddings": True, "attention_dropout": 0.2})
    torch.manual_seed(0)
    model, rows = transformers.LlamaForCausalLM(names["SHAPE"]), names["Rows"]()
    strike = lambda step, values: faults.strike(step)  # noqa: E731
    figures = raydist.fit(config, model=model, train=rows, test=rows, on_step=strike)
    state = {name: each for name, each in model.state_dict().items() if not each.is_meta}
    weights = {name: each.full_tensor().tolist() for name, each in state.items()}
    return {"figures": figures, "weights": weights, "random": torch.get_rng_state().tolist()}


@pytest.mark.slow
def test_killed_ranks_of_its_stages_go_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in WORDS if not word.startswith(("job=", "data.shuffle", "train.steps"))]
    words += ["scale=1x4", "parallel=ddp", "parallel.pp=2", "watch.progress=none"]
    words += ["snapshot.every=1", "train.steps=14", "restart.in_place=auto"]
    alone = raydist.run(tuned, *words)
    done = raydist.run(tuned, *words, struck=(kill(0, 6), kill(3, 9, 1)))
    assert [end.rank for end in done.restarts] == [0, 3]
    assert len(losses(done)) == 14
    assert (done.values, losses(done)) == (alone.values, losses(alone))


REFUSED = """
import transformers
import raydist

def gpt2():
    shape = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2)
    return transformers.GPT2LMHeadModel(shape)

def job(config):
    raydist.fit(config, train=[{"input_ids": 1, "labels": 1}] * 64)
"""


@pytest.mark.slow
def test_a_model_that_has_no_stages_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFUSED)
    program = Program(tmp_path, *WORDS, "model._target_=mine.gpt2", "parallel=pp", "scale=1x2")
    assert program.wait() == 2, program.screen
    words = "GPT2LMHeadModel has no plan of stages (_pp_plan); set parallel=fsdp parallel.pp=1"
    assert words in " ".join(program.screen.split())
    assert "launch:" not in program.screen
