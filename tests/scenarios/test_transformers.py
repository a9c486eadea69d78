"""A model of transformers as it is, with its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import Program

transformers = pytest.importorskip("transformers")

ROWS = """
import torch
import transformers
import raydist

SHAPE = transformers.LlamaConfig(
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
    model = transformers.LlamaForCausalLM(SHAPE)
    return raydist.fit(config, model=model, train=Rows(padded=True), test=Rows(padded=True))
"""
)
TUNE = (
    ROWS
    + """
def job(config):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(SHAPE)
    figures = raydist.fit(config, model=model, train=Rows())
    raydist.models.save_weights(model, "tuned")
    return figures
"""
)
WORDS = (
    "job=mine.py",
    "scale=1x2",
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
@pytest.mark.parametrize("division", ["ddp", "fsdp", "tp"])
def test_an_unmodified_model_trains(tmp_path: Path, division: str) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    more = "train.accumulate=2", "train.loss_per=token"
    program = Program(tmp_path, *WORDS, f"parallel={division}", *more)
    assert program.wait() == 0, program.screen
    names: dict[str, Any] = {}
    exec(ROWS, names)
    torch.manual_seed(0)
    loss, test_loss = by_hand(transformers.LlamaForCausalLM(names["SHAPE"]), names["Rows"](True))
    metrics = program.result()["metrics"]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["test_loss"] == pytest.approx(test_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_a_pretrained_model_is_tuned_and_given_back(tmp_path: Path, division: str) -> None:
    names: dict[str, Any] = {}
    exec(ROWS, names)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(names["SHAPE"])
    model.save_pretrained(tmp_path / "pretrained")
    (tmp_path / "mine.py").write_text(TUNE)
    program = Program(tmp_path, *WORDS, f"parallel={division}", "train.weights=pretrained")
    assert program.wait() == 0, program.screen
    rows = names["Rows"]()
    loss, _ = by_hand(model, rows)
    assert program.result()["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert program.events("warning") == []
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert type(tuned) is transformers.LlamaForCausalLM
    with torch.no_grad():
        found, known = (each(rows.tokens).logits for each in (tuned, model))
    torch.testing.assert_close(found, known, atol=1e-3, rtol=1e-3)
