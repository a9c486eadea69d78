"""The loss of large vocabularies by chunks of the positions: train.loss_chunks. (rank side)

The scores of all positions are the largest tensors of a language model, and its loss has three of
them at once in fp32. Here the model returns what goes into its last layer. Last layer and loss are
computed for one chunk of the positions after the other, and again in the backward pass, so that the
scores of one chunk exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raydist.shared.errors import ConfigError
from raydist.training.blocks import named_layer
from raydist.training.evaluation import Metric
from raydist.training.token_loss import is_counted, weighed_mean


class ChunkedLoss:
    """A loss (output of the model without its last layer, target) -> its mean, of shape []."""

    def __init__(
        self, layer: Callable[[torch.Tensor], torch.Tensor], loss: Any, chunks: int
    ) -> None:
        self.layer = layer
        self.loss = loss
        self.chunks = chunks

    def __call__(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        along = hidden.dim() - 2  # the positions
        if target.shape[: along + 1] != hidden.shape[:-1]:
            cause = (
                f"a target of shape {[*target.shape]} has not one value for each of the positions "
                f"{[*hidden.shape[:-1]]}"
            )
            raise ConfigError.of("train.loss_chunks", self.chunks, cause, "train.loss_chunks=1")
        targets = target.chunk(self.chunks, along)
        count = is_counted(target).sum()
        total = torch.zeros((), device=hidden.device)
        for inputs, own in zip(hidden.chunk(self.chunks, along), targets, strict=True):
            loss = checkpoint(self._of_chunk, inputs, own, use_reentrant=False)
            total = total + weighed_mean(loss, is_counted(own).sum())
        return total / count

    def _of_chunk(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.loss(self.scores(inputs), target)
        return mean

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores in fp32."""
        return self.layer(hidden).float()

    def of_scores(self, metric: Metric) -> Metric:
        """Return a metric that gets the scores."""
        return lambda hidden, target: metric(self.scores(hidden), target)


@contextmanager
def chunked_loss(model: nn.Module, loss: Any, chunks: int) -> Iterator[ChunkedLoss]:
    """Give a loss that computes the last layer of a model and `loss` by chunks of the positions.

    Inside the block the model returns what goes into its last layer, [B, T, width] (or [B, width]),
    and the loss takes that: `loss_of(model(tokens), target).backward()`. The last layer is what the
    model's method `get_output_embeddings` returns, or its method `scores`, [B, T, width] -> [B, T,
    vocab]. The model must return the output of that unchanged.

    - `loss`: (scores in fp32, target) of a part of the positions -> the mean over those whose
      target is not -100, a tensor of shape [].
    - `chunks`: how many parts the positions have (the last but one dimension).

    ConfigError: the model names no last layer; or, in a call, it returns something else, or the
    target has another shape.
    """
    module, name = last_layer(model, chunks)
    layer = getattr(module, name)

    def given(hidden: torch.Tensor) -> torch.Tensor:
        last[:] = [hidden]
        return hidden

    def check(_: nn.Module, inputs: Any, output: Any) -> None:
        if not last or output is not last.pop():
            cause = f"{type(model).__name__} does not return the output of its last layer unchanged"
            raise ConfigError.of("train.loss_chunks", chunks, cause, "train.loss_chunks=1")

    last: list[torch.Tensor] = []
    setattr(module, name, given)
    hook = model.register_forward_hook(check)
    try:
        yield ChunkedLoss(layer, loss, chunks)
    finally:
        hook.remove()
        vars(module).pop(name, None)


def last_layer(model: nn.Module, chunks: int) -> tuple[nn.Module, str]:
    """Return the module with the method that makes the scores, and the method's name."""
    if callable(getattr(model, "scores", None)):
        return model, "scores"
    head = named_layer(model, "get_output_embeddings")
    if head is None:
        cause = (
            f"{type(model).__name__} names no last layer: give it a method get_output_embeddings() "
            "that returns it"
        )
        raise ConfigError.of("train.loss_chunks", chunks, cause, "train.loss_chunks=1")
    return head, "forward"
