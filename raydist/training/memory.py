"""Bytes of a rank for a model, without a batch: parameters, gradients, the optimizer's state, a
block. (rank side)

`python -m raydist.training.memory` answers tools.plan, which runs where there may be no torch.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from raydist.messages.server import LookAtModel
from raydist.settings import config
from raydist.settings.mesh import MeshShape, mesh_shape, microbatches
from raydist.shared.errors import ConfigError
from raydist.training import models
from raydist.training.blocks import find_blocks
from raydist.training.heads import check_heads
from raydist.training.stages import cut_model
from raydist.worker.torch_private import fake_tensors

STATES = {"adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}
"""Tensors of the optimizer for each parameter; sgd has one with momentum."""


def memory_of(model: nn.Module, job: config.Job, shape: MeshShape) -> dict[str, int]:
    """Bytes by what they are for, on the rank with the most. ConfigError: the model cannot be
    divided so.

    `model`: on meta, or fake. `activations` are there if it is fake and has a method `example`,
    which makes an input of so many samples. They are an upper bound: that of a tp group without its
    layers' division.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    blocks = find_blocks(model, job.parallel.blocks)
    check_heads(model, shape.tp)
    parts = cut_model(model, blocks, shape.pp) if shape.pp > 1 else [model]
    found = [_of_part(part, blocks, job, shape, plan) for part in parts]
    for of_part, bytes_ in zip(found, activations(model, parts, job, shape), strict=False):
        of_part["activations"] = bytes_
    return max(found, key=lambda of_part: sum(of_part.values()))


def activations(
    model: nn.Module, parts: Sequence[nn.Module], job: config.Job, shape: MeshShape
) -> list[int]:
    """Bytes that the forward passes of each part keep for the backward passes; empty if that cannot
    be known here."""
    example: Any = getattr(model, "example", None)
    if example is None or any(value.is_meta for value in model.parameters()):
        return []
    count = microbatches(job, shape) if shape.pp > 1 else 1
    each = job.train.accumulate * shape.data * count
    samples = math.ceil((job.data.global_batch or job.data.batch_size * each // count) / each)
    known = inspect.signature(example).parameters
    given = example(
        samples, **{name: value for name, value in job.job.args.items() if name in known}
    )
    on_their_way = count if job.parallel.schedule == "gpipe" else min(count, shape.pp)
    half = torch.bfloat16 if job.train.precision == "bf16" else None
    found = []
    for part in parts:
        values = {
            name: _cast(value, half)
            for name, value in (*part.named_parameters(), *part.named_buffers())
        }
        kept: list[torch.Tensor] = []

        def keep(value: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(value)
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            given = torch.func.functional_call(part, values, given)
        by_storage = {_storage(each): each.untyped_storage().nbytes() for each in kept}
        others = by_storage.keys() - {_storage(value) for value in values.values()}
        found.append(on_their_way * sum(by_storage[each] for each in others))
    return found


def _storage(value: torch.Tensor) -> int:
    """The same number for tensors that share their memory; those without values have no address."""
    return int(StorageWeakRef(value.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def _cast(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A parameter or a buffer in the type in which it is computed with."""
    made = value.detach().to(dtype if value.is_floating_point() else None)
    return made.requires_grad_(value.requires_grad)


def check_model(settings: Mapping[str, Any], named: str, stages: int, tp: int) -> None:
    """Raise ConfigError if the model that `model=` names cannot be divided: no blocks, too few of
    them, or of heads.

    `named`: parallel.blocks. A model that cannot be built here, without a GPU or a package of the
    ranks, is theirs.
    """
    try:
        with torch.device("meta"):
            model = models.build_model(settings)
    except ConfigError:
        return
    blocks = find_blocks(model, named)
    check_heads(model, tp)
    if stages > 1:
        cut_model(model, blocks, stages)


def reply_to_check(request: LookAtModel, reply_fd: int) -> NoReturn:
    """In a child of the fork server: write why the model cannot be divided, or nothing."""
    sys.path[:] = request.sys_path
    with os.fdopen(reply_fd, "w") as reply:
        try:
            check_model(request.model, request.blocks, request.stages, request.tp)
        except ConfigError as error:
            json.dump({"message": error.message, **error.facts}, reply)
    os._exit(0)


def _of_part(
    part: nn.Module,
    blocks: Sequence[nn.Module],
    job: config.Job,
    shape: MeshShape,
    plan: Iterable[str],
) -> dict[str, int]:
    """As memory_of, of a stage or of the whole model."""
    states = STATES.get(job.optim.name, int(bool(job.optim.args.get("momentum"))))
    own = trained = 0
    for name, value in part.named_parameters():
        layer = name.rpartition(".")[0]
        bytes_ = part_bytes(
            value,
            shape.shard,
            shape.tp if any(fnmatch.fnmatch(layer, each) for each in plan) else 1,
        )
        own += bytes_
        trained += bytes_ * value.requires_grad
    whole = sum(value.nbytes for value in part.parameters())
    sizes = [
        sum(value.nbytes for value in each.parameters())
        for each in part.modules()
        if each in blocks
    ]
    gathered = whole if shape.pp > 1 else max(sizes) + shape.tp * (whole - sum(sizes))
    gathered //= shape.tp * (2 if job.train.precision == "bf16" else 1)
    if shape.pp > 1:
        # a stage stays gathered for all micro-batches of a step, and so do its gradients, which are
        # in fp32
        gathered += (
            sum(value.nbytes for value in part.parameters() if value.requires_grad) // shape.tp
        )
    return {
        "parameters": own,
        "gradients": trained,
        job.optim.name: states * trained,
        "gathered": gathered,
    }


def part_bytes(value: torch.Tensor, shard: int, tp: int) -> int:
    """Bytes of the first of `shard` parts of a tensor, which is cut along its first dimension."""
    rows = value.shape[0] if value.dim() else 1
    return value.nbytes // rows * math.ceil(rows / shard) // tp


def main() -> None:
    """Read {"job": …, "ranks": …, "per_node": …} from the standard input, and print what
    `memory_of` returns.

    Or {"refused": the arguments of a ConfigError}.
    """
    asked = json.load(sys.stdin)
    job = config.from_dict(asked["job"])
    shape = mesh_shape(job.parallel, asked["ranks"], asked["per_node"])
    with fake_tensors():
        model = models.build_model(job.model)
        try:
            found: Mapping[str, Any] = memory_of(model, job, shape)
        except ConfigError as error:
            found = {"refused": {"message": error.message, **error.facts}}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
