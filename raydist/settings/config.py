"""The settings of a run: frozen dataclasses; a field's docstring is its --help text. (either side)

compose.py builds a `Job` from conf/ and the overrides. This file imports neither hydra nor torch
nor ray, so that driver, nodes and ranks can read the settings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from raydist.settings.secrets import MASK, masked

TRACKERS = {
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""What `track` accepts: the name of a tracker -> the module that writes it.

The name is also that of the tracker's extra in pyproject.toml.
"""
NOTICES = ("failed", "hung", "slow", "finished", "stopped")
"""What `notify.events` accepts: the kinds of messages."""
MAX_SECONDS = 10**9
"""Limit on a duration in seconds, 31 years: datetime.timedelta, threading and gloo count up to 292
years or less, and raise an OverflowError in the rank for more."""
MAX_BATCH = 10**9
"""Limit on samples; a typing error is refused before data or memory are asked for it."""
FUSED = ("sgd", "adam", "adamw", "adagrad")
"""The optimizers for which torch has a fused implementation, on CPUs and GPUs."""


def one_of(default: str | bool, *others: str | bool) -> Any:
    """Define a field that accepts one of a few values."""
    return field(default=default, metadata={"choices": (default, *others)})


def at_least(least: float, default: Any, most: int | None = None) -> Any:
    """Define a number from `least` to `most` (or null, if the type allows it).

    `most`: None for no upper limit.
    """
    return field(default=default, metadata={"least": least, "most": most})


def greater_than(below: float, default: Any, most: int | None = None) -> Any:
    """Define a number greater than `below`, up to `most` (or null, if the type allows it).

    `most`: None for no upper limit.
    """
    return field(default=default, metadata={"below": below, "most": most})


@dataclass(frozen=True)
class Target:
    """What every rank runs: `job=digits`, `job=path/to/file.py`, `job=package.module:function`."""

    target: str = "digits"
    """A name in jobs/, a Python file (its function `job`, or file.py:function), or
    package.module:function."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the job's function: job.args.hidden=64."""


@dataclass(frozen=True)
class Horovod:
    """Options of backend=horovod."""

    op: str = one_of("average", "sum")
    """How the gradients of the ranks are reduced: average or sum."""
    compression: str = one_of("none", "fp16")
    """fp16: gradients are sent in half precision."""
    groups: int | None = at_least(1, None)
    """Number of parameter groups whose gradients are each reduced together; null: fused by size."""
    process_sets: list[list[int]] = field(default_factory=list)
    """Groups of ranks that have their own collectives:
    backend.horovod.process_sets=[[0,1],[2,3]]."""
    fusion_mb: float | None = at_least(0, None)
    """Size in MiB up to which gradients that are ready together are sent together; 0: each alone;
    null: 128."""
    cycle_ms: float | None = greater_than(0, None)
    """Milliseconds that a gradient waits for others to be sent with it; null: 1."""
    autotune: bool = False
    """Tune fusion_mb and cycle_ms, if they are null, during training; horovod-autotune.csv lists
    the trials."""
    timeline: bool = False
    """Record every collective in horovod-timeline.json of the run folder, for chrome://tracing or
    Perfetto."""
    stall_warn_s: int = at_least(0, 60, most=MAX_SECONDS)
    """Seconds after which rank 0's log names the ranks that a collective waits for; 0: no check."""
    stall_fail_s: int = at_least(0, 600, most=MAX_SECONDS)
    """Seconds after which a waiting collective fails the run; 0: never."""
    log_level: str = one_of("warning", "trace", "debug", "info", "error", "fatal")
    """Horovod's own log level, in the logs of the ranks."""


@dataclass(frozen=True)
class Mpi:
    """Options of backend=mpi."""

    mpirun: str = "auto"
    """Path of mpirun (Open MPI or MPICH) on every node; auto: the one on PATH, else the one next to
    this Python."""
    args: list[str] = field(default_factory=list)
    """More arguments of mpirun: backend.mpi.args=[--bind-to,core]."""


