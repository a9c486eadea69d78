"""All ranks stop after one step: what the driver sends, and what ranks do, also where hosts run
ahead of devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.rank import Holding, HoldRank, ReleaseRank, StopAfter
from raydist.messages.request import Request
from raydist.recovery import quiesce as quiesce_module
from raydist.recovery.quiesce import Quiesce
from raydist.shared import kinds
from raydist.shared.errors import LaunchError
from raydist.worker.context import StopRequest
from tests.records import event
from tests.recovery.test_resize import planned
from tests.waiting import wait_until

SEVERAL = 3


class Ranks:
    """A group whose ranks are threads. Their steps wait for each other every `sync` steps, as
    collectives do. A fit follows the other, each with `last` steps; 0: there is only one."""

    def __init__(self, sync: int, done: tuple[int, ...] = (0,) * SEVERAL, last: int = 0) -> None:
        self.plan = planned(len(done), per_node=1)
        self.requests = [StopRequest() for _ in done]
        self.steps = list(done)
        self.fits = [1 for _ in done]
        self.busy: set[int] = set()
        """Ranks that answer no request now, as one that compiles and keeps the GIL; they handle it
        later."""
        self.ended: set[int] = set()
        self._late: list[Callable[[], Any]] = []
        self._sync, self._barrier = sync, threading.Barrier(len(done))
        self._last = last
        self.threads = [
            threading.Thread(target=self._train, args=(rank,), daemon=True)
            for rank in range(len(done))
        ]
        for request, step in zip(self.requests, done, strict=True):
            request.enter_fit(1, step)

    def _train(self, rank: int) -> None:
        while True:
            step = self.steps[rank] + 1
            if step % self._sync == 0:
                self._barrier.wait(10)
            time.sleep(0.0005 * rank)
            self.steps[rank] = step
            if step == self._last:  # it asks after no last step, as fit does
                self.fits[rank] += 1
                self.steps[rank] = 0
                self.requests[rank].enter_fit(self.fits[rank], 0)
            elif self.requests[rank].due(step):
                return

    def call(self, rank: int, request: Request[Any]) -> Future[Any]:
        reply: Future[Any] = Future()
        match request:
            case HoldRank() if rank in self.ended:
                reply.set_exception(LaunchError("the rank has ended"))
            case HoldRank() if rank in self.busy:
                self._late.append(self.requests[rank].hold)
            case HoldRank():
                reply.set_result(Holding(*self.requests[rank].hold_in_fit()))
            case ReleaseRank():
                for handle in self._late if rank in self.busy else ():
                    handle()
                self.requests[rank].release()
                reply.set_result(None)
            case StopAfter(step, fit):
                self.requests[rank].stop_after(step, fit)
                reply.set_result(None)
        return reply


@pytest.mark.parametrize("sync", [1, 7, 50], ids=["every step", "a few steps ahead", "far ahead"])
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("last", [0, 2, 20], ids=["one fit", "short fits", "fits"])
def test_all_ranks_stop_after_the_same_step(sync: int, seconds: float, last: int) -> None:
    ranks = Ranks(sync, last=last)
    for thread in ranks.threads:
        thread.start()
    time.sleep(seconds)
    Quiesce(cast("WorkerGroup", ranks), script=False).agree()
    for thread in ranks.threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(set(zip(ranks.fits, ranks.steps, strict=True))) == 1


@pytest.mark.parametrize("begun", [(1, 1), (2, 1), (2, 2)])
def test_a_request_in_the_last_step_of_a_fit_stops_the_next(begun: tuple[int, int]) -> None:
    """The ranks agreed on the last step, and continued in the next fit for as many more."""
    ranks = Ranks(sync=1, done=(99, 99), last=100)
    for rank, fit in enumerate(begun):
        if fit == 2:
            ranks.requests[rank].enter_fit(2, 0)
    step = Quiesce(cast("WorkerGroup", ranks), script=False).agree()
    assert step == (100 if begun == (1, 1) else 1)
    for rank, fit in enumerate(begun):
        if fit == 1:
            ranks.requests[rank].enter_fit(2, 0)
    assert [request.due(1) for request in ranks.requests] == [True, True]


def test_ranks_continue_if_one_does_not_answer_and_stop_once_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that had answered stood still, and the run was ended for a hang."""
    monkeypatch.setattr(quiesce_module, "REPLY_S", 0.1)
    ranks = Ranks(sync=7)
    ranks.busy = {2}
    for thread in ranks.threads:
        thread.start()
    one = Quiesce(cast("WorkerGroup", ranks), script=False)
    assert one.agree() is None
    before = list(ranks.steps)
    wait_until(
        lambda: all(now >= was + 20 for now, was in zip(ranks.steps, before, strict=True)),
        "all ranks continue",
    )
    ranks.busy.clear()
    step = one.agree()
    for thread in ranks.threads:
        thread.join(10)
        assert not thread.is_alive()
    assert set(ranks.steps) == {step}


