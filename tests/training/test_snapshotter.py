"""Which snapshot all ranks go back to, and how a rank that has none gets it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raydist.settings.config import Backend, Job, Optim, Snapshot
from raydist.shared import cgroup
from raydist.state.device import HostDevice
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import PAGE, blank_page
from raydist.training import optim, snapshotter
from raydist.training.checkpointer import WholeCheckpointer
from raydist.training.rank_model import RankModel
from raydist.training.snapshot_interval import spacing
from raydist.training.snapshotter import Offer, Restored, Snapshotter, choose_snapshot
from raydist.training.step import Stepper
from raydist.worker import context
from tests.lagging import Lagging
from tests.ranks import run_ranks, succeeded
from tests.waiting import wait_until

GLOO = Job(backend=Backend("gloo"))


def offers(*steps: int, whole: bool = True) -> list[Offer]:
    return [Offer(step, int(whole)) for step in steps]


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([offers(5, 4), offers(5, 4, whole=False)], (5, 0)),
        ([offers(6, 5), offers(5, 4, whole=False)], (5, 0)),  # the other was not so far yet
        ([offers(5, 4), []], (5, 0)),  # the other is new
        ([[], offers(5, 4)], (5, 1)),
        ([[], offers(6, 5), offers(5, 4)], (5, 1)),
        ([offers(5, whole=False), offers(5, whole=False)], None),  # the node with all of it is lost
        ([[], []], None),
        ([offers(9, 8), offers(5, 4)], None),
    ],
)
def test_the_newest_state_that_will_do(
    offers: list[list[Offer]], chosen: tuple[int, int] | None
) -> None:
    assert choose_snapshot(offers) == chosen


def state(step: int, rank: int) -> dict[str, Any]:
    return {
        "own": {"rank": torch.tensor([rank]), "world_size": 2},
        "model": torch.arange(1001) * step,
        "name": "x",
    }


def find(holders: dict[int, tuple[int, ...]], nodes: int) -> Any:
    """Return a function for ranks: rank r has kept whole states of the steps holders[r], and
    returns what it finds."""

    def job(job: Job) -> Any:
        here = context.current()
        me = here.rank.rank
        here.rank = context.Rank(
            me, 0 if nodes > 1 else me, me if nodes > 1 else 0, here.rank.world_size
        )
        descriptor = os.memfd_create("test")
        os.pwrite(descriptor, blank_page(), 0)
        for step in holders.get(me, ()):
            SnapshotBuffer(descriptor).write(step, state(step, me))
        here.memory = descriptor, descriptor
        kept = Snapshotter(job, here.comm).find()
        return kept and (
            kept.step,
            kept.state["model"].tolist(),
            kept.own and kept.own["rank"].tolist(),
        )

    return job


def test_every_rank_finds_the_same_step_and_its_own_part(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_RESTART_COUNT": "1"}
    results = run_ranks(2, GLOO, find({0: (3, 4), 1: (2, 3)}, nodes=2), tmp_path, env)
    assert [each.error for each in results] == ["", ""]
    assert [each.value for each in results] == [
        (3, [3 * i for i in range(1001)], [rank]) for rank in range(2)
    ]


@pytest.mark.parametrize("holder", [0, 1])
def test_a_new_node_gets_the_state_of_one_that_has_it(tmp_path: Path, holder: int) -> None:
    env = {"TORCHELASTIC_RESTART_COUNT": "1"}
    results = run_ranks(2, GLOO, find({holder: (3, 4)}, nodes=2), tmp_path, env)
    assert [each.error for each in results] == ["", ""]
    assert [each.value for each in results] == [(4, [4 * i for i in range(1001)], None)] * 2


@pytest.mark.parametrize(("kind", "same"), [("cuda", True), ("cpu", False)])
def test_a_rank_with_a_gpu_reads_the_memory_of_its_node_without_a_copy(
    tmp_path: Path, kind: str, same: bool
) -> None:
    """Each of eight ranks copied the whole state before it went to its GPU."""

    def job(job: Job) -> bool:
        here, descriptor = context.current(), os.memfd_create("test")
        os.pwrite(descriptor, blank_page(), 0)
        memory = SnapshotBuffer(descriptor, Lagging())
        memory.write(3, {**state(3, 0), "own": {"world_size": 1}})
        memory.settle()
        here.memory = descriptor, descriptor
        context.Rank.device = property(lambda rank: torch.device(kind))  # type: ignore[assignment,method-assign]
        vars(snapshotter)["device_of"] = lambda device: HostDevice()
        kept = Snapshotter(job, here.comm).find()
        assert kept is not None
        memory.read(memory.steps[3], clone="none")["model"].fill_(-1)
        return bool((kept.state["model"] == -1).all())

    (result,) = run_ranks(1, GLOO, job, tmp_path, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert (result.error, result.value) == ("", same)


def test_ranks_of_a_node_with_gpus_do_not_count_up_one_step_of_adam_together(
    tmp_path: Path,
) -> None:
    """The optimizer leaves `step` on the host as it gets it: it was the memory that all of them
    read."""

    def trained(job: Job, steps: int, device: str = "cpu", kept: Restored | None = None) -> Stepper:
        """After so many steps, from this state on. A tensor on `meta` is on another device, as on a
        GPU."""
        comm, given = context.current().comm, torch.ones(2, 4, device=device)
        model = RankModel(job, nn.Linear(4, 3), comm, torch.device(device), 0.1)
        schedule = optim.schedule(job.optim, model.optimizer, optim.Course(10))
        stepper = Stepper(job.train, model, lambda output, _: output.sum(), schedule)
        if kept is not None:
            stepper.load(kept.state, kept.path)
        for _ in range(steps):
            stepper.update(stepper.forward_backward(iter([(given, given)])))
        return stepper

    def adam_steps(state: Mapping[str, Any]) -> list[torch.Tensor]:
        return [each["step"] for each in state["optimizer"]["state"].values()]

    def job(job: Job) -> Any:
        here, descriptor = context.current(), os.memfd_create("test")
        os.pwrite(descriptor, blank_page(), 0)
        whole = trained(job, 5).state()
        memory = SnapshotBuffer(descriptor, Lagging(on_host=adam_steps(whole)))
        memory.write(5, {**whole, "own": {"world_size": 1}})
        memory.settle()
        here.memory = descriptor, descriptor
        context.Rank.device = property(lambda rank: torch.device("cuda"))  # type: ignore[assignment,method-assign]
        vars(snapshotter)["device_of"] = lambda device: HostDevice()
        offered = [Snapshotter(job, here.comm).find() for _ in range(2)]
        states = [trained(job, 1, "meta", kept).state() for kept in offered]
        slot = memory.read(memory.steps[5])
        return [[int(step) for step in adam_steps(each)] for each in (*states, slot)]

    # A fused optimizer has `step` on the device.
    settings = replace(GLOO, optim=Optim("adamw", fused=False))
    (result,) = run_ranks(1, settings, job, tmp_path, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert (result.error, result.value) == ("", [[6, 6], [6, 6], [5, 5]])


def test_ranks_of_a_node_with_gpus_do_not_count_up_one_step_of_asgd_together(
    tmp_path: Path,
) -> None:
    """It has `step` on the GPU, but torch leaves a loaded one where it is: in memory of all ranks."""

    def job(job: Job) -> Any:
        def stepper(device: str) -> Stepper:
            comm = context.current().comm
            model = RankModel(job, nn.Linear(4, 3), comm, torch.device(device), 0.1)
            schedule = optim.schedule(job.optim, model.optimizer, optim.Course(10))
            return Stepper(job.train, model, lambda output, _: output.sum(), schedule)

        first, again = stepper("cpu"), stepper("meta")
        given = torch.ones(2, 4)
        first.update(first.forward_backward(iter([(given, given)])))
        kept = first.state()
        own = {"buffers": {}, "loss": torch.zeros(())}
        Restored(1, kept, own).restore(again, lambda: None)
        for each in again.model.optimizer.state.values():
            each["step"] += 1
        return [
            [float(each["step"]) for each in states]
            for states in (
                kept["optimizer"]["state"].values(),
                again.model.optimizer.state.values(),
            )
        ]

    settings = replace(GLOO, optim=Optim(_target_="torch.optim.ASGD"))
    (result,) = run_ranks(1, settings, job, tmp_path)
    assert (result.error, result.value) == ("", [[1, 1], [2, 2]])


def on_new_node(room: int) -> Any:
    """Return a function for 4 ranks of two nodes: rank 0 has a state of step 4, and the second node
    is new with this much room."""

    def job(job: Job, folder: Path) -> Any:
        here = context.current()
        me = here.rank.rank
        here.rank = context.Rank(me, me % 2, me // 2, here.rank.world_size)
        lead = os.open(folder / f"node-{me // 2}", os.O_RDWR)
        own = lead if me % 2 == 0 else os.memfd_create("own")
        if own != lead:
            os.pwrite(own, blank_page(), 0)
        if me < 2:
            SnapshotBuffer(own).write(4, state(4, me) if me == 0 else {"own": state(4, me)["own"]})
        here.memory = own, lead
        sizes, kind = list[int](), type(here.comm)
        add = kind.sum

        def noted(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return add(comm, tensor)  # type: ignore[no-any-return]

        kind.sum = noted
        snapshotter.PIECE = 1000
        if me >= 2:
            cgroup.memory_left = lambda root=Path("/"): room
        kept = Snapshotter(job, here.comm).find()
        held = SnapshotBuffer(own).steps
        return kept and (
            kept.step,
            kept.state["model"].tolist(),
            kept.own,
            max(sizes),
            len(sizes) > 8,
            sorted(held),
        )

    return job


@pytest.mark.parametrize("room", [1 << 30, 1000])
def test_a_state_reaches_a_new_node_in_pieces_and_is_there_once(tmp_path: Path, room: int) -> None:
    """Each rank held all of it, as int64: of a state of 100 GB eight times on each node."""
    for node in range(2):
        (tmp_path / f"node-{node}").write_bytes(blank_page())
    env = {"TORCHELASTIC_RESTART_COUNT": "1"}
    results = run_ranks(4, GLOO, partial(on_new_node(room), folder=tmp_path), tmp_path, env)
    assert [each.error for each in results] == [""] * 4
    expected = 4, [4 * i for i in range(1001)], None, 1000, True
    assert [each.value for each in results] == [(*expected, [4])] * 2 + [(*expected, [])] * 2


def between_two_fits(job: Job, lead: Path) -> Any:
    """On the two ranks of a node: the first one failed after the first raydist.fit, the other one
    had begun the second. `lead`: the file of the first one's memory."""
    here = context.current()
    first = here.rank.rank == 0
    descriptor = os.open(lead, os.O_RDWR)
    own = descriptor if first else os.memfd_create("own")
    if first:
        memory = SnapshotBuffer(own)
        memory.begin_fit(1)
        memory.write(4, state(4, 0))
    else:
        os.pwrite(own, blank_page(), 0)
        SnapshotBuffer(own).begin_fit(2)
    here.memory, here.fit = (own, descriptor), 1
    return Snapshotter(job, here.comm).find()


