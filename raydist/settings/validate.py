"""Values of a Job that cannot be right: a ConfigError with the value and a suggestion. (pure)"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from raydist.settings import in_place, notices, profiled
from raydist.settings.config import TRACKERS, Backend, Job, Parallel, Scale, Sweep
from raydist.settings.duration import seconds_of
from raydist.settings.fused import fused_choice
from raydist.settings.mesh import check_division, divides, mesh_shape
from raydist.settings.priority import priority_of
from raydist.shared import arguments
from raydist.shared.errors import ConfigError

MAX_RANKS = 1_000_000
"""Limit on the ranks of a run.

Beyond it, a typing error would exhaust the driver's memory before it is refused.
"""
MIN_SHARE = 0.0001
"""The smallest part of a GPU or another resource that Ray counts.

Ray's resources are fixed-point numbers in units of 1/10000.
"""
RANKS_OWN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|MASTER_ADDR"
    r"|MASTER_PORT|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)"
)
"""Variables that differ among ranks, or that all ranks use to meet.

With one value for all ranks the run would hang.
"""
GPUS = re.compile(r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES")
"""The variables that choose the GPUs of a process.

With one value for all ranks of a cluster they would use GPUs that Ray gave to another run, or share
one.
"""


def validate(job: Job) -> Job:
    """Return the job itself; ConfigError for the first value that cannot be right."""
    check_fields(job, "")
    if (best := job.checkpoint.best) is not None:
        mode, _, metric = best.partition(":")
        if mode not in ("max", "min") or not metric or metric != metric.strip():
            right = mode if mode in ("max", "min") else "max"
            example = f"checkpoint.best={right}:{(metric or mode).strip() or 'accuracy'}"
            raise ConfigError.of(
                "checkpoint.best", best, "must be max:METRIC or min:METRIC", example
            )
    if not re.fullmatch(r"auto|all|none|\d+(,\d+)*", job.watch.output):
        cause = "must be auto, all, none, or ranks"
        raise ConfigError.of("watch.output", job.watch.output, cause, "watch.output=0,3")
    profiled.steps_to_profile(job.watch.profile)
    if wrong := [name for name in job.track if name not in TRACKERS]:
        named = re.findall(r"[a-z]+", ",".join(job.track))
        if set(named) <= TRACKERS.keys():
            raise ConfigError.of(
                "track", ",".join(job.track), "several are a list", f"track=[{','.join(named)}]"
            )
        raise ConfigError.unknown("track", wrong[0], TRACKERS)
    if twice := [name for name in TRACKERS if job.track.count(name) > 1]:
        once = ",".join(dict.fromkeys(job.track))
        raise ConfigError.of(
            "track", ",".join(job.track), f"{twice[0]} is named twice", f"track=[{once}]"
        )
    if job.args and not job.script:
        cause = "only a program (script=) has arguments"
        raise ConfigError.of(
            "args", " ".join(job.args), cause, "script=FILE.py", "job.args.NAME=VALUE"
        )
    _check_env(job.env)
    if job.hang.limit_s < job.hang.after_s:
        cause = f"must be hang.after_s={job.hang.after_s:g} or more"
        raise ConfigError.of(
            "hang.limit_s", job.hang.limit_s, cause, f"hang.limit_s={job.hang.after_s:g}"
        )
    if job.backend.name == "mpi" and job.restart.max:
        raise ConfigError.of(
            "restart.max", job.restart.max, "mpirun cannot restart its ranks", "restart=none"
        )
    if job.backend.name == "mpi" and job.scale.numa not in ("auto", "none"):
        right = "scale.numa=none backend.mpi.args=[--bind-to,numa]"
        raise ConfigError.of("scale.numa", job.scale.numa, "mpirun binds its ranks itself", right)
    if job.backend.name == "horovod":
        _check_horovod(job.backend, job.init_method)
    in_place.check(job)
    notices.check_notify(job.notify)
    _check_queue(job)
    _check_size(job)
    _check_sweep(job.sweep)
    _check_repeatable(job)
    _check_parallel(job)
    fused_choice(job, gpus=False)
    if job.optim.min_lr_ratio and job.optim.schedule in ("constant", "step"):
        cause = f"the rate does not fall to 0 with optim.schedule={job.optim.schedule}"
        raise ConfigError.of(
            "optim.min_lr_ratio", job.optim.min_lr_ratio, cause, "optim.schedule=cosine"
        )
    batch, passes = job.data.global_batch, job.train.accumulate
    if batch is not None and batch % passes:
        near = round(batch / passes) * passes or passes
        cause = f"it cannot be split into train.accumulate={passes} equal parts"
        raise ConfigError.of("data.global_batch", batch, cause, f"data.global_batch={near}")
    if job.fabric.kind in ("ethernet", "site") and job.fabric.strict:
        cause = f"it requires RDMA, which fabric.kind={job.fabric.kind} does not use"
        raise ConfigError.of(
            "fabric.strict", "true", cause, "fabric.kind=auto", "fabric.strict=false"
        )
    if job.fabric.kind in ("ethernet", "site") and job.fabric.hca:
        value = f"[{','.join(job.fabric.hca)}]"
        cause = f"with fabric.kind={job.fabric.kind} raydist chooses no HCAs"
        raise ConfigError.of("fabric.hca", value, cause, "fabric.kind=auto", "fabric.hca=[]")
    arguments.check_arguments(job.args, job.init_method, job.backend.name)
    return job


def check_fields(node: Any, prefix: str) -> None:
    """Apply the checks that a field itself defines: one of a few values, or limits.

    A number must be finite.
    """
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        choices, least, below, most = (
            field.metadata.get(key) for key in ("choices", "least", "below", "most")
        )
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{name}.")
        elif choices is not None and value not in choices:
            raise ConfigError.unknown(
                name,
                value,
                [str(each).lower() if isinstance(each, bool) else each for each in choices],
            )
        elif isinstance(value, float) and not math.isfinite(value):
            example = example_number(field)
            raise ConfigError.of(name, value, "must be a finite number", f"{name}={example}")
        elif value is not None and most is not None and value > most:
            raise ConfigError.of(name, value, f"must be {most} or less", f"{name}={most}")
        elif value is not None and least is not None and value < least:
            raise ConfigError.of(name, value, f"must be {least} or more", f"{name}={least}")
        elif value is not None and below is not None and value <= below:
            raise ConfigError.of(
                name, value, f"must be more than {below}", f"{name}={example_number(field)}"
            )


def example_number(field: dataclasses.Field[Any]) -> Any:
    """Return a value that a field with a number accepts."""
    return 1 if field.default is None else field.default


def _check_env(env: Mapping[str, str]) -> None:
    if own := next(filter(RANKS_OWN.fullmatch, env), None):
        cause = "raydist sets it for each rank"
        raise ConfigError.of(f"env.{own}", env[own], cause, "scale=NODESxRANKS")
    if own := next(filter(GPUS.fullmatch, env), None):
        cause = "the ranks of a node get the GPUs that Ray assigns, or this shell's variable leaves"
        gpus = 0 if env[own] in ("", "-1") else 1
        raise ConfigError.of(f"env.{own}", env[own], cause, f"scale.gpus={gpus}")


def _check_queue(job: Job) -> None:
    priority_of(job.queue.priority)
    if job.queue.limit and not seconds_of("queue.limit", job.queue.limit):
        cause = "must be longer than nothing"
        raise ConfigError.of("queue.limit", job.queue.limit, cause, "queue.limit=4h")
    if job.queue.shrink and job.scale.max_nodes is None:
        cause = "the run has a fixed number of nodes"
        right = f"scale.nodes=1..{max(2, job.scale.nodes or 2)} queue.shrink=true"
        raise ConfigError.of("queue.shrink", "true", cause, right)
    if job.queue.limit and job.backend.name == "mpi":
        cause = "a run of mpirun does not make way, and would not end then"
        raise ConfigError.of("queue.limit", job.queue.limit, cause, "queue.limit=''")


def _check_horovod(backend: Backend, init_method: str) -> None:
    settings, name = backend.horovod, "backend.horovod"
    if init_method != "env":
        raise ConfigError.of(
            "init_method", init_method, "Horovod has its own rendezvous", "init_method=env"
        )
    if 0 < settings.stall_fail_s <= settings.stall_warn_s:
        cause = "must be 0, or more than stall_warn_s"
        example = f"{name}.stall_fail_s={2 * settings.stall_warn_s}"
        raise ConfigError.of(f"{name}.stall_fail_s", settings.stall_fail_s, cause, example)
    for ranks in settings.process_sets:
        if not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks):
            example = f"{name}.process_sets=[[0,1],[2,3]]"
            raise ConfigError.of(
                f"{name}.process_sets", ranks, "must be lists of different ranks", example
            )


def _check_size(job: Job) -> None:
    """Check the number of ranks and their resources.

    If that number may change, also check what else the job needs for that.
    """
    scale = job.scale
    ranks = (scale.max_nodes or scale.nodes or 1) + scale.spares
    if ranks * (scale.per_node or 1) > MAX_RANKS:
        size = f"{scale.max_nodes or scale.nodes or 1}x{scale.per_node or 1}"
        raise ConfigError.of("scale", size, f"a run has at most {MAX_RANKS} ranks", "scale=2x8")
    for name, amount in {"gpus": scale.gpus or 0.0, **scale.resources}.items():
        if not (amount == 0 or MIN_SHARE <= amount < math.inf):
            key = name if name == "gpus" else f"resources.{name}"
            raise ConfigError.of(
                f"scale.{key}", amount, f"must be 0, or {MIN_SHARE} or more", f"scale.{key}=1"
            )
    override = size_override(scale)
    if not override:
        return
    key, _, size = override.partition("=")

    def wrong(cause: str, *suggestions: str) -> ConfigError:
        return ConfigError.of(key, size, cause, *suggestions)

    if scale.max_nodes is not None and (scale.nodes or 1) > scale.max_nodes:
        raise wrong(
            "the minimum is more than the maximum", f"scale.nodes={scale.max_nodes}..{scale.nodes}"
        )
    if scale.max_nodes is not None and scale.spares:
        cause = f"scale.nodes={scale.nodes or 1}..{scale.max_nodes} uses all nodes already"
        raise ConfigError.of("scale.spares", scale.spares, cause, "scale.spares=0")
    if scale.nodes is None and scale.spares:
        raise wrong("scale=cluster uses all nodes already", f"scale.nodes=1 {override}")
    if scale.nodes is None:
        raise ConfigError.of(
            "scale.max_nodes", scale.max_nodes, "scale=cluster uses all nodes already", override
        )
    if job.backend.name == "mpi":
        right = "scale.spares=0" if scale.spares else "scale.max_nodes=null"
        raise wrong("the ranks of mpirun cannot join, leave or move", right)
    if job.group == "inline":
        raise wrong("group=inline runs on this machine only", "group=ray")
    if scale.placement != "STRICT_SPREAD":
        raise wrong(
            f"scale.placement={scale.placement} does not count nodes",
            "scale.placement=STRICT_SPREAD",
        )
    if scale.spares and job.restart.max == 0:
        raise wrong(
            "restart.max=0 restarts no rank on a spare node", "restart.max=1", "scale.spares=0"
        )
    if scale.max_nodes is not None and job.data.resize == "keep" and not job.script:
        _check_batch(job, scale.max_nodes)
    if (
        scale.max_nodes is not None
        and job.data.resize == "scale"
        and job.data.global_batch is not None
    ):
        cause = f"data.global_batch={job.data.global_batch} fixes the samples per step"
        raise ConfigError.of("data.resize", "scale", cause, "data.resize=keep", "data.batch_size=N")


def _check_sweep(sweep: Sweep) -> None:
    """Check which settings of a sweep need an objective, and how many."""
    objectives = [each for each in sweep.objective.split(",") if each]
    for each in objectives:
        if not re.fullmatch(r"(min|max):\S(.*\S)?", each.strip()):
            name = (each.partition(":")[2] or each).strip()
            raise ConfigError.of(
                "sweep.objective",
                sweep.objective,
                "must be min:NAME or max:NAME",
                f"sweep.objective=min:{name}",
            )
    for key, value, most in (
        ("prune", sweep.prune, 1),
        ("sampler", sweep.sampler, 1 if sweep.sampler == "cmaes" else 9),
    ):
        if value in ("none", "auto", "grid", "random"):
            continue
        if not objectives:
            raise ConfigError.of(
                f"sweep.{key}", value, "it needs an objective", "sweep.objective=min:NAME"
            )
        if len(objectives) > most:
            cause = f"it takes one objective, not {len(objectives)}"
            raise ConfigError.of(f"sweep.{key}", value, cause, f"sweep.objective={objectives[0]}")


def _check_batch(job: Job, max_nodes: int) -> None:
    """Check that a global batch has a sample for each rank of the largest size.

    Without data.global_batch it is the batch of the initial ranks.
    """
    per_node = job.scale.per_node or 1
    # Until the number of ranks per node is known, assume that each rank has different samples.
    parallel = job.parallel if job.scale.per_node else Parallel()
    first, ranks = (
        mesh_shape(parallel, nodes * per_node, per_node).data
        for nodes in (job.scale.nodes or 1, max_nodes)
    )
    batch = job.data.global_batch or job.data.batch_size * job.train.accumulate * first
    if batch < ranks:
        own = "ranks" if ranks == max_nodes * per_node else "parts of the ranks"
        cause = f"{batch} samples per step are too few for {ranks} {own}"
        key, _, size = size_override(job.scale).partition("=")
        raise ConfigError.of(key, size, cause, f"data.global_batch={ranks}", "data.resize=scale")


def _check_repeatable(job: Job) -> None:
    if job.deterministic and job.train.cudnn_search:
        cause = "it may find other algorithms in the next run, which deterministic=true forbids"
        raise ConfigError.of(
            "train.cudnn_search", "true", cause, "train.cudnn_search=false", "deterministic=false"
        )


def _check_parallel(job: Job) -> None:
    """Check what else a job with a model divided among ranks needs.

    The number of ranks may still be open.
    """
    settings, scale = job.parallel, job.scale
    if not divides(settings):
        return

    parts = {
        f"parallel.{name}": getattr(settings, name) for name in ("shard", "replicate", "tp", "pp")
    }
    numbers = [(key, value) for key, value in parts.items() if value and settings.name == "ddp"]
    wrong = functools.partial(ConfigError.of, *(numbers or [("parallel", settings.name)])[0])
    if job.backend.name in ("horovod", "mpi", "ucc"):
        raise wrong(
            f"backend={job.backend.name} averages gradients only", "backend=auto", "parallel=ddp"
        )
    if job.script or job.backend.name == "script":
        raise wrong(
            "a program divides its model itself; raydist.fit does it for a job", "parallel=ddp"
        )
    if job.train.precision == "fp16":
        raise wrong("a model in shards has no loss scaling", "train.precision=bf16", "parallel=ddp")
    if job.train.channels_last:
        raise wrong("shards are contiguous", "train.channels_last=false", "parallel=ddp")
    if scale.nodes is not None and scale.per_node is not None:
        for nodes in range(scale.nodes, (scale.max_nodes or scale.nodes) + 1):
            check_division(job, nodes * scale.per_node, scale.per_node)


def size_override(scale: Scale) -> str:
    """Return the override that makes the number of nodes variable or asks for spare nodes.

    Empty if there is none.
    """
    if scale.max_nodes is not None:
        return f"scale.nodes={scale.nodes or 1}..{scale.max_nodes}"
    return f"scale.spares={scale.spares}" if scale.spares else ""
