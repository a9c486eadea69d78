"""The loss per target instead of per batch: train.loss_per=token, for padded samples. (rank side)

The mean of the means of several batches is not the mean over their targets, if padding leaves them
different numbers of targets. So the loss of each batch is multiplied by its targets, and divided by
those of the whole optimizer step, over all passes and ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raydist.shared.errors import ConfigError
from raydist.training.model_call import OwnLoss

IGNORED = -100
"""The target that the losses of torch and transformers leave out of their mean."""


def is_counted(target: torch.Tensor) -> torch.Tensor:
    """Return which targets are not IGNORED. In bytes, which have none, -100 would be 156."""
    return target.ne(IGNORED) | (target.dtype is torch.uint8)


def weighed_mean(mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return mean x weight; 0 if that is 0.

    The mean over no targets is NaN: it must reach neither the loss nor the gradient.
    """
    return torch.where(weight > 0, mean * weight, torch.zeros_like(mean))


@dataclass(frozen=True)
class TokenLoss:
    """A loss, the mean over the targets that are not IGNORED, which also counts them."""

    loss: Callable[[Any, Any], torch.Tensor]
    shifted: bool
    """Whether the model itself shifts the labels, and so has no output for the first of a row."""

    @classmethod
    def of(cls, loss: Callable[[Any, Any], torch.Tensor], model: torch.nn.Module) -> TokenLoss:
        """Return the loss of a model by target. `loss`: an OwnLoss, or that of the job."""
        return cls(loss, shifts_labels(model))

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        return self.loss(output, target)

    def count(self, target: Any) -> torch.Tensor:
        """Return the number of targets that are not IGNORED, int64 of shape [].

        `target`: what the loss gets. Of a whole batch it is the column `shift_labels` or `labels`,
        else the last one. ConfigError: it is no tensor.
        """
        shifted = False
        if isinstance(self.loss, OwnLoss):
            shifted = self.shifted
            if isinstance(target, Mapping):
                shifted = shifted and "shift_labels" not in target
                known = [target[name] for name in ("shift_labels", "labels") if name in target]
                target = known[0] if known else [*target.values()][-1]
            elif not isinstance(target, torch.Tensor):
                target = target[-1]
        if not isinstance(target, torch.Tensor):
            cause = f"targets are counted in a tensor, and these are a {type(target).__name__}"
            raise ConfigError.of("train.loss_per", "token", cause, "train.loss_per=sample")
        return is_counted(target[..., 1:] if shifted else target).sum()

    def weighed(self, loss: torch.Tensor, target: Any, share: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch x its targets x `share`; 0 if it has no targets."""
        return weighed_mean(loss, share * self.count(target))


def shifts_labels(model: torch.nn.Module) -> bool:
    """Report whether a model of transformers shifts the labels itself.

    It does if its loss is that of a causal language model, which its `loss_type`, from the name of
    its class, may name otherwise (`ForConditionalGeneration`). A model without a `loss_type` has
    that loss too, as GPT2LMHeadModel. But some of all these compute their own: those that do not
    shift the labels for it, as BartForCausalLM, name neither that loss nor `shift_labels`.
    """
    # The decoder of a model with an encoder gets its inputs shifted, and keeps all labels.
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    used = getattr(getattr(model, "loss_function", None), "__name__", "")  # also once compiled
    causal = getattr(model, "loss_type", None) == "ForCausalLM" or used == "ForCausalLMLoss"
    return causal and any(map(_names_shifted_labels, model.modules()))


def _names_shifted_labels(module: torch.nn.Module) -> bool:
    methods = [vars(each).get("forward") for each in type(module).__mro__]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in methods if each]
    names = {name for code in codes if code for name in (*code.co_names, *code.co_varnames)}
    return not names.isdisjoint({"loss_function", "shift_labels"})


def own_loss(loss: Any) -> OwnLoss | None:
    """Return this loss if it is one that the model computes."""
    inner = loss.loss if isinstance(loss, TokenLoss) else loss
    return inner if isinstance(inner, OwnLoss) else None
