"""What a training may ask for, all at once, under each division of the model on four ranks: the
figures are those of a loop by hand in one process, also those of a training that loses a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.training.gpt import GPT
from raydist.training.optim import without_decay
from tests.conftest import ROOT
from tests.programs import Program
from tests.scripts.everything import BAD, BATCH, KILLED, SIZES, STEPS, TESTS, Rows, next_token

safetensors = pytest.importorskip("safetensors.torch")

LR, DECAY, CLIP, MIN_RATIO, WARMUP = 0.5, 0.1, 0.5, 0.1, 2
WORDS = (
    f"job={ROOT}/tests/scripts/everything.py",
    "scale=1x4",
    "group=inline",
    "backend=gloo",
    "seed=5",
    "watch.progress=none",
    "data.shuffle=false",
    f"data.global_batch={BATCH}",
    "snapshot.every=3",
    "checkpoint.every=5",
    "optim=sgd",
    f"optim.lr={LR}",
    f"optim.args.weight_decay={DECAY}",
    "optim.groups=no_decay",
    "optim.schedule=wsd",
    "optim.decay_ratio=0.5",
    f"optim.min_lr_ratio={MIN_RATIO}",
    f"optim.warmup={WARMUP}",
    f"train.steps={STEPS}",
    f"train.clip={CLIP}",
    "train.accumulate=2",
    "train.loss_per=token",
    "train.weights=pretrained",
    "train.nan=skip",
    "train.check_resume=true",
    "train.evaluate_steps=5",
    "train.evaluate_batches=2",
)
DIVISIONS = {
    "ddp": ("train.recompute=selective",),
    "hsdp": ("parallel=hsdp", "parallel.shard=2", "train.recompute=selective"),
    "tp": ("parallel=tp", "parallel.tp=2", "train.recompute=blocks"),
    "pp": ("parallel=fsdp", "parallel.pp=2", "train.recompute=selective"),
}


def rate(step: int) -> float:
    """Return the learning rate of a step, from 0."""
    done = (step - WARMUP) / (STEPS - WARMUP)
    left = min(1.0, max(0.0, 1 - (done - 0.5) / 0.5))
    return LR * ((step + 1) / WARMUP if step < WARMUP else MIN_RATIO + (1 - MIN_RATIO) * left)


def by_hand(model: GPT) -> dict[str, list[Any]]:
    """Train a model in one process, with each step in one pass; return the figures of its steps."""
    bare, found = without_decay(model), dict[str, list[Any]](loss=[], grad_norm=[], lr=[], test=[])
    named = dict(model.named_parameters())
    groups: list[Any] = [
        {"params": [each for name, each in named.items() if name not in bare]},
        {"params": [named[name] for name in bare], "weight_decay": 0.0},
    ]
    settings: Any = {"momentum": 0.9, "nesterov": True, "weight_decay": DECAY}
    optimizer, rows = torch.optim.SGD(groups, lr=LR, **settings), Rows()
    for step in range(STEPS):
        part = slice(BATCH * step, BATCH * (step + 1))
        loss = next_token(model(rows.tokens[part]), rows.labels[part])
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step + 1 != BAD:
            optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm.item())
        found["lr"].append(rate(step))
        if (step + 1) % 5 == 0 or step + 1 == STEPS:
            with torch.no_grad():
                tested = next_token(model(rows.tokens[:TESTS]), rows.labels[:TESTS])
                found["test"].append(tested.item())
    return found


def saved_tokens(run_dir: Path, rank: int) -> torch.Tensor:
    """Return the tokens of the two batches that a rank has saved of the step that is not finite."""
    file = run_dir / "nan" / f"step-{BAD:08d}" / f"rank-{rank}.pt"
    one, two = (batch["tokens"] for batch in torch.load(file, weights_only=True))
    return torch.cat([one, two])


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of the weights that all begin with, and the figures of the training by hand."""
    folder = tmp_path_factory.mktemp("begin")
    torch.manual_seed(1)
    model = GPT(**SIZES)
    safetensors.save_file(dict(model.named_parameters()), folder / "model.safetensors")
    return folder, by_hand(model)


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_all_features_together_are_a_loop_by_hand(
    tmp_path: Path, wanted: Any, division: str
) -> None:
    weights, known = wanted
    (tmp_path / "pretrained").symlink_to(weights)
    program = Program(tmp_path, *WORDS, *DIVISIONS[division])
    assert program.wait(300) == 0, program.screen
    reports = [each for each in program.events("report") if each["rank"] == 0]
    steps = [each["values"] for each in reports if "loss" in each["values"]]
    tests = [each["values"]["test_loss"] for each in reports if "test_loss" in each["values"]]
    unbroken, killed, ended = steps[:STEPS], steps[STEPS : 2 * STEPS + 1], steps[2 * STEPS + 1 :]
    for name in ("loss", "grad_norm", "lr"):
        found = [values[name] for values in unbroken]
        assert found == pytest.approx(known[name], abs=1e-5, nan_ok=True), name
    assert tests[:3] == pytest.approx(known["test"], abs=1e-5)
    # Snapshots are of each third step: the one after it is made twice.
    assert [values["samples"] // BATCH for values in killed[KILLED - 1 :]] == [
        KILLED,
        *range(KILLED, STEPS + 1),
    ]
    del killed[KILLED]
    assert repr(killed) == repr(unbroken)  # NaN is not equal to itself
    assert repr(ended) == repr(unbroken[: BAD - 1])
    parts = [saved_tokens(program.run_dir, rank) for rank in range(4)]
    rows = {tuple(row) for part in parts for row in part.tolist()}
    assert rows == {tuple(row) for row in Rows().tokens[BATCH * (BAD - 1) : BATCH * BAD].tolist()}
    (checked,) = program.events("checked")
    assert (checked["resumed"], checked["steps"], checked.get("differs")) == (KILLED - 1, 1, None)
