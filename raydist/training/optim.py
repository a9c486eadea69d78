"""The optimizer, its groups, its learning rate for a global batch, its schedule. (rank side)"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.torch_version import TorchVersion

from raydist.settings.config import Job, Optim
from raydist.settings.fused import fused_choice
from raydist.shared.errors import ConfigError, nearest
from raydist.state.snapshot_layout import State
from raydist.worker.torch_private import unscale_before_step

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
    "wsd": lambda done: 1 - done,
}
"""The learning-rate factor after the warm-up by schedule, as a function of the fraction (0 to 1) of
the training done; of wsd, of the fraction of the decay."""


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
    if too_many_meshes(parameters):
        return False  # also a restart makes a step, to create the state that it fills
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


def too_many_meshes(parameters: Iterable[Any]) -> bool:
    """Report whether this torch has no fused optimizer of these parameters together.

    Before 2.14, Adam's takes none of several meshes, as `parallel.shard` and `parallel.tp` together
    make them.
    """
    meshes = {getattr(each, "device_mesh", None) for each in parameters}
    return len(meshes) > 1 and TorchVersion(torch.__version__) < "2.14"


def optimizer_class(settings: Optim) -> type[torch.optim.Optimizer]:
    """Return the optimizer's class.

    ConfigError: `optim._target_` cannot be imported, or is no class that `fit` can use.
    """
    name = settings._target_
    if not name:
        named: type[torch.optim.Optimizer] = getattr(torch.optim, OPTIMIZERS[settings.name])
        return named
    try:
        found: Any = pkgutil.resolve_name(name)
    except Exception as error:  # a module of the user's may raise anything
        cause = f"it cannot be imported: {error}"
        raise ConfigError.of("optim", name, cause, "optim=torch.optim.NAdam") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        cause = "it is not a class of torch.optim.Optimizer"
        raise ConfigError.of("optim", name, cause, "optim=torch.optim.NAdam")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        cause = "its step needs a closure, which raydist.fit does not have"
        raise ConfigError.of("optim", name, cause, "optim=adamw")
    return found


def arguments(settings: Optim) -> Set[str]:
    """Return the names of the arguments of the optimizer's class: its settings, not its state."""
    return inspect.signature(optimizer_class(settings)).parameters.keys()


def without_decay(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that get no weight decay with `optim.groups=no_decay`.

    They are embeddings, and parameters with less than two dimensions. It serves a loop of your own
    as well.
    """
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
    }
    return {
        name
        for name, value in model.named_parameters()
        if value.dim() < 2 or id(value) in embeddings
    }


def in_groups(
    settings: Optim, parameters: Mapping[str, torch.nn.Parameter], undecayed: Set[str]
) -> list[Any]:
    """Return the parameters, in two groups with `optim.groups=no_decay`.

    A group may be empty, as on a stage of a pipeline. ConfigError: the optimizer has no weight
    decay.
    """
    if settings.groups == "one":
        return list(parameters.values())
    if "weight_decay" not in arguments(settings):
        cause = f"{settings.title} has no weight decay"
        raise ConfigError.of("optim.groups", settings.groups, cause, "optim.groups=one")
    decayed, others = split_names(parameters, undecayed)
    return [
        {"params": [parameters[name] for name in decayed]},
        {"params": [parameters[name] for name in others], "weight_decay": 0.0},
    ]


def split_names(names: Iterable[str], undecayed: Set[str]) -> tuple[list[str], list[str]]:
    """Return the names of the parameters with weight decay, and of those without."""
    every = list(names)
    return [n for n in every if n not in undecayed], [n for n in every if n in undecayed]


def continued(group: State, saved: State, settings: Set[str]) -> State:
    """Return a group of the optimizer that continues a saved one.

    Its settings are the current ones, so that a new weight decay applies. `settings`: the arguments
    of the optimizer's class. What else is in a group, such as a count of steps, is state.
    """
    current = (settings | {"initial_lr"}) - {"params", "lr"}
    return {**group, **saved, **{name: group[name] for name in group.keys() & current}}


def optimizer(
    settings: Optim, parameters: Iterable[Any], lr: float, fused: bool = False
) -> torch.optim.Optimizer:
    """Create the optimizer. `parameters`: tensors, or groups of them.

    ConfigError: it does not have an argument of `optim.args`, or refuses its value; or as
    `optimizer_class` says.
    """
    kind: Any = optimizer_class(settings)
    signature = inspect.signature(kind).parameters
    known = [name for name in signature if name not in ("self", "params", "lr")]
    any_name = any(each.kind is each.VAR_KEYWORD for each in signature.values())
    for name in settings.args:
        if name == "lr":
            rate = settings.args["lr"]
            raise ConfigError.of(
                "optim.args.lr", rate, "it has a separate setting", f"optim.lr={rate}"
            )
        if name == "fused" and not settings._target_:
            given = str(settings.args["fused"]).lower()
            raise ConfigError.of(
                "optim.args.fused", given, "it has a separate setting", f"optim.fused={given}"
            )
        if name not in known and not any_name:
            value, close = settings.args[name], nearest(name, known, "optim.args.")
            cause, guess = f"{kind.__name__} has no such argument", close and f"{close}={value}"
            raise ConfigError.of(f"optim.args.{name}", value, cause, guess=guess, known=known)
    try:
        return kind(parameters, lr=lr, **settings.args, **({"fused": True} if fused else {}))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        overrides = " ".join(f"optim.args.{name}={value}" for name, value in settings.args.items())
        key, value = ("optim.args", settings.args) if overrides else ("optim.lr", lr)
        raise ConfigError.of(
            key, value, f"{kind.__name__} refuses it: {error}", text=overrides
        ) from error


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Switch the fused implementation off where torch's would fail or be wrong for these gradients.

    On a CPU its kernels walk linearly through memory, whatever the strides: they would silently
    update the wrong weights. Gradients of autograd and DDP have the strides of their parameters.
    Those of Horovod are contiguous, even if the parameters are channels-last. The kernels take no
    sparse gradients. SGD's takes a momentum for all parameters or for none, so no parameter may get
    its first gradient later than the others. Of several meshes: see `too_many_meshes`.
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
        if group.get("fused") and (late or too_many_meshes(group["params"]) or not alike):
            group["fused"] = False
            unscale_before_step(optimizer)


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
    if settings.schedule == "wsd":  # Hu et al. 2024, arXiv:2404.06395
        done = (done - (1 - settings.decay_ratio)) / settings.decay_ratio
    factor = SHAPES[settings.schedule](min(1.0, max(0.0, done)))
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * factor


def schedule(settings: Optim, optimizer: torch.optim.Optimizer, course: Course) -> LambdaLR:
    """Return the schedule of the learning rate over a training."""
    return LambdaLR(optimizer, lambda step: rate_factor(settings, step, course))
