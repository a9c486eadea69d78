"""The order of samples: a function of seed and position, never of the number of ranks."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from raydist.settings.config import Data, Job, Train
from raydist.shared.errors import ConfigError
from raydist.training import data


def order(size: int, batch: int, world: int = 1, rank: int = 0, **also: Any) -> data.Order:
    facts = {"accumulate": 1, "seed": 0, "shuffle": True} | also
    return data.Order(size=size, global_batch=batch, world_size=world, rank=rank, **facts)


def steps(size: int, world: int, accumulate: int, portion: int, **also: Any) -> list[list[int]]:
    """Return the samples of each optimizer step, over all ranks."""
    batch = portion * accumulate * world
    ranks = [
        list(order(size, batch, world, rank, accumulate=accumulate, **also))
        for rank in range(world)
    ]
    each = [[one.indices.tolist() for one in portions] for portions in ranks]
    return [
        sorted(index for own in each for part in own[at : at + accumulate] for index in part)
        for at in range(0, len(each[0]), accumulate)
    ]


@given(
    size=st.integers(24, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 5), layout=st.sampled_from(
        [(1, 1, 24), (2, 1, 12), (3, 2, 4), (4, 3, 2), (1, 24, 1), (24, 1, 1)]
    )
)  # fmt: skip
def test_steps_are_the_same_for_every_number_of_ranks(
    size: int, seed: int, epoch: int, layout: tuple[int, int, int]
) -> None:
    alone = steps(size, 1, 1, 24, seed=seed, epoch=epoch)
    assert steps(size, *layout, seed=seed, epoch=epoch) == alone
    assert len(alone) == size // 24
    seen = [index for step in alone for index in step]
    assert len(set(seen)) == len(seen)


@given(position=st.integers(0, 120), batch=st.integers(1, 40))
def test_from_a_position_on_it_is_the_rest(position: int, batch: int) -> None:
    one = order(120, batch, position=position)
    rest = one.permutation()[position:].tolist()
    got = [index for portion in one for index in portion.indices.tolist()]
    assert got == rest[: len(rest) // batch * batch]
    assert len(one) == one.steps_left == len(rest) // batch


def test_each_seed_and_each_epoch_has_its_own_order() -> None:
    orders = {
        tuple(order(50, 10, seed=seed, epoch=epoch).permutation().tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert (
        order(50, 10, seed=3).permutation().tolist() == order(50, 10, seed=3).permutation().tolist()
    )


def test_without_shuffling_it_is_the_order_of_the_files() -> None:
    assert order(50, 10, shuffle=False, epoch=2).permutation().tolist() == list(range(50))


@given(size=st.integers(1, 100), batch=st.integers(1, 20), world=st.integers(1, 5))
def test_tests_fall_to_one_rank_each(size: int, batch: int, world: int) -> None:
    rotas = [data.EvalSampler(size, batch, rank, world) for rank in range(world)]
    portions = [list(rota) for rota in rotas]
    assert sorted(
        index for own in portions for part in own for index in part.indices.tolist()
    ) == list(range(size))
    assert [len(own) for own in portions] == [len(rota) for rota in rotas]
    assert all(part.indices.size <= batch for own in portions for part in own)


class Lucky(Dataset[Any]):
    """Every sample is what the three generators say."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]
        )


def drawn(workers: int, **also: Any) -> torch.Tensor:
    return torch.cat(list(data.loader(Lucky(), order(8, 4, **also), Data(workers=workers))))


def test_augmentation_is_a_function_of_the_position() -> None:
    whole, rest = drawn(0), drawn(0, position=4)
    assert torch.equal(whole[4:], rest)
    assert torch.equal(whole, drawn(2))
    assert not torch.equal(whole.sort(dim=0)[0], drawn(0, epoch=1).sort(dim=0)[0])
    assert len(set(whole[:, 3].tolist())) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_test_samples_draw_the_same_in_each_evaluation(workers: int) -> None:
    """A worker that had lived through an earlier evaluation drew other numbers than a new one."""
    sampler = data.EvalSampler(8, 4, rank=1, world_size=2, seed=5)
    batches = data.loader(Lucky(), sampler, Data(workers=workers))
    first, second = torch.cat(list(batches)), torch.cat(list(batches))
    assert torch.equal(first, second)
    assert len(set(first[:, 3].tolist())) == 4
    assert not torch.equal(first, torch.cat(list(data.loader(Lucky(), sampler, Data()))) + 1)


def hashes(workers: int = 0, **also: Any) -> list[str | None]:
    """Return the checksum of each step, in the order in which a loop asks for them."""
    found = order(32, 8, hashes=deque(), **also)
    batches = data.loader(Lucky(), found, Data(workers=workers))
    next(iter(batches))  # a rehearsal, before the first step
    return [
        found.next_hash() for number, _ in enumerate(batches, 1) if not number % found.accumulate
    ]


