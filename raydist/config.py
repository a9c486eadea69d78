"""The settings of a run: frozen dataclasses, a docstring under each field; that text is the help. (either side)

conf/ and the words typed are composed into a `Job` by compose.py. Nothing here imports hydra, torch or ray, so that
every side of a run can read its settings.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL", re.IGNORECASE)
"""Environment variables whose value must not be written anywhere."""


def one_of(default: str, *others: str) -> Any:
    """A field that holds one word of a few; `check` refuses any other and offers the nearest."""
    return field(default=default, metadata={"words": (default, *others)})


def at_least(low: float, default: Any) -> Any:
    """A number that is `low` or more (or null, where the type allows it)."""
    return field(default=default, metadata={"low": low})


def above(low: float, default: Any) -> Any:
    """A number greater than `low` (or null, where the type allows it)."""
    return field(default=default, metadata={"above": low})


@dataclass(frozen=True)
class Target:
    """What every rank runs: `job=digits`, `job=path/to/file.py`, `job=package.module:function`."""

    target: str = "digits"
    """A name in jobs/, a Python file (its function `job`, or file.py:function), or package.module:function."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the job's function: job.args.hidden=64."""


@dataclass(frozen=True)
class Horovod:
    """What backend=horovod does, beside moving the gradients."""

    op: str = one_of("average", "sum")
    """How the ranks' gradients become one: average, or sum."""
    compression: str = one_of("none", "fp16")
    """fp16: gradients travel as half-precision numbers."""
    groups: int | None = at_least(1, None)
    """Reduce the gradients in so many groups of parameters, each as one; null: as they come, fused by size."""
    process_sets: list[list[int]] = field(default_factory=list)
    """Groups of ranks with collectives of their own: backend.horovod.process_sets=[[0,1],[2,3]]."""
    fusion_mb: float | None = at_least(0, None)
    """Gradients that are ready together travel together, up to so many MiB; 0: each alone; null: 128."""
    cycle_ms: float | None = above(0, None)
    """Milliseconds that gradients wait for others to travel with; null: 1."""
    autotune: bool = False
    """Search for better fusion_mb and cycle_ms, where they are null, while it trains; horovod-autotune.csv has all
    that was tried."""
    timeline: bool = False
    """Record every collective in horovod-timeline.json of the run folder, for chrome://tracing or Perfetto."""
    stall_warn_s: int = at_least(0, 60)
    """Seconds after which ranks that a collective waits for are named in rank 0's log; 0: no such check at all."""
    stall_fail_s: int = at_least(0, 600)
    """Seconds after which a collective that still waits fails the run; 0: never."""
    log_level: str = one_of("warning", "trace", "debug", "info", "error", "fatal")
    """How much Horovod itself writes into the ranks' logs."""


@dataclass(frozen=True)
class Mpi:
    """What backend=mpi starts the ranks with."""

    mpirun: str = "auto"
    """Path of Open MPI's or MPICH's mpirun on every node; auto: the one on PATH, else the one of this Python."""
    args: list[str] = field(default_factory=list)
    """More words for mpirun: backend.mpi.args=[--bind-to,core]."""


@dataclass(frozen=True)
class Backend:
    """Who moves the gradients."""

    name: str = "auto"
    """auto (nccl where the job has GPUs, gloo otherwise), gloo, nccl, horovod; mpi for a script of MPI's, and
    for a job, as ucc, where this torch has it. script: auto, for a script= that joins as under torchrun."""
    timeout_s: float = above(0, 600.0)
    """Seconds a collective or the rendezvous may take before torch gives up."""
    bucket_mb: float = above(0, 25.0)
    """Size of DDP's gradient buckets in MiB."""
    find_unused_parameters: bool = False
    """DDP: look for parameters that took no part in the loss; costs a pass over the graph each step."""
    static_graph: bool = False
    """DDP: promise that the graph never changes, which lets DDP do less each step."""
    horovod: Horovod = field(default_factory=Horovod)
    mpi: Mpi = field(default_factory=Mpi)


