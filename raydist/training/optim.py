"""The optimizer by name, its learning rate for a global batch, the rate's schedule. (rank side)"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from raydist.settings.config import Job, Optim
from raydist.settings.fused import fused_choice
from raydist.shared.errors import ConfigError, nearest

OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
}

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "step": lambda done: 0.1 ** math.floor(3 * done),
}
"""The learning-rate factor after the warm-up by schedule, as a function of the fraction (0 to 1) of
the training done."""


def learning_rate(settings: Optim, global_batch: int) -> float:
    """Return the learning rate for a global batch.

    Linear scaling is that of Goyal et al. 2017, square root scaling that of Krizhevsky 2014.
    """
    ratio = global_batch / settings.scaling_batch
    return settings.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.scaling]


def fused(job: Job, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Report whether the optimizer of these parameters is fused.

    On a CPU fused SGD gives the same bits as the loop over parameters: always without momentum;
    with momentum if each parameter fills whole vectors of 64 bytes, because the fused kernel rounds
    the remainder differently. That was compared on x86 for every combination of momentum,
    dampening, Nesterov, weight decay and maximize, under each of torch's instruction sets.
    """
    choice = fused_choice(job, gpus=any(each.device.type != "cpu" for each in parameters))
    kinds = (
        (torch.float32, torch.float64)
        if choice.exact
        else (torch.float32, torch.float64, torch.bfloat16)
    )
    if not choice.on or not parameters or any(each.dtype not in kinds for each in parameters):
        return job.optim.fused is True
    whole = all(each.nbytes % 64 == 0 for each in parameters)
    return not choice.exact or whole or not job.optim.args.get("momentum")


def optimizer(
    settings: Optim, parameters: Iterable[torch.nn.Parameter], lr: float, fused: bool = False
) -> torch.optim.Optimizer:
    """Create the optimizer.

    ConfigError: it does not have an argument of `optim.args`, or refuses its value.
    """
    kind = getattr(torch.optim, OPTIMIZERS[settings.name])
    known = [
        name for name in inspect.signature(kind).parameters if name not in ("self", "params", "lr")
    ]
    for name in settings.args:
        if name == "lr":
            rate = settings.args["lr"]
            raise ConfigError.of(
                "optim.args.lr", rate, "it has a separate setting", f"optim.lr={rate}"
            )
        if name == "fused":
            given = str(settings.args["fused"]).lower()
            raise ConfigError.of(
                "optim.args.fused", given, "it has a separate setting", f"optim.fused={given}"
            )
        if name not in known:
            value, close = settings.args[name], nearest(name, known, "optim.args.")
            cause, guess = f"{kind.__name__} has no such argument", close and f"{close}={value}"
            raise ConfigError.of(f"optim.args.{name}", value, cause, guess=guess, known=known)
    try:
        return kind(parameters, lr=lr, **settings.args, **({"fused": True} if fused else {}))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        overrides = " ".join(f"optim.args.{name}={value}" for name, value in settings.args.items())
        key, value = ("optim.args", settings.args) if overrides else ("optim.lr", lr)
        raise ConfigError.of(
            key, value, f"{kind.__name__} refuses it: {error}", typed=overrides
        ) from error


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Switch the fused implementation off where torch's would fail or be wrong for these gradients.

    On a CPU its kernels walk linearly through memory, whatever the strides: they would silently
    update the wrong weights. Gradients of autograd and DDP have the strides of their parameters.
    Those of Horovod are contiguous, even if the parameters are channels-last. The kernels take no
    sparse gradients. SGD's takes a momentum for all parameters or for none, so no parameter may get
    its first gradient later than the others.
    """
    for group in optimizer.param_groups:
        pairs = [(each, each.grad) for each in group["params"]]
        alike = all(
            grad is None or (not grad.is_sparse and grad.stride() == each.stride())
            for each, grad in pairs
        )
        # `get`, because a look-up would create the state of a parameter that has none, and it would
        # be kept and saved
        begun = {
            optimizer.state.get(each, {}).get("momentum_buffer") is not None for each, _ in pairs
        }
        late = group.get("momentum") and (len(begun) > 1 or any(grad is None for _, grad in pairs))
        if group.get("fused") and (late or not alike):
            group["fused"] = False


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a loaded state the strides of its parameters.

    The saved parameters may have been channels-last.
    """
    for value, state in optimizer.state.items():
        for name, each in state.items():
            if (
                isinstance(each, torch.Tensor)
                and each.shape == value.shape
                and each.stride() != value.stride()
            ):
                state[name] = torch.empty_like(value).copy_(each)


def copy_host_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy the parts of a loaded state that still map the file: it is deleted some day."""
    for state in optimizer.state.values():
        for name, each in state.items():
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                state[name] = each.clone()


class Course(NamedTuple):
    """The whole training in optimizer steps of the current size.

    With `data.resize=scale` that size may change.
    """

    steps: int
    ahead: int = 0
    """The offset that converts the number of a step into its position in this course."""
    warmed: float | None = None
    """The position at which the warm-up ends; None: its number of steps."""


def rate_factor(settings: Optim, step: int, course: Course) -> float:
    """Return the factor of the learning rate at a step: a linear warm-up, then the schedule."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    begin = settings.warmup if course.warmed is None else course.warmed
    done = (step + course.ahead - begin) / max(1, course.steps - begin)
    return SHAPES[settings.schedule](min(1.0, max(0.0, done)))


def schedule(settings: Optim, optimizer: torch.optim.Optimizer, course: Course) -> LambdaLR:
    """Return the schedule of the learning rate over a training."""
    return LambdaLR(optimizer, lambda step: rate_factor(settings, step, course))
