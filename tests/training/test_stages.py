"""A model cut into the stages of a pipeline: the same output, whatever goes from stage to stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset, TensorDataset

import raydist
from raydist.settings.config import Backend, Data, Job, Optim, Parallel, Train
from raydist.shared.errors import ConfigError
from raydist.training.blocks import find_blocks
from raydist.training.gpt import GPT
from raydist.training.models import MLP, SmallCNN
from raydist.training.stages import cut_model, forget_others, shared
from tests.losses import next_token
from tests.ranks import run_ranks, succeeded
from tests.training.test_parallel import whole_blocks


class Skips(nn.Module):
    """Its last lines take what was made before the first block; a block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        first = x.tanh()
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) * self.scale
        return x + first if more is None else x + more


def small(**words: Any) -> GPT:
    return GPT(layers=3, width=16, heads=2, kv_heads=1, hidden=40, **words)


TOKENS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize(
    ("model", "batch", "stages", "tied"),
    [
        (small(), TOKENS, 3, {"embedding.weight": (0, 2)}),
        (small(tied=False), TOKENS, 2, {}),
        (MLP(), torch.randn(4, 64), 2, {}),
        (SmallCNN(), torch.randn(4, 1, 8, 8), 2, {}),
        (Skips(), torch.randn(4, 4), 4, {"blocks.0.weight": (0, 3), "blocks.0.bias": (0, 3)}),
    ],
    ids=["gpt", "untied", "mlp", "cnn", "skips"],
)
def test_the_stages_make_the_output_of_the_model(
    model: nn.Module, batch: Any, stages: int, tied: Any
) -> None:
    wanted, names = model.eval()(batch), model.state_dict().keys()
    parts = cut_model(model, find_blocks(model), stages)
    assert {name for part in parts for name in part.state_dict()} == names
    assert shared(model, parts) == tied
    for part in parts:
        given = part.eval()(*batch) if isinstance(batch, tuple) else part.eval()(batch)
        batch = given
    assert torch.equal(batch, wanted)


def test_a_stage_keeps_its_own_parameters_only() -> None:
    model = small()
    parts = cut_model(model, find_blocks(model), 3)
    forget_others(model, parts[2])
    assert {name for name, value in model.named_parameters() if value.is_meta} >= {
        "blocks.0.attention.out.weight"
    }
    assert not any(value.is_meta for value in parts[2].parameters())
    assert {name for name, _ in parts[2].named_parameters()} >= {"embedding.weight", "norm.weight"}


class Unlike(Skips):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        return x


class Asks(Skips):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else x
        return x


