"""Metrics over the test samples; each sample counts once, whatever the rank count. (rank side)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raydist.training.model_call import model_call
from raydist.training.token_loss import TokenLoss, own_loss
from raydist.worker import context
from raydist.worker.backends import Comm

Metric = Callable[[Any, Any], torch.Tensor]
"""(output, target) -> one value per sample, or their mean as a tensor of shape []."""


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 for each sample whose highest score is that of its target, else 0.

    - `output`: scores of shape [B, classes].
    - `target`: int64 of shape [B].

    Returns float of shape [B]; for the argument `metrics` of `fit`.
    """
    return (output.argmax(dim=1) == target).float()


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[tuple[Any, bool]],
    metrics: Mapping[str, Metric],
    comm: Comm,
    device: torch.device,
) -> dict[str, float]:
    """Return the mean of each metric over all samples of all ranks.

    `batches`: each with whether it has samples of this rank; the others exist for the ranks that
    have more. On return each module is in its previous mode.
    """
    total = torch.zeros(2, len(metrics), dtype=torch.float64, device=device)
    own = next(filter(None, map(own_loss, metrics.values())), None)
    with in_mode(model, False), torch.no_grad():
        for batch, counts in batches:
            call = model_call(batch, own)
            output = call.output(model)
            # No samples of this rank, or another stage of the pipeline has the output.
            if not counts or output is None:
                continue
            for index, metric in enumerate(metrics.values()):
                value = metric(output, call.target).double()
                weight: int | torch.Tensor = call.samples
                if isinstance(metric, TokenLoss):
                    weight = metric.count(call.target)
                    value = torch.where(weight > 0, value, 0)  # NaN without targets
                total[0, index] += value.sum() if value.dim() else value * weight
                total[1, index] += weight
    sums, weights = comm.sum(total).tolist()
    return {
        name: s / w if w else math.nan for name, s, w in zip(metrics, sums, weights, strict=True)
    }


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside the block; restore each module's mode after it.

    A job may have frozen some modules by `.eval()`, such as batch norm in a pretrained model that
    it fine-tunes.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def sum_over_ranks(number: float) -> float:
    """Return the sum of a number over all ranks. All ranks must call it."""
    comm: Comm | None = context.current().comm
    return number if comm is None else float(comm.sum(torch.tensor(number, dtype=torch.float64)))


def same_buffers(model: torch.nn.Module, comm: Comm, rank: int) -> None:
    """Copy rank 0's buffers, which a checkpoint holds, to every rank.

    Batch norm's statistics differ among ranks after a step.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for dtype, buffers in by_dtype.items():
        flat = torch.cat([buffer.detach().flatten() for buffer in buffers])
        flat = flat.to(torch.uint8) if dtype == torch.bool else flat
        first = comm.sum(flat if rank == 0 else torch.zeros_like(flat)).to(dtype)
        for buffer, part in zip(
            buffers, torch.split(first, [buffer.numel() for buffer in buffers]), strict=True
        ):
            buffer.copy_(part.view_as(buffer))