@dataclass(frozen=True)
class Backend:
    """The library that reduces the gradients."""

    name: str = "auto"
    """auto (nccl if the ranks have GPUs, else gloo), gloo, nccl, horovod; mpi for an MPI program;
    mpi and ucc for a job if torch was built with it; script: like auto, for a script= that joins
    the process group itself."""
    timeout_s: float = greater_than(0, 600.0, most=MAX_SECONDS)
    """Timeout of a collective and of the rendezvous, in seconds."""
    bucket_mb: float = greater_than(0, 25.0)
    """Size of DDP's gradient buckets in MiB."""
    find_unused_parameters: bool = False
    """DDP: find parameters that the loss does not use; costs a pass over the graph in each step."""
    static_graph: bool = False
    """DDP: the graph never changes, so DDP does less in each step."""
    horovod: Horovod = field(default_factory=Horovod)
    mpi: Mpi = field(default_factory=Mpi)


@dataclass(frozen=True)
class Scale:
    """The number of ranks, and where they run."""

    nodes: int | None = at_least(1, 1)
    """Number of nodes; null: all nodes of the cluster (scale=cluster)."""
    max_nodes: int | None = at_least(1, None)
    """Makes the job elastic between `nodes` and `max_nodes`: it continues with fewer nodes when
    some are lost, and with more when they join. scale.nodes=2..8 sets both."""
    per_node: int | None = at_least(1, None)
    """Ranks on each node; null: one per GPU; without GPUs two on one node, and on a cluster one per
    `cpus` CPUs."""
    spares: int = at_least(0, 0)
    """Number of standby nodes, kept warm: one of them replaces a node that is lost."""
    gpus: float | None = at_least(0, None)
    """GPUs of each rank; null: 1 if the nodes have GPUs and the backend can use them, else 0."""
    cpus: float = at_least(0.0001, 1.0)
    """CPUs of each rank, and its OMP_NUM_THREADS. With 1, a rank that is bound (numa) has a thread
    per core, divided by the ranks that share the cores."""
    resources: dict[str, float] = field(default_factory=dict)
    """Other Ray resources of each rank: scale.resources.highmem=1."""
    placement: str = one_of("STRICT_SPREAD", "STRICT_PACK", "PACK", "SPREAD")
    """STRICT_SPREAD: exactly `nodes` nodes with `per_node` ranks each. Ray's other strategies place
    `nodes` x `per_node` ranks one by one: PACK on few nodes, SPREAD over many, STRICT_PACK all on
    one."""
    labels: dict[str, str] = field(default_factory=dict)
    """Use only nodes with these Ray labels, as Ray's label selectors:
    scale.labels.market-type=on-demand."""
    numa: str = one_of("auto", "none", "node", "socket", "exclusive", "core-complex")
    """Bind each rank to CPUs near its GPU, as torchrun's --numa-binding: those of the GPU's NUMA
    node, those of its socket, an equal share of that node's cores, or a core complex. Ranks without
    GPUs are spread over the NUMA nodes. auto: node, or else socket, if the job's GPUs are at all of
    them, so that no CPU is left out."""
    avoid: bool = True
    """Avoid nodes that were lost or slow, or had a broken GPU, in two runs of the last week, if
    there is room without them."""
    keep_warm_s: float = at_least(0, 300.0, most=MAX_SECONDS)
    """Seconds that the fork server of each node stays after a run, with torch imported, for the
    user's next run in the same environment; 0: it ends with the run. `raydist warm` lists and ends
    them."""
    wait_s: float = at_least(0, 600.0, most=MAX_SECONDS)
    """Seconds to wait for nodes that the autoscaler, or a person, is starting, and for room that
    something outside the queue holds."""


@dataclass(frozen=True)
class Fabric:
    """The network between the ranks."""

    kind: str = one_of("auto", "ib", "roce", "ethernet", "site")
    """auto: RDMA if NCCL finds it. ib, roce: only HCAs of that kind. ethernet: TCP, even if there
    is RDMA. site: raydist sets no network variables, because the site does."""
    interface: str | None = None
    """Network interface for rendezvous, gloo and NCCL's sockets; null: the one with the node's Ray
    address."""
    hca: list[str] = field(default_factory=list)
    """The HCAs that carry the gradients: fabric.hca=[mlx5_0,mlx5_1]; empty: the active ones near
    the GPUs, without those for storage."""
    strict: bool = False
    """Fail if there is no RDMA, instead of using TCP."""
    debug: bool = False
    """NCCL writes to logs/rank-N.nccl which network it chose, and why."""