@pytest.mark.parametrize(
    ("model", "stages", "words"),
    [
        (small(), 4, "GPT has 3 blocks .*too few for 4 stages; set parallel.pp=3"),
        (Unlike(), 2, "Unlike.forward differs in training and evaluation"),
        (Asks(), 2, "torch.fx cannot follow Asks.forward .*set parallel=fsdp"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model: nn.Module, stages: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cut_model(model, find_blocks(model), stages)


def in_double_precision(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return next_token(scores, following).double()


def test_after_fit_the_model_answers_on_all_ranks(tmp_path: Path) -> None:
    def evaluate(job: Job) -> Any:
        torch.manual_seed(0)
        model = small()
        text = torch.arange(160).view(16, 10)
        figures = raydist.fit(
            job, model=model, train=TensorDataset(text, text), loss=in_double_precision
        )
        return figures["loss"], model(TOKENS).tolist(), model(TOKENS[:1, :7]).shape

    job = Job(
        backend=Backend("gloo"),
        data=Data(batch_size=8),
        train=Train(steps=2, precision="bf16", accumulate=2),
    )
    one, two, whole = (
        each
        for ranks, name, batch in ((2, "pp", 8), (1, "ddp", 8))
        for each in run_ranks(
            ranks,
            replace(job, parallel=Parallel(name), data=Data(batch_size=batch)),
            evaluate,
            tmp_path / name,
        )
    )
    assert (one.error, two.error, whole.error) == ("", "", "")
    assert one.value == two.value
    assert one.losses == two.losses
    assert one.value[2] == (1, 7, 256)
    assert one.losses == pytest.approx(whole.losses, abs=0.01)  # in bf16, each in its own way
    assert torch.tensor(one.value[1]) == pytest.approx(torch.tensor(whole.value[1]), abs=0.05)


def test_a_stage_on_meta_is_made_block_by_block(tmp_path: Path) -> None:
    def build(job: Job) -> Any:
        with torch.device("meta"):
            model = small()
        whole = whole_blocks(model)
        text = torch.arange(160).view(16, 10)
        raydist.fit(job, model=model, train=TensorDataset(text, text), loss=next_token)
        part = model.forward.__self__.part  # type: ignore[attr-defined]
        values = {name: value.full_tensor().detach() for name, value in part.named_parameters()}
        held = {
            name
            for name, value in model.named_parameters()
            if not value.is_meta and name not in values
        }
        return whole, values, held, model(TOKENS)

    job = Job(
        backend=Backend("gloo"),
        data=Data(batch_size=4),
        train=Train(steps=1),
        parallel=Parallel("fsdp", pp=2),
    )
    results = run_ranks(4, replace(job, optim=Optim("sgd", 1e-9)), build, tmp_path)
    assert [one.error for one in results] == [""] * 4
    (first, begin, held, output), (_, same, _, _), (second, end, beside, _), _ = (
        one.value for one in results
    )
    assert [first, second] == [[1], [1, 1]]
    assert (held, beside) == (set(), set())  # nothing but the stage is on this rank
    assert {*begin, *end} == {*small().state_dict()}
    assert all(torch.equal(begin[name], same[name]) for name in begin)
    assert torch.equal(begin["embedding.weight"], end["embedding.weight"])
    assert float(begin["embedding.weight"].std()) == pytest.approx(0.02, rel=0.1)
    ups = [each[f"blocks.{n}.feed_forward.up.weight"] for n, each in enumerate((begin, end, end))]
    assert not torch.equal(ups[0], ups[1])
    assert not torch.equal(ups[1], ups[2])
    model = small().eval()
    model.load_state_dict(begin | end)
    assert torch.allclose(output, model(TOKENS), atol=1e-5)


class Ragged(torch.utils.data.Dataset[Any]):
    """Rows of tokens; each six are longer than those before."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(index, index + 5 + index // 6 * 2)
        return row[:-1], row[1:]


def padded(samples: list[Any]) -> Any:
    return [pad_sequence([*column], batch_first=True) for column in zip(*samples, strict=True)]


def ragged(job: Job) -> str:
    """Train on rows of any length, then on a loader whose last batch is smaller; return why it
    cannot."""
    torch.manual_seed(0)
    raydist.fit(job, model=small(), train=Ragged(), collate=padded, loss=next_token)
    if not job.parallel.microbatches:
        return ""
    batches = DataLoader(Subset(Ragged(), range(7)), batch_size=4, collate_fn=padded)
    job = replace(job, train=Train(steps=2), data=Data(global_batch=4))
    with pytest.raises(ConfigError) as caught:
        raydist.fit(job, model=small(), train=batches, loss=next_token)
    return str(caught.value)


def test_the_batches_of_a_pipeline_may_have_any_shape_that_can_be_split(tmp_path: Path) -> None:
    job = Job(
        backend=Backend("gloo"),
        data=Data(global_batch=12, shuffle=False),
        optim=Optim("sgd", lr=0.5),
        train=Train(steps=2, accumulate=2),
    )
    (alone,) = succeeded(run_ranks(1, job, ragged, tmp_path / "alone"))
    staged = replace(job, parallel=Parallel(pp=2, microbatches=2))
    for each in succeeded(run_ranks(2, staged, ragged, tmp_path / "stages")):
        assert each.losses[:2] == pytest.approx(alone.losses, abs=1e-5)
        assert "parallel.microbatches=2: a batch of 3 samples" in each.value


def test_the_batches_of_the_ranks_of_a_stage_may_differ_in_shape(tmp_path: Path) -> None:
    """In the second pass, and in the second batch of the evaluation, only one of two ranks gets a
    new shape; the other one has no samples in the last batch of the evaluation."""

    def train(job: Job) -> dict[str, float]:
        torch.manual_seed(0)
        test = Subset(Ragged(), [0, 1, 2, 3, 4, 9, 5, 10, 11])
        return raydist.fit(
            job, model=small(), train=Ragged(), test=test, collate=padded, loss=next_token
        )

    job = Job(
        backend=Backend("gloo", timeout_s=120),
        data=Data(global_batch=8, shuffle=False),
        optim=Optim("sgd", lr=0.5),
        train=Train(steps=3, accumulate=4),
    )
    (alone,) = succeeded(run_ranks(1, job, train, tmp_path / "alone"))
    staged = replace(
        job,
        parallel=Parallel("fsdp", pp=2, microbatches=2),
        train=replace(job.train, accumulate=2),
    )
    for each in succeeded(run_ranks(4, staged, train, tmp_path / "stages")):
        assert each.losses == pytest.approx(alone.losses, abs=1e-5)
        # where rows are padded depends on the number of ranks
        assert each.value["test_loss"] == pytest.approx(alone.value["test_loss"], abs=0.02)
