"""States in memory: what comes out is what went in, and nothing half-written is ever seen."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
import torch

from raydist.shared import cgroup
from raydist.state.snapshot import (
    NoRoom,
    SnapshotBuffer,
    layout_of,
    put_together,
    take_apart,
)
from raydist.state.snapshot_layout import (
    PAGE,
    REPLICA_SLOTS,
    SAVE_SLOT,
    blank_page,
    last_whole_step,
)
from tests.lagging import Lagging
from tests.ranks import SERVER, start_server


@contextmanager
def closing_memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def descriptor() -> Iterator[int]:
    with closing_memory() as descriptor:
        yield descriptor


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and (one.dtype, one.stride()) == (
            other.dtype,
            other.stride(),
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def state(step: int, size: int = 10) -> dict[str, Any]:
    return {
        "own": {"random": torch.full((3,), step)},
        "model": {"weight": torch.full((size,), float(step))},
    }


def test_a_state_comes_back_as_it_was_whatever_it_holds(descriptor: int) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    kept: dict[str, Any] = {
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "none": None, "tuple": (1, 2.5, "x", b"y"),
        "numbers": {3: torch.tensor(7), "nan": torch.tensor(float("nan")).isnan()}, "empty": torch.empty(0, 3),
        "half": torch.randn(5).half(), "flags": torch.tensor([True, False]), "view": torch.arange(10)[::2],
        "ordered": OrderedDict(b=[torch.ones(2)], a=1),
    }  # fmt: skip
    memory = SnapshotBuffer(descriptor)
    result = SnapshotBuffer(descriptor).read(memory.write(5, kept))
    kept["view"] = kept["view"].contiguous()  # gaps between the numbers are not kept
    assert same(result, kept)
    assert result["model"]._metadata == kept["model"]._metadata
    assert list(memory.steps) == [5]


def test_what_is_read_stays_when_the_slot_is_written_again(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    result = memory.read(memory.write(1, state(1)))
    for step in range(2, 6):
        memory.write(step, state(step))
    assert same(result, state(1))


def test_the_two_newest_states_are_there_and_two_slots_are_enough(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    used = {memory.write(step, state(step)) for step in range(10)}
    assert used == {0, 1}
    assert sorted(memory.steps) == [8, 9]
    assert [row[:2] for row in memory.offers()] == [(9, 1), (8, 1)]
    size = os.fstat(descriptor).st_size
    memory.write(10, state(10))
    assert os.fstat(descriptor).st_size == size


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        (([], []), -1),
        (([4, 5], [4, 5]), 5),
        (([4, 5], [3, 4]), 4),  # rank 1 was stopped before it had kept step 5
        (([4, 5], [5, 6]), 5),
        (([5], [3, 4]), 5),
        (([4, 5], []), 5),  # too little memory for rank 1
        (([8, 9], [8, 9], [2, 3]), 9),  # once there were three ranks
    ],
)
def test_the_step_to_save_last_is_one_that_all_ranks_have(
    steps: tuple[list[int], ...], chosen: int
) -> None:
    pages = []
    for rank, own in enumerate(steps):
        with closing_memory() as descriptor:
            memory = SnapshotBuffer(descriptor)
            for step in own:
                memory.write(step, state(step) if rank == 0 else {"own": state(step)["own"]})
            pages.append(os.pread(descriptor, PAGE, 0))
    assert last_whole_step(pages) == chosen


def test_a_slot_on_its_way_to_the_disk_is_left_alone(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    locked = memory.write(1, state(1))
    memory.lock(locked)
    for step in range(2, 10):
        assert memory.write(step, state(step)) != locked
    assert same(memory.read(locked), state(1))
    assert sorted(memory.steps) == [1, 8, 9]


def test_a_state_whose_bytes_are_freed_is_gone_and_a_request_beside_it_stays(
    descriptor: int,
) -> None:
    memory = SnapshotBuffer(descriptor)
    memory.write(1, state(1, 1 << 20))
    memory.fill(SAVE_SLOT, 7, {"mine": torch.ones(5)})
    memory.free()
    assert not memory.steps
    assert same(memory.read(SAVE_SLOT), {"mine": torch.ones(5)})
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20


def test_a_state_may_grow(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    for step, size in enumerate([10, 1000, 100_000, 10, 1_000_000]):
        assert same(memory.read(memory.write(step, state(step, size))), state(step, size))
        assert step == 0 or same(memory.read(memory.steps[step - 1])["own"], state(step - 1)["own"])


def test_two_buffers_of_one_file_grow_apart(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop and the thread of sharded states have one each."""
    size_of = os.fstat

    def slow(number: int) -> os.stat_result:
        size = size_of(number)
        time.sleep(0.1)  # the other grows meanwhile
        return size

    monkeypatch.setattr(os, "fstat", slow)
    one, other = SnapshotBuffer(descriptor), SnapshotBuffer(descriptor)
    thread = threading.Thread(target=one.open_replica, args=(5000, 10))
    thread.start()
    slot = other.open_own(5000, 10)
    thread.join()
    other.bytes_of(slot)[:5000] = b"x" * 5000
    (replica,) = (each for each in REPLICA_SLOTS if one.size(each) == (5000, 10))
    assert bytes(one.bytes_of(replica)[:5000]) == bytes(5000)


