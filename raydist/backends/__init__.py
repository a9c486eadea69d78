"""The table of backends: a name, and the file that knows it, imported in the rank only. (either side)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from raydist import context
from raydist.errors import ConfigError, suggest

if TYPE_CHECKING:
    import torch

    from raydist.config import Job

BACKENDS = {
    "gloo": "raydist.backends.ddp",
    "nccl": "raydist.backends.ddp",
    "mpi": "raydist.backends.ddp",
    "ucc": "raydist.backends.ddp",
    "horovod": "raydist.backends.horovod",
}
"""Each backend's file. It has a function `join(job, env)`: a context manager that gives this rank's `Comm`."""


class Comm(Protocol):
    """What the loop needs of a backend. All ranks call each method in the same order."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model whose gradients will be averaged; parameters and buffers become those of rank 0."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer to step; its state becomes that of rank 0."""

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Inside, backward adds up gradients and none travels."""

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until every gradient is the average over all ranks (before clipping)."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Around optimizer.step() after finish_gradients."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over all ranks, on every rank."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor (one shape and type), in order of rank, on every rank."""


def check_there(name: str, script: str = "") -> None:
    """Refuse a backend whose package is not installed, or that nobody knows. `script`: what runs instead of a job."""
    if name == "script" and not script:
        raise ConfigError("backend=script: which one? Say script=train.py, or backend=auto for a job")
    if name not in ("auto", "script", *BACKENDS):
        raise ConfigError(f"backend.name={name}: {suggest(name, BACKENDS, 'backend=')}")
    if name == "horovod" and find_spec("horovod") is None:
        raise ConfigError("backend=horovod: Horovod is not installed here; python -m raydist.tools.horovod build")
    if name in ("mpi", "ucc") and not (name == "mpi" and script) and not torch_has(name):
        raise ConfigError(
            f"backend={name}: this torch ({version('torch')}) was built without {name.upper()}, as those of PyPI are; "
            "say backend=gloo, or backend=nccl on GPUs"
            + ("; a program of MPI's own is run by backend=mpi script=FILE" if name == "mpi" else "")
        )


def torch_has(name: str) -> bool:
    """Whether this torch was built with mpi or ucc. Asked in a process of its own: the driver never imports torch."""
    code = f"import torch.distributed as d; raise SystemExit(not d.is_{name}_available())"
    return subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def join(name: str, job: Job, env: Mapping[str, str]) -> Iterator[Comm]:
    """Join the ranks of this job, all of them seeded alike; leaving the `with` block leaves them."""
    from raydist.loop import random_state

    check_there(name)
    random_state.seed_everything(job.seed, job.deterministic)
    with import_module(BACKENDS[name]).join(job, env) as comm:
        here = context.here()
        here.comm, here.checkpoint = comm, job.checkpoint
        try:
            yield comm
            for wait in here.leaving:
                wait()
        finally:
            here.comm = None
