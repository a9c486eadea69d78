"""The table of backends by name: each is a module that only a rank imports. (either side)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from raydist.settings.mesh import divides
from raydist.shared.errors import ConfigError
from raydist.worker import context

if TYPE_CHECKING:
    import torch

    from raydist.settings.config import Job, Parallel

BACKENDS = {
    "gloo": "raydist.worker.backends.ddp",
    "nccl": "raydist.worker.backends.ddp",
    "mpi": "raydist.worker.backends.ddp",
    "ucc": "raydist.worker.backends.ddp",
    "horovod": "raydist.worker.backends.horovod",
}
"""The modules by backend. Each has a function `join(job, env)`, a context manager that yields this
rank's `Comm`."""

SHARDED = "raydist.training.parallel"
PIPELINE = "raydist.training.pipeline"


def module_of(name: str, parallel: Parallel) -> str:
    """Return the module of a backend for this division of the model."""
    if parallel.name == "pp" or (parallel.pp or 1) > 1:
        return PIPELINE
    return SHARDED if divides(parallel) else BACKENDS[name]


class Comm(Protocol):
    """The operations of a backend that the loop uses. All ranks call them in the same order."""

    sharded: ClassVar[bool]
    """Whether `wrap` leaves each rank only a part of each parameter."""
    pipelined: ClassVar[bool]
    """Whether `wrap` returns a Pipeline, with some of the model's blocks."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model so that its gradients are averaged.

        Its parameters and buffers become those of rank 0.
        """

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        """Wrap the model's optimizer; the state becomes that of rank 0."""

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Accumulate gradients without communication in backward passes inside the block."""

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until every gradient is the average over all ranks (before clipping)."""

    def clip(self, model: torch.nn.Module, norm: float) -> torch.Tensor:
        """Scale the gradients down so that the norm over the whole model is at most `norm`.

        Return the norm that they had, of shape [].
        """

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Enclose optimizer.step() after finish_gradients."""

    def start_mean(self, loss: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to average a loss over all ranks; return a function that waits for the result."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over all ranks, on every rank."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor (of one shape and type), in order of rank, on every rank."""


def check_installed(name: str, script: str = "") -> None:
    """Raise ConfigError for an unknown or missing backend. `script`: the program, if any."""
    if name == "script" and not script:
        raise ConfigError.of(
            "backend", "script", "no script is set", "script=train.py", "backend=auto"
        )
    if name not in ("auto", "script", *BACKENDS):
        raise ConfigError.unknown("backend", name, BACKENDS)
    if name == "horovod" and find_spec("horovod") is None:
        build = "raydist horovod build"
        raise ConfigError(
            f"backend=horovod: Horovod is not installed here; run {build}",
            "backend",
            "horovod",
            build,
        )
    if name in ("mpi", "ucc") and not (name == "mpi" and script) and not torch_has(name):
        cause = f"torch {version('torch')} was built without {name.upper()}, as on PyPI"
        cause += " (an MPI program runs with backend=mpi script=FILE)" if name == "mpi" else ""
        raise ConfigError.of("backend", name, cause, "backend=gloo", "backend=nccl")


def process_set(*ranks: int) -> Any:
    """Return the Horovod process set of these ranks.

    Example: `hvd.allreduce(x, process_set=raydist.process_set(0, 1))`.

    - `ranks`: the ranks of one of `backend.horovod.process_sets`, in any order.

    Returns an `hvd.ProcessSet`. ConfigError: the setting has no such set.
    """
    return import_module(BACKENDS["horovod"]).find_process_set(tuple(sorted(ranks)))


def torch_has(name: str) -> bool:
    """Report whether this torch was built with mpi or ucc.

    Another process checks that, because the driver never imports torch.
    """
    code = f"import torch.distributed as d; raise SystemExit(not d.is_{name}_available())"
    # -c imports from the current folder first, which may be /tmp.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


@contextmanager
def join(name: str, job: Job, env: Mapping[str, str]) -> Iterator[Comm]:
    """Join the ranks of this job, with equal seeds on all; leave them at the end of the block."""
    from raydist.worker import random_state

    check_installed(name)
    random_state.seed_everything(job.seed, job.deterministic)
    with import_module(module_of(name, job.parallel)).join(job, env) as comm:
        current = context.current()
        current.comm = comm
        current.checkpoint = job.checkpoint
        try:
            yield comm
            for wait in current.final_waits:
                wait()
        finally:
            current.comm = None