def test_a_part_of_ones_own_is_no_whole_state(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    memory.write(3, {"own": {"random": torch.ones(3)}})
    assert memory.offers()[0][:2] == (3, 0)


def test_states_of_later_steps_can_be_dropped(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    memory.write(4, state(4))
    memory.write(5, state(5))
    memory.forget_after(4)
    assert list(memory.steps) == [4]


def write_for_ever(descriptor: Any) -> None:
    memory, step = SnapshotBuffer(descriptor.detach()), 0
    while True:
        step += 1
        memory.write(step, state(step, 200_000))


@pytest.mark.parametrize("seed", range(5))
def test_a_writer_that_is_killed_at_any_moment_leaves_whole_states_only(
    descriptor: int, seed: int
) -> None:
    start_server()
    writer = SERVER.Process(target=write_for_ever, args=(DupFd(descriptor),))
    writer.start()
    memory, until = SnapshotBuffer(descriptor), time.monotonic() + 60
    while len(memory.steps) < 1 and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0.01, 0.05))
    writer.kill()
    writer.join()
    assert memory.steps
    for step, slot in memory.steps.items():
        assert same(memory.read(slot), state(step, 200_000))


def test_too_little_memory_is_said_and_leaves_the_states_that_are_there(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SnapshotBuffer(descriptor)
    memory.write(1, state(1))
    monkeypatch.setattr(cgroup, "memory_left", lambda: 10 << 20)
    with pytest.raises(NoRoom, match="a state takes 8 MiB, and 10 MiB of memory are free"):
        memory.write(2, state(2, 1 << 21))
    assert same(memory.read(memory.steps[1]), state(1))


def test_states_beside_one_that_is_saved_have_memory_for_all_of_them(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot takes its memory when it is filled, so the free memory is that before all of them."""
    memory = SnapshotBuffer(descriptor, Lagging())
    size = 1 << 23
    memory.lock(memory.write(1, state(1, size // 4)))
    memory.settle()
    for free, enough in ((2.6, False), (6.0, True)):
        monkeypatch.setattr(cgroup, "memory_left", lambda free=free: int(free * size))
        assert memory.room_while_saving() == enough


def test_a_limit_of_file_sizes_is_said_as_too_little_memory_is(descriptor: int) -> None:
    memory = SnapshotBuffer(descriptor)
    memory.write(1, state(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    try:
        with pytest.raises(
            NoRoom, match=r"states take 8\.\d MiB.* may have 2\.0 MiB \(ulimit -f\)"
        ):
            memory.write(2, state(2, 1 << 21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert same(memory.read(memory.steps[1]), state(1))


def test_tensors_are_taken_out_and_put_back_in_their_places() -> None:
    tensors: list[torch.Tensor] = []
    whole = {"a": torch.ones(1), "b": [torch.zeros(2), {"c": torch.ones(3)}]}
    tree = take_apart(whole, tensors)
    assert [tensor.numel() for tensor in tensors] == [1, 2, 3]
    assert same(put_together(tree, tensors), whole)


def test_tensors_do_not_overlap() -> None:
    spots, end = layout_of(
        [torch.ones(3), torch.ones(5, dtype=torch.uint8), torch.ones(1, dtype=torch.float64)]
    )
    begins = [spot.begin for spot in spots]
    assert begins == [0, 64, 128]
    assert end == 192


def write_steps(descriptor: Any) -> None:
    memory, step = SnapshotBuffer(descriptor.detach()), 0
    while True:
        step += 1 << 20  # several bytes change
        memory.complete(0, step)
        memory.complete(0, -1)


def test_a_step_is_on_the_page_whole_or_not_at_all(descriptor: int) -> None:
    """A process killed while it writes a step must leave the step or none: not a 0, nor half of its
    bytes."""
    start_server()
    writer = SERVER.Process(target=write_steps, args=(DupFd(descriptor),))
    writer.start()
    memory, seen = SnapshotBuffer(descriptor), set[int]()
    until = time.monotonic() + 60
    while len(seen) < 100 and time.monotonic() < until:
        seen |= set(memory.steps)
    writer.kill()
    writer.join()
    assert len(seen) >= 100
    assert not [step for step in seen if step == 0 or step % (1 << 20)]
