"""Recomputation, groups of parameters and optimizers of a person's own: the same training under each
division, and after a resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raydist.settings.compose import compose
from raydist.settings.config import Checkpoint, Data, Job, Optim, Parallel, Train
from raydist.settings.mesh import mesh_shape
from raydist.shared.errors import ConfigError
from raydist.training import memory, optim
from raydist.training.blocks import find_blocks
from raydist.training.gpt import GPT
from raydist.training.models import SmallCNN
from raydist.training.recompute import recompute
from raydist.worker import context
from raydist.worker.torch_private import fake_tensors
from tests.ranks import RankResult, run_ranks, succeeded
from tests.training.test_parallel import BASE, common_losses, gpt

STEPS, SAVED = 4, 2


class Mean(torch.optim.Optimizer):
    """Follows the mean of the gradients. It counts its steps in numbers, as some optimizers do: one
    for each parameter, and one for each group."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for value in (each for each in group["params"] if each.grad is not None):
                state = self.state[value]
                state["turn"] = state.get("turn", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(value))
                mean.lerp_(value.grad, 1 / (1 + state["turn"] + 0.5 * group["steps"]))
                value.mul_(1 - group["lr"] * group["weight_decay"]).add_(mean, alpha=-group["lr"])


TASK = replace(BASE, checkpoint=Checkpoint(every=SAVED, keep=9), train=Train(steps=STEPS))
WAYS = {
    "nadam": replace(
        TASK,
        optim=Optim(
            _target_="torch.optim.NAdam",
            lr=0.01,
            args={"weight_decay": 1.0, "decoupled_weight_decay": True},
            groups="no_decay",
            schedule="wsd",
            decay_ratio=0.5,
            min_lr_ratio=0.1,
            warmup=2,
        ),
    ),
    "mean": replace(
        TASK,
        optim=Optim(
            _target_=f"{__name__}.Mean", lr=0.5, args={"weight_decay": 0.1}, groups="no_decay"
        ),
    ),
}
DIVISIONS = {
    "ddp": Parallel(),
    "fsdp": Parallel("fsdp"),
    "tp": Parallel(shard=2, tp=2),
    "pp": Parallel("fsdp", pp=2),
}


def several(job: Job) -> list[str]:
    """Train in each way, and go on from the checkpoint in the middle of two of them; return what was
    trained. The job's name has the kinds of recomputation."""
    here, begun = context.current(), list[str]()
    folder, kinds = here.rank.run_dir, job.name.split(",")
    for way, kind in (*(("nadam", kind) for kind in kinds), ("mean", "none")):
        name = f"{way}-{kind}"
        settings = replace(WAYS[way], parallel=job.parallel)
        settings = replace(settings, train=replace(settings.train, recompute=kind))
        for again in (False, True) if kind in (kinds[-1], "none") else (False,):
            here.rank = replace(here.rank, run_dir=folder / name / f"again-{again}")
            here.newest = here.fits = 0  # each training is the first of its run
            at = folder / name / "again-False" / "checkpoints" / f"step-{SAVED:08d}"
            with resuming(str(at) if again else ""):
                gpt(settings)
            begun.append(f"{name}{' again' if again else ''}")
    return begun


@contextmanager
def resuming(path: str) -> Iterator[None]:
    if path:
        os.environ["RAYDIST_RESUME"] = path
    yield
    os.environ.pop("RAYDIST_RESUME", None)


