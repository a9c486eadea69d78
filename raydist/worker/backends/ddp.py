"""DDP on torch.distributed: joins the process group, averages gradients in backward. (rank side)"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raydist.settings.config import Backend, Job
from raydist.shared import env_names
from raydist.shared.errors import ConfigError
from raydist.worker import context, torch_private
from raydist.worker.in_place import Address, InPlace, listening
from raydist.worker.store import StoreOfAttempt

INIT_BARRIER = "TORCH_DIST_INIT_BARRIER"


@dataclass(frozen=True)
class DDPComm:
    """The Comm of torch.distributed."""

    settings: Backend
    device: torch.device
    """The model's device."""
    listens: set[Address] = field(default_factory=set, compare=False, kw_only=True)
    """Where gloo waits for other ranks, on each of its interfaces."""
    wrapped: WeakSet[DistributedDataParallel] = field(
        default_factory=WeakSet, compare=False, kw_only=True
    )
    """The models that have buckets for gradients, while the job has them: with torch before 2.14 a
    rank may hang that leaves the group while they exist."""
    store: StoreOfAttempt | None = field(default=None, compare=False, kw_only=True)
    """Where ranks that can be connected anew meet."""
    sharded: ClassVar[bool] = False
    pipelined: ClassVar[bool] = False

    @property
    def comm_device(self) -> torch.device:
        """The device of communicated tensors: NCCL takes only those of a GPU."""
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        # A single rank has no other to average with, and DDP refuses a model without trainable
        # parameters.
        if dist.get_world_size() == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.settings.bucket_mb,
            find_unused_parameters=self.settings.find_unused_parameters,
            static_graph=self.settings.static_graph,
            gradient_as_bucket_view=True,
        )
        self.wrapped.add(wrapped)
        return wrapped

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        return optimizer

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        # With a static graph torch raises in the first backward pass without a sum (pytorch issue
        # 187732): each pass averages its gradients.
        quiet = isinstance(model, DistributedDataParallel) and not self.settings.static_graph
        return cast("DistributedDataParallel", model).no_sync() if quiet else nullcontext()

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: DDP's backward pass has averaged the gradients."""

    def clip(self, model: torch.nn.Module, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return nullcontext()

    def start_mean(self, loss: torch.Tensor) -> Callable[[], torch.Tensor]:
        ranks = dist.get_world_size()
        if ranks == 1:
            return lambda: loss
        total = loss.to(torch.promote_types(loss.dtype, torch.float32), copy=True)
        work = dist.all_reduce(total, async_op=True)

        def mean() -> torch.Tensor:
            work.wait()  # with NCCL the stream waits, not the host
            return total / ranks

        return mean

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.to(self.comm_device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.to(self.comm_device).contiguous()
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        return [each.to(tensor.device) for each in gathered]

    def meet(self, in_place: InPlace) -> None:
        """Connect the ranks of an attempt, which may have been connected before (in_place)."""
        in_place.meet(self, sorted(self.listens), self.settings.timeout_s)

    def handle(self) -> str:
        return torch_private.group_handle()

    def connect(self, number: int, handles: Sequence[str]) -> None:
        self.release()
        assert self.store is not None, "join() has opened it"
        self.store.follow()
        torch_private.connect_group(number + 1, handles)
        if number > 0:
            torch_private.begin_groups_anew(number, self.store)
        dist.barrier()  # as in join()

    def release(self) -> None:
        # An aborted backward pass leaves buckets that wait for gradients.
        while self.wrapped:
            wrapped = self.wrapped.pop()
            wrapped.zero_grad(set_to_none=True)
            torch_private.drop_reducer(wrapped)


@contextmanager
def no_barrier() -> Iterator[None]:
    """Let init_process_group return without waiting in the store for the other ranks.

    It connects to nobody if ranks are to be connected anew: they meet afterwards.
    """
    before = os.environ.pop(INIT_BARRIER, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[INIT_BARRIER] = before


def refuse_in_place(job: Job) -> None:
    """Raise ConfigError if the job requires a torch that can connect ranks anew."""
    if job.restart.in_place == "on":
        cause = (
            f"torch {torch.__version__} cannot connect ranks anew; 2.14 and newer can, without "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL"
        )
        raise ConfigError.of("restart.in_place", "on", cause, "restart.in_place=auto")


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[DDPComm]:
    """Join the default process group; leave it at the end of the block."""
    device = context.rank().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = int(env.get("WORLD_SIZE", "1"))
    current = context.current()
    if current.in_place is not None and not torch_private.connects_anew():
        refuse_in_place(job)
        current.in_place = None
    rank, timeout = int(env.get("RANK", "0")), timedelta(seconds=job.backend.timeout_s)
    device_id = device if job.backend.name == "nccl" else None
    comm = DDPComm(job.backend, device)
    if current.in_place is not None:
        comm, listened = replace(comm, store=StoreOfAttempt(timeout)), listening()
        with no_barrier():
            dist.init_process_group(
                job.backend.name,
                timeout=timeout,
                device_id=device_id,
                store=comm.store,
                rank=rank,
                world_size=world_size,
                enable_reconfigure=True,  # torch before 2.14 does not know the argument
            )
        comm.listens.update(listening() - listened)
        comm.meet(current.in_place)
    else:
        dist.init_process_group(
            job.backend.name,
            timeout=timeout,
            device_id=device_id,
            **init_arguments(job.init_method, rank, world_size, env),
        )
        if world_size > 1 and job.backend.name == "gloo":
            # Gloo connects each pair separately. Without this barrier, a rank whose job ends at
            # once closes the connections that a slower rank is still opening, and that rank fails
            # in init_process_group.
            dist.barrier()
    failed = True
    try:
        yield comm
        failed = False
    finally:
        # destroy_process_group waits for other ranks. A failed rank must not wait: its end makes
        # the driver end them.
        if world_size == 1 or not failed:
            dist.destroy_process_group()


def init_arguments(
    init_method: str, rank: int, world_size: int, env: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of init_process_group for a rendezvous method."""
    position = {"rank": rank, "world_size": world_size}
    if world_size == 1 and "MASTER_ADDR" not in env:
        return {"store": dist.HashStore(), **position}  # type: ignore[attr-defined]
    if init_method == "env":
        return {"init_method": "env://", **position}
    if init_method == "tcp":
        host = env["MASTER_ADDR"]
        return {
            "init_method": f"tcp://{f'[{host}]' if ':' in host else host}:{env['MASTER_PORT']}",
            **position,
        }
    if env_names.RENDEZVOUS_FILE not in env:
        cause = "it needs a new file that all nodes see"
        right = f"{env_names.RENDEZVOUS_FILE}=/shared/folder/new-file"
        raise ConfigError.of("init_method", "file", cause, right, "init_method=env")
    return {"init_method": f"file://{env[env_names.RENDEZVOUS_FILE]}", **position}
