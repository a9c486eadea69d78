"""raydist.Recoverable in one process: where it goes on, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raydist
from raydist.shared import kinds
from raydist.shared.kinds import OfRank
from raydist.worker import context


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, an empty folder, no words."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "RAYDIST_RUN_DIR", "RAYDIST_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["job.py"])


class Line:
    """A model of one layer, its optimizer, and what goes back with them."""

    def __init__(self, config: Any, **others: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.training = raydist.Recoverable(
            config, model=self.model, optimizer=self.optimizer, **others
        )


def job(config: Any, steps: int = 4) -> tuple[list[int], list[float]]:
    """Train with noise; return the steps made, and the weights."""
    noise = torch.Generator().manual_seed(1)
    line, made = Line(config, noise=noise), []
    for step in line.training.steps(steps):
        with line.training.step():
            outputs: torch.Tensor = line.training.model(torch.randn(8, 4, generator=noise))
            (outputs + torch.rand(())).square().mean().backward()  # type: ignore[no-untyped-call]
            line.optimizer.step()
            made.append(step)
    return made, line.model.weight.flatten().tolist()


@pytest.mark.slow
def test_without_a_launcher_a_run_goes_on_where_another_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["job.py", "job.args.steps=8"])
    made, weights = raydist.main(job)
    assert made == [*range(1, 9)]
    monkeypatch.setattr(sys, "argv", ["job.py", "checkpoint.every=3"])
    assert raydist.main(job)[0] == [1, 2, 3, 4]
    monkeypatch.setattr(sys, "argv", ["job.py", "job.args.steps=8", "resume=auto"])
    assert raydist.main(job) == ([5, 6, 7, 8], weights)
    assert raydist.main(job) == ([], weights)


def twice(config: Any) -> None:
    job(config, steps=2)
    job(config, steps=1)


def test_a_second_loop_says_that_it_is_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps were compared with those of the first: a run that failed in both was given up."""
    found: list[kinds.Begin] = []
    emit = context.emit_event

    def note(event: OfRank) -> None:
        found.extend([event] if isinstance(event, kinds.Begin) else [])
        emit(event)

    monkeypatch.setattr(context, "emit_event", note)
    raydist.main(twice)
    assert [(event.fit, event.steps) for event in found] == [(None, 2), (2, 1)]


def without_block(config: Any) -> None:
    for _ in Line(config).training.steps(3):
        pass


def unloadable(config: Any) -> None:
    next(Line(config, odd=Odd()).training.steps(3))


def wrapped(config: Any) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raydist.Recoverable(config, model=model, optimizer=optimizer)


def more(config: Any) -> None:
    next(Line(config, average=torch.zeros(2)).training.steps(9))


def in_shards() -> None:
    raydist.sharded.save(3, {"weight": torch.zeros(2)}, wait=True)


class Odd:
    """Its state is no number, tensor or text."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": Path("here")}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (without_block, raydist.RaydistError, r"step 1 was not made .*with training.step"),
        (unloadable, TypeError, r"the state\['parts'\]\['odd'\]\['at'\] is a pathlib"),
        (wrapped, TypeError, r"give raydist\.Recoverable the model itself"),
    ],
)
def test_what_cannot_go_back_is_refused(
    function: Any, error: type[Exception], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((error, SystemExit)) as refused:
        raydist.main(function)
    assert re.search(text, f"{refused.value} {capfd.readouterr().err}")


def test_outside_of_a_run_there_are_no_steps() -> None:
    with pytest.raises(
        raydist.RaydistError, match=r"outside a run: end the file with raydist.main"
    ):
        next(Line(raydist.Job()).training.steps(3))
    with pytest.raises(TypeError, match=r"losses= is a list: raydist.Recoverable takes tensors, "):
        Line(raydist.Job(), losses=[])


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (job, r"does not fit .*'average'.*resume=none"),
        (in_shards, r"resume=.*step-00000003: it was saved in shards.*resume=none"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    before: Any, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raydist.main(before)
    monkeypatch.setattr(sys, "argv", ["job.py", "resume=auto"])
    with pytest.raises(SystemExit) as ended:
        raydist.main(more)
    assert ended.value.code == 2
    assert re.search(text, capfd.readouterr().err)
