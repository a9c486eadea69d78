"""Levers of speed: variables of threads, compilers, allocator; each on or off, and why. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raydist.cluster.placement import Plan
from raydist.network.binding import Binding, bind_node
from raydist.network.facts import Facts, version_numbers
from raydist.network.names import CACHE_FOLDER, EnvVar
from raydist.settings.config import Job
from raydist.settings.fused import fused_choice

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}
"""The folders of torch.compile, Triton and the CUDA driver.

By default the first is in /tmp, at a path that another user may own; the others are in the home,
which may be a network file system.
"""
EXPANDABLE = "less GPU memory is lost to fragments when sizes differ"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
RENAMED = (2, 9)
"""The first torch that reads PYTORCH_ALLOC_CONF; earlier versions read the second name."""
REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""The variable that registers tensors with NCCL, as NVLS needs.

torch turns it off if segments are expandable (ProcessGroupNCCL.cpp), because NCCL cannot register
them (pytorch#165419).
"""


class Lever(NamedTuple):
    """One thing that may speed up training."""

    name: str
    on: bool
    why: str


def thread_variables(job: Job, node: Facts, binding: Binding, ranks: int) -> Iterator[EnvVar]:
    """Yield OMP_NUM_THREADS: scale.cpus, or the cores to which a rank is bound.

    The cores are used if they are more than one and scale.cpus is below 2. The value is equal for
    the `ranks` ranks of the node, so that none of them is slower, and within the quota of their
    cgroup.
    """
    own, threads = max(1, int(job.scale.cpus)), min(binding.cores, node.cpus // ranks)
    if own > 1 or threads <= 1:
        yield EnvVar("OMP_NUM_THREADS", str(own), f"scale.cpus={job.scale.cpus:g}")
    else:
        why = (
            f"cores of a rank with scale.numa={binding.mode}, divided by the ranks that share them"
        )
        yield EnvVar("OMP_NUM_THREADS", str(threads), why)


def compiler_variables(gpus: bool) -> Iterator[EnvVar]:
    """Yield the folders of compiled code."""
    for name, folder in CACHES.items():
        if gpus or name != "CUDA_CACHE_PATH":
            yield EnvVar(
                name,
                f"{CACHE_FOLDER}/{folder}",
                "kept for the next start, shared by the ranks of the node",
            )


def allocator_variables(job: Job, node: Facts, gpus: bool) -> Iterator[EnvVar]:
    """Yield the settings of torch's CUDA allocator, unless there is an obstacle."""
    if not allocator_obstacle(job, node, gpus):
        version = version_numbers(node.versions.get("torch", ""))
        name = ALLOCATOR[1] if version and version < RENAMED else ALLOCATOR[0]
        yield EnvVar(name, "expandable_segments:True", EXPANDABLE)


def allocator_obstacle(job: Job, node: Facts, gpus: bool) -> str:
    """Return why raydist does not set the allocator; empty if it does."""
    if not gpus:
        return "the ranks have no GPU"
    for name in (*ALLOCATOR, REGISTERS):
        if name in job.env or name in node.environment:
            return f"{name} is set"
    if job.script:
        name = "env.PYTORCH_ALLOC_CONF=expandable_segments:True"
        return (
            f"a program may share CUDA tensors with other processes, which can fail then "
            f"(pytorch#165685); {name}"
        )
    return ""


def levers(
    job: Job, plan: Plan, facts: Sequence[Facts], variables: Sequence[EnvVar]
) -> Iterator[Lever]:
    """Yield each lever for the ranks of rank 0's node. `variables`: those of rank 0."""
    gpus = bool(plan.request.rank_resources.get("GPU"))
    reasons = {var.name: var for var in variables}
    binding = bind_node(job, plan, facts, plan.slots[0])
    yield Lever(
        "NUMA binding",
        bool(binding.cpus),
        f"{binding.mode}: {binding.why}" if binding.cpus else binding.why,
    )
    threads = reasons["OMP_NUM_THREADS"]
    yield Lever("threads", threads.value != "1", f"{threads.value} for each rank: {threads.reason}")
    yield Lever("freed memory", True, reasons["MALLOC_TRIM_THRESHOLD_"].reason)
    yield Lever("compiled code", True, reasons["TORCHINDUCTOR_CACHE_DIR"].reason)
    why = allocator_obstacle(job, facts[0], gpus)
    yield Lever("expandable segments", not why, why or EXPANDABLE)
    yield collection(job, plan.world_size)
    yield from loop_levers(job, gpus)


def collection(job: Job, ranks: int) -> Lever:
    """Return the lever for Python's garbage collection at the same step."""
    name, every = "garbage collection", job.train.gc
    if ranks == 1:
        return Lever(name, False, "there is one rank")
    if not every:
        return Lever(name, False, "each rank collects when Python decides; train.gc=100")
    return Lever(
        name,
        True,
        f"train.gc={every}: a full collection on all ranks after each {every} optimizer steps",
    )


def tf32(job: Job, gpus: bool) -> Lever:
    """Return the lever for fp32 matrix products in TF32."""
    if not gpus:
        return Lever("TF32", False, "the ranks have no GPU")
    name = "train.fast" if job.train.fast and not job.train.tf32 else "train.tf32"
    on = job.train.tf32 or job.train.fast
    return Lever(
        "TF32",
        on,
        f"{name}=true" if on else "it rounds the factors of fp32 products: train.tf32=true",
    )


def cudnn_search(job: Job, gpus: bool) -> Lever:
    """Return the lever for cuDNN's search for the fastest algorithm of a convolution."""
    name, train = "cuDNN search", job.train
    if not gpus:
        return Lever(name, False, "the ranks have no GPU")
    if job.deterministic:
        return Lever(
            name, False, "deterministic=true: it may find other algorithms in the next run"
        )
    if train.cudnn_search or train.fast:
        return Lever(name, True, f"train.{'cudnn_search' if train.cudnn_search else 'fast'}=true")
    return Lever(
        name, False, "each new shape of a convolution takes longer once: train.cudnn_search=true"
    )


def loop_levers(job: Job, gpus: bool) -> Iterator[Lever]:
    """Yield the levers of raydist.fit."""
    train = job.train
    if job.script:
        yield Lever("raydist.fit's own", False, "a script has its own loop")
        return
    fused = fused_choice(job, gpus)
    yield Lever("fused optimizer", fused.on, f"{job.optim.title}: {fused.why}")
    why = f"train.compile={str(train.compile).lower()}"
    if not train.compile:
        why = "the first step takes long: train.compile=true, or less long: train.compile=blocks"
    yield Lever("torch.compile", bool(train.compile), why)
    images = train.channels_last or (train.fast and gpus)
    name = "train.channels_last" if train.channels_last else "train.fast"
    if not images:
        name = "train.fast" if gpus else "convolutions on a CPU are no faster: train.channels_last"
    yield Lever("channels-last images", images, f"{name}=true")
    yield tf32(job, gpus)
    yield cudnn_search(job, gpus)
    half = train.precision != "fp32"
    why = (
        f"train.precision={train.precision}"
        if half
        else "it changes the numbers: train.precision=bf16"
    )
    yield Lever("half precision", half, why)
