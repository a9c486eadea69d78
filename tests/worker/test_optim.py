"""Optimizers by name, the rate for the batch, and the shape of the rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from raydist.settings.config import Optim
from raydist.shared.errors import ConfigError
from raydist.worker.loop import optim


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_each_name_is_torchs_own_class(name: str) -> None:
    made = optim.optimizer(Optim(name=name), [parameter()], 0.125)
    assert type(made).__name__ == optim.OPTIMIZERS[name]
    assert made.param_groups[0]["lr"] == 0.125


def test_arguments_reach_it() -> None:
    made = optim.optimizer(Optim(name="sgd", args={"momentum": 0.9, "nesterov": True}), [parameter()], 0.1)
    assert (made.param_groups[0]["momentum"], made.param_groups[0]["nesterov"]) == (0.9, True)


@pytest.mark.parametrize(
    ("name", "args", "say"),
    [
        ("sgd", {"momentom": 0.9}, "optim.args.momentum=0.9"),
        ("adam", {"momentum": 0.9}, "optim.args.momentum=0.9: Adam has no such argument"),
        ("adamw", {"weight_decay": -1}, "optim.args.weight_decay=-1: AdamW refuses it: Invalid weight_decay"),
        ("sgd", {"nesterov": True}, "optim.args.nesterov=True: SGD refuses it: Nesterov momentum requires"),
        ("sgd", {"lr": 0.5}, "optim.lr=0.5"),
        ("sgd", {"params": []}, "has no such argument"),
    ],
)
def test_wrong_arguments_are_named(name: str, args: dict[str, Any], say: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optim.optimizer(Optim(name=name, args=args), [parameter()], 0.1)
    assert say == caught.value.suggestion or say in str(caught.value)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_with_the_batch(rule: str, rate: float) -> None:
    assert optim.learning_rate(Optim(lr=0.1, scaling=rule, scaling_batch=64), 256) == pytest.approx(rate)


def rates(**words: Any) -> list[float]:
    """The rate of each of 12 steps, as the optimizer has it."""
    settings = Optim(**words)
    made = optim.optimizer(settings, [parameter()], 1.0)
    schedule = optim.schedule(settings, made, steps=12)
    seen = []
    for _ in range(12):
        seen.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    return seen


def test_constant() -> None:
    assert rates() == [1.0] * 12


def test_warm_up_climbs_to_the_full_rate() -> None:
    assert rates(warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1.0] + [1.0] * 8)


def test_cosine() -> None:
    assert rates(schedule="cosine") == pytest.approx([(1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)])


def test_linear_after_a_warm_up() -> None:
    assert rates(schedule="linear", warmup=2) == pytest.approx([0.5, 1.0] + [1 - step / 10 for step in range(10)])


def test_step_is_a_tenth_at_each_third() -> None:
    assert rates(schedule="step") == pytest.approx([1.0] * 4 + [0.1] * 4 + [0.01] * 4)


@pytest.mark.parametrize("shape", sorted(optim.SHAPES))
def test_steps_past_the_end_have_a_rate_too(shape: str) -> None:
    # torch asks for the rate after the last step, and a resumed run may have been longer.
    settings = Optim(schedule=shape, warmup=3)
    assert all(0 <= optim.rate_factor(settings, step, 10) <= 1 for step in range(40))
    assert optim.rate_factor(settings, 0, 1) == pytest.approx(1 / 3)
