"""Devices that lag behind their hosts: in every order of copies and collectives there is a state to
return to."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import blank_page
from raydist.training import loop, snapshotter
from raydist.training.snapshot_interval import SnapshotInterval
from raydist.training.snapshotter import OFFERS, Offer, choose_snapshot
from raydist.worker import context
from tests.lagging import Lagging, TurnHost

AHEAD = 6
"""Steps by which a host may run ahead of its device."""


def new_memory() -> int:
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    return descriptor


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = new_memory()
    yield descriptor
    os.close(descriptor)


class Training:
    """Ranks whose hosts queue steps on lagging devices, and keep every `every`-th; the scheduler
    chooses who continues.

    A step is an all-reduce, which a device begins once all have come to it, and an optimizer step.
    """

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.every, self.size = self.choose.choice([1, 1, 2, 3]), self.choose.choice([2, 3])
        self.can_wait = [self.choose.random() < 0.7 for _ in range(self.size)]
        self.limit = self.every + (self.every > 1 and any(self.can_wait))
        """How many steps a restart repeats at most: a state that is copied alongside the next step
        may be lost with that step."""
        self.save_every = self.choose.choice([0, 5, 7])
        self.held = [0] * self.size
        self.devices = [Lagging() for _ in range(self.size)]
        self.reached, self.done = [0] * self.size, [0] * self.size
        self.descriptors = [new_memory() for _ in range(self.size)]
        self.hosts = [
            TurnHost(lambda host, rank=rank: self.train(rank, host))  # type: ignore[misc]
            for rank in range(self.size)
        ]

    def train(self, rank: int, host: TurnHost) -> None:
        keeper = Keeper(self, rank, host)
        while True:
            keeper.queue_step()
            if keeper.step % self.every == 0 and self.choose.random() < 0.1:
                # a checkpoint is begun, or was written
                keeper.memory.settle()
                keeper.memory.lock(self.choose.choice([-1, *keeper.memory.steps.values()]))
            keeper.keep_if_due()
            if self.save_every and keeper.step % self.save_every == 0:
                keeper.hold()  # for a checkpoint, before which the ranks exchange something
                self.held[rank] = keeper.step
                while min(self.held) < keeper.step:
                    host.pause()
            self.run_ahead(rank, keeper.step, host)

    def run_ahead(self, rank: int, step: int, host: TurnHost) -> None:
        host.pause()
        while step - self.done[rank] > AHEAD:
            host.pause()

    def take_turn(self, likely: list[float]) -> None:
        """Let a host, or one of the queues of a device, continue."""
        (chosen,) = self.choose.choices(range(2 * self.size), likely)
        if chosen < self.size:
            self.hosts[chosen].run_turn()
        else:
            self.advance(chosen - self.size)

    def advance(self, rank: int) -> None:
        device = self.devices[rank]
        self.choose.choice([device.queue, device.copies]).advance()

    def run(self) -> None:
        """Train for some time; then a rank is killed, and the others continue to where they need
        it."""
        likely = [
            self.choose.random() for _ in range(2 * self.size)
        ]  # some hosts or devices are slow
        for _ in range(self.choose.randrange(20, 600)):
            self.take_turn(likely)
        killed = self.devices[self.choose.randrange(self.size)]
        killed.queue.items.clear()
        killed.copies.items.clear()
        for _ in range(self.choose.randrange(100)):
            self.advance(self.choose.randrange(self.size))
        for host in self.hosts:
            host.kill()


class Keeper:
    """The host of one rank, as raydist.fit queues its steps and keeps their states."""

    def __init__(self, training: Training, rank: int, host: TurnHost) -> None:
        self.training, self.rank = training, rank
        self.device = training.devices[rank]
        self.device.pause = host.pause
        self.memory = SnapshotBuffer(training.descriptors[rank], self.device)
        self.interval = SnapshotInterval(training.every, Alone(), self.device)  # type: ignore[arg-type]
        self.weight, self.step = torch.zeros(50), 0

    def queue_step(self) -> None:
        """Queue an all-reduce, and then an optimizer step, as raydist.fit does."""
        self.step += 1
        training, rank, step = self.training, self.rank, self.step

        def come() -> bool:
            training.reached[rank] = step
            return min(training.reached) >= step

        def update() -> None:
            self.weight.fill_(step)
            training.done[rank] = step

        self.device.launch(lambda: None, ready=come)
        self.interval.catch_up(self.memory.catch_up)
        self.device.launch(update)

    def keep_if_due(self, agreed: bool = False) -> None:
        def keep(alongside: bool) -> None:
            self.write(agreed, alongside)

        self.interval.step(self.step, keep, self.training.can_wait[self.rank])

    def hold(self) -> None:
        """Keep the state of this step, due or not."""
        self.memory.settle()
        if self.step not in self.memory.steps:
            self.write()
        self.memory.settle()

    def write(self, agreed: bool = False, alongside: bool = False) -> None:
        state = {"own": {"step": self.step}, "model": self.weight}
        self.memory.write(self.step, state, agreed, alongside)


class TurnEvent:
    """A threading.Event for hosts that run in turns."""

    def __init__(self, host: TurnHost) -> None:
        self._host, self._set = host, False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self) -> None:
        while not self._set:
            self._host.pause()


class Resized(Training):
    """All ranks are asked to leave after a common step (a resize, or a drain), each at a moment of
    its own."""

    def __init__(self, seed: int) -> None:
        self.requests = [context.StopRequest() for _ in range(16)]
        self.left: dict[int, int] = {}
        super().__init__(seed)
        for request, host in zip(self.requests, self.hosts, strict=False):
            request._known = TurnEvent(host)  # type: ignore[assignment]

    def train(self, rank: int, host: TurnHost) -> None:
        keeper, request = Keeper(self, rank, host), self.requests[rank]
        while True:
            keeper.queue_step()
            keeper.keep_if_due()
            if request.due(keeper.step):  # as fit does: keep the state, due or not
                keeper.hold()
                self.left[rank] = keeper.step
                return
            self.run_ahead(rank, keeper.step, host)

    def run(self) -> None:
        likely = [self.choose.random() + 0.01 for _ in range(2 * self.size)]
        requested, limits, reported, order = (
            self.choose.randrange(200),
            dict[int, int](),
            set[int](),
            [*range(self.size)],
        )
        self.choose.shuffle(order)
        for turn in range(100_000):
            self.take_turn(likely)
            if turn >= requested and len(limits) < self.size and self.choose.random() < 0.1:
                limits[order[len(limits)]] = self.requests[order[len(limits)]].hold()
            elif (
                len(limits) == self.size
                and len(reported) < self.size
                and self.choose.random() < 0.1
            ):
                reported.add(rank := order[len(reported)])
                self.requests[rank].stop_after(max(limits.values()))
            if len(self.left) == self.size:
                break
        for host in self.hosts:
            host.kill()


class Shards(Training):
    """Each rank keeps its own shards, and waits with the next ones until all ranks have these."""

    def __init__(self, seed: int) -> None:
        self.have = [0] * 16
        super().__init__(seed)

    def train(self, rank: int, host: TurnHost) -> None:
        keeper, kept = Keeper(self, rank, host), 0
        while True:
            keeper.queue_step()
            if keeper.step % self.every == 0:
                keeper.memory.settle()
                self.have[rank] = kept
                while min(self.have[: self.size]) < kept:
                    host.pause()
                kept = keeper.step
            keeper.keep_if_due(agreed=True)
            self.run_ahead(rank, keeper.step, host)


def test_ranks_that_leave_do_so_after_the_same_step_and_have_its_state() -> None:
    """leave:N holds however far hosts run ahead of devices: no rank meets a collective that another
    leaves out."""
    late = 0
    for seed in range(100):
        training = Resized(seed)
        training.run()
        assert len(training.left) == training.size, (seed, training.left)
        (step,) = {*training.left.values()}
        assert training.reached == training.done == [step] * training.size, seed
        memories = [SnapshotBuffer(descriptor) for descriptor in training.descriptors]
        offers = [[Offer(*row) for row in memory.offers()[:OFFERS]] for memory in memories]
        stay = training.choose.randrange(
            1, training.size + 1
        )  # fewer ranks continue, or as many, or one more
        chosen = choose_snapshot([*offers[:stay], []])
        assert chosen is not None
        assert chosen[0] == step, seed
        for memory in memories:
            assert memory.read(memory.steps[step])["model"].unique().tolist() == [step]
        late += step % training.every != 0
        for descriptor in training.descriptors:
            os.close(descriptor)
    assert late, "the common step was due anyway"


@pytest.mark.parametrize("seeds", range(2))
def test_after_a_kill_at_any_moment_all_ranks_have_the_shards_of_a_common_step(seeds: int) -> None:
    count = 0
    for seed in range(50 * seeds, 50 * seeds + 50):
        training = Shards(seed)
        training.run()
        memories = [SnapshotBuffer(descriptor) for descriptor in training.descriptors]
        steps = set.intersection(*({*memory.steps} for memory in memories))
        reached = max(training.done)
        assert reached - max(steps, default=0) <= training.every + training.limit, (
            seed,
            [memory.steps for memory in memories],
        )
        for memory in memories if steps else []:
            count += 1
            state = memory.read(memory.steps[max(steps)])
            assert (state["own"]["step"], state["model"].unique().tolist()) == (
                max(steps),
                [max(steps)],
            )
        for descriptor in training.descriptors:
            os.close(descriptor)
    assert count > 30


@pytest.mark.parametrize("seeds", range(4))
def test_after_a_kill_at_any_moment_all_ranks_have_a_common_step_within_the_limit(
    seeds: int,
) -> None:
    count = 0
    for seed in range(100 * seeds, 100 * seeds + 100):
        training = Training(seed)
        training.run()
        memories = [SnapshotBuffer(descriptor) for descriptor in training.descriptors]
        offers = [[Offer(*row) for row in memory.offers()[:OFFERS]] for memory in memories]
        for lost in range(
            training.choose.randrange(training.size)
        ):  # their hosts are lost: new ranks have nothing
            offers[lost] = []
        chosen = choose_snapshot(offers)
        reached = max(training.done)
        if chosen is None:
            assert reached <= training.limit, (
                seed,
                [memory.steps for memory in memories],
                training.done,
            )
        else:
            count += 1
            step, _ = chosen
            assert reached - step <= training.limit, (
                seed,
                [memory.steps for memory in memories],
                training.done,
            )
            for memory in (
                memory for memory, each in zip(memories, offers, strict=True) if each
            ):  # the others are sent it
                state = memory.read(memory.steps[step])
                assert (state["own"]["step"], state["model"].unique().tolist()) == (step, [step])
        for descriptor in training.descriptors:
            os.close(descriptor)
    assert count > 30


def test_a_slot_is_complete_when_the_device_says_so_though_the_host_asks_nothing(
    descriptor: int,
) -> None:
    device = Lagging()
    memory = SnapshotBuffer(descriptor, device)
    memory.write(1, {"model": torch.ones(3)})
    seen = []
    while device.advance():
        seen.append(sorted(SnapshotBuffer(descriptor).steps))
    # the copy waits for the training (an item of each queue), then the step, the mark, and the
    # training waits for it (as before)
    assert seen == [*[[]] * 3, *[[1]] * 4]


def test_a_state_copied_alongside_the_next_step_is_that_of_its_step(descriptor: int) -> None:
    device, weight, passes = Lagging(), torch.zeros(3), list[int]()
    memory = SnapshotBuffer(descriptor, device)
    device.launch(lambda: weight.fill_(1))
    memory.write(1, {"model": weight}, alongside=True)
    device.launch(lambda: passes.append(2))
    memory.catch_up()
    device.launch(lambda: weight.fill_(2))
    while device.queue.advance():
        pass
    assert (passes, weight.tolist(), memory.steps) == ([2], [1] * 3, {})
    while device.copies.advance():
        pass
    while device.queue.advance():
        pass
    assert weight.tolist() == [2] * 3
    assert memory.read(memory.steps[1])["model"].tolist() == [1] * 3


def test_two_complete_states_stay_while_a_third_is_copied(descriptor: int) -> None:
    device = Lagging()
    memory = SnapshotBuffer(descriptor, device)
    used = {memory.write(step, {"model": torch.ones(3)}) for step in range(1, 8)}
    assert (sorted(memory.steps), len(used)) == ([5, 6], 3)
    memory.settle()
    assert sorted(memory.steps) == [5, 6, 7]


def test_memory_is_no_longer_page_locked_when_it_is_left(descriptor: int) -> None:
    """The next memory at that address would be copied to the old pages."""
    device = Lagging()
    memory = SnapshotBuffer(descriptor, device)
    for step, size in enumerate([10, 100_000, 10, 1_000_000, 2_000_000, 4_000_000], 1):
        memory.write(step, {"model": torch.ones(size)})
    memory.settle()
    assert len(device.registered) == 4  # three slots, and the first page
    reader = SnapshotBuffer(descriptor, other := Lagging())
    reader.read(memory.steps[6])
    reader.open_replica(1000, 10)
    assert not other.register_calls  # for a copy from a GPU only
    memory.drop()
    assert len(device.registered) == 1
    assert not memory.steps


def test_memory_that_cannot_be_page_locked_is_used_all_the_same_and_asked_for_once(
    descriptor: int,
) -> None:
    device = Lagging()
    device.room = 0
    memory = SnapshotBuffer(descriptor, device)
    for step in range(1, 10):
        memory.write(step, {"model": torch.full((3,), step)})
    memory.settle()
    assert memory.read(memory.steps[9])["model"].tolist() == [9, 9, 9]
    assert device.register_calls == 4


def test_memory_that_a_state_has_outgrown_is_given_back(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    for step in range(12):
        memory.write(step, {"model": torch.ones(1 << (10 + step))})
    memory.write(12, {"model": torch.ones(1 << 21)})
    used = os.fstat(descriptor).st_blocks * 512
    assert used < 1.1 * 4 * ((1 << 21) + (1 << 21))  # the two newest
    memory.free()
    assert os.fstat(descriptor).st_blocks * 512 <= 1 << 16


def test_reports_come_in_order_each_when_its_device_has_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, reports = Lagging(), list[tuple[int, float]]()
    monkeypatch.setattr(loop, "device_of", lambda _: device)
    monkeypatch.setattr(
        context,
        "emit_report",
        lambda step, values, **_: reports.append((step, float(values["loss"]))),
    )
    reporter, loss = loop.MetricReporter(torch.device("cpu")), torch.zeros(())
    for step in range(1, 6):
        device.launch(lambda step=step: loss.fill_(step))  # type: ignore[misc]
        reporter.step(step, {"loss": loss})
        while step == 3 and device.advance():
            pass
    assert reports == [(1, 1.0), (2, 2.0), (3, 3.0)]
    reporter.rest()
    assert reports == [(step, float(step)) for step in range(1, 6)]


@pytest.mark.parametrize(("copy_s", "every"), [(0.0005, 1), (0.0049, 5), (0.1999, 200)])
def test_the_cost_of_a_snapshot_is_the_time_of_the_device(
    monkeypatch: pytest.MonkeyPatch, descriptor: int, copy_s: float, every: int
) -> None:
    """The host waits for the queue of the device when it keeps a state: that is no cost of the
    state."""
    device = Lagging(copy_s=copy_s)
    monkeypatch.setattr(snapshotter, "device_of", lambda _: device)
    keeper = made_snapshotter(monkeypatch, descriptor, device)
    for step in range(1, 9):
        device.launch(lambda: None, s=0.1)
        keeper.step(step, lambda: {"step": step}, lambda: {"model": torch.ones(3)})  # noqa: B023 - called at once
    assert keeper.interval.every == every


@pytest.mark.parametrize(
    ("copy_s", "able", "every"), [(0.0495, True, 2), (0.1555, True, 76), (0.0495, False, 50)]
)
def test_a_copy_alongside_costs_the_time_for_which_the_device_waits(
    monkeypatch: pytest.MonkeyPatch, descriptor: int, copy_s: float, able: bool, every: int
) -> None:
    """A step has 0.08 s before it changes the state, and then 0.02 s."""
    device = Lagging(copy_s=copy_s)
    keeper, kept = made_snapshotter(monkeypatch, descriptor, device), list[int]()
    for step in range(1, 257):
        device.launch(lambda: None, s=0.08)
        keeper.catch_up()
        device.launch(lambda: None, s=0.02)
        keeper.step(step, lambda: kept.append(step) or {}, lambda: {"model": torch.ones(3)}, able)  # type: ignore[func-returns-value]  # noqa: B023 - called at once
    assert keeper.interval.every == every
    assert kept[:4] == [1, 2, 3, 4]
    assert not able or all(later - step > 1 for step, later in pairwise(kept[4:]))


def test_the_wait_for_the_copy_of_the_snapshot_before_is_no_cost_of_this_one() -> None:
    """Of models in shards a node sends a copy to the next one: that took a hundred steps, of which
    each snapshot of the first steps waited for one copy, so one in ten thousand steps was kept."""
    device = Lagging()

    def wait_for_copy() -> None:
        device.launch(lambda: None, s=10.0)

    interval = SnapshotInterval(None, Alone(), device, wait_for_copy, lambda: 10.0)  # type: ignore[arg-type]
    for step in range(1, 9):
        device.launch(lambda: None, s=0.1)
        interval.step(step, lambda _: device.launch(lambda: None, s=0.003))
    assert interval.every == 100


def test_nothing_grows_with_the_steps(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> None:
    for fixed in (1, None):
        device = Lagging()
        keeper = made_snapshotter(monkeypatch, descriptor, device, fixed)
        for step in range(1, 400):
            keeper.step(step, lambda: {"step": step}, lambda: {"model": torch.ones(3)})  # noqa: B023 - called at once
            while device.advance():
                pass
        assert len(keeper.interval._timing.steps) + len(keeper.interval._timing.costs) < 100


class Alone:
    """The communication of one rank."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def made_snapshotter(
    monkeypatch: pytest.MonkeyPatch, descriptor: int, device: Lagging, every: int | None = None
) -> Any:
    """Return the Snapshotter of a run with one rank."""
    from raydist.settings.config import Job, Snapshot
    from raydist.worker import checkpoint

    monkeypatch.setattr(snapshotter, "device_of", lambda _: device)
    monkeypatch.setattr(checkpoint, "own_memory", lambda: SnapshotBuffer(descriptor, device))
    here = context.Context(
        context.Rank(), lambda event: None, lambda step, phase: None, memory=(descriptor, -1)
    )
    context.enter(here)
    try:
        result = snapshotter.Snapshotter(Job(snapshot=Snapshot(every=every)), Alone())  # type: ignore[arg-type]
        result.go_on()
    finally:
        context.enter(None)
    return result
