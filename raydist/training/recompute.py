"""Activations that are computed again in the backward pass: train.recompute. (rank side)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raydist.shared.errors import ConfigError
from raydist.worker import torch_private

ATEN = torch.ops.aten
KEPT = frozenset(
    [
        ATEN.mm.default,
        ATEN.addmm.default,
        ATEN.bmm.default,
        ATEN.baddbmm.default,
        ATEN.convolution.default,
        *torch_private.attention_kernels(),
    ]
)
"""The operations whose outputs `selective` keeps: products of matrices, convolutions, attention.
They take most of the time of a forward pass."""


def recompute(blocks: Sequence[nn.Module], how: str) -> None:
    """Have the backward pass compute the activations of these blocks again.

    Between the passes only the input of each block is kept, and with `selective` what products of
    matrices and attention give. It changes `forward` of each block, so that all parameters keep
    their names; it is called before a model is compiled, wrapped or sharded, and serves a loop of
    your own as well. ConfigError: a block has batch norm.
    """
    for block in blocks:
        normed = next(filter(_counts, block.modules()), None)
        if normed is not None:
            cause = (
                f"{type(block).__name__} has a {type(normed).__name__}, whose running means would "
                "count each batch twice"
            )
            raise ConfigError.of("train.recompute", how, cause, "train.recompute=none")
        forward: Any = block.forward
        if isinstance(forward, Recomputed):
            forward = forward.forward  # of another raydist.fit of the same job
        changed: Any = block
        changed.forward = Recomputed(forward, selective=how == "selective")


class Recomputed:
    """The `forward` of a block that is computed again in the backward pass.

    Its call has a frame of Python: torch.compile traces that, but nothing inside a bare
    `checkpoint`. Copies of the block have copies of it.
    """

    def __init__(self, forward: Callable[..., Any], selective: bool) -> None:
        self.forward = forward
        self.more: dict[str, Any] = {"context_fn": _selective} if selective else {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False, **self.more, **named)


def _counts(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
        and module.track_running_stats
        and module.training
    )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