@dataclass(frozen=True)
class Data:
    """The samples and their batches."""

    root: str = "data"
    """Folder of the dataset's files (mnist, cifar10, folder), relative to the current folder."""
    batch_size: int = at_least(1, 32, most=MAX_BATCH)
    """Samples in one forward pass of one rank."""
    global_batch: int | None = at_least(1, None, most=MAX_BATCH)
    """Samples in one optimizer step over all ranks; null: batch_size x train.accumulate x ranks. If
    set, each step sees the same samples on any number of ranks, and batch_size follows from it."""
    resize: str = one_of("keep", "scale")
    """What happens when the number of nodes changes (scale.nodes=2..8). keep: the samples in an
    optimizer step stay, in more passes if there are fewer ranks. scale: batch_size stays on each
    rank; optim.scaling sets the learning rate."""
    workers: int = at_least(0, 0, most=1024)
    """DataLoader workers of each rank; 0: load in the rank itself."""
    pin_memory: bool = True
    """Page-locked batches, for faster copies to a GPU; no effect without a GPU."""
    shuffle: bool = True
    """A new order in each epoch, which depends on the seed and the epoch, not on the number of
    ranks."""


@dataclass(frozen=True)
class Optim:
    """The optimizer, its learning rate and its schedule."""

    name: str = one_of("sgd", "adam", "adamw", "rmsprop", "adagrad")
    """The optimizer of torch.optim."""
    lr: float = greater_than(0, 0.05)
    """Learning rate for a global batch of `scaling_batch`; with scaling=none, for any batch. The
    file of the chosen `optim=` sets it (sgd: 0.1); 0.05 for a class."""
    args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer: optim.args.momentum=0.9. The file of the chosen `optim=` has
    some (sgd: momentum=0.9 nesterov=true weight_decay=0.0001)."""
    fused: bool | str = one_of("auto", True, False)
    """torch's fused optimizer, which updates all parameters in one pass. auto: adam and adamw on
    GPUs, elsewhere where the weights have the same bits, or with train.fast=true; else the last
    bits may differ. rmsprop has none."""
    schedule: str = one_of("constant", "cosine", "linear", "step", "wsd")
    """Learning rate after the warm-up: constant, cosine to 0, linear to 0, step (x0.1 after each
    third), wsd (constant, then linear to 0 in the last part of the training, `decay_ratio`)."""
    decay_ratio: float = greater_than(0, 0.2, most=1)
    """schedule=wsd: the part of the steps after the warm-up in which the rate falls."""
    min_lr_ratio: float = at_least(0, 0.0, most=1)
    """Where cosine, linear and wsd end, as a part of the full rate: 0.1 is a tenth of it."""
    warmup: int = at_least(0, 0)
    """Steps in which the learning rate rises linearly to its full value."""
    scaling: str = one_of("none", "linear", "sqrt")
    """How the learning rate grows with the global batch: lr x k (linear: Goyal et al. 2017,
    arXiv:1706.02677) or lr x sqrt(k), with k = global batch / scaling_batch."""
    scaling_batch: int = at_least(1, 256)
    """The global batch for which `lr` was chosen."""
    groups: str = one_of("one", "no_decay")
    """no_decay: no weight decay on embeddings and on parameters with less than two dimensions, such
    as norms and biases."""
    _target_: str = ""
    """Any class of torch.optim.Optimizer, in place of `name`: optim=torch.optim.NAdam, or
    optim=my_module.MyOptimizer."""

    @property
    def title(self) -> str:
        """The optimizer's name, for a person."""
        return self._target_.rpartition(".")[2] or self.name