def test_each_step_has_the_checksum_of_its_samples() -> None:
    first = hashes()
    assert len(set(first)) == 4
    for also in ({"world": 2, "rank": 1}, {"workers": 2}, {"accumulate": 2}):
        assert hashes(**also) == first
    assert hashes(position=16) == first[2:]
    for other in ({"epoch": 1}, {"seed": 1}, {"shuffle": False}):
        assert not {*hashes(**other)} & {*first}
    assert order(32, 8).next_hash() is None


def test_each_rank_has_its_own_augmentation() -> None:
    one, two = (
        torch.cat(list(data.loader(Lucky(), order(8, 8, 2, rank), Data()))) for rank in (0, 1)
    )
    assert not set(one[:, 3].tolist()) & set(two[:, 3].tolist())


def test_loading_does_not_change_the_ranks_generator() -> None:
    def next_numbers() -> tuple[float, float, float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if load:
            list(data.loader(Lucky(), order(8, 4), Data()))
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    load = False
    without = next_numbers()
    load = True
    assert next_numbers() == without


def test_tensors_are_taken_by_one_index() -> None:
    features, labels = torch.arange(40.0).view(10, 4), torch.arange(10)
    batches = list(data.loader(TensorDataset(features, labels), order(10, 5), Data()))
    assert [type(batch) for batch in batches] == [list, list]
    for got, at in batches:
        assert torch.equal(got, features[at])
    plain = DataLoader(TensorDataset(features, labels), batch_size=5)
    assert [part.shape for part in next(iter(plain))] == [part.shape for part in batches[0]]


def test_collate_makes_the_batch() -> None:
    loader = data.loader(TensorDataset(torch.arange(8.0)), order(8, 4), Data(), collate=len)
    assert list(loader) == [4, 4]


class Many(Dataset[Any]):
    """Gives several samples at once."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_getitems_of_a_data_set_is_used() -> None:
    got = torch.cat(list(data.loader(Many(), order(8, 4), Data())))
    assert sorted(got.tolist()) == list(range(0, 80, 10))


def test_loader_workers_get_their_batches_without_the_whole_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.multiprocessing would move the permutation of all samples to /dev/shm, once for each
    rank."""
    batches: list[torch.Tensor] = []
    permutation = data.Order.permutation

    def kept(self: data.Order) -> torch.Tensor:
        batches.append(permutation(self))
        return batches[-1]

    monkeypatch.setattr(data.Order, "permutation", kept)
    got = torch.cat(list(data.loader(Many(), order(8, 4), Data(workers=1))))
    assert sorted(got.tolist()) == list(range(0, 80, 10))
    assert [each.is_shared() for each in batches] == [False]  # type: ignore[no-untyped-call]


def make(size: int, world: int = 2, accumulate: int = 1, **words: Any) -> data.Order:
    job = Job(data=Data(**words), train=Train(accumulate=accumulate))
    return data.order(range(size), job, world_size=world)


def test_batch_size_is_of_one_rank_and_global_batch_of_all() -> None:
    assert make(1000, 4, 2, batch_size=8).global_batch == 64
    assert make(1000, 4, 2, batch_size=8).portion == 8
    assert make(1000, 4, 2, global_batch=16).portion == 2


@pytest.mark.parametrize(
    ("size", "world", "accumulate", "words", "say"),
    [
        (100, 4, 1, {"global_batch": 30}, "data.global_batch=32"),
        (100, 4, 2, {"global_batch": 3}, "data.global_batch=8"),
        (20, 2, 1, {"batch_size": 32}, "data.batch_size=10"),
        (20, 2, 1, {"global_batch": 32}, "data.global_batch=20"),
        (21, 2, 2, {"global_batch": 32}, "data.global_batch=20"),
        (3, 8, 1, {}, "scale=1x3"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    size: int, world: int, accumulate: int, words: dict[str, int], say: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(size, world, accumulate, **words)
    assert refused.value.suggestion == say


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_samples_on_a_gpu_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins memory of the host only; `meta` stands for a GPU here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, pinned in (("cpu", True), ("meta", False)):
        samples: Any = TensorDataset(torch.zeros(8, device=device))
        for each in (samples, Subset(samples, range(8))):
            assert data.loader(each, order(8, 4), Data()).pin_memory == pinned


def test_a_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="train=Stream has no length"):
        data.order(Stream(), Job())


def test_missing_files_are_named(tmp_path: Path) -> None:
    from torchvision.datasets import MNIST

    with pytest.raises(
        ConfigError, match=rf"data\.root={tmp_path}: MNIST/raw/… not found.*data\.root="
    ):
        data.on_disk(lambda: MNIST(str(tmp_path)), tmp_path, "MNIST/raw/…")


def test_workers_are_forked_unless_the_program_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14's default is forkserver, which can't send samples of a class that a function
    defines."""

    class Local(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

    default = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_default_context", default)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    batches = list(data.loader(Local(), order(8, 4), Data(workers=1)))
    assert len(batches) == 2
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", default)
    assert data.worker_start(1) is None
    assert data.worker_start(0) is None
