"""The functions of a job that raydist.fit calls: `train_step`, `on_step`, `on_evaluate`. On real
gloo ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Backend, Checkpoint, Data, Job, Optim, Parallel, Snapshot, Train
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import SAVE_SLOT
from raydist.training.fit import of_this_run
from raydist.worker import context
from tests.ranks import RankResult, run_ranks, succeeded
from tests.training import test_own_loss
from tests.training.test_sharded import memory

FEATURES, CLASSES, STEPS, BATCH = 8, 4, 4, 16
LR = 0.5
BASE = Job(
    backend=Backend("gloo"),
    data=Data(global_batch=BATCH, shuffle=False),
    optim=Optim("sgd", lr=LR, args={}),
    train=Train(steps=STEPS, grad_norm=True, evaluate_steps=2, accumulate=2),
    checkpoint=Checkpoint(every=99),
    seed=5,
)
DIVISIONS = {
    "ddp": Parallel("ddp"),
    "fsdp": Parallel("fsdp"),
    "tp": Parallel("tp", tp=2),
}


class Net(test_own_loss.Net):
    """The model that tp can divide."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.tp_plan = {"blocks.0": "colwise", "blocks.1": "rowwise"}

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(features).relu())
        return scores


def tensors() -> tuple[Tensor, Tensor]:
    return test_own_loss.tensors(BATCH * STEPS, FEATURES, CLASSES)


