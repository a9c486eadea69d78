"""DDP's backend: every way to meet, what its Comm promises, and how it is left."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Backend, Data, Job, Train
from raydist.shared.errors import ConfigError
from raydist.worker import backends, context
from raydist.worker.backends import ddp
from tests.ranks import RankResult, run_ranks, succeeded

GLOO = Job(backend=Backend(name="gloo", timeout_s=30))


def comm() -> Any:
    return context.current().comm


def values_of(results: list[RankResult]) -> list[Any]:
    return [each.value for each in succeeded(results)]


@pytest.mark.parametrize("init_method", ["env", "tcp", "file"])
def test_ranks_meet(tmp_path: Path, init_method: str) -> None:
    def total(job: Job) -> tuple[float, int, str]:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return (
            float(comm().sum(torch.tensor(1.0 + dist.get_rank()))),
            dist.get_world_size(),
            type(store).__name__,
        )

    env = {"RAYDIST_RENDEZVOUS_FILE": str(tmp_path / "meet")} if init_method == "file" else {}
    kind = "FileStore" if init_method == "file" else "TCPStore"
    assert (
        values_of(run_ranks(3, replace(GLOO, init_method=init_method), total, tmp_path, env))
        == [(6.0, 3, kind)] * 3
    )


def test_tcp_ranks_are_clients_of_the_store_that_is_held(tmp_path: Path) -> None:
    # The port belongs to another process; a rank 0 that opened a store there would fail, or be
    # alone with it.
    def address(job: Job) -> Any:
        return ddp.init_arguments("tcp", 0, 2, os.environ)["init_method"], dist.get_world_size()

    ((one, _), _) = values_of(run_ranks(2, replace(GLOO, init_method="tcp"), address, tmp_path))
    assert one.startswith("tcp://127.0.0.1:")


def test_an_ipv6_address_is_bracketed() -> None:
    env = {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}
    assert ddp.init_arguments("tcp", 1, 2, env) == {
        "init_method": "tcp://[fd00::1]:29500",
        "rank": 1,
        "world_size": 2,
    }


def test_init_method_file_without_a_file_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="RAYDIST_RENDEZVOUS_FILE=/"):
        ddp.init_arguments("file", 0, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


@pytest.mark.parametrize("init_method", ["env", "tcp", "file"])
def test_the_only_process_needs_no_address(init_method: str) -> None:
    with backends.join("gloo", replace(GLOO, init_method=init_method), {}) as one:
        assert dist.get_world_size() == 1
        assert one.sum(torch.ones(2)).tolist() == [1, 1]
        assert [part.tolist() for part in one.gather(torch.ones(1))] == [[1]]
        group: Any = dist.new_group([0])
        dist.all_reduce(torch.ones(1), group=group)
        assert comm() is one
    assert not dist.is_initialized()
    assert comm() is None
    context.enter(None)


def test_alone_a_failure_leaves_the_group_too() -> None:
    with pytest.raises(KeyError), backends.join("gloo", GLOO, {}):
        raise KeyError
    assert not dist.is_initialized()
    context.enter(None)


def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path: Path) -> None:
    def fail(job: Job) -> None:
        if dist.get_rank() == 0:
            raise ValueError("first cause")
        comm().sum(torch.ones(1))

    began = time.monotonic()
    results = run_ranks(2, GLOO, fail, tmp_path)
    assert "first cause" in results[0].error
    assert "RuntimeError" in results[1].error  # its peer is gone
    assert time.monotonic() - began < GLOO.backend.timeout_s


def test_the_timeout_is_the_settings(tmp_path: Path) -> None:
    def wait(job: Job) -> None:
        if dist.get_rank() == 0:
            comm().sum(torch.ones(1))
        else:
            time.sleep(2)

    results = run_ranks(
        2, replace(GLOO, backend=Backend(name="gloo", timeout_s=0.5)), wait, tmp_path
    )
    assert "500ms" in results[0].error


def test_sum_and_gather_leave_what_they_were_given(tmp_path: Path) -> None:
    def both(job: Job) -> tuple[list[float], list[float], list[list[int]]]:
        mine = torch.full((2,), 1.0 + dist.get_rank())
        total = comm().sum(mine)
        bytes_of = torch.tensor([dist.get_rank(), 7], dtype=torch.uint8)
        return mine.tolist(), total.tolist(), [each.tolist() for each in comm().gather(bytes_of)]

    one, two = values_of(run_ranks(2, GLOO, both, tmp_path))
    assert one == ([1, 1], [3, 3], [[0, 7], [1, 7]])
    assert two == ([2, 2], [3, 3], [[0, 7], [1, 7]])


def collectives() -> int:
    """Return how many collectives this rank's group has begun."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def test_gradients_are_averaged_and_none_travels_while_accumulating(tmp_path: Path) -> None:
    def learn(job: Job) -> tuple[float, int, int]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, float(dist.get_rank()))  # becomes rank 0's
        wrapped = comm().wrap(model)
        inputs = torch.tensor([[1.0 + dist.get_rank()]])
        begin = collectives()
        with comm().accumulating(wrapped):
            wrapped(inputs).backward()
        quiet = collectives() - begin
        wrapped(inputs).backward()
        assert float(model.weight.detach()) == 0
        return float(model.weight.grad), quiet, collectives() - begin - quiet  # type: ignore[arg-type]

    # each rank adds up twice its input: the mean over ranks of (2, 4)
    assert values_of(run_ranks(2, GLOO, learn, tmp_path)) == [(3.0, 0, 1)] * 2


