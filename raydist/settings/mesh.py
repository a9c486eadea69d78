"""`parallel=` and a number of ranks -> stages, copies, shards, shares of layers. (pure)"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raydist.settings.config import Job, Parallel
from raydist.shared.errors import ConfigError


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh: pp x replicate x shard x tp = ranks.

    The last dimension varies fastest: the ranks of a tp group or a stage are consecutive.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def data(self) -> int:
        """The number of ranks with different samples.

        The ranks of one tp group, and the stages of one pipeline, have the same samples.
        """
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Return the position of a rank among those with different samples."""
        return rank // self.tp % self.data


def divides(settings: Parallel) -> bool:
    """Report whether parameters are DTensors, in shards.

    `parallel=ddp` without numbers gives each rank the whole model.
    """
    numbers = (settings.shard, settings.tp, settings.replicate, settings.pp)
    return settings.name != "ddp" or max(number or 1 for number in numbers) > 1


def mesh_shape(settings: Parallel, ranks: int, per_node: int) -> MeshShape:
    """Return the mesh shape for a number of ranks. ConfigError: the numbers do not fit.

    `per_node`: ranks of each node.
    """
    if not divides(settings):
        return MeshShape(replicate=ranks)
    tp = settings.tp or (per_node if settings.name == "tp" else 1)
    if per_node % tp:
        fits = max(number for number in range(1, min(tp, per_node) + 1) if per_node % number == 0)
        cause = f"the ranks of a tp group must be on one node, and each node has {per_node}"
        raise ConfigError.of(
            "parallel.tp", tp, cause, f"parallel.tp={fits}", f"scale.per_node={tp}"
        )
    others = tp * (settings.shard or 1) * (settings.replicate or 1)
    pp = settings.pp or (max(1, ranks // others) if settings.name == "pp" else 1)
    if (ranks // tp) % pp:
        stages = max(1, ranks // tp)
        fits = max(number for number in range(1, min(pp, stages) + 1) if stages % number == 0)
        cause = f"{ranks} ranks{f' / tp {tp}' if tp > 1 else ''} cannot be divided into {pp} stages"
        raise ConfigError.of("parallel.pp", pp, cause, f"parallel.pp={fits}")
    data = ranks // (tp * pp)
    by_default = max(1, data // (settings.replicate or 1))
    if settings.name == "hsdp":
        by_default = min(per_node // tp, data)
    if pp > 1 and settings.name in ("ddp", "pp"):
        by_default = 1
    shard = settings.shard or by_default
    replicate = settings.replicate or data // shard or 1
    if replicate * shard * tp * pp != ranks:
        raise _unfit(settings, MeshShape(replicate, shard, tp, pp), ranks)
    return MeshShape(replicate, shard, tp, pp)


def check_words(overrides: Sequence[str]) -> None:
    """Raise ConfigError if the typed numbers alone cannot fit the typed ranks.

    No file of conf/ could correct that. This spares a wrong product the imports and the time of
    composing. All other errors are found once the job is composed.
    """
    values = dict(text.partition("=")[::2] for text in overrides)
    numbers = {
        name: values.get(f"parallel.{name}", "") for name in ("pp", "replicate", "shard", "tp")
    }
    known: Any = {
        name: int(text) for name, text in numbers.items() if text.isdecimal() and int(text)
    }
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", values.get("scale", ""))
    if size is None or not known or any(name.startswith("scale.") for name in values):
        return
    ranks, per_node = int(size[1]) * int(size[2]), int(size[2])
    if ranks % math.prod(known.values()) or per_node % known.get("tp", 1):
        mesh_shape(Parallel(values.get("parallel", Parallel().name), **known), ranks, per_node)


def microbatches(job: Job, shape: MeshShape) -> int:
    """Return the number of parts of a batch that are in the pipeline at the same time.

    The default is the largest number that divides the batch, up to 4 for each stage, with at least
    two samples per part: batch norm needs two, and with more parts the ranks are idle for less of
    the time. If none fits, it is one part for each stage.
    """
    if job.parallel.microbatches:
        return job.parallel.microbatches
    batches = shape.data * job.train.accumulate
    samples = job.data.global_batch / batches if job.data.global_batch else job.data.batch_size
    counts = range(4 * shape.pp, shape.pp, -1)
    return next(
        (count for count in counts if samples % count == 0 and samples >= 2 * count), shape.pp
    )


def check_microbatches(job: Job, shape: MeshShape) -> None:
    """Raise ConfigError if a batch cannot be split into micro-batches as the schedule needs.

    They must be equal, and not too few for the schedule.
    """
    if shape.pp == 1:
        return
    count, each = microbatches(job, shape), job.train.accumulate * shape.data
    if count < shape.pp and job.parallel.schedule == "1f1b":
        cause = f"1f1b needs one for each of the {shape.pp} stages"
        raise ConfigError.of(
            "parallel.microbatches", count, cause, f"parallel.microbatches={shape.pp}"
        )
    global_batch = job.data.global_batch
    if (global_batch or job.data.batch_size * each) % (each * count) == 0:
        return
    name, value, step = (
        ("global_batch", global_batch, each * count)
        if global_batch
        else ("batch_size", job.data.batch_size, count)
    )
    cause = f"the samples of a rank's forward pass cannot be split into {count} equal micro-batches"
    if global_batch:
        cause = f"it cannot be split into {each} batches of {count} equal micro-batches"
    right = f"data.{name}={max(1, round(value / step)) * step}"
    fits = [
        number
        for number in range(shape.pp, min(count, value))
        if value % (number * step // count) == 0
    ]
    raise ConfigError.of(
        f"data.{name}",
        value,
        cause,
        right,
        *(f"parallel.microbatches={number}" for number in fits[-1:]),
    )


def check_chunks(job: Job, shape: MeshShape, own_loss: bool = False) -> None:
    """Raise ConfigError if the loss cannot be computed by chunks.

    `own_loss`: the model computes it.
    """
    chunks, why = job.train.loss_chunks, ""
    if shape.pp > 1 or shape.tp > 1:
        why = "a stage of a pipeline, or a tp group, computes the last layer as one"
    elif own_loss:
        why = "the model computes its own loss: fit needs loss="
    elif job.backend.find_unused_parameters:
        why = "backend.find_unused_parameters would take the last layer for unused"
    if chunks > 1 and why:
        raise ConfigError.of("train.loss_chunks", chunks, why, "train.loss_chunks=1")


def check_portions(job: Job, shape: MeshShape) -> None:
    """Raise ConfigError if a global batch does not split evenly among the ranks and the passes.

    In an elastic run portions may differ by one sample.
    """
    batch, each = job.data.global_batch, shape.data * job.train.accumulate
    if job.scale.max_nodes is None and batch is not None and batch % each:
        near = max(1, round(batch / each)) * each
        cause = (
            f"{shape.data} parts of the ranks x train.accumulate={job.train.accumulate} cannot "
            "share it evenly"
        )
        raise ConfigError.of("data.global_batch", batch, cause, f"data.global_batch={near}")


def check_division(job: Job, ranks: int, per_node: int) -> None:
    """Raise ConfigError if the model, or a step's samples, cannot be divided among these ranks.

    `per_node`: ranks of each node.
    """
    shape = mesh_shape(job.parallel, ranks, per_node)
    check_microbatches(job, shape)
    check_chunks(job, shape)
    check_portions(job, shape)


def _unfit(settings: Parallel, shape: MeshShape, ranks: int) -> ConfigError:
    """Return the error for a product that is not the number of ranks; it names the typed number."""
    stages = f"pp {shape.pp} x " if shape.pp > 1 else ""
    cause = (
        f"{stages}replicate {shape.replicate} x shard {shape.shard} x tp {shape.tp} are not "
        f"the {ranks} ranks"
    )
    if settings.replicate:
        right = "parallel.replicate=null"
        return ConfigError.of("parallel.replicate", settings.replicate, cause, right)
    data = ranks // (shape.tp * shape.pp)
    fits = max(number for number in range(1, min(shape.shard, data) + 1) if data % number == 0)
    return ConfigError.of("parallel.shard", shape.shard, cause, f"parallel.shard={fits}")