@dataclass(frozen=True)
class Train:
    """The training loop of raydist.fit."""

    epochs: int = at_least(0, 10)
    """Passes over the training samples."""
    steps: int | None = at_least(1, None)
    """Number of optimizer steps, which wins over `epochs`; null: all epochs."""
    precision: str = one_of("fp32", "bf16", "fp16")
    """bf16 and fp16: autocast; fp16 with loss scaling. Where the model is sharded: bf16 parameters
    in the forward and backward pass, sums of gradients and the optimizer in fp32; no fp16."""
    accumulate: int = at_least(1, 1)
    """Forward and backward passes per optimizer step. With parallel=ddp gradients are reduced in
    the last one only; with fsdp and hsdp in each, so that a rank holds only its shards of them."""
    loss_per: str = one_of("sample", "token")
    """What has the same weight in the loss of a step. sample: each sample, so that ranks and passes
    average their losses. token: each target that is not -100, over all ranks and passes, so that
    padding changes nothing; the loss must be the mean over these."""
    loss_chunks: int = at_least(1, 1)
    """Compute the last layer and the loss of a language model for so many parts of the positions,
    one after the other, so that only one part's scores exist at a time. With parallel=ddp, fsdp and
    hsdp."""
    weights: str = ""
    """A safetensors file, or a folder with such files, that has the values with which the model
    begins, on each node. Relative to the current folder; empty: the model's own."""
    clip: float | None = greater_than(0, None)
    """Maximum norm of the gradient; null: no clipping."""
    recompute: str = one_of("none", "blocks", "selective")
    """Activations that the backward pass computes again, to save memory. blocks: all but the input
    of each block. selective: also keep what products of matrices and attention give."""
    compile: bool | str = one_of(False, True, "blocks")
    """Use torch.compile for the loss, and for the whole model. blocks: for each of its blocks, as
    always where they are sharded; the first step is much shorter if they are alike."""
    channels_last: bool = False
    """Images in channels-last memory order; parallel=ddp only."""
    tf32: bool = False
    """Compute fp32 matrix products on GPUs in TF32, which has 10 bits of mantissa instead of 23."""
    cudnn_search: bool = False
    """On GPUs, time cuDNN's algorithms for each new shape of a convolution and take the fastest. It
    may be another one in another run, so not with deterministic=true."""
    gc: int = at_least(0, 0)
    """Optimizer steps between full garbage collections of Python, which all ranks make at the same
    step; 0: each rank when Python decides. Also for script= and loops of your own, if they use
    torch.optim."""
    fast: bool = False
    """Switch on what speeds up training without a change of meaning: gc=100; in raydist.fit
    optim.fused, and on GPUs channels_last, tf32 and cudnn_search."""
    grad_norm: bool = False
    """Report the norm of the gradient in each step, before clipping. With `clip` it always is."""
    nan: str = one_of("ignore", "skip", "end")
    """What happens if the loss or the norm of the gradient is not finite. skip: the step changes
    no weight. end: the run ends, and each rank saves its batches of the step in the run folder."""
    check_resume: bool = False
    """Compare the first steps after a restart or a resume with what was recorded of them before:
    their losses and samples. One line reports what came of it. Unless `snapshot.every` is set,
    snapshots are four steps apart or more, so that most restarts repeat steps."""
    evaluate_every: int = at_least(0, 1)
    """Epochs between evaluations; 0: evaluate at the end only."""
    evaluate_steps: int | None = at_least(1, None)
    """Optimizer steps between evaluations, which wins over `evaluate_every`; null: by epochs."""
    evaluate_batches: int | None = at_least(1, None)
    """Limit on the batches of each rank in an evaluation; null: all test samples."""


@dataclass(frozen=True)
class Parallel:
    """How raydist.fit divides model and batch: pp x replicate x shard x tp = number of ranks."""

    name: str = one_of("ddp", "fsdp", "hsdp", "tp", "pp")
    """What the numbers below are if they are not set. ddp: each rank has the whole model. fsdp:
    all ranks share one copy of the parameters, gradients and optimizer state. hsdp: the ranks of a
    node share one. tp: the ranks of a node share each layer, and fsdp among nodes. pp: each rank
    has some of the blocks, a stage of one pipeline."""
    replicate: int | None = at_least(1, None)
    """Copies of the model; null: ranks / (shard x tp x pp)."""
    shard: int | None = at_least(1, None)
    """Ranks that share one copy by torch's fully_shard; null: by `name`."""
    tp: int | None = at_least(1, None)
    """Ranks of one node that compute each layer together, by the model's or the job's plan; null:
    by `name`."""
    pp: int | None = at_least(1, None)
    """Stages of a pipeline, each with some of the model's blocks; null: by `name`."""
    microbatches: int | None = at_least(1, None, most=MAX_BATCH)
    """Equal parts of a batch that go through the stages one after another; null: up to four for
    each stage, each with two samples or more."""
    schedule: str = one_of("1f1b", "gpipe")
    """The order in which a stage works on micro-batches; torch's name. 1f1b: backward as soon as
    possible, so that few activations are kept. gpipe: backward after the forward of all."""
    blocks: str = ""
    """Class of the modules that are sharded, and compiled, one by one: parallel.blocks=Block.
    Empty: the model's _no_split_modules, else the class that repeats in its ModuleLists and
    Sequentials."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints on disk or in an object store."""

    every: int | None = at_least(1, None)
    """Optimizer steps between checkpoints; null: one at the end of each epoch."""
    keep: int = at_least(1, 3)
    """Number of newest checkpoints to keep."""
    best: str | None = None
    """Also keep the best checkpoint by this metric: max:accuracy or min:loss."""


