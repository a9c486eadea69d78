"""DDP over torch.distributed's own backends: join the group, average gradients while backward runs. (rank side)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raydist import context
from raydist.config import Backend, Job
from raydist.errors import ConfigError


@dataclass(frozen=True)
class DDP:
    """The Comm of torch.distributed."""

    settings: Backend
    device: torch.device
    """The model's device."""

    @property
    def wire(self) -> torch.device:
        """Where tensors lie when they travel: NCCL takes those of a GPU only."""
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        # One rank alone has nobody to average with, and DDP refuses a model that has nothing to train.
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

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
        return optimizer

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: DDP's backward has waited for them."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return nullcontext()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.to(self.wire, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self.wire).contiguous()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        return [each.to(tensor.device) for each in every]


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[DDP]:
    """Be a member of the default process group inside the `with` block."""
    device = context.rank().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = int(env.get("WORLD_SIZE", "1"))
    dist.init_process_group(
        job.backend.name,
        timeout=timedelta(seconds=job.backend.timeout_s),
        device_id=device if job.backend.name == "nccl" else None,
        **meeting(job.init_method, int(env.get("RANK", "0")), world_size, env),
    )
    failed = True
    try:
        yield DDP(job.backend, device)
        failed = False
    finally:
        # Leaving waits for the others' collectives. A rank that failed must not: it has to end, so that they are ended.
        if world_size == 1 or not failed:
            dist.destroy_process_group()


def meeting(init_method: str, rank: int, world_size: int, env: Mapping[str, str]) -> dict[str, Any]:
    """init_process_group's arguments that say how the ranks find each other."""
    seat = {"rank": rank, "world_size": world_size}
    if world_size == 1 and "MASTER_ADDR" not in env:
        return {"store": dist.HashStore(), **seat}  # type: ignore[attr-defined]
    if init_method == "env":
        return {"init_method": "env://", **seat}
    if init_method == "tcp":
        host = env["MASTER_ADDR"]
        return {"init_method": f"tcp://{f'[{host}]' if ':' in host else host}:{env['MASTER_PORT']}", **seat}
    if "RAYDIST_RENDEZVOUS_FILE" not in env:
        raise ConfigError(
            "init_method=file needs a file that all nodes see: set RAYDIST_RENDEZVOUS_FILE=/shared/folder/new-file, "
            "or say init_method=env"
        )
    return {"init_method": f"file://{env['RAYDIST_RENDEZVOUS_FILE']}", **seat}
