"""A model as the job made it, without its values, to divide it once more. (rank side)

fully_shard, parallelize_module and the cut into stages change modules: their class, their hooks,
their parameters. Nothing takes that back, and each refuses a module that it has changed.
"""

from __future__ import annotations

import copy
import gc
from typing import Any, NamedTuple

import torch
from torch import nn

from raydist.worker import torch_private

OWN = frozenset(vars(nn.Module()))
"""The attributes that torch gives each module: its parameters, buffers, modules and hooks."""


class Outline(NamedTuple):
    """A parameter without its values."""

    on_meta: nn.Parameter
    device: torch.device

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Outline:
        empty = torch.empty_like(parameter, device="meta")
        on_meta = nn.Parameter(empty, parameter.requires_grad)
        vars(on_meta).update(vars(parameter))
        return cls(on_meta, parameter.device)

    def filled(self) -> nn.Parameter:
        """Return a new parameter of zeros; if this one was on meta, it has no values either."""
        zeros = torch.zeros_like(self.on_meta, device=self.device)
        made = nn.Parameter(zeros, self.on_meta.requires_grad)
        vars(made).update(vars(self.on_meta))
        return made


class Undivided(NamedTuple):
    """A module before the model was divided."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    """All its attributes; None stands for each parameter."""
    outlines: dict[str, Outline]
    """The module's own parameters by name. Those that modules share have one outline."""


class Blueprint:
    """What a model is made of before it is divided among ranks.

    Parameters take no memory in it. Buffers are copied only if the model does not save them: all
    others are in a snapshot.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = gc.get_freeze_count()
        """The objects that the garbage collector does not look at."""
        of: dict[int, Outline] = {}
        self._modules = []
        for module in model.modules():
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            outlines = {name: of.setdefault(id(value), Outline.of(value)) for name, value in own}
            attributes = {name: without_values(name, each) for name, each in vars(module).items()}
            self._modules.append(Undivided(module, type(module), attributes, outlines))
        saved = saved_ids(model)
        self._unsaved = [
            (each, each.clone())
            for each in model.buffers()
            if id(each) not in saved and not each.is_meta
        ]

    def restore(self) -> None:
        """Make the model what it was before it was divided; its parameters are zeros."""
        for module, kind, attributes, _ in self._modules:
            torch_private.forget_division(module)
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(
                {name: without_values(name, each) for name, each in attributes.items()}
            )
        made: dict[int, nn.Parameter] = {}
        for module, _, _, outlines in self._modules:
            for name, outline in outlines.items():
                key = id(outline.on_meta)
                if key not in made:
                    made[key] = outline.filled()
                # as an attribute: nn.LSTM keeps a list of its weights besides
                setattr(module, name, made[key])
        for buffer, value in self._unsaved:
            buffer.data = value.clone()
        self._collect()

    def _collect(self) -> None:
        """Free the divided model: there are cycles in it, and groups with threads and sockets."""
        more = gc.get_freeze_count() > self._frozen  # train.gc
        if more:
            gc.unfreeze()
        gc.collect()
        if more:
            gc.freeze()


def without_values(name: str, value: Any) -> Any:
    """Return the attribute `name` of a module; a copy, without parameters, if torch changes it."""
    if name not in OWN:
        return value
    value = copy.copy(value)
    if isinstance(value, dict):
        value.update({key: None for key, each in value.items() if isinstance(each, nn.Parameter)})
    return value


def saved_ids(model: nn.Module) -> set[int]:
    """Return the identities of the tensors in a model's state_dict."""
    return {id(value) for value in model.state_dict(keep_vars=True).values()}


def indivisible(model: nn.Module) -> str:
    """Return why a model can't be divided once more after it was divided; empty if it can."""
    if not torch_private.divides_anew():
        return "this torch does not divide a model twice"
    saved = saved_ids(model)
    for name, value in model.named_parameters():
        if type(value) is not nn.Parameter:
            return f"the parameter {name} is a {type(value).__name__}"
        if id(value) not in saved:
            return f"the model's state_dict leaves out {name}"
    return ""