def test_a_fit_that_has_finished_is_not_found_in_memory_on_any_rank(tmp_path: Path) -> None:
    (tmp_path / "lead").write_bytes(blank_page())
    work = partial(between_two_fits, lead=tmp_path / "lead")
    results = run_ranks(2, GLOO, work, tmp_path, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert [(each.error, each.value) for each in results] == [("", None)] * 2


def test_a_first_attempt_looks_for_nothing(tmp_path: Path) -> None:
    results = run_ranks(
        2, GLOO, find({0: (3,), 1: (3,)}, nodes=2), tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"}
    )
    assert [each.value for each in results] == [None, None]


def rhythm(every: int | None, pause: float) -> Any:
    def job(job: Job) -> list[int]:
        here = context.current()
        descriptor = os.memfd_create("test")
        os.pwrite(descriptor, blank_page(), 0)
        here.memory = descriptor, descriptor
        keeper = Snapshotter(Job(snapshot=Snapshot(every=every)), here.comm)
        keeper.begin(0)
        kept = []
        for step in range(1, 30):
            torch.ones(1).add_(1)
            time.sleep(pause)
            keeper.step(step, lambda: {"rank": torch.ones(1)}, lambda: state(1, 0))
            kept.append(max(SnapshotBuffer(descriptor).steps, default=0))
        return kept

    return job


@pytest.mark.parametrize(("every", "last"), [(1, 29), (10, 20), (0, 0)])
def test_as_often_as_is_asked(tmp_path: Path, every: int, last: int) -> None:
    for each in run_ranks(2, GLOO, rhythm(every, 0.0), tmp_path):
        assert (each.error, each.value[-1]) == ("", last)


@pytest.mark.parametrize(
    ("shares", "copies", "steps"),
    [
        ([0.0, 0.004], [0.0, 0.0], 1),
        ([0.01], [0.0], 1),
        ([0.0101], [0.0], 2),
        ([0.5, 0.02], [0.0, 0.0], 50),
        ([0.0], [0.0], 1),
        ([3.0], [0.0], 300),
        ([0.003, 0.004], [10.0, 9.5], 10),  # the network needs as long as ten steps
        ([0.3, 0.2], [10.0, 9.5], 30),
    ],
)
def test_each_step_is_kept_if_that_takes_a_percent_of_it_at_most(
    shares: list[float], copies: list[float], steps: int
) -> None:
    assert spacing(shares, copies) == steps


def test_a_buffer_that_has_grown_is_restored() -> None:
    module = nn.Sequential(nn.Module(), nn.BatchNorm1d(2))
    for name, size in (("table", 4), ("new", 3)):
        module[0].register_buffer(name, torch.zeros(size), persistent=False)
    table, mean = torch.arange(8.0), torch.full((2,), 5.0)
    buffers = dict(module.named_buffers()) | {"0.table": table, "1.running_mean": mean}
    del buffers["0.new"]
    stepper: Any = SimpleNamespace(
        model=SimpleNamespace(module=module, device=torch.device("cpu")),
        load=lambda state, path: None,
    )
    own = {"buffers": buffers, "loss": torch.ones(())}
    Restored(5, {}, own).restore(stepper, lambda: None)
    table.zero_()  # a later step overwrites this memory
    restored = dict(module.named_buffers())
    assert restored["0.table"].tolist() == [*range(8)]
    assert restored["0.new"].tolist() == [0, 0, 0]
    assert torch.equal(restored["1.running_mean"], mean)
    assert "0.table" not in module.state_dict()


def scarce(last: int) -> Any:
    """8 steps; no more memory is free after the `last`. One is on its way to the disk from the 3rd
    to the 6th."""

    def job(job: Job) -> Any:
        here = context.current()
        descriptor = os.memfd_create("test")
        os.pwrite(descriptor, blank_page(), 0)
        here.memory, memory = (descriptor, descriptor), SnapshotBuffer(descriptor)
        keeper = Snapshotter(Job(snapshot=Snapshot(every=1)), here.comm)
        keeper.begin(0)
        kept = []
        for step in range(1, 9):
            if step in (3, 6) and memory.steps:
                memory.lock(memory.steps[2] if step == 3 else -1)
            keeper.step(step, lambda: {"rank": torch.ones(1)}, partial(state, step, 0))
            kept.append(max(memory.steps, default=0))
            if step == last:
                cgroup.memory_left = lambda root=Path("/"): 1000
        return kept, os.fstat(descriptor).st_size

    return job


def test_without_memory_for_a_third_state_none_is_kept_while_one_gets_to_the_disk(
    tmp_path: Path,
) -> None:
    (result,) = run_ranks(1, GLOO, scarce(2), tmp_path)
    assert (result.error, result.kind("warning")) == ("", [])
    assert result.value[0] == [1, 2, 3, 3, 3, 6, 7, 8]


def scarce_while_saving(job: Job) -> Any:
    """8 steps; a checkpoint is saved after the third, and rank 0 has no memory for a third state."""
    here, descriptor = context.current(), os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    here.memory, memory = (descriptor, descriptor), SnapshotBuffer(descriptor)
    lead = here.rank.rank == 0
    keeper = WholeCheckpointer(Job(snapshot=Snapshot(every=1)), here.comm)
    keeper.begin(0)

    def writer() -> None:
        wait_until(lambda: memory.locked_slot >= 0)
        time.sleep(1)
        memory.lock(-1)

    kept = []
    parts = lambda: {"rank": torch.ones(1)}, lambda: {"model": torch.ones(1 << 20)}
    for step in range(1, 9):
        keeper.snapshots.step(step, *parts)
        if step == 3:
            cgroup.memory_left = lambda root=Path("/"): 1 << 20 if lead else 1 << 30
            if lead:
                threading.Thread(target=writer).start()
            keeper.save_parts(3, *parts, {})
        kept.append({*memory.steps})
    memory.lock(memory.steps[8])
    held = [keeper.snapshots.hold(step, *parts) for step in (9, 10)]
    memory.lock(-1)
    return kept, held, {*memory.steps}


def test_ranks_have_a_common_state_while_a_checkpoint_is_written_without_memory(
    tmp_path: Path,
) -> None:
    one, other = succeeded(run_ranks(2, GLOO, scarce_while_saving, tmp_path))
    assert all(mine & theirs for mine, theirs in zip(one.value[0], other.value[0], strict=True))
    assert one.value[0][-1] == {7, 8}
    assert one.value[1:] == ([True, False], {8, 9})
    assert other.value[1:] == ([True, True], {8, 9, 10})


def test_without_memory_for_two_there_are_none_and_what_they_took_is_free(tmp_path: Path) -> None:
    (result,) = run_ranks(1, GLOO, scarce(1), tmp_path)
    assert (result.error, result.value) == ("", ([1, 0, 0, 0, 0, 0, 0, 0], PAGE))
    (warning,) = result.kind("warning")
    assert "no more snapshots: a state takes" in warning["text"]


def test_steps_that_take_no_time_are_not_all_kept_and_all_ranks_agree(tmp_path: Path) -> None:
    one, other = run_ranks(2, GLOO, rhythm(None, 0.0), tmp_path)
    assert (one.error, other.error) == ("", "")
    assert one.value == other.value
    assert one.value[3] == 4  # until it is known what one costs
    assert one.value[7] < 8
    assert one.value[-1] < 29