@dataclass(frozen=True)
class Scale:
    """How many ranks, and where."""

    nodes: int | None = at_least(1, 1)
    """Nodes to use; null takes every node that is there (scale=cluster)."""
    max_nodes: int | None = at_least(1, None)
    """With it, `nodes` is the least: the job takes as many nodes as there are up to so many, goes on with fewer when
    some are lost, and with more when they come. scale.nodes=2..8 says both."""
    per_node: int | None = at_least(1, None)
    """Ranks on each node; null: one per GPU, or without GPUs two on one node and one per cpus over a cluster."""
    spares: int = at_least(0, 0)
    """Nodes that are held beside those, warm: one of them takes over at once when a node is lost."""
    gpus: float | None = at_least(0, None)
    """GPUs of each rank; null: 1 where the nodes have GPUs and the backend can use them, otherwise 0."""
    cpus: float = above(0, 1.0)
    """CPUs of each rank, also its OMP_NUM_THREADS."""
    resources: dict[str, float] = field(default_factory=dict)
    """Other Ray resources of each rank: scale.resources.highmem=1."""
    placement: str = one_of("STRICT_SPREAD", "STRICT_PACK", "PACK", "SPREAD")
    """STRICT_SPREAD: exactly `nodes` nodes with `per_node` ranks each. Ray's other strategies place nodes x per_node
    ranks one by one: PACK on few nodes, SPREAD over many, STRICT_PACK all on one."""
    labels: dict[str, str] = field(default_factory=dict)
    """Only nodes with these Ray labels, in Ray's selector words: scale.labels.market-type=on-demand."""
    avoid: bool = True
    """Leave out nodes that were lost or slow in two runs of the last week, where there is room without them."""
    wait_s: float = at_least(0, 600.0)
    """Seconds to wait for nodes that the autoscaler, or a person, is bringing."""


@dataclass(frozen=True)
class Fabric:
    """Which network the ranks talk over."""

    kind: str = one_of("auto", "ib", "roce", "ethernet", "site")
    """auto: RDMA where NCCL finds it. ib, roce: only HCAs of that kind. ethernet: TCP, even where there is RDMA.
    site: no variable of the network is set; the site has done it."""
    interface: str | None = None
    """Network interface for rendezvous, gloo and NCCL's sockets; null: the one that owns the node's Ray address."""
    hca: list[str] = field(default_factory=list)
    """Exactly these HCAs carry the gradients: fabric.hca=[mlx5_0,mlx5_1]; empty: the active ones near the GPUs, those
    for storage left out."""
    strict: bool = False
    """RDMA, or an error; never silently TCP."""
    debug: bool = False
    """NCCL tells in logs/rank-N.nccl which network it chose, and why."""


@dataclass(frozen=True)
class Data:
    """The samples, and in which portions."""

    root: str = "data"
    """Folder of the data set's files (mnist, cifar10, folder); relative to the folder you stand in."""
    batch_size: int = at_least(1, 32)
    """Samples of one forward pass on one rank."""
    global_batch: int | None = at_least(1, None)
    """Samples of one optimizer step over all ranks; null: batch_size x train.accumulate x ranks. Set it, and the same
    steps see the same samples on any number of ranks (batch_size then follows from it)."""
    resize: str = one_of("keep", "scale")
    """When the number of nodes changes (scale.nodes=2..8). keep: an optimizer step takes as many samples as before,
    in more passes if there are fewer ranks. scale: batch_size on each rank; optim.scaling says what the rate does."""
    workers: int = at_least(0, 0)
    """Loader processes of each rank; 0 loads in the rank itself."""
    pin_memory: bool = True
    """Page-locked batches for faster copies; only where there is a GPU."""
    shuffle: bool = True
    """A new order each epoch: a function of seed and epoch, not of the number of ranks."""


