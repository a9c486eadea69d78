"""Metrics over the test samples: each sample counted exactly once, whatever the number of ranks. (rank side)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raydist.backends import Comm

Metric = Callable[[Any, Any], torch.Tensor]
"""(output, target) -> one value per sample, or their mean as a tensor without dimensions."""


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 where the highest score is the target's, 0 elsewhere."""
    return (output.argmax(dim=1) == target).float()


def evaluate(
    model: torch.nn.Module, batches: Iterable[Any], metrics: Mapping[str, Metric], comm: Comm, device: torch.device
) -> dict[str, float]:
    """The mean of each metric over all samples of all ranks. The model is in training mode afterwards."""
    total = torch.zeros(len(metrics) + 1, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for *inputs, target in batches:
            output, count = model(*inputs), len(target)
            for index, metric in enumerate(metrics.values()):
                value = metric(output, target).double()
                total[index] += value.sum() if value.dim() else value * count
            total[-1] += count
    model.train()
    *sums, count = comm.sum(total).tolist()
    return {name: value / count for name, value in zip(metrics, sums, strict=True)}


def same_buffers(model: torch.nn.Module, comm: Comm, rank: int) -> None:
    """Give every rank the buffers of rank 0, which a checkpoint has: after a step batch norm's statistics differ."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for kind, buffers in kinds.items():
        flat = torch.cat([buffer.detach().flatten() for buffer in buffers])
        flat = flat.to(torch.uint8) if kind == torch.bool else flat
        first = comm.sum(flat if rank == 0 else torch.zeros_like(flat)).to(kind)
        for buffer, part in zip(buffers, torch.split(first, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
