"""Bytes of a rank for a model, without a batch: parameters, gradients, the optimizer's state, a block. (rank side)

`python -m raydist.worker.loop.memory` answers tools.plan, which runs where there may be no torch.
"""

from __future__ import annotations

import fnmatch
import json
import math
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from raydist.settings import config
from raydist.settings.mesh import MeshShape, mesh_shape
from raydist.worker.backends.stages import cut_model
from raydist.worker.loop import models
from raydist.worker.loop.blocks import find_blocks

STATES = {"adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}
"""Tensors of the optimizer for each parameter; sgd has one with momentum."""


def memory_of(model: nn.Module, job: config.Job, shape: MeshShape) -> dict[str, int]:
    """Bytes by what they are for, on the rank with the most. Activations are not among them.

    `model`: may be on meta. ConfigError: its blocks are not known.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    blocks = find_blocks(model, job.parallel.blocks)
    parts = cut_model(model, blocks, shape.pp) if shape.pp > 1 else [model]
    return max((_of_part(part, blocks, job, shape, plan) for part in parts), key=lambda bytes_: sum(bytes_.values()))


def _of_part(
    part: nn.Module, blocks: Sequence[nn.Module], job: config.Job, shape: MeshShape, plan: Iterable[str]
) -> dict[str, int]:
    """As memory_of, of a stage or of the whole model."""
    states = STATES.get(job.optim.name, int(bool(job.optim.args.get("momentum"))))
    own = trained = 0
    for name, value in part.named_parameters():
        layer = name.rpartition(".")[0]
        bytes_ = part_bytes(value, shape.shard, shape.tp if any(fnmatch.fnmatch(layer, each) for each in plan) else 1)
        own += bytes_
        trained += bytes_ * value.requires_grad
    whole = sum(value.nbytes for value in part.parameters())
    sizes = [sum(value.nbytes for value in each.parameters()) for each in part.modules() if each in blocks]
    # a stage stays gathered for all micro-batches of a step
    gathered = whole // shape.tp if shape.pp > 1 else max(sizes) // shape.tp + whole - sum(sizes)
    gathered //= 2 if job.train.precision == "bf16" else 1
    return {"parameters": own, "gradients": trained, job.optim.name: states * trained, "gathered": gathered}


def part_bytes(value: torch.Tensor, shard: int, tp: int) -> int:
    """Bytes of the first of `shard` parts of a tensor, which is cut along its first dimension."""
    rows = value.shape[0] if value.dim() else 1
    return value.nbytes // rows * math.ceil(rows / shard) // tp


def main() -> None:
    """Read {"job": …, "ranks": …, "per_node": …} from the standard input, and print what `memory_of` returns."""
    asked = json.load(sys.stdin)
    job = config.from_dict(asked["job"])
    with torch.device("meta"):
        model = models.build_model(job.model)
    print(json.dumps(memory_of(model, job, mesh_shape(job.parallel, asked["ranks"], asked["per_node"]))))


if __name__ == "__main__":
    main()
