"""Settings -> the same, or the one that can't be right and the word to type instead. (pure)"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from raydist.config import Job, Scale
from raydist.errors import ConfigError, suggest


def check(job: Job) -> Job:
    """The job itself, or a ConfigError for the first value that can't be right, with the word to type instead."""
    _check_fields(job, "")
    if job.checkpoint.best is not None:
        mode, _, metric = job.checkpoint.best.partition(":")
        if mode not in ("max", "min") or not metric:
            raise ConfigError(
                f"checkpoint.best={job.checkpoint.best}: say max:METRIC or min:METRIC, "
                f"as in checkpoint.best=max:{metric or mode or 'accuracy'}"
            )
    if not re.fullmatch(r"auto|all|none|\d+(,\d+)*", job.watch.output):
        raise ConfigError(f"watch.output={job.watch.output}: say all, none, or ranks as in watch.output=0,3")
    if job.backend.name == "mpi" and job.restart.max:
        raise ConfigError(f"restart.max={job.restart.max}: mpirun's ranks are not started again; say restart=none")
    check_size(job)
    if not job.job.target:
        raise ConfigError("job is empty: say job=digits, job=path/to/file.py or job=package.module:function")
    if job.data.global_batch is not None and job.data.global_batch % job.train.accumulate:
        near = round(job.data.global_batch / job.train.accumulate) * job.train.accumulate or job.train.accumulate
        raise ConfigError(
            f"data.global_batch={job.data.global_batch} can't be split into train.accumulate={job.train.accumulate} "
            f"equal parts: say data.global_batch={near}"
        )
    if job.fabric.kind in ("ethernet", "site") and job.fabric.strict:
        raise ConfigError(
            f"fabric.strict asks for RDMA, and fabric.kind={job.fabric.kind} for none; say fabric.kind=auto"
        )
    return job


def check_size(job: Job) -> None:
    """Refuse a size that may change, or spares, where that can't be."""
    scale, said = job.scale, size_word(job.scale)
    if not said:
        return
    if scale.max_nodes is not None and (scale.nodes or 1) > scale.max_nodes:
        raise ConfigError(f"{said}: the least is more than the most; say scale.nodes={scale.max_nodes}..{scale.nodes}")
    if scale.max_nodes is not None and scale.spares:
        raise ConfigError(
            f"scale.spares={scale.spares} beside {said}: such a job takes every node that comes; leave scale.spares out"
        )
    if scale.nodes is None:
        word = f"scale.nodes=N {said}" if scale.spares else f"scale.nodes=1..{scale.max_nodes}"
        raise ConfigError(f"{said} beside scale=cluster, which takes every node there is; say {word}")
    if job.backend.name == "mpi":
        raise ConfigError(f"{said}: mpirun's ranks can't change places, join or leave; say scale.nodes={scale.nodes}")
    if job.group == "inline":
        raise ConfigError(f"{said}: group=inline has this machine only; leave one of them out")
    if scale.placement != "STRICT_SPREAD":
        raise ConfigError(f"{said} counts whole nodes: say scale.placement=STRICT_SPREAD, not {scale.placement}")
    if scale.spares and job.restart.max == 0:
        raise ConfigError(f"{said} beside restart.max=0: no spare can ever take over; say restart.max=1, or no spares")
    if scale.max_nodes is not None and job.data.resize == "keep" and not job.script:
        check_batch(job, scale.max_nodes)
    if scale.max_nodes is not None and job.data.resize == "scale" and job.data.global_batch is not None:
        raise ConfigError(
            f"data.resize=scale: data.global_batch={job.data.global_batch} says how many samples a step takes; "
            "say data.batch_size, or data.resize=keep"
        )


def check_batch(job: Job, most: int) -> None:
    """Refuse a global batch that the most ranks could not share: it is that of the ranks that the job begins with."""
    least, each = job.scale.nodes or 1, job.scale.per_node or 1
    batch = job.data.global_batch or job.data.batch_size * job.train.accumulate * least * each
    if batch < most * each:
        raise ConfigError(
            f"{size_word(job.scale)}: {batch} samples a step are too few for {most * each} ranks; "
            f"say data.global_batch={most * each}, or data.resize=scale"
        )


def size_word(scale: Scale) -> str:
    """The word that makes the size one that may change, or asks for spares; empty where there is none."""
    if scale.max_nodes is not None:
        return f"scale.nodes={scale.nodes or 1}..{scale.max_nodes}"
    return f"scale.spares={scale.spares}" if scale.spares else ""


def _check_fields(node: Any, prefix: str) -> None:
    for f in dataclasses.fields(node):
        value, name = getattr(node, f.name), prefix + f.name
        if dataclasses.is_dataclass(value):
            _check_fields(value, f"{name}.")
        elif "words" in f.metadata and value not in f.metadata["words"]:
            raise ConfigError(f"{name}={value}: {suggest(str(value), f.metadata['words'], prefix=f'{name}=')}")
        elif value is not None and "low" in f.metadata and value < f.metadata["low"]:
            raise ConfigError(f"{name}={value}: must be {f.metadata['low']} or more; say {name}={f.metadata['low']}")
        elif value is not None and "above" in f.metadata and value <= f.metadata["above"]:
            default = f.default if f.default is not None else 1
            raise ConfigError(f"{name}={value}: must be more than {f.metadata['above']}; say {name}={default}")
