"""Has all ranks stop after the same step, for a drain or for another number of ranks. (driver)"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.rank import HoldRank, ReleaseRank, StopAfter
from raydist.messages.request import AnyReply, Request
from raydist.shared import kinds
from raydist.shared.kinds import Event

REPLY_S = 60.0
"""Limit on the wait for the steps of all ranks. They come from a thread of each rank, so within
milliseconds."""


class Quiesce(AbstractContextManager["Quiesce"]):
    """Brings one attempt to a point where its ranks can be stopped without losing a step.

    A program (`script=`) can be stopped at once, as under torchrun. raydist.fit stops after a step
    that is common to all ranks (worker.context.StopRequest). A function with its own loop can be
    stopped after its next checkpoint.
    """

    def __init__(self, group: WorkerGroup, script: bool) -> None:
        self._group = group
        self._script = script
        self._requested = self._fit = self._asked = False
        self._left_ranks: set[int] = set()
        self._closed = threading.Event()

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def request(self) -> bool:
        """Bring the ranks to such a point; return whether they can be stopped now."""
        self._requested = True
        self._ask()
        return self._script

    def note(self, rank: int, event: Event) -> bool:
        """Record an event of a rank; return whether the ranks can be stopped now."""
        match event:
            case kinds.Begin() if rank == 0:
                self._fit = True
                self._ask()
            case kinds.Left():
                self._left_ranks.add(rank)
                return len(self._left_ranks) == self._group.plan.world_size
            case kinds.Saved() | kinds.SaveShards():  # the shards are in the node's memory
                return self._requested and not self._fit
        return False

    def _ask(self) -> None:
        if self._requested and self._fit and not self._asked:
            self._asked = True
            threading.Thread(target=self._agree, name="raydist-quiesce", daemon=True).start()

    def _agree(self) -> None:
        """Try until all ranks agree, or one has ended, or the attempt has."""
        while not self._closed.is_set() and self.agree() is None:
            pass

    def agree(self) -> int | None:
        """Have every rank hold, then stop after the largest current step of all; return that step.

        Returns None if a rank did not answer in time, such as one that compiles, and -1 if one has
        ended, of which its agent notifies the supervisor; the others continue. Returns -1 if the
        attempt is over.
        """
        replies = self._ask_each(HoldRank())
        wait(replies, timeout=REPLY_S)
        if self._closed.is_set():
            return -1
        ended = any(reply.done() and reply.exception() is not None for reply in replies)
        if ended or not all(reply.done() for reply in replies):
            # They would be paused until the run is ended for a hang. A rank that has finished ends
            # no attempt, and others may not wait for it, as with Horovod's process sets.
            self._ask_each(ReleaseRank())
            return -1 if ended else None
        last = max((reply.result() for reply in replies), key=lambda each: (each.fit, each.step))
        self._ask_each(StopAfter(last.step, last.fit))
        return last.step

    def _ask_each(self, request: Request[AnyReply]) -> list[Future[AnyReply]]:
        """Send a request to each rank; to none once the attempt is over: others may run then."""
        ranks = range(0 if self._closed.is_set() else self._group.plan.world_size)
        return [self._group.call(rank, request) for rank in ranks]