def once(model: nn.Module, batch: Any) -> Tensor:
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def twice(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Two views of a sample should get the same scores, as in consistency training."""
    features, labels = batch
    scores, others = model(features), model(features.flip(1))
    return {
        "loss": F.cross_entropy(scores, labels) + F.mse_loss(scores, others),
        "scores": scores,
    }


def right(output: Any, batch: Any) -> Any:
    return (output["scores"].argmax(dim=1) == batch[1]).float()


class Trained:
    """What a training returns, and what its hooks got."""

    def __init__(self, job: Job, **given: Any) -> None:
        samples = TensorDataset(*tensors())
        test = TensorDataset(*(each[:26] for each in tensors()))
        self.steps: list[tuple[int, dict[str, Any]]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.modes = set[bool]()
        if step := given.get("train_step"):
            given["train_step"] = partial(self._noted, step)
        self.result = raydist.fit(
            job,
            model=Net(),
            train=samples,
            test=test,
            on_step=self._on_step,
            on_evaluate=lambda step, values: self.evaluations.append((step, dict(values))),
            **given,
        )

    def _noted(self, step: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        self.modes.add(model.training and torch.is_grad_enabled())
        return step(model, batch)

    def _on_step(self, step: int, values: Any) -> None:
        assert {values[name].shape for name in ("loss", "grad_norm")} == {torch.Size([])}
        self.steps.append((step, {name: float(value) for name, value in values.items()}))


def every(job: Job) -> dict[str, Trained]:
    return {
        "loss": Trained(job, loss=F.cross_entropy),
        "once": Trained(job, train_step=once),
        "twice": Trained(job, train_step=twice, metrics={"right": right}),
    }


def by_hand(
    step: Callable[..., Any], tests: int = 26
) -> tuple[list[dict[str, float]], list[float]]:
    """Train in one process, each step in one pass; return the figures of steps and evaluations."""
    net, (features, labels) = Net(), tensors()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    steps, evaluations = [], []
    for number in range(STEPS):
        part = slice(number * BATCH, (number + 1) * BATCH)
        output = step(net, (features[part], labels[part]))
        loss = output["loss"] if isinstance(output, dict) else output
        optimizer.zero_grad()
        loss.backward()
        gradients = [each.grad for each in net.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
        if number % 2:
            with torch.no_grad():
                output = step(net, (features[:tests], labels[:tests]))
            evaluations.append(float(output["loss"] if isinstance(output, dict) else output))
    return steps, evaluations


@pytest.fixture(scope="module", params=DIVISIONS)
def results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    """What each of four ranks has got under a division."""
    folder = tmp_path_factory.mktemp(request.param)
    job = replace(BASE, parallel=DIVISIONS[request.param])
    return succeeded(run_ranks(4, job, every, folder))


def test_a_step_of_the_jobs_own_trains_as_in_one_process(results: Any) -> None:
    steps_by_name: dict[str, Any] = {"loss": once, "once": once, "twice": twice}
    for name, step in steps_by_name.items():
        steps, tests = by_hand(step)
        for rank in results:
            trained = rank.value[name]
            assert [number for number, _ in trained.steps] == [*range(1, STEPS + 1)]
            for figure in ("loss", "grad_norm"):
                found = [values[figure] for _, values in trained.steps]
                assert found == pytest.approx([each[figure] for each in steps], abs=1e-5), name
            assert [number for number, _ in trained.evaluations] == [2, 4]
            measured = [values["test_loss"] for _, values in trained.evaluations]
            assert measured == pytest.approx(tests, abs=1e-5), name
            assert trained.modes == (set() if name == "loss" else {True, False})
    assert 0 < results[0].value["twice"].result["right"] <= 1


def test_hooks_get_on_all_ranks_what_is_reported(results: Any) -> None:
    told = [event for event in results[0].kind("report") if "loss" in event["values"]]
    hooked = [each for name in ("loss", "once", "twice") for each in results[0].value[name].steps]
    assert [(event["step"], event["values"]) for event in told] == hooked
    for rank in results[1:]:
        for name, trained in rank.value.items():
            assert trained.steps == results[0].value[name].steps
            assert trained.evaluations == results[0].value[name].evaluations
            assert trained.result.items() >= trained.evaluations[-1][1].items()


def refusal(job: Job, **given: Any) -> str:
    """Return the error of a training that does not go on."""
    with pytest.raises(raydist.RaydistError) as error:
        raydist.fit(job, model=Net(), train=TensorDataset(*tensors()), **given)
    return f"{type(error.value).__name__}: {error.value.message}"


def shapeless(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_what_can_not_be_called_is_refused_before_the_training(tmp_path: Path) -> None:
    def refused(job: Job) -> list[str]:
        loss: Any = {"loss": F.cross_entropy}
        return [
            refusal(job, on_step=lambda step: None, **loss),
            refusal(job, on_evaluate=7, **loss),
            refusal(job, train_step=lambda model, inputs, target: None),
            refusal(job, train_step=once, **loss),
        ]

    (rank,) = succeeded(run_ranks(1, BASE, refused, tmp_path))
    wanted = (
        "on_step=<lambda>(step): too many positional arguments; "
        "raydist.fit calls on_step(step, values)",
        "on_evaluate=7 cannot be called: raydist.fit calls on_evaluate(step, values)",
        "train_step=<lambda>(model, inputs, target): missing a required argument: 'target'; "
        "raydist.fit calls train_step(model, batch)",
        "train_step= computes the loss: give raydist.fit no loss= beside it",
    )
    assert rank.value == [f"ConfigError: {text}" for text in wanted]
    assert not rank.kind("begin")


def test_a_step_without_a_loss_is_named(tmp_path: Path) -> None:
    def refused(job: Job) -> str:
        return refusal(job, train_step=shapeless)

    (rank,) = succeeded(run_ranks(1, BASE, refused, tmp_path))
    assert rank.value == (
        "RaydistError: train_step must return the loss, a tensor of shape [] or an output with "
        ".loss, but it returned a Tensor of shape [8]"
    )


def test_what_a_hook_raises_ends_the_training(tmp_path: Path) -> None:
    def stopped(job: Job) -> list[int]:
        seen = []

        def on_step(step: int, values: Any) -> None:
            seen.append(step)
            if step == 2:
                raise ArithmeticError("no more")

        samples: Any = TensorDataset(*tensors())
        with pytest.raises(ArithmeticError):
            raydist.fit(job, model=Net(), train=samples, loss=F.cross_entropy, on_step=on_step)
        return seen

    for rank in succeeded(run_ranks(2, BASE, stopped, tmp_path)):
        assert rank.value == [1, 2]


class Drawing(nn.Module):
    """Draws random numbers, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.layer(features + 0.1 * torch.randn(len(features), 1))
        return scores


class Kept:
    """A training on one rank whose states are kept in memory. A hook adds 1 to the bias after
    each evaluation."""

    def __init__(self, job: Job, descriptor: int, stop: int = 0) -> None:
        """`stop`: the step after which the rank fails, before its state is kept."""
        here = context.current()
        here.memory, here.buffer, here.fits = (descriptor, descriptor), None, 0
        self.saved: dict[int, Tensor] = {}
        self.hooked: dict[int, Tensor] = {}
        self.losses: dict[int, float] = {}
        self.figures: dict[str, float] = {}
        self._stop = stop
        self._model = Drawing()
        threading.Thread(
            target=self._write, args=(SnapshotBuffer(descriptor),), daemon=True
        ).start()
        with suppress(ArithmeticError):
            self.figures = raydist.fit(
                job,
                model=self._model,
                train=TensorDataset(*tensors()),
                test=TensorDataset(*tensors()),
                loss=F.cross_entropy,
                on_step=self._on_step,
                on_evaluate=self._on_evaluate,
            )
        self.bias = self._model.layer.bias.detach().clone()

    def _write(self, memory: SnapshotBuffer) -> None:
        """Note the weights of each checkpoint, in place of the writer of the node."""
        while True:
            if (slot := memory.locked_slot) >= 0:
                # A request that names a snapshot has only what that lacks.
                request = memory.read_request(SAVE_SLOT)
                self.saved[request.step] = request.state["model"]["layer.bias"].clone()
                assert slot in (SAVE_SLOT, memory.steps.get(request.step))
                memory.lock(-1)
            time.sleep(0.001)

    def _on_step(self, step: int, values: Any) -> None:
        self.losses[step] = float(values["loss"])
        if step == self._stop:
            raise ArithmeticError("no more")

    def _on_evaluate(self, step: int, values: Any) -> None:
        with torch.no_grad():
            self._model.layer.bias[0] += 1
        self.hooked[step] = self._model.layer.bias.detach().clone()


def kept(job: Job) -> tuple[Kept, Kept]:
    """Train to the end; and with a failure after the evaluation and the checkpoint of step 2."""
    torch.manual_seed(0)
    whole, descriptor = Kept(job, memory()), memory()
    torch.manual_seed(0)
    Kept(job, descriptor, stop=3)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    os.environ["RAYDIST_RESUME"] = "checkpoints/step-00000002"
    return whole, Kept(job, descriptor)


def test_what_an_evaluation_changes_is_in_checkpoints_and_after_a_restart(tmp_path: Path) -> None:
    job = replace(BASE, snapshot=Snapshot(every=1), checkpoint=Checkpoint(every=2))
    (rank,) = succeeded(run_ranks(1, job, kept, tmp_path))
    whole, restarted = rank.value
    assert [*whole.saved] == [*whole.hooked] == [2, 4]
    for step, bias in whole.hooked.items():
        assert torch.equal(whole.saved[step], bias)
    assert [*restarted.hooked] == [2, 4]
    assert restarted.losses == {step: whole.losses[step] for step in (3, 4)}


@pytest.mark.parametrize(("every", "again"), [(1, [4]), (3, [])])
def test_a_restart_after_the_end_leaves_what_the_last_evaluation_has_changed(
    every: int, again: list[int], tmp_path: Path
) -> None:
    """The state was that after the evaluation, and the hook changed it once more.

    With a state of every step, that before the evaluation is in memory.
    """

    def end_twice(job: Job) -> tuple[Kept, Kept]:
        torch.manual_seed(0)
        descriptor = memory()
        ended = Kept(job, descriptor)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        os.environ["RAYDIST_RESUME"] = "checkpoints/step-00000004"
        return ended, Kept(job, descriptor)

    job = replace(BASE, snapshot=Snapshot(every=every), checkpoint=Checkpoint(every=2))
    (rank,) = succeeded(run_ranks(1, job, end_twice, tmp_path))
    ended, restarted = rank.value
    assert torch.equal(restarted.bias, ended.bias)
    assert restarted.figures == ended.figures
    assert [*restarted.hooked] == again


@pytest.mark.parametrize(
    ("state", "ours"),
    [
        ({"config": {"dir": "runs/first"}}, False),
        ({"config": {"dir": "runs/second"}}, True),
        ({}, True),
    ],
)
def test_a_run_evaluates_what_it_resumes_though_that_was_evaluated(
    state: dict[str, Any], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its test samples may be others. After its restart it took the results for its own."""
    job = replace(BASE, dir="runs/second")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("RAYDIST_RUN_DIR", "runs/second")
    assert of_this_run(job, state) is ours
    monkeypatch.delenv("RAYDIST_RUN_DIR")
    assert of_this_run(job, state)  # torchrun's next attempt composes another folder


@pytest.mark.parametrize(("steps", "evaluate_every"), [(6, 1), (4, 2)])
def test_the_last_checkpoint_has_what_the_last_evaluation_changes(
    steps: int, evaluate_every: int, tmp_path: Path
) -> None:
    """It is not due by the number of epochs; the checkpoint is, by that of steps."""
    train = Train(steps=steps, evaluate_every=evaluate_every)
    job = replace(BASE, train=train, snapshot=Snapshot(every=1), checkpoint=Checkpoint(every=2))
    (rank,) = succeeded(run_ranks(1, job, lambda job: Kept(job, memory()), tmp_path))
    assert max(rank.value.saved) == max(rank.value.hooked) == steps
    assert torch.equal(rank.value.saved[steps], rank.value.hooked[steps])


def test_a_pipeline_has_hooks_but_no_step_of_the_jobs_own(tmp_path: Path) -> None:
    def piped(job: Job) -> tuple[str, Any]:
        refused = refusal(job, train_step=once)
        return refused, Trained(job, loss=F.cross_entropy).steps

    job = replace(BASE, parallel=Parallel("pp"))
    steps, _ = by_hand(once)
    for rank in succeeded(run_ranks(2, job, piped, tmp_path)):
        refused, hooked = rank.value
        assert refused == (
            "ConfigError: parallel.pp=2: train_step= calls the whole model, and each rank has one "
            "stage of it; set parallel=fsdp parallel.pp=1"
        )
        found = [values["loss"] for _, values in hooked]
        assert found == pytest.approx([each["loss"] for each in steps], abs=1e-5)


def zeroed(job: Job) -> tuple[bool, float]:
    """Train a divided model whose hook sets all parameters to 0 after the last evaluation; return
    whether the hook had their shards, and the largest value in the state after it."""
    model, sharded = Net(), list[bool]()

    def on_evaluate(step: int, values: Any) -> None:
        sharded.extend(hasattr(each, "full_tensor") for each in model.parameters())
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()

    samples = TensorDataset(*tensors())
    raydist.fit(
        job,
        model=model,
        train=samples,
        test=samples,
        loss=F.cross_entropy,
        on_evaluate=on_evaluate,
    )
    return all(sharded), max(
        each.full_tensor().abs().max().item() for each in model.state_dict().values()
    )


def test_a_hook_changes_the_shards_of_a_divided_model(tmp_path: Path) -> None:
    job = replace(BASE, parallel=DIVISIONS["fsdp"], train=Train(steps=1, evaluate_steps=1))
    for rank in succeeded(run_ranks(2, job, zeroed, tmp_path)):
        assert rank.value == (True, 0)
