"""Have all ranks stop after the same step, for a drain or for another number of ranks. (driver)"""

from __future__ import annotations

import threading
from concurrent.futures import wait

from raydist.launch.worker_group import WorkerGroup
from raydist.shared.events import Event
from raydist.worker.protocol import HoldRank, StopAfter

REPLY_S = 60.0
"""Longest wait for the steps of all ranks. They come from a thread of each rank, so within milliseconds."""


class Quiesce:
    """One attempt's way to a point where its ranks can be stopped and no step is lost.

    A program (`script=`) can be stopped at once, as under torchrun. raydist.fit stops after a step that is common to
    all ranks (worker.context.StopRequest). A function with a loop of its own can be stopped after its next checkpoint.
    """

    def __init__(self, group: WorkerGroup, script: bool) -> None:
        self._group, self._script = group, script
        self._requested = self._fit = self._asked = False
        self._left: set[int] = set()

    def request(self) -> bool:
        """Bring the ranks to such a point; whether they can be stopped now."""
        self._requested = True
        self._ask()
        return self._script

    def note(self, rank: int, event: Event) -> bool:
        """Take in an event of a rank; whether the ranks can be stopped now."""
        kind = event["kind"]
        if kind == "begin" and rank == 0:
            self._fit = True
            self._ask()
        if kind == "left":
            self._left.add(rank)
            return len(self._left) == self._group.plan.world_size
        return kind == "saved" and self._requested and not self._fit

    def _ask(self) -> None:
        if self._requested and self._fit and not self._asked:
            self._asked = True
            threading.Thread(target=self.agree, name="raydist-quiesce", daemon=True).start()

    def agree(self) -> None:
        """Have every rank hold, and stop after the largest step that one of them is making.

        If a rank has ended or hangs, none is told a step: the supervisor learns of that from its agent.
        """
        replies = [self._group.call(rank, HoldRank()) for rank in range(self._group.plan.world_size)]
        wait(replies, timeout=REPLY_S)
        if any(not reply.done() or reply.exception() is not None for reply in replies):
            return
        step = max(reply.result() for reply in replies)
        for rank in range(self._group.plan.world_size):
            self._group.call(rank, StopAfter(step))
