"""Continues a training in this process after another rank was killed, if exact. (rank side)"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from raydist.shared import kinds
from raydist.training import sharded
from raydist.training.blueprint import Blueprint, indivisible
from raydist.training.data import Order
from raydist.worker import context, torch_private
from raydist.worker.backends import Comm
from raydist.worker.backends.ddp import DDPComm
from raydist.worker.in_place import InPlace

T = TypeVar("T")


def outlive(comm: Comm, order: Order, model: torch.nn.Module, train: Callable[[], T]) -> T:
    """Return what `train` returns.

    If another rank is killed meanwhile, and this one can go back to the state that all have in
    memory, `train` is called again, in the next attempt of the job. It must make the same
    collectives as in a new process. `model`: what it trains, not yet divided among the ranks.
    """
    in_place = context.current().in_place
    if in_place is None or not isinstance(comm, DDPComm):
        return train()
    if why := unable(order) or (undivided(comm, model) if comm.sharded else ""):
        in_place.refuse(why)
        return train()
    blueprint, sizes = Blueprint(model) if comm.sharded else None, buffer_sizes(model)

    def begin_again() -> None:
        if blueprint is not None:
            blueprint.restore()
        meet_again(comm, in_place)

    def why_not() -> str:
        return no_common_state(comm) or ("" if comm.sharded else resized(model, sizes))

    return in_place.outlive(train, begin_again, why_not)


def meet_again(comm: DDPComm, in_place: InPlace) -> None:
    """Begin the next attempt of the job in this process: connect to its ranks."""
    context.current().begin_again()
    comm.meet(in_place)
    context.emit_event(kinds.Joined(rank=context.rank().rank, pid=os.getpid()))


def unable(order: Order) -> str:
    """Return why this training cannot begin again in the same process, empty if it can."""
    if order.kind != "map":
        return "only a data set with an index can go back to an earlier sample"
    return used_before("raydist.fit")


def used_before(place: str) -> str:
    """Return why the ranks cannot begin again at this place of the job, empty if they can.

    A new rank runs the job from its first line: it would repeat alone what the job did with all
    ranks before this place.
    """
    if context.current().fits > 1:
        return f"the job was in its second {place}"
    if (used := torch_private.group_use()) is None:
        return f"this torch does not say whether the job used torch.distributed before {place}"
    if used != (1, 1):  # the default group, and its barrier in join()
        return f"the job used torch.distributed before {place}"
    return ""


def undivided(comm: Comm, model: torch.nn.Module) -> str:
    """Return why this model can't be divided among the ranks once more, empty if it can."""
    if context.rank().device.type == "cuda":
        return "a model in shards stays only on a CPU so far"
    return indivisible(model)


def buffer_sizes(model: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and the type of each buffer of a model, by name."""
    return {
        name: (each.shape, each.dtype)
        for name, each in model.named_buffers()
        if not torch.nn.parameter.is_lazy(each)
    }


def resized(model: torch.nn.Module, sizes: dict[str, tuple[torch.Size, torch.dtype]]) -> str:
    """Return why a new rank, whose buffers have these sizes, cannot join, empty if it can.

    DDP sends the buffers of one rank to all others before any state is loaded.
    """
    now = buffer_sizes(model)
    changed = [name for name in {**sizes, **now} if now.get(name) != sizes.get(name)]
    if not changed:
        return ""
    name = changed[0]
    if name not in sizes:
        return f"the model has a new buffer {name}"
    retyped = name in now and now[name][0] == sizes[name][0]
    return f"the buffer {name} of the model has changed its {'type' if retyped else 'size'}"


def no_common_state(comm: Comm) -> str:
    """Return why this rank has no state that all ranks have, empty if it has one.

    A rank that has kept two whole states has seen all others make the step after the first one,
    before which they kept it.
    """
    current = context.current()
    if comm.sharded:
        sharded.leave()
        has_one = current.common >= 0
    else:
        steps = current.buffer.steps if current.buffer is not None else {}
        has_one = len(steps) > 1 or current.common in steps
    return "" if has_one else "no state of all ranks was in memory yet"
