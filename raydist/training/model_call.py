"""How a batch becomes the arguments of a model, and the loss that a model computes. (rank side)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raydist.shared.errors import RaydistError

TrainStep = Callable[[torch.nn.Module, Any], Any]
"""(model, batch) -> the loss, or an output that has it."""


class ModelCall(NamedTuple):
    """A call of a model with a batch."""

    inputs: Sequence[Any]
    named: Mapping[str, Any]
    """Keyword arguments."""
    target: Any
    """What loss and metrics get beside the output; the whole batch if the model computes its own
    loss."""
    train_step: TrainStep | None = None
    """What calls the model instead."""

    def output(self, model: torch.nn.Module) -> Any:
        """Call the model."""
        if self.train_step is not None:
            # It may pop the labels; the batch is still needed: for the weights of the loss, and
            # again if this is the rehearsal of a step.
            changes = isinstance(self.target, MutableMapping | list)
            return self.train_step(model, copy(self.target) if changes else self.target)
        return model(*self.inputs, **self.named)

    @property
    def samples(self) -> int:
        """The number of samples: of the target, or of the first tensor of the whole batch."""
        if not isinstance(self.target, Mapping | list | tuple):
            return len(self.target)
        first = (each for each in tensors_in(self.target) if each.dim())
        return len(next(first, self.target))


@dataclass(frozen=True)
class OwnLoss:
    """The loss that a model, or a job's `train_step` with it, computes of a whole batch.

    The output is the loss, has it under the name `loss`, or is a tuple with one tensor of shape [].
    """

    train_step: TrainStep | None = None

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the loss in an output, a tensor of shape []. RaydistError: it has none."""
        named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        found = [named if named is not None else output]
        if named is None and isinstance(output, list | tuple):
            found = [each for each in output if isinstance(each, torch.Tensor) and each.dim() == 0]
        if len(found) == 1 and isinstance(found[0], torch.Tensor) and found[0].dim() == 0:
            return found[0]
        what = "a tensor of shape [] or an output with .loss"
        if self.train_step is not None:
            raise RaydistError(
                f"train_step must return the loss, {what}, but it returned {_kind(output)}"
            )
        names = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise RaydistError(
            f"without loss= the model must return its loss, {what}, but called{names} it returned "
            f"{_kind(output)}: give fit a loss, or the batches what the model needs for its loss, "
            "such as labels"
        )


def model_call(batch: Any, own: OwnLoss | None) -> ModelCall:
    """Return the call of a model with a batch.

    A batch is (input, …, target), or a dict of columns in that order. `own`: the model gets all of
    it, a dict as keyword arguments, and computes its loss; or `train_step` gets model and batch.
    """
    if own is None:
        columns = batch.values() if isinstance(batch, Mapping) else batch
        *inputs, target = columns
        return ModelCall(inputs, {}, target)
    if own.train_step is not None:
        return ModelCall((), {}, batch, own.train_step)
    if isinstance(batch, Mapping):
        return ModelCall((), batch, batch)
    return ModelCall((batch,) if isinstance(batch, torch.Tensor) else batch, {}, batch)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def _kind(output: Any) -> str:
    shape = f" of shape {[*output.shape]}" if isinstance(output, torch.Tensor) else ""
    return f"a {type(output).__name__}{shape}"
