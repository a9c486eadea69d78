"""Continues a training in this process after another rank was killed, if exact. (rank side)"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from raydist.shared import kinds
from raydist.training.data import Order
from raydist.worker import context, torch_private
from raydist.worker.backends import Comm
from raydist.worker.backends.ddp import DDPComm

T = TypeVar("T")


def outlive(comm: Comm, order: Order, train: Callable[[], T]) -> T:
    """Return what `train` returns.

    If another rank is killed meanwhile, and this one can go back to the state that all have in
    memory, `train` is called again, in the next attempt of the job. It must make the same
    collectives as in a new process.
    """
    in_place = context.current().in_place
    if in_place is None or not isinstance(comm, DDPComm):
        return train()
    if why := unable(order):
        in_place.why_not = why
        return train()

    def meet_again() -> None:
        context.current().begin_again()
        comm.meet(in_place)
        context.emit_event(kinds.Joined(rank=context.rank().rank, pid=os.getpid()))

    return in_place.outlive(train, meet_again, no_common_state)


def unable(order: Order) -> str:
    """Return why this training cannot begin again in the same process, empty if it can.

    A new rank runs the job from its first line: it would repeat alone what the job did with all
    ranks before this point.
    """
    if order.kind != "map":
        return "only a data set with an index can go back to an earlier sample"
    if context.current().fits > 1:
        return "the job was in its second raydist.fit"
    if (used := torch_private.group_use()) is None:
        return "this torch does not say whether the job used torch.distributed before raydist.fit"
    if used != (1, 1):  # the default group, and its barrier in join()
        return "the job used torch.distributed before raydist.fit"
    return ""


def no_common_state() -> str:
    """Return why this rank has no state that all ranks have, empty if it has one.

    A rank that has kept two states has seen all others make the step after the first one, before
    which they kept it.
    """
    current = context.current()
    steps = current.buffer.steps if current.buffer is not None else {}
    if len(steps) > 1 or current.common in steps:
        return ""
    return "no state of all ranks was in memory yet"
