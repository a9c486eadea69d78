"""The optimizer of a name, its learning rate for a global batch, and the schedule of the rate. (rank side)"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from raydist.settings.config import Optim
from raydist.shared.errors import ConfigError, nearest

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad"}

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "step": lambda done: 0.1 ** math.floor(3 * done),
}
"""By schedule: the factor of the learning rate after the warm-up, from the fraction (0 to 1) of steps done."""


def learning_rate(settings: Optim, global_batch: int) -> float:
    """The learning rate for a global batch: linear (Goyal et al. 2017) or square root scaling (Krizhevsky 2014)."""
    ratio = global_batch / settings.scaling_batch
    return settings.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.scaling]


def optimizer(settings: Optim, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Make the optimizer. ConfigError: it does not have an argument of `optim.args`, or refuses its value."""
    kind = getattr(torch.optim, OPTIMIZERS[settings.name])
    known = [name for name in inspect.signature(kind).parameters if name not in ("self", "params", "lr")]
    for name in settings.args:
        if name == "lr":
            rate = settings.args["lr"]
            raise ConfigError.of("optim.args.lr", rate, "it has a setting of its own", f"optim.lr={rate}")
        if name not in known:
            value, close = settings.args[name], nearest(name, known, "optim.args.")
            cause, guess = f"{kind.__name__} has no such argument", close and f"{close}={value}"
            raise ConfigError.of(f"optim.args.{name}", value, cause, guess=guess, known=known)
    try:
        return kind(parameters, lr=lr, **settings.args)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        typed = " ".join(f"optim.args.{name}={value}" for name, value in settings.args.items())
        key, value = ("optim.args", settings.args) if typed else ("optim.lr", lr)
        raise ConfigError.of(key, value, f"{kind.__name__} refuses it: {error}", typed=typed) from error


def rate_factor(settings: Optim, step: int, steps: int) -> float:
    """The factor of the learning rate at a step: a linear warm-up, then the schedule."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, steps - settings.warmup)
    return SHAPES[settings.schedule](min(1.0, done))


def schedule(settings: Optim, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The schedule of the learning rate over `steps` optimizer steps."""
    return LambdaLR(optimizer, lambda step: rate_factor(settings, step, steps))
