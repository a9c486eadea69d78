"""Creates the values of a model on meta: the same whole, by blocks, or in a stage. (rank side)"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn

from raydist.shared.errors import ConfigError
from raydist.worker import random_state


def on_meta(model: nn.Module) -> bool:
    """Report whether any parameter of a model has no values yet."""
    return any(each.is_meta for each in model.parameters())


def make_values(
    model: nn.Module, part: Sequence[nn.Module], device: torch.device, seed: int
) -> None:
    """Create the meta parameters and buffers of a part with the modules' own reset_parameters.

    Each module draws from a generator that is seeded by `seed` and the module's name in the model.
    Therefore the values do not depend on what else is created on this rank: with one seed a model
    begins with the same values under every division. (On GPUs, the same only on one kind of GPU.)
    Modules inside of others draw first.

    - `part`: a block with all that is inside it, or the modules outside of the blocks; the
      outermost first.

    ConfigError: a module with such parameters has no reset_parameters, nor has the outermost one.
    """
    names = {module: name for name, module in model.named_modules()}
    empty = {module for module in part if any(value.is_meta for value in _own(module))}
    made: dict[int, nn.Parameter] = {}
    for module in reversed(part):
        if module in empty:
            _give_memory(module, device, made)
        if hasattr(module, "reset_parameters") and not empty.isdisjoint(module.modules()):
            torch.manual_seed(random_state.derive(seed, zlib.crc32(names[module].encode())))
            module.reset_parameters()  # type: ignore[operator]
        elif module in empty and not hasattr(part[0], "reset_parameters"):
            cause = (
                f"{type(module).__name__} is on meta and has no reset_parameters to make its values"
            )
            raise ConfigError(
                f"{type(model).__name__}: {cause}; build the model without torch.device('meta')"
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


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