@dataclass(frozen=True)
class Optim:
    """The optimizer, its rate and the schedule of the rate."""

    name: str = one_of("sgd", "adam", "adamw", "rmsprop", "adagrad")
    """Which of torch.optim's optimizers."""
    lr: float = above(0, 0.05)
    """Learning rate at batch `scaling_batch`, or as it is when scaling=none."""
    args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer: optim.args.momentum=0.9."""
    schedule: str = one_of("constant", "cosine", "linear", "step")
    """Shape of the rate after the warm-up: constant, cosine to 0, linear to 0, step (x0.1 at each third)."""
    warmup: int = at_least(0, 0)
    """Steps in which the rate climbs linearly to its full height."""
    scaling: str = one_of("none", "linear", "sqrt")
    """How the rate grows with the global batch: lr x k or lr x sqrt(k), k = global batch / scaling_batch
    (linear: Goyal et al. 2017, arXiv:1706.02677)."""
    scaling_batch: int = at_least(1, 256)
    """The global batch for which `lr` was chosen."""


@dataclass(frozen=True)
class Train:
    """The loop."""

    epochs: int = at_least(0, 10)
    """Passes over the training samples."""
    steps: int | None = at_least(1, None)
    """Stop after so many optimizer steps, whatever `epochs` says."""
    precision: str = one_of("fp32", "bf16", "fp16")
    """bf16 and fp16: autocast; fp16 also scales the loss."""
    accumulate: int = at_least(1, 1)
    """Forward and backward passes per optimizer step; gradients travel only in the last."""
    clip: float | None = above(0, None)
    """Largest norm of the whole gradient; null: no clipping."""
    compile: bool = False
    """torch.compile the model."""
    channels_last: bool = False
    """Images in channels-last memory order."""
    evaluate_every: int = at_least(0, 1)
    """Epochs between evaluations; 0: only at the end."""


@dataclass(frozen=True)
class Checkpoint:
    """What is written to disk, and what is kept."""

    every: int | None = at_least(1, None)
    """Optimizer steps between checkpoints; null: one at the end of each epoch."""
    keep: int = at_least(1, 3)
    """Newest checkpoints to keep."""
    best: str | None = None
    """Also keep the best by this metric: max:accuracy or min:loss."""


@dataclass(frozen=True)
class Hang:
    """When a rank counts as stuck. Nobody is ended for being slow: only for what can't get better, or for `limit_s`."""

    after_s: float = above(0, 3.0)
    """Seconds of silence, beside `steps` of the rank's own steps, after which all ranks are looked at."""
    steps: float = at_least(0, 3.0)
    """Steps, as long as the rank's own take (their median), that a rank may be silent in addition."""
    limit_s: float = above(0, 1800.0)
    """Seconds of silence after which the run is ended, whatever the reason; also where it starts or saves."""
    end: bool = True
    """End the run when ranks hang for good: one is stopped, or they wait in different collectives. false: only tell."""


@dataclass(frozen=True)
class Snapshot:
    """States of the training in memory, for a restart that loses no step."""

    every: int | None = at_least(0, None)
    """Optimizer steps between snapshots; 0: none; null: each step, or as often as takes 1% of the time."""


@dataclass(frozen=True)
class Restart:
    """How often ranks that failed are started again, from the newest state that there is."""

    max: int | None = at_least(0, None)
    """Failures that are forgiven within `window_s`; 0: none. Nodes that the cluster takes away do not count.
    null: 3; of a program (script=) 0, which might do twice what it should do once."""
    window_s: float | None = above(0, 3600.0)
    """Seconds after which a failure is forgotten; null: never."""


