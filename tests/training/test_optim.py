"""Optimizers by name, the rate for the batch, and the shape of the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from raydist.settings.config import Job, Optim, Parallel, Train
from raydist.settings.validate import validate
from raydist.shared.errors import ConfigError
from raydist.training import optim


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_each_name_is_torchs_own_class(name: str) -> None:
    optimizer = optim.optimizer(Optim(name=name), [parameter()], 0.125)
    assert type(optimizer).__name__ == optim.OPTIMIZERS[name]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_arguments_reach_it() -> None:
    optimizer = optim.optimizer(
        Optim(name="sgd", args={"momentum": 0.9, "nesterov": True}), [parameter()], 0.1
    )
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (
        0.9,
        True,
    )


@pytest.mark.parametrize(
    ("name", "args", "say"),
    [
        ("sgd", {"momentom": 0.9}, "optim.args.momentum=0.9"),
        ("adam", {"momentum": 0.9}, "optim.args.momentum=0.9: Adam has no such argument"),
        (
            "adamw",
            {"weight_decay": -1},
            "optim.args.weight_decay=-1: AdamW refuses it: Invalid weight_decay",
        ),
        (
            "sgd",
            {"nesterov": True},
            "optim.args.nesterov=True: SGD refuses it: Nesterov momentum requires",
        ),
        ("sgd", {"lr": 0.5}, "optim.lr=0.5"),
        ("adamw", {"fused": True}, "optim.fused=true"),
        ("sgd", {"params": []}, "has no such argument"),
    ],
)
def test_wrong_arguments_are_named(name: str, args: dict[str, Any], say: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optim.optimizer(Optim(name=name, args=args), [parameter()], 0.1)
    assert say == caught.value.suggestion or say in str(caught.value)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_with_the_batch(rule: str, rate: float) -> None:
    assert optim.learning_rate(Optim(lr=0.1, scaling=rule, scaling_batch=64), 256) == pytest.approx(
        rate
    )


def rates(**words: Any) -> list[float]:
    """Return the optimizer's learning rate in each of 12 steps."""
    settings = Optim(**words)
    optimizer = optim.optimizer(settings, [parameter()], 1.0)
    schedule = optim.schedule(settings, optimizer, optim.Course(12))
    seen = []
    for _ in range(12):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_constant() -> None:
    assert rates() == [1.0] * 12


def test_warm_up_climbs_to_the_full_rate() -> None:
    assert rates(warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1.0] + [1.0] * 8)


def test_cosine() -> None:
    assert rates(schedule="cosine") == pytest.approx(
        [(1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)]
    )


def test_linear_after_a_warm_up() -> None:
    assert rates(schedule="linear", warmup=2) == pytest.approx(
        [0.5, 1.0] + [1 - step / 10 for step in range(10)]
    )


def test_step_is_a_tenth_at_each_third() -> None:
    assert rates(schedule="step") == pytest.approx([1.0] * 4 + [0.1] * 4 + [0.01] * 4)


def test_wsd_is_constant_and_falls_at_the_end() -> None:
    assert rates(schedule="wsd", decay_ratio=0.25) == pytest.approx([1.0] * 10 + [2 / 3, 1 / 3])
    assert rates(schedule="wsd", warmup=2, decay_ratio=1.0) == rates(schedule="linear", warmup=2)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_the_rate_ends_at_its_floor(shape: str) -> None:
    floored = rates(schedule=shape, min_lr_ratio=0.1)
    assert floored == pytest.approx([0.1 + 0.9 * rate for rate in rates(schedule=shape)])
    settings = Optim(schedule=shape, min_lr_ratio=0.1)
    assert optim.rate_factor(settings, 12, optim.Course(12)) == pytest.approx(0.1)


@pytest.mark.parametrize("shape", sorted(optim.SHAPES))
def test_steps_past_the_end_have_a_rate_too(shape: str) -> None:
    # torch asks for the rate after the last step, and a resumed run may have been longer.
    settings = Optim(schedule=shape, warmup=3)
    assert all(0 <= optim.rate_factor(settings, step, optim.Course(10)) <= 1 for step in range(40))
    assert optim.rate_factor(settings, 0, optim.Course(1)) == pytest.approx(1 / 3)


def stepped(
    job: Job, shapes: Sequence[tuple[int, ...]], fused: bool | None = None
) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """(the optimizer, all parameters) after six steps with gradients that are drawn."""
    drawn = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    own = optim.optimizer(
        job.optim, parameters, 0.037, optim.fused(job, parameters) if fused is None else fused
    )
    for _ in range(6):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=drawn)
        own.step()
    return own, torch.cat([each.detach().flatten() for each in parameters])


