"""The optimizer by its name, the rate for the global batch, and the rate's shape over the steps. (rank side)"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from raydist.config import Optim
from raydist.errors import ConfigError, suggest

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad"}

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "step": lambda done: 0.1 ** math.floor(3 * done),
}
"""The height of the rate after the warm-up, by the share (0 to 1) of the steps that are done."""


def learning_rate(settings: Optim, global_batch: int) -> float:
    """The rate for this global batch."""
    grown = global_batch / settings.scaling_batch
    return settings.lr * {"none": 1.0, "linear": grown, "sqrt": math.sqrt(grown)}[settings.scaling]


def optimizer(settings: Optim, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer; ConfigError for an argument that it does not have, or refuses."""
    kind = getattr(torch.optim, OPTIMIZERS[settings.name])
    known = [name for name in inspect.signature(kind).parameters if name not in ("self", "params", "lr")]
    for name in settings.args:
        if name == "lr":
            raise ConfigError(f"optim.args.lr={settings.args['lr']}: say optim.lr={settings.args['lr']}")
        if name not in known:
            raise ConfigError(
                f"optim.args.{name}: {kind.__name__} has no such argument; {suggest(name, known, 'optim.args.')}"
            )
    try:
        return kind(parameters, lr=lr, **settings.args)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        words = ", ".join(f"optim.args.{name}={value}" for name, value in settings.args.items())
        raise ConfigError(f"{kind.__name__} refuses {words or f'optim.lr={lr}'}: {error}") from error


def height(settings: Optim, step: int, steps: int) -> float:
    """The rate at a step, as a share of its full height: a linear climb, then the shape."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, steps - settings.warmup)
    return SHAPES[settings.schedule](min(1.0, done))


def schedule(settings: Optim, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The rate over `steps` optimizer steps."""
    return LambdaLR(optimizer, lambda step: height(settings, step, steps))
