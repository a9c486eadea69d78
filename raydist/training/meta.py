"""Creates the values of a model on meta: the same whole, by blocks, or in a stage. (rank side)"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from raydist.shared.errors import ConfigError
from raydist.training.blocks import of_transformers
from raydist.training.weights import WeightFiles, own_tensors
from raydist.worker import random_state


def on_meta(model: nn.Module) -> bool:
    """Report whether any parameter of a model has no values yet."""
    return any(each.is_meta for each in model.parameters())


def make_values(
    model: nn.Module,
    part: Sequence[nn.Module],
    device: torch.device,
    seed: int,
    files: WeightFiles | None = None,
) -> None:
    """Create the meta parameters and buffers of a part with the modules' own reset_parameters.

    Models of transformers make them with their `_init_weights`, which gets one module.

    Each module draws from a generator that is seeded by `seed` and the module's name in the model.
    Therefore the values do not depend on what else is created on this rank: with one seed a model
    begins with the same values under every division. (On GPUs, the same only on one kind of GPU.)
    Modules inside of others draw first.

    - `part`: a block with all that is inside it, or the modules outside of the blocks; the
      outermost first.
    - `files`: the values of all tensors that they have (`train.weights`).

    ConfigError: a module with such parameters has no reset_parameters, nor has the outermost one.
    """
    names = {module: name for name, module in model.named_modules()}
    empty = {module for module in part if any(value.is_meta for value in own_tensors(module))}
    made: dict[int, nn.Parameter] = {}
    for module in reversed(part):
        if module in empty:
            _give_memory(module, device, made)
    own_way = _way_of_transformers(model)
    if own_way is not None:
        _mark(empty)
    if files is not None and empty:
        empty &= files.fill(model, part)
    for module in reversed(part):
        if empty.isdisjoint(module.modules()):
            continue
        torch.manual_seed(random_state.derive(seed, zlib.crc32(names[module].encode())))
        if own_way is not None:
            own_way(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        elif module in empty and not hasattr(part[0], "reset_parameters"):
            cause = (
                f"{type(module).__name__} is on meta and has no reset_parameters to make its values"
            )
            raise ConfigError(
                f"{type(model).__name__}: {cause}; build the model without torch.device('meta')"
            )
    if own_way is not None:
        _check(model, [each for each in part if each in empty])
    if files is not None and empty:
        files.fill(model, part)  # again: a reset_parameters may draw those of modules inside, too


def _way_of_transformers(model: nn.Module) -> Any:
    """Return the method by which a model of transformers makes the values of one module.

    None: it is no such model. A method of this name in another model may not make all of them.
    """
    return getattr(model, "_init_weights", None) if of_transformers(model) else None


def _mark(modules: Iterable[nn.Module]) -> None:
    """Fill the tensors of these modules with NaN, by which `_check` finds those without values."""
    with torch.no_grad():
        for value in (each for module in modules for each in own_tensors(module)):
            if value.is_floating_point():
                value.fill_(torch.nan)


def _check(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError if a tensor of these modules has got no values."""
    for module in modules:
        if any(bool(each.isnan().any()) for each in own_tensors(module)):
            raise ConfigError(
                f"{type(model).__name__}._init_weights makes no values for "
                f"{type(module).__name__}: build the model without torch.device('meta')"
            )


def _give_memory(module: nn.Module, device: torch.device, made: dict[int, nn.Parameter]) -> None:
    """Allocate the module's own tensors that are on meta.

    `made`: the new parameters by the identity of the one on meta; modules that share one keep
    sharing.
    """
    before = dict(module.named_parameters(recurse=False))
    module.to_empty(device=device, recurse=False)
    for name, value in before.items():
        if value.is_meta:
            setattr(module, name, made.setdefault(id(value), getattr(module, name)))


def take_values(part: nn.Module, model: nn.Module) -> None:
    """Give a stage the model's own tensors where it has a tensor without its module.

    That is the case for tied weights.
    """
    for name, module in part.named_modules():
        for key, value in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            own = getattr(model.get_submodule(name), key)
            if own is not value:
                setattr(module, key, own)
