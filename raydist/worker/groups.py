"""Process groups and meshes that have the timeout of the default group. (rank side)

torch would use its own timeout for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raydist.worker import context
from raydist.worker.backends import Comm
from raydist.worker.torch_private import set_timeout

TURN_S = 5.0
"""Seconds that other ranks wait for rank 0 in one collective."""


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
    """Create a group as torch.distributed.new_group does, with `backend.timeout_s`.

    All ranks must create all groups in the same order, including those that they are not in. torch
    names a group by a counter: if a rank has left one out, the ranks of the next group never meet.
    With NCCL the group is split off the default one, which is a collective of all its ranks.
    """
    return dist.new_group(None if ranks is None else [*ranks], timeout=_timeout(), backend=backend)


def new_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks with these dimensions, each with `backend.timeout_s`."""
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if (limit := _timeout()) is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, limit)
    return mesh


def _timeout() -> timedelta | None:
    """Return the timeout of the job; None in a program that has joined the ranks itself."""
    settings = getattr(context.current().comm, "settings", None)
    return None if settings is None else timedelta(seconds=settings.timeout_s)


def wait_for_rank_0(comm: Comm, done: Callable[[float], bool]) -> None:
    """Wait on all ranks until rank 0 is done. `done`: waits up to the given number of seconds.

    The ranks wait in turns: otherwise the others would wait in the next collective, which ends the
    run after `backend.timeout_s`.
    """
    waits, first = True, context.rank().rank == 0
    while waits:
        waits = first and not done(TURN_S)
        waits = any(int(each.item()) for each in comm.gather(torch.tensor([int(waits)])))


def collective(comm: Comm) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Return a `gather` for numbers on the host.

    NCCL would wait for the GPU's work, so ranks with GPUs use gloo.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl" or dist.get_world_size() == 1:
        return comm.gather
    group = new_group(backend="gloo")

    def gather(own: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own, group=group)
        return gathered

    return gather