def by_training(results: list[RankResult]) -> dict[str, list[float]]:
    """Return the losses of each training, by its name."""
    losses, found = common_losses(results), dict[str, list[float]]()
    for name in results[0].value:
        count = STEPS - SAVED if name.endswith("again") else STEPS
        found[name], losses = losses[:count], losses[count:]
    assert not losses
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """The losses by division and training, on four ranks."""
    found = {}
    for name, parallel in DIVISIONS.items():
        kinds = "none,blocks,selective" if name == "ddp" else "blocks,selective"
        job = replace(BASE, parallel=parallel, name=kinds)
        folder = tmp_path_factory.mktemp(name)
        found[name] = by_training(succeeded(run_ranks(4, job, several, folder)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_the_losses_are_those_without_recomputation(trained: Any, division: str) -> None:
    wanted = trained["ddp"]["nadam-none"]
    assert wanted[-1] < wanted[0]
    for how in ("blocks", "selective"):
        assert trained[division][f"nadam-{how}"] == pytest.approx(wanted, abs=1e-5)
    assert trained[division]["mean-none"] == pytest.approx(trained["ddp"]["mean-none"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_a_resume_is_exact_with_any_optimizer(trained: Any, division: str) -> None:
    of_division = trained[division]
    for name in ("nadam-selective", "mean-none"):
        assert of_division[f"{name} again"] == of_division[name][SAVED:], name


# Groups and classes


def test_what_gets_no_weight_decay() -> None:
    with torch.device("meta"):
        model = GPT(layers=1, width=16, heads=2, kv_heads=1, hidden=40, tied=False)
    assert optim.without_decay(model) == {
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.feed_forward_norm.weight",
        "norm.weight",
    }
    settings = Optim("adamw", args={"weight_decay": 0.1}, groups="no_decay")
    values = dict(model.named_parameters())
    groups = optim.in_groups(settings, values, optim.without_decay(model))
    own = optim.optimizer(settings, groups, 0.1)
    assert [group["weight_decay"] for group in own.param_groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in own.param_groups] == [len(values) - 4, 4]
    bias = nn.Linear(2, 3)
    assert optim.without_decay(bias) == {"bias"}


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (Optim(_target_="nowhere.Lion"), "optim=nowhere.Lion: it cannot be imported"),
        (Optim(_target_="torch.optim.Lion"), "optim=torch.optim.Lion: it cannot be imported"),
        (
            Optim(_target_="torch.nn.Linear"),
            "optim=torch.nn.Linear: it is not a class of torch.optim.Optimizer",
        ),
        (Optim(_target_="torch.optim.LBFGS"), "optim=torch.optim.LBFGS: its step needs a closure"),
        (
            Optim(_target_="torch.optim.Rprop", groups="no_decay"),
            "optim.groups=no_decay: Rprop has no weight decay",
        ),
        (
            Optim(_target_="torch.optim.NAdam", args={"beta": 1}),
            "optim.args.beta=1: NAdam has no such argument",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(settings: Optim, cause: str) -> None:
    def make() -> None:
        values = {"w": nn.Parameter(torch.zeros(2, 2))}
        optim.optimizer(settings, optim.in_groups(settings, values, set()), 0.1)

    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(cause)


def test_an_optimizer_by_its_class_has_no_arguments_of_another() -> None:
    for choice in ("optim=torch.optim.NAdam", "optim._target_=torch.optim.NAdam"):
        settings = compose([choice, "optim.args.eps=0.1"]).optim
        assert (settings._target_, settings.args) == ("torch.optim.NAdam", {"eps": 0.1})
        assert settings.title == "NAdam"
    with pytest.raises(ConfigError, match=r"optim=a\.B: chosen twice"):
        compose(["optim=adam", "optim._target_=a.B"])
    with pytest.raises(ConfigError, match=r"optim\.fused=true: a class of your choice"):
        compose(["optim=a.B", "optim.fused=true"])


# Recomputation


def test_batch_norm_is_not_counted_twice() -> None:
    model = SmallCNN()
    with pytest.raises(
        ConfigError, match=r"^train\.recompute=blocks: Sequential has a BatchNorm2d"
    ):
        recompute([model.features], "blocks")
    recompute([model.features.eval()], "blocks")


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set parallel\.blocks=CLASS or train\.recompute=none"):
        find_blocks(nn.Linear(2, 2), "", "train.recompute=none")


class Alive(TorchDispatchMode):
    """Notes the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = operation(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
        return output

    def bytes_without(self, values: list[torch.Tensor]) -> int:
        """Return the bytes of those that still exist, without these."""
        known = {StorageWeakRef(value.untyped_storage()) for value in values}  # type: ignore[no-untyped-call]
        left = [ref for ref in self.made if not ref.expired() and ref not in known]  # type: ignore[no-untyped-call]
        return sum(map(self.made.__getitem__, left))


@pytest.mark.parametrize("how", ["none", "blocks", "selective"])
def test_the_plan_counts_what_is_kept_for_the_backward_pass(how: str) -> None:
    sizes: Any = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 96}
    job = replace(BASE, data=Data(global_batch=4), train=Train(recompute=how))
    with fake_tensors():
        planned = GPT(**sizes)
        kept = memory.Kept({memory._storage(value) for value in planned.parameters()})
        blocks = [] if how == "none" else find_blocks(planned)
        with kept.watch(planned, blocks, selective=how == "selective"):
            planned(planned.example(4))
        shape = mesh_shape(job.parallel, 1, 1)
        (counted,) = memory.activations(planned, [planned], job, shape)
    assert counted.kept == sum(kept.bytes.values())
    assert counted.recomputed == kept.largest_block
    model = GPT(**sizes)
    if how != "none":
        recompute(find_blocks(model), how)
    with Alive() as alive:
        scores = model(model.example(4))
    # without the scores, which the loss keeps
    held = alive.bytes_without([*model.parameters(), scores])
    assert held == sum(kept.bytes.values())
    assert (kept.largest_block > 0) == (how != "none")


@pytest.mark.parametrize("how", ["blocks", "selective"])
def test_dropout_draws_the_same_again(how: str) -> None:
    def gradients(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)) for _ in "ab"]
        if recomputed:
            recompute(blocks, how)
        nn.Sequential(*blocks)(torch.randn(4, 8)).sum().backward()
        return [cast("torch.Tensor", each.grad) for block in blocks for each in block.parameters()]

    for own, wanted in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(own, wanted)