def test_once_an_attempt_is_over_its_ranks_are_asked_nothing() -> None:
    """The agents may have ranks of the next attempt."""
    one, group = quiesce()
    with one:
        pass
    one.agree()
    assert group.sent == []


def test_ranks_that_have_not_begun_stop_where_the_others_do() -> None:
    ranks = Ranks(sync=1000, done=(100, 100, 100))
    ranks.requests[2] = StopRequest()  # it does not know yet that it continues after step 100
    for thread in ranks.threads[:2]:
        thread.start()
    time.sleep(0.02)
    Quiesce(cast("WorkerGroup", ranks), script=False).agree()
    ranks.requests[2].enter_fit(1, 100)
    ranks.threads[2].start()
    for thread in ranks.threads:
        thread.join(10)
    assert len(set(ranks.steps)) == 1


class Recorder:
    """A group that records requests."""

    def __init__(self) -> None:
        self.plan = planned(2, per_node=1)
        self.sent: list[tuple[int, Request[Any]]] = []
        self.requested = threading.Event()

    def call(self, rank: int, request: Request[Any]) -> Future[Any]:
        reply: Future[Any] = Future()
        reply.set_result(Holding({0: 5, 1: 8}[rank]))
        self.sent.append((rank, request))
        if len(self.sent) == 4:
            self.requested.set()
        return reply


def quiesce(script: bool = False) -> tuple[Quiesce, Recorder]:
    group = Recorder()
    return Quiesce(cast("WorkerGroup", group), script), group


HOLD: list[tuple[int, Request[Any]]] = [(0, HoldRank()), (1, HoldRank())]
AFTER_8: list[tuple[int, Request[Any]]] = [(0, StopAfter(8)), (1, StopAfter(8))]


def test_a_program_can_be_stopped_at_once() -> None:
    one, group = quiesce(script=True)
    assert one.request()
    assert group.sent == []


def test_a_loop_of_ones_own_can_be_stopped_after_its_next_checkpoint() -> None:
    one, group = quiesce()
    assert not one.note(0, event("saved", step=3))
    assert not one.request()
    assert not one.note(1, event("report", step=4))
    assert one.note(0, event("saved", step=5))
    assert group.sent == []


def test_a_loop_in_shards_can_be_stopped_once_they_are_in_the_nodes_memory() -> None:
    one, _ = quiesce()
    shards = kinds.SaveShards(
        rank=0, step=3, folder="checkpoints", keep=1, best=None, metrics={}, reported={}
    )
    assert not one.note(0, shards)
    assert not one.request()
    assert one.note(0, shards)


@pytest.mark.parametrize(
    "sooner", [True, False], ids=["requested before it begins", "requested while it runs"]
)
def test_fit_is_stopped_after_the_largest_step_that_a_rank_is_making(sooner: bool) -> None:
    one, group = quiesce()
    assert not (sooner and one.request())
    assert not one.note(0, event("begin", steps=9))
    assert not (not sooner and one.request())
    assert group.requested.wait(10)
    assert group.sent == [*HOLD, *AFTER_8]
    assert not one.note(0, event("saved", step=3))
    assert not one.note(1, event("left", step=8))
    assert one.note(0, event("left", step=8))


def test_a_second_request_asks_nothing_again() -> None:
    one, group = quiesce()
    one.note(0, event("begin", steps=9))
    one.request()
    one.request()
    assert group.requested.wait(10)
    assert group.sent == [*HOLD, *AFTER_8]


def test_a_rank_that_has_ended_holds_no_other() -> None:
    """It may have finished before ranks that do not wait for it, as with Horovod's process sets."""
    ranks = Ranks(sync=10**9)
    ranks.ended = {2}
    for thread in ranks.threads[:2]:
        thread.start()
    assert Quiesce(cast("WorkerGroup", ranks), script=False).agree() == -1
    before = ranks.steps[:2]
    wait_until(
        lambda: all(now >= was + 20 for now, was in zip(ranks.steps[:2], before, strict=True)),
        "the others continue",
    )
    for request, thread in zip(ranks.requests[:2], ranks.threads[:2], strict=True):
        request.hold()
        request.stop_after(0)
        thread.join(10)
        assert not thread.is_alive()
