"""Models that compute their own loss: what they are called with, and where their loss is found. On
real gloo ranks."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import raydist
from raydist.settings.config import Backend, Checkpoint, Data, Job, Optim, Parallel, Train
from raydist.worker import context
from tests.ranks import RankResult, run_ranks, succeeded

FEATURES, CLASSES, STEPS, BATCH = 6, 3, 5, 8
BASE = Job(
    backend=Backend("gloo"),
    data=Data(global_batch=BATCH, shuffle=False),
    optim=Optim("sgd", lr=0.1),
    train=Train(steps=STEPS),
    checkpoint=Checkpoint(every=99),
    seed=5,
)
DIVISIONS = {
    "ddp": BASE,
    "fsdp": replace(BASE, parallel=Parallel("fsdp")),
    "accumulated": replace(BASE, train=replace(BASE.train, accumulate=2)),
}


class Net(nn.Module):
    """Two blocks and a head: features -> scores."""

    def __init__(self, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(features, features) for _ in range(2)))
        self.head = nn.Linear(features, classes)

    def forward(self, features: Tensor) -> Any:
        return self.head(self.blocks(features))


class Named(Net):
    """Takes keywords, as the models of transformers do; `form` is the form of its output."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        scores = super().forward(features)
        return scores if labels is None else self.form(F.cross_entropy(scores, labels), scores)


class Placed(Net):
    """Takes inputs and targets by their places."""

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(features)
        return scores, F.cross_entropy(scores, labels)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "attribute": lambda loss, scores: SimpleNamespace(loss=loss, logits=scores),
    "mapping": lambda loss, scores: {"loss": loss, "logits": scores},
    "tuple": lambda loss, scores: (loss, scores),
    "loss alone": lambda loss, scores: loss,
}


class Rows(TensorDataset):
    """Samples as dicts of columns, the target first."""

    def __getitem__(self, index: int) -> Any:
        features, label = (tensor[index] for tensor in self.tensors)
        return {"labels": label, "features": features}


class RowStream(IterableDataset[Any]):
    """The same samples as a stream."""

    def __iter__(self) -> Iterator[Any]:
        rows = Rows(*tensors())
        return (rows[index] for index in range(len(rows)))


def tensors(
    samples: int = BATCH * STEPS, features: int = FEATURES, classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=drawn)
    return inputs, torch.randint(classes, (samples,), generator=drawn)


def user_dict(samples: list[Any]) -> Any:
    """Collate into a mapping that is no dict, as the tokenizers of transformers do."""
    return UserDict(default_collate(samples))


def loader(accumulate: int) -> Any:
    """Return this rank's batches of the same steps."""
    me = context.rank()
    part = BATCH // me.world_size // accumulate
    order = [
        [*range(first, first + part)]
        for micro in range(STEPS * accumulate)
        for first in [(micro * me.world_size + me.rank) * part]
    ]
    return DataLoader(Rows(*tensors()), batch_sampler=order)


def right(output: Any, batch: Any) -> Any:
    """Return 1 for each sample whose highest score is that of its label."""
    if isinstance(batch, Mapping):
        return (output["logits"].argmax(dim=1) == batch["labels"]).float()
    scores, labels = (output[0], batch[1]) if isinstance(output, tuple) else (output, batch)
    return (scores.argmax(dim=1) == labels).float()


def figures(job: Job, model: nn.Module, **given: Any) -> Any:
    """Return what a training returns, and the loss of each of its steps."""
    here = context.current()
    before, losses = here.emit, []

    def emit(event: Any) -> None:
        if isinstance(event, raydist.events.Report) and "loss" in event.values:
            losses.append(event.values["loss"])
        before(event)

    here.emit = emit
    try:
        return raydist.fit(job, model=model, **given), losses
    except raydist.RaydistError as error:
        return str(error)
    finally:
        here.emit = before


def every(job: Job) -> dict[str, Any]:
    """Train in each way that the tests below look at."""
    plain, rows = TensorDataset(*tensors()), Rows(*tensors())
    known = figures(
        job, Net(), train=plain, test=plain, loss=F.cross_entropy, metrics={"right": right}
    )
    found = {form: figures(job, Named(make), train=rows, test=rows) for form, make in FORMS.items()}
    mapping = FORMS["mapping"]
    return found | {
        "loss=": known,
        "placed": figures(job, Placed(), train=plain, test=plain, metrics={"right": right}),
        "named": figures(job, Named(mapping), train=rows, test=rows, metrics={"right": right}),
        "stream": figures(job, Named(mapping), train=RowStream(), test=rows),
        "loader": figures(job, Named(mapping), train=loader(job.train.accumulate), test=rows),
        "collated": figures(job, Named(mapping), train=rows, test=rows, collate=user_dict),
        "no loss": figures(job, Net(), train=TensorDataset(tensors()[0])),
        "no labels": figures(
            job, Named(lambda *_: SimpleNamespace(loss=None, logits=0)), train=rows
        ),
    }


@pytest.fixture(scope="module", params=DIVISIONS)
def results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[RankResult]]:
    """What each of two ranks has got under a division."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, succeeded(run_ranks(2, DIVISIONS[request.param], every, folder))


def test_a_models_own_loss_is_that_of_loss(results: Any) -> None:
    division, ranks = results
    for rank in ranks:
        (known, losses), shared = rank.value["loss="], ["placed", "named"]
        assert len(losses) == STEPS
        assert [rank.value[name] for name in shared] == [(known, losses)] * 2, division
        del known["right"]
        for name in (*FORMS, "stream", "loader", "collated"):
            assert rank.value[name] == (known, losses), (division, name)


def test_a_model_that_returns_no_loss_is_named(results: Any) -> None:
    for rank in results[1]:
        assert "called it returned a Tensor of shape" in rank.value["no loss"]
        assert (
            "called with labels, features it returned a SimpleNamespace"
            in (rank.value["no labels"])
        )


def test_a_pipeline_needs_a_loss(tmp_path: Path) -> None:
    def refused(job: Job) -> str:
        with pytest.raises(raydist.ConfigError) as error:
            raydist.fit(job, model=Named(FORMS["mapping"]), train=Rows(*tensors()))
        return error.value.message

    job = replace(BASE, parallel=Parallel("pp"), data=Data(global_batch=BATCH))
    for rank in succeeded(run_ranks(2, job, refused, tmp_path)):
        assert rank.value.startswith("parallel.pp=2: only the last stage has the output")