@dataclass(frozen=True)
class Hang:
    """When a rank hangs. A slow rank is ended only after `limit_s`."""

    after_s: float = greater_than(0, 3.0, most=MAX_SECONDS)
    """Seconds without a heartbeat, plus `steps` of the rank's steps, after which all ranks are
    examined."""
    steps: float = at_least(0, 3.0)
    """Additional silence that is allowed, in steps of the rank (their median duration)."""
    limit_s: float = greater_than(0, 1800.0, most=MAX_SECONDS)
    """Seconds without a heartbeat after which the run is ended, also while it starts or saves; not
    a program that reports nothing, nor while a rank waits in the debugger."""
    end: bool = True
    """End the run if ranks can never continue: one is stopped, or they wait in different
    collectives. false: only report it."""


@dataclass(frozen=True)
class Snapshot:
    """Training states in memory, so that a restart loses no step."""

    every: int | None = at_least(0, None)
    """Optimizer steps between snapshots; 0: no snapshots; null: each step, or fewer, to take 1% of
    the time."""


@dataclass(frozen=True)
class Restart:
    """Restarts of failed ranks, from the newest snapshot or checkpoint."""

    max: int | None = at_least(0, None)
    """Maximum number of failures within `window_s`; 0: no restart. Nodes that the cluster takes
    away do not count. null: 3, and one more for each 1,024 ranks; 0 for backend=mpi, and for
    script= with a fixed number of nodes and no spares, because running it again may repeat side
    effects."""
    window_s: float | None = greater_than(0, 3600.0, most=MAX_SECONDS)
    """Seconds after which a failure no longer counts; null: it always counts."""
    in_place: str = one_of("off", "auto", "on")
    """Replace only a rank that was killed; the others keep their processes, go back to the last
    snapshot, and continue with it. auto: in raydist.fit and raydist.Recoverable on gloo; on: refuse
    jobs whose ranks cannot."""


@dataclass(frozen=True)
class Queue:
    """The order in which runs get room on a Ray cluster (queue=auto, queue=on, queue=off)."""

    enabled: bool | None = None
    """Wait in the cluster's queue while there is no room, and make way for runs of higher
    priority. null (queue=auto): yes, unless Slurm or a RayJob of KubeRay has already queued the run
    and given it its machines."""
    priority: str = "normal"
    """high, normal, low, or a whole number: they are 100, 0 and -100. Runs of equal priority are
    placed in the order in which they came."""
    exempt_s: float = at_least(0, 600.0, most=MAX_SECONDS)
    """Seconds that a run has to itself once it is placed; after that, runs of higher priority may
    take its room."""
    limit: str = ""
    """Time after which the run makes way for a run of equal priority, too, and waits at the end of
    the line: 4h, 1h30m, 90 (seconds); empty: none. A run with a limit may be placed before a larger
    one that waits, if the limit ends before that one can have room."""
    shrink: bool = False
    """An elastic run (scale.nodes=2..8) gives up nodes beyond its minimum, before another run is
    stopped, and takes them again when no run waits. It begins with its minimum."""
    requeue: bool = True
    """Whether the run waits again once it has made way. If not, it ends as stopped, and resume=
    continues it."""
    killable: bool = False
    """Whether a program (script=) makes way, too. raydist cannot stop it after a step: it gets
    SIGTERM, and is started anew later."""