def test_a_static_graph_learns_from_several_passes_what_another_does(tmp_path: Path) -> None:
    def learn(job: Job) -> list[float]:
        torch.manual_seed(0)
        inputs = torch.arange(64.0).view(16, 4) / 64
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        model = nn.Linear(4, 1)
        raydist.fit(job, model=model, train=data, loss=nn.functional.mse_loss)
        return model.weight.flatten().tolist()

    static, dynamic = (
        values_of(
            run_ranks(
                2,
                replace(
                    GLOO,
                    backend=replace(GLOO.backend, static_graph=static),
                    data=Data(global_batch=8),
                    train=Train(steps=3, accumulate=2),
                ),
                learn,
                tmp_path / str(static),
            )
        )
        for static in (True, False)
    )
    assert [pytest.approx(each, rel=1e-5) for each in dynamic] == static


def test_settings_reach_ddp(tmp_path: Path) -> None:
    def words(job: Job) -> tuple[bool, int, bool, bool]:
        wrapped = comm().wrap(nn.Linear(2, 2))
        assert isinstance(wrapped, DistributedDataParallel)
        return (
            wrapped.find_unused_parameters,
            wrapped.bucket_bytes_cap,
            wrapped.static_graph,
            wrapped.gradient_as_bucket_view,
        )

    backend = Backend(name="gloo", bucket_mb=3, find_unused_parameters=True, static_graph=True)
    assert (
        values_of(run_ranks(2, Job(backend=backend), words, tmp_path))
        == [(True, 3 << 20, True, True)] * 2
    )


def test_a_model_without_trainable_parameters_is_not_wrapped(tmp_path: Path) -> None:
    def wrap(job: Job) -> str:
        return type(comm().wrap(nn.ReLU())).__name__

    assert values_of(run_ranks(2, GLOO, wrap, tmp_path)) == ["ReLU", "ReLU"]


def test_a_model_is_freed_with_the_training_that_made_it(tmp_path: Path) -> None:
    """Models of several trainings would not fit on a GPU; and with torch before 2.14 a rank may hang
    that leaves gloo's group while one exists."""

    def train(job: Job) -> list[int]:
        data, loss = TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), nn.functional.mse_loss
        counts = []
        for _ in range(2):
            raydist.fit(job, model=nn.Linear(3, 1), train=data, loss=loss)
            gc.collect()
            counts.append(sum(type(each) is DistributedDataParallel for each in gc.get_objects()))
        return counts

    job = replace(GLOO, train=Train(steps=2), data=Data(batch_size=2))
    assert values_of(run_ranks(2, job, train, tmp_path)) == [[0, 0], [0, 0]]


def test_jobs_may_make_process_groups(tmp_path: Path) -> None:
    def grouped(job: Job) -> float:
        pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        value = torch.tensor(10.0 ** dist.get_rank())
        dist.all_reduce(value, group=pairs[dist.get_rank() // 2])
        return float(value)

    assert values_of(run_ranks(4, GLOO, grouped, tmp_path)) == [11, 11, 1100, 1100]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_nccl_carries_tensors_of_the_cpu_too() -> None:
    with backends.join("nccl", Job(backend=Backend(name="nccl")), {}) as one:
        assert one.sum(torch.ones(2)).device.type == "cpu"
        assert one.gather(torch.ones(1, dtype=torch.uint8))[0].device.type == "cpu"
    context.enter(None)