WHOLE, BROKEN = [(16,), (64, 3, 7, 16), (512, 96), (1, 16)], [(16,), (3,), (1000, 33), (9,)]
MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


@pytest.mark.parametrize(
    ("args", "shapes", "on"),
    [
        ({}, WHOLE, True),
        ({"weight_decay": 0.3, "maximize": True}, BROKEN, True),
        (MOMENTUM, WHOLE, True),
        ({"momentum": 0.37, "dampening": 0.1, "weight_decay": 0.3}, WHOLE, True),
        (MOMENTUM, BROKEN, False),  # the kernel rounds the ends otherwise
        ({"foreach": True}, WHOLE, False),
    ],
)
def test_sgd_is_fused_where_each_bit_stays(
    args: dict[str, Any], shapes: list[tuple[int, ...]], on: bool
) -> None:
    job = Job(optim=Optim(name="sgd", args=args))
    own, weights = stepped(job, shapes)
    assert bool(own.param_groups[0]["fused"]) == on
    assert torch.equal(weights, stepped(job, shapes, fused=False)[1])


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad"])
def test_the_others_are_fused_with_train_fast_and_differ_in_their_last_bits(name: str) -> None:
    job = Job(optim=Optim(name=name))
    own, weights = stepped(job, BROKEN)
    assert not own.param_groups[0]["fused"]
    fast, close = stepped(replace(job, train=Train(fast=True)), BROKEN)
    assert fast.param_groups[0]["fused"]
    torch.testing.assert_close(close, weights, rtol=1e-6, atol=1e-6)
    off, _ = stepped(
        replace(job, train=Train(fast=True), optim=replace(job.optim, fused=False)), BROKEN
    )
    assert not off.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("job", "say"),
    [
        (Job(optim=Optim("rmsprop", fused=True)), "optim.fused=true: torch has no fused RMSprop"),
        (
            Job(optim=Optim("sgd", fused=True), parallel=Parallel("fsdp")),
            "no fused sgd for a model in shards",
        ),
        (
            Job(
                optim=Optim("sgd", fused=True, args={"momentum": 0.9}),
                train=Train(precision="fp16"),
            ),
            "overflows",
        ),
        (Job(optim=Optim("sgd", fused="yes")), "optim.fused=yes"),
    ],
)
def test_what_torch_cannot_fuse_is_refused(job: Job, say: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(job)
    assert say in str(caught.value)
    validate(
        replace(job, optim=replace(job.optim, fused="auto"), train=replace(job.train, fast=True))
    )


def test_gradients_that_the_fused_kernels_would_misread_switch_them_off() -> None:
    image = torch.nn.Parameter(torch.randn(16, 4, 4, 4))
    for fine, gradient in (
        (True, torch.randn(16, 4, 4, 4)),
        (False, torch.randn(16, 4, 4, 4).to(memory_format=torch.channels_last)),
        (False, torch.randn(16, 4, 4, 4).to_sparse()),
        (False, None),  # the momentum of a first gradient that comes later
    ):
        own = optim.optimizer(Optim(args={"momentum": 0.9}), [image, parameter()], 0.1, fused=True)
        image.grad, own.param_groups[0]["params"][1].grad = gradient, torch.ones(3)
        optim.check_gradients(own)
        assert own.param_groups[0]["fused"] == fine
        own.step()


def test_before_torch_2_14_nothing_is_fused_over_several_meshes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart makes a step before there are gradients to check."""
    parameters: list[Any] = [parameter(), parameter()]
    for each, mesh in zip(parameters, ("shard", "tp"), strict=True):
        each.device_mesh = mesh
    job = Job(optim=Optim("adamw", fused=True), parallel=Parallel(tp=2))
    for version, several in (("2.13.1", False), ("2.14.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert optim.fused(job, parameters) == several
        assert optim.fused(job, parameters[:1])


def test_a_state_of_channels_last_weights_goes_on_in_others() -> None:
    def make(layout: torch.memory_format) -> torch.optim.Optimizer:
        weights = torch.nn.Parameter(
            torch.arange(1024.0).view(16, 4, 4, 4).clone(memory_format=layout)
        )
        own = optim.optimizer(Optim("adamw"), [weights], 0.1, fused=True)
        weights.grad = weights.detach().clone()
        return own

    saved, fresh = make(torch.channels_last), make(torch.contiguous_format)
    saved.step()
    fresh.load_state_dict(deepcopy(saved.state_dict()))
    optim.align_state(fresh)
    (weights,) = fresh.param_groups[0]["params"]
    weights.data.copy_(saved.param_groups[0]["params"][0].data)
    for own in (saved, fresh):
        own.step()
    torch.testing.assert_close(weights, saved.param_groups[0]["params"][0])