@dataclass(frozen=True)
class Watch:
    """What is shown during the run."""

    progress: str = one_of("auto", "bar", "lines", "none")
    """auto: a live bar in a terminal or a notebook, plain lines elsewhere."""
    every_s: float = greater_than(0, 10.0, most=MAX_SECONDS)
    """Seconds between plain lines."""
    slow: float = at_least(0, 10.0)
    """A rank is reported as slow if its own work takes this many percent of a step longer than that
    of the others; 0: no check."""
    output: str = "auto"
    """Ranks whose output is shown, each line with its rank: all, none, 0,3; auto: all for script=,
    none for a job."""
    page: bool = False
    """Serve a page that shows the run, on 127.0.0.1 of the driver's machine; the link is
    printed."""
    operate: bool = True
    """Whether the pages of the run have buttons for stacks, a profile and a checkpoint. Commands
    such as `raydist stacks` work in any case."""
    profile: str = ""
    """Steps of all ranks that are profiled, in one file in the run folder: 100..105; empty: none.
    From step 2 on, at most 1000 steps. As `raydist profile`."""
    post_mortem: bool = False
    """A rank that raises an exception waits there for a person before it fails, as at a
    breakpoint(): `raydist debug` begins pdb's post-mortem."""
    job_metadata: bool = False
    """Write the result into the metadata of a job that was submitted to Ray. Ray has no public API
    for it."""


@dataclass(frozen=True)
class Notify:
    """Messages that the run failed, hangs, has a slow rank, or has finished; each kind once."""

    webhook: str = ""
    """A URL that gets each message as a POST request. It is a secret: better set
    RAYDIST_NOTIFY_WEBHOOK, in the environment or in env_file=, which no command line shows."""
    form: str = one_of("auto", "slack", "json")
    """What the webhook gets. slack: Slack's incoming webhooks, and those of services that imitate
    them; json: one object with all fields; auto: slack for a URL of Slack's, else json."""
    command: str = ""
    """A shell command that gets each message: the JSON on its standard input, the parts in
    variables: notify.command='mail -s "$RAYDIST_NOTIFY_TITLE" me'."""
    events: list[str] = field(default_factory=lambda: ["failed", "hung", "slow", "finished"])
    """The kinds of messages: failed, hung, slow, finished; stopped: by Ctrl-C or another
    signal."""


@dataclass(frozen=True)
class Sweep:
    """Many runs with different settings (`raydist sweep`)."""

    sampler: str = one_of("auto", "grid", "random", "tpe", "gp", "cmaes", "nsga2", "qmc")
    """Who proposes the settings of a trial: grid (every combination), random, or a sampler of
    Optuna; auto: grid if the space has only choices, and at most `trials` combinations if that
    is set, else random."""
    trials: int | None = at_least(1, None)
    """Number of trials; null: all combinations of the grid."""
    objective: str = ""
    """The reported number to minimize or maximize: sweep.objective=min:test_loss. Several are
    separated by commas. Its last value counts."""
    prune: str = one_of("none", "asha", "median")
    """Which trials end early. asha: at each milestone the best 1/`reduction` of the trials continue
    at once; the others are paused, and continue once they are among the best. median: a trial that
    is worse than the median of the others ends."""
    min_steps: int = at_least(1, 100)
    """The first milestone, in steps. The next ones: with asha each at `reduction` times the one
    before, with median at 2, 3, … times the first."""
    reduction: int = at_least(2, 3)
    """asha: at each milestone 1/`reduction` of the trials continue."""
    parallel: int | None = at_least(1, None)
    """Maximum number of trials at a time; null: as many as the cluster has room for. A Ray that
    raydist starts on this machine gets CPUs for that many."""
    on_failure: str = one_of("skip", "retry", "end")
    """What happens after the last failure of a trial. skip: the other trials continue.
    retry: it is started again from its last state, up to `retries` times. end: the sweep ends; the
    default of --multirun."""
    retries: int = at_least(0, 1)
    """on_failure=retry: how often a trial is started again."""
    max_failures: int | None = at_least(1, None)
    """The sweep ends once this many trials have finally failed; null: never for that reason."""
    hours: float | None = at_least(0.0001, None)
    """After this many hours, those before a resume included, no trial starts, and running ones
    stop after a step, with their last state on the disk; null: no limit."""
    resume: str = ""
    """The folder of a sweep to continue: finished trials do not run again, the others continue from
    their last state."""
    seed: int = at_least(0, 0, most=2**32 - 1)
    """Seed of the sampler."""
    dir: str = ""
    """The folder of the sweep that a run is a trial of. raydist sets it."""