@dataclass(frozen=True)
class Watch:
    """What the person sees while it runs."""

    progress: str = one_of("auto", "bar", "lines", "none")
    """auto: a live bar in a terminal, plain lines elsewhere."""
    every_s: float = above(0, 10.0)
    """Seconds between plain lines."""
    slow: float = at_least(0, 10.0)
    """A rank is named slow if its own work takes so many percent of a step longer than that of the others; 0: none."""
    output: str = "auto"
    """Ranks whose output is shown, each line with its rank: all, none, 0,3; auto: all of a script, none of a job."""


@dataclass(frozen=True)
class Job:
    """All settings of one run."""

    name: str = ""
    """Name of the run and of its folder; empty: the job's own name."""
    job: Target = field(default_factory=Target)
    script: str = ""
    """A program to run on every rank instead of a job: a Python file, "-m package.module", or any command."""
    args: list[str] = field(default_factory=list)
    """The words after the script: args='--epochs 3 --rank {rank}'. Between braces: rank, world_size, local_rank,
    node_rank, init_method, master_addr, master_port, backend."""
    backend: Backend = field(default_factory=Backend)
    scale: Scale = field(default_factory=Scale)
    fabric: Fabric = field(default_factory=Fabric)
    data: Data = field(default_factory=Data)
    model: dict[str, Any] = field(default_factory=dict)
    """A class or function by `_target_`, and its arguments: model=resnet18 model.num_classes=10."""
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    snapshot: Snapshot = field(default_factory=Snapshot)
    restart: Restart = field(default_factory=Restart)
    watch: Watch = field(default_factory=Watch)
    hang: Hang = field(default_factory=Hang)
    init_method: str = one_of("env", "tcp", "file")
    """How ranks meet: env (MASTER_ADDR and MASTER_PORT), tcp (tcp://address:port), file (a file that all nodes see)."""
    group: str = one_of("ray", "inline")
    """ray: one actor per rank. inline: no Ray; one rank runs in this very process (pdb works), several as processes."""
    start: str = one_of("fork", "spawn")
    """fork: ranks come from a warm server that has imported torch. spawn: a new interpreter each, if fork is unsafe."""
    seed: int = at_least(0, 0)
    """Seed of everything random: parameters, order of samples, augmentation."""
    deterministic: bool = False
    """Only deterministic algorithms, or an error where torch has none."""
    resume: str = "none"
    """none; auto (newest complete checkpoint of this run, else of the newest run of that name); a path or URL."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables for the ranks; they win over raydist's own."""
    env_file: str = ""
    """A file with such variables, as docker's --env-file: NAME=value, or NAME to pass one on; `env` wins over it."""
    working_dir: str = ""
    """A folder to send to every node (working_dir=.): the ranks run in their copy of it, as after ray job submit."""
    pip: list[str] = field(default_factory=list)
    """Packages that Ray installs for the ranks, or one requirements file: pip=[transformers,einops==0.8.0]."""
    storage: str = ""
    """A folder that all nodes see, or a URL (storage=s3://bucket/runs): checkpoints, and at its end the run's records,
    go to NAME/RUN below it; empty: into the run folder."""
    dir: str = ""
    """The run folder; Hydra's (hydra.run.dir). Filled in when the run starts."""


def as_dict(job: Job) -> dict[str, Any]:
    """Plain dicts, lists and scalars: what travels to the ranks and lands in files, as JSON."""
    return dataclasses.asdict(job)


def as_saved(job: Job) -> dict[str, Any]:
    """The same, as it may be written to a disk: of secrets only the names."""
    shown = {name: "***" if SECRET.search(name) else value for name, value in job.env.items()}
    return {**as_dict(job), "env": shown}


def from_dict(plain: dict[str, Any]) -> Job:
    """The Job that `as_dict` took apart."""
    job: Job = _build(Job, plain)
    return job


def _build(kind: Any, plain: dict[str, Any]) -> Any:
    parts = {f.name: f.default_factory for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.default_factory)}
    return kind(**{name: _build(parts[name], value) if name in parts else value for name, value in plain.items()})
