"""`parallel=` and a number of ranks -> how many replicate, shard and share layers; or what to type instead. (pure)"""

from __future__ import annotations

from dataclasses import dataclass

from raydist.settings.config import Parallel
from raydist.shared.errors import ConfigError


@dataclass(frozen=True)
class MeshShape:
    """replicate x shard x tp = ranks. The last varies fastest: ranks of one tp group are consecutive."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """Ranks with samples of their own; those of one tp group have the same."""
        return self.replicate * self.shard


def divides(settings: Parallel) -> bool:
    """Whether parameters are DTensors, in shards: `parallel=ddp` without numbers leaves each rank the whole model."""
    return settings.name != "ddp" or max(settings.shard or 1, settings.tp or 1, settings.replicate or 1) > 1


def mesh_shape(settings: Parallel, ranks: int, per_node: int) -> MeshShape:
    """The shape for so many ranks. ConfigError: the numbers do not fit. `per_node`: ranks of each node."""
    if not divides(settings):
        return MeshShape(replicate=ranks)
    tp = settings.tp or (per_node if settings.name == "tp" else 1)
    if per_node % tp:
        fits = max(number for number in range(1, tp + 1) if per_node % number == 0)
        cause = f"the ranks of a tp group must be on one node, and each node has {per_node}"
        raise ConfigError.of("parallel.tp", tp, cause, f"parallel.tp={fits}", f"scale.per_node={tp}")
    data = ranks // tp
    by_default = per_node // tp if settings.name == "hsdp" else max(1, data // (settings.replicate or 1))
    shard = settings.shard or by_default
    replicate = settings.replicate or data // shard or 1
    if replicate * shard * tp != ranks:
        raise _unfit(settings, MeshShape(replicate, shard, tp), ranks)
    return MeshShape(replicate, shard, tp)


def _unfit(settings: Parallel, shape: MeshShape, ranks: int) -> ConfigError:
    """The product is not the number of ranks: the error names the number that was typed."""
    cause = f"replicate {shape.replicate} x shard {shape.shard} x tp {shape.tp} are not the {ranks} ranks"
    if settings.replicate:
        right = "parallel.replicate=null"
        return ConfigError.of("parallel.replicate", settings.replicate, cause, right)
    data = ranks // shape.tp
    fits = max(number for number in range(1, min(shape.shard, data) + 1) if data % number == 0)
    return ConfigError.of("parallel.shard", shape.shard, cause, f"parallel.shard={fits}")