@dataclass(frozen=True)
class Job:
    """All settings of one run."""

    name: str = ""
    """Name of the run and of its folder; empty: the name of the job."""
    job: Target = field(default_factory=Target)
    script: str = ""
    """A program to run as every rank, instead of a job: a Python file, "-m package.module", or any
    command."""
    args: list[str] = field(default_factory=list)
    """Arguments of the script: args='--epochs 3 --rank {rank}'. In braces: rank, world_size,
    local_rank, node_rank, init_method, master_addr, master_port, backend."""
    backend: Backend = field(default_factory=Backend)
    scale: Scale = field(default_factory=Scale)
    fabric: Fabric = field(default_factory=Fabric)
    data: Data = field(default_factory=Data)
    model: dict[str, Any] = field(default_factory=dict)
    """The model's class or function in `_target_`, and its arguments: model=resnet18
    model.num_classes=10."""
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    snapshot: Snapshot = field(default_factory=Snapshot)
    restart: Restart = field(default_factory=Restart)
    queue: Queue = field(default_factory=Queue)
    watch: Watch = field(default_factory=Watch)
    track: list[str] = field(default_factory=list)
    """Experiment trackers that get what the run reports: tensorboard, mlflow, wandb, trackio;
    several as in track=[mlflow,tensorboard]."""
    notify: Notify = field(default_factory=Notify)
    hang: Hang = field(default_factory=Hang)
    sweep: Sweep = field(default_factory=Sweep)
    init_method: str = one_of("env", "tcp", "file")
    """Rendezvous of the ranks: env (MASTER_ADDR, MASTER_PORT), tcp (tcp://address:port), file (all
    nodes see it)."""
    group: str = one_of("auto", "ray", "inline")
    """ray: one actor per rank. inline: no Ray; one rank runs in this process (pdb works), several
    as processes. auto: inline for a script= on one node while no Ray runs here, else ray."""
    start: str = one_of("fork", "spawn")
    """fork: ranks are forked from a server that has imported torch. spawn: a new interpreter, if
    fork is unsafe."""
    seed: int = at_least(0, 0, most=2**63 - 1)
    """Seed of all random numbers: parameters, order of samples, augmentation."""
    deterministic: bool = False
    """Use deterministic algorithms only; an operation without one fails."""
    resume: str = "none"
    """none; auto (the newest complete checkpoint of this run folder, else of the newest run with
    this name; a new start if that run has finished); a path or URL of a run folder or a
    checkpoint."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks; they win over those that raydist sets."""
    env_file: str = ""
    """A file with such variables, as for docker's --env-file: NAME=value, or NAME to pass one on.
    `env` wins."""
    working_dir: str = ""
    """A folder to send to every node (working_dir=.), without the folders runs, multirun and
    outputs at its top and without files like .env; the ranks run in the copy, as with ray job
    submit."""
    pip: list[str] = field(default_factory=list)
    """Packages that Ray installs for the ranks: pip=[transformers,einops==0.8.0], or one
    requirements file."""
    storage: str = ""
    """A folder that all nodes see, or a URL (storage=s3://bucket/runs): checkpoints, and after the
    run its records, go to NAME/RUN in it; empty: to the run folder."""
    dir: str = ""
    """The run folder (hydra.run.dir). raydist sets it when the run starts."""


def as_dict(job: Job) -> dict[str, Any]:
    """Return the settings as dicts, lists and scalars, for JSON."""
    return dataclasses.asdict(job)


def as_saved(job: Job) -> dict[str, Any]:
    """Return the settings as they may be saved: without the values of secrets.

    If there is an env_file, the values of variables are left out too.
    """
    plain = as_dict(job)
    if job.env_file:
        plain["env"] = dict.fromkeys(job.env, MASK)
    without: dict[str, Any] = masked(plain)
    return without


def from_dict(plain: dict[str, Any]) -> Job:
    """Return the Job of a dict from `as_dict`."""
    job: Job = _build(Job, plain)
    return job


def _build(kind: Any, plain: dict[str, Any]) -> Any:
    parts = {
        f.name: f.default_factory
        for f in dataclasses.fields(kind)
        if dataclasses.is_dataclass(f.default_factory)
    }
    return kind(
        **{
            name: _build(parts[name], value) if name in parts else value
            for name, value in plain.items()
        }
    )
