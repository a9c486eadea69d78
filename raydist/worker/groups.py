"""Process groups with the timeout of the default group, and long waits in turns. (rank side)

torch would use its own timeout for other groups and for meshes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raydist.worker import context
from raydist.worker.backends import Comm
from raydist.worker.in_place import listening
from raydist.worker.torch_private import set_timeout

TURN_S = 5.0
"""Seconds that ranks wait in one collective for a rank that is not done."""

Result = TypeVar("Result")


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
    """Create a group as torch.distributed.new_group does, with `backend.timeout_s`.

    All ranks must create all groups in the same order, including those that they are not in. torch
    names a group by a counter: if a rank has left one out, the ranks of the next group never meet.
    With NCCL the group is split off the default one, which is a collective of all its ranks.
    """
    with _listeners_known():
        return dist.new_group(
            None if ranks is None else [*ranks], timeout=_timeout(), backend=backend
        )


def new_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks with these dimensions, each with `backend.timeout_s`."""
    with _listeners_known():
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if (limit := _timeout()) is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, limit)
    return mesh


@contextmanager
def _listeners_known() -> Iterator[None]:
    """Tell all ranks where the groups that are created inside the block wait for other ranks.

    A rank that outlives another one breaks its connections to these addresses (in_place).
    """
    current = context.current()
    if current.in_place is None:
        yield
        return
    before = listening()
    yield
    for each in _gather_json(current.comm, sorted(listening() - before)):
        current.in_place.add((host, port) for host, port in each)


def _gather_json(comm: Comm, value: Any) -> list[Any]:
    """Gather a value from all ranks, by rank, as JSON: nothing received is unpickled."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(each.item()) for each in comm.gather(torch.tensor([len(text)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = text
    rows = zip(comm.gather(padded), sizes, strict=True)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in rows]


def _timeout() -> timedelta | None:
    """Return the timeout of the job; None in a program that has joined the ranks itself."""
    settings = getattr(context.current().comm, "settings", None)
    return None if settings is None else timedelta(seconds=settings.timeout_s)


def wait_for_all(comm: Comm, done: Callable[[float], bool]) -> None:
    """Wait until all ranks are done. `done`: waits up to the given number of seconds.

    The ranks wait in turns: otherwise those that are done would wait in the next collective, which
    ends the run after `backend.timeout_s`.
    """
    waits = True
    while waits:
        waits = not done(TURN_S)
        waits = any(int(each.item()) for each in comm.gather(torch.tensor([int(waits)])))


def work_in_turns(comm: Comm, work: Callable[[], Result]) -> Result:
    """Do this rank's work in a thread while all ranks wait for each other; return what it returned.

    All ranks must call it, or `wait_for_all`. An error is raised once all ranks are done.
    """
    device = context.rank().device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def in_thread() -> Result:
        # A new thread starts on GPU 0, and would create a context there. It would also read tensors
        # in another stream than the one that computes them.
        if stream is not None:
            torch.cuda.set_stream(stream)
        return work()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(in_thread)
        wait_for_all(comm, lambda within_s: bool(futures.wait([working], within_s).done))
        return working.result()


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
