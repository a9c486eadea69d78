"""DDP on torch.distributed: joins the process group, averages gradients in backward. (rank side)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raydist.settings.config import Backend, Job
from raydist.shared import env_names
from raydist.shared.errors import ConfigError
from raydist.worker import context


@dataclass(frozen=True)
class DDPComm:
    """The Comm of torch.distributed."""

    settings: Backend
    device: torch.device
    """The model's device."""
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
        return DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.settings.bucket_mb,
            find_unused_parameters=self.settings.find_unused_parameters,
            static_graph=self.settings.static_graph,
            gradient_as_bucket_view=True,
        )

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        return optimizer

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: DDP's backward pass has averaged the gradients."""

    def clip(self, model: torch.nn.Module, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

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


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[DDPComm]:
    """Join the default process group; leave it at the end of the block."""
    device = context.rank().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = int(env.get("WORLD_SIZE", "1"))
    dist.init_process_group(
        job.backend.name,
        timeout=timedelta(seconds=job.backend.timeout_s),
        device_id=device if job.backend.name == "nccl" else None,
        **init_arguments(job.init_method, int(env.get("RANK", "0")), world_size, env),
    )
    if world_size > 1 and job.backend.name == "gloo":
        # Gloo connects each pair separately. Without this barrier, a rank whose job ends at once
        # closes the connections that a slower rank is still opening, and that rank fails in
        # init_process_group.
        dist.barrier()
    failed = True
    try:
        yield DDPComm(job.backend, device)
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
