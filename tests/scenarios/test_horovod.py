"""Horovod's backend on real ranks: the same losses as DDP, what its Comm promises, and its own
words."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import Backend, Checkpoint, Data, Horovod, Job, Optim, Train
from raydist.shared.errors import ConfigError
from raydist.worker import backends, context
from tests.horovod_ranks import requires_horovod, run_horovod
from tests.losses import next_token
from tests.ranks import RankResult, run_ranks, succeeded
from tests.training.test_loop import BASE, stop_after, train

pytestmark = requires_horovod
HOROVOD = replace(BASE, backend=Backend(name="horovod", timeout_s=30))


def on_horovod(job: Job, **settings: Any) -> Job:
    return replace(job, backend=Backend(name="horovod", timeout_s=30, horovod=Horovod(**settings)))


def ranks_of(
    world: int, function: Callable[[Job], Any], tmp: Path, job: Job = HOROVOD
) -> list[Any]:
    return [one.value for one in succeeded(run_horovod(world, job, function, tmp))]


def comm() -> Any:
    return context.current().comm


# One epoch and more, the same seed: what Horovod changes is who adds up the gradients, not what is
# learned.


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_loss_curve_is_that_of_ddp(tmp_path: Path, world: int) -> None:
    under_ddp = succeeded(run_ranks(world, BASE, train, tmp_path / "ddp"))
    under_horovod = succeeded(run_horovod(world, HOROVOD, train, tmp_path / "horovod"))
    for one, other in zip(under_ddp, under_horovod, strict=True):
        assert len(one.losses) == 16
        assert other.losses == pytest.approx(one.losses, abs=1e-4)
        assert other.value[1] == one.value[1], "the same samples"
        for name, value in one.value[2].items():
            # A bias before a batch norm has a gradient of rounding errors, which AdamW blows up.
            if name.endswith("weight"):
                assert torch.allclose(other.value[2][name], value, atol=1e-4), name


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"train": Train(epochs=1, accumulate=3)}, id="accumulate"),
        pytest.param({"train": Train(epochs=1, accumulate=2, clip=0.05)}, id="clip"),
        pytest.param(
            {"train": Train(epochs=1, precision="fp16", clip=0.5)}, id="fp16 with its scaler"
        ),
        pytest.param({"train": Train(epochs=1, precision="bf16", accumulate=2)}, id="bf16"),
        pytest.param(
            {"optim": Optim(name="sgd", lr=0.1, args={"momentum": 0.9, "weight_decay": 0.1})},
            id="sgd",
        ),
        pytest.param(
            {"optim": Optim(name="adam", lr=0.01, scaling="linear", scaling_batch=4)},
            id="scaled rate",
        ),
        pytest.param({"data": Data(global_batch=24)}, id="one step more than none"),
    ],
)
def test_every_way_of_training_gives_ddps_losses(tmp_path: Path, changed: dict[str, Any]) -> None:
    wanted = succeeded(run_ranks(2, replace(BASE, **changed), train, tmp_path / "ddp"))
    results = succeeded(run_horovod(2, replace(HOROVOD, **changed), train, tmp_path / "horovod"))
    assert len(wanted[0].losses) >= 4
    assert results[0].losses == pytest.approx(wanted[0].losses, abs=1e-4)
    assert results[1].losses == pytest.approx(wanted[1].losses, abs=1e-4)


def padded(job: Job) -> dict[str, float]:
    """Train a small language model on rows of which some are mostly padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(9, (48, 8), generator=generator)
    lengths = torch.randint(1, 8, (48, 1), generator=generator) ** 2 // 7 + 1
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(8) >= lengths, -100)
    net = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 9))

    data = TensorDataset(tokens, labels)
    return raydist.fit(job, model=net, train=data, test=data, loss=next_token)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_target_weighs_the_same_as_under_ddp(tmp_path: Path, world: int) -> None:
    per_token = Train(epochs=2, accumulate=2, clip=0.1, loss_per="token")
    changed: dict[str, Any] = {"train": per_token, "optim": Optim("sgd", lr=0.5)}
    changed["data"] = Data(global_batch=12, shuffle=False)
    wanted = succeeded(run_ranks(world, replace(BASE, **changed), padded, tmp_path / "ddp"))
    results = succeeded(
        run_horovod(world, replace(HOROVOD, **changed), padded, tmp_path / "horovod")
    )
    for one, other in zip(wanted, results, strict=True):
        assert len(one.losses) == 8
        assert other.losses == pytest.approx(one.losses, abs=1e-5)
        assert other.value == pytest.approx(one.value, abs=1e-5)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_images_in_channels_last_order_train_as_well(tmp_path: Path, compression: str) -> None:
    def images(job: Job) -> bool:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(24, 3, 6, 6, generator=generator), torch.arange(24) % 2)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        raydist.fit(job, model=net, train=data, loss=F.cross_entropy)
        return next(net.parameters()).is_contiguous(memory_format=torch.channels_last)

    # Horovod's gradients are contiguous, and the fused kernels of torch do not look at strides
    fused = replace(BASE.optim, fused=True)
    changed: dict[str, Any] = {"train": Train(epochs=2, channels_last=True), "optim": fused}
    wanted = succeeded(run_ranks(2, replace(BASE, **changed), images, tmp_path / "ddp"))
    job = replace(on_horovod(BASE, compression=compression), **changed)
    results = succeeded(run_horovod(2, job, images, tmp_path / "horovod"))
    assert [one.value for one in results] == [True, True]
    assert results[0].losses == pytest.approx(
        wanted[0].losses, abs=1e-4 if compression == "none" else 1e-2
    )


@pytest.mark.parametrize("number", [1, 2, 99])
def test_grouped_gradients_are_the_same_gradients(tmp_path: Path, number: int) -> None:
    wanted = succeeded(run_horovod(2, HOROVOD, train, tmp_path / "plain"))
    results = succeeded(
        run_horovod(2, on_horovod(BASE, groups=number), train, tmp_path / "grouped")
    )
    assert results[0].losses == pytest.approx(wanted[0].losses, abs=1e-5)


def test_the_groups_are_as_many_as_asked_and_neighbours() -> None:
    from raydist.worker.backends.horovod import gradient_groups

    net = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(7)])
    net[3].requires_grad_(False)
    trained = [each for each in net.parameters() if each.requires_grad]
    assert [len(group) for group in gradient_groups(net, 3) or []] == [2, 2, 2]
    assert [id(each) for group in gradient_groups(net, 4) or [] for each in group] == [
        id(each) for each in trained
    ]
    assert gradient_groups(net, None) is None


def test_gradients_travel_as_half_precision_when_asked(tmp_path: Path) -> None:
    def gradient(job: Job) -> torch.Tensor:
        net = nn.Linear(1, 1, bias=False)
        wrapped = comm().wrap_optimizer(torch.optim.SGD(net.parameters(), lr=1.0), comm().wrap(net))
        # 1 + 2^-12 is no number of half precision
        net(torch.full((1, 1), 1 + 2**-12)).sum().backward()
        comm().finish_gradients(wrapped)
        assert net.weight.grad is not None
        return net.weight.grad

    full = ranks_of(2, gradient, tmp_path)
    half = ranks_of(2, gradient, tmp_path, on_horovod(BASE, compression="fp16"))
    assert full[0].item() == 1 + 2**-12
    assert half[0].item() == half[1].item() == 1.0
    assert half[0].dtype == torch.float32


@pytest.mark.parametrize(("op", "expected"), [("average", 2.0), ("sum", 6.0)])
def test_gradients_become_one_as_asked(tmp_path: Path, op: str, expected: float) -> None:
    def gradient(job: Job) -> float:
        net = nn.Linear(1, 1, bias=False)
        wrapped = comm().wrap_optimizer(torch.optim.SGD(net.parameters(), lr=1.0), comm().wrap(net))
        net(torch.full((1, 1), 1.0 + context.rank().rank)).sum().backward()
        comm().finish_gradients(wrapped)
        assert net.weight.grad is not None
        return net.weight.grad.item()

    assert ranks_of(3, gradient, tmp_path, on_horovod(BASE, op=op)) == [expected] * 3


def test_parameters_buffers_and_the_state_of_the_optimizer_become_those_of_rank_0(
    tmp_path: Path,
) -> None:
    def begin(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        rank = context.rank().rank
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(
            net.parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.6 + 0.1 * rank)
        )
        for _ in range(1 + rank):
            net(torch.randn(8, 3)).sum().backward()
            optimizer.step()
        wrapped = comm().wrap_optimizer(optimizer, comm().wrap(net))
        return {
            name: value.clone() for name, value in net.state_dict().items()
        }, wrapped.state_dict()

    ((tensors, state), *others) = ranks_of(3, begin, tmp_path)
    assert state["state"][0]["step"] == 1
    assert state["param_groups"][0]["betas"] == (0.5, 0.6)
    for own, own_state in others:
        assert all(torch.equal(value, own[name]) for name, value in tensors.items())
        assert own_state["param_groups"] == state["param_groups"]
        for index, known in state["state"].items():
            assert all(
                torch.equal(value, own_state["state"][index][name]) for name, value in known.items()
            )


def test_an_optimizer_that_has_not_stepped_is_not_made_to(tmp_path: Path) -> None:
    # Horovod's own broadcast_optimizer_state steps with gradients of zero: weight decay shrinks the
    # parameters.
    def begin(job: Job) -> tuple[float, int]:
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.5)
        wrapped = comm().wrap_optimizer(optimizer, comm().wrap(net))
        return net.weight.item(), len(wrapped.state_dict()["state"])

    assert ranks_of(2, begin, tmp_path) == [(1.0, 0)] * 2


def test_nothing_that_came_over_the_network_is_unpickled(tmp_path: Path) -> None:
    def begin(job: Job) -> None:
        import cloudpickle

        def refuse(*_: Any) -> Any:
            raise AssertionError("unpickled")

        cloudpickle.load = (
            refuse  # Horovod calls it by this name, so that its own way would end here
        )
        train(job)

    ranks_of(2, begin, tmp_path, on_horovod(BASE, groups=2))


def test_sum_and_gather_of_every_kind_of_number(tmp_path: Path) -> None:
    def collect(job: Job) -> list[Any]:
        mine = context.rank().rank
        kinds = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)
        sums = [comm().sum(torch.full((2,), 1 + mine, dtype=kind)) for kind in kinds]
        scalar = comm().sum(torch.tensor(2.0 + mine))
        rows = comm().gather(torch.tensor([[mine, 7]], dtype=torch.uint8))
        one = comm().gather(torch.tensor(mine))
        return [
            [(each.tolist(), each.dtype) for each in sums],
            scalar.item(),
            [r.tolist() for r in rows],
            one,
        ]

    for sums, scalar, rows, one in ranks_of(3, collect, tmp_path):
        assert [total for total, _ in sums] == [[6, 6]] * 5
        assert [kind for _, kind in sums] == [
            torch.float32,
            torch.float64,
            torch.int64,
            torch.int32,
            torch.uint8,
        ]
        assert scalar == 9.0
        assert rows == [[[0, 7]], [[1, 7]], [[2, 7]]]
        assert [(each.item(), each.shape) for each in one] == [
            (r, torch.Size([])) for r in range(3)
        ]


def test_summing_leaves_the_tensor_alone(tmp_path: Path) -> None:
    def collect(job: Job) -> list[float]:
        mine = torch.ones(3)
        comm().sum(mine)
        return mine.tolist()

    assert ranks_of(2, collect, tmp_path) == [[1.0] * 3] * 2


# A training resumes under another backend.


def resumed(run: Callable[..., list[RankResult]], job: Job, run_dir: Path) -> list[RankResult]:
    path = run_dir / "checkpoints" / "step-00000008"
    return succeeded(run(2, job, train, run_dir / "second", {"RAYDIST_RESUME": str(path)}))


@pytest.mark.parametrize("first_is_ddp", [True, False])
def test_a_checkpoint_of_one_backend_is_resumed_under_the_other(
    tmp_path: Path, first_is_ddp: bool
) -> None:
    ways = [(run_ranks, BASE), (run_horovod, HOROVOD)]
    (first, one), (second, other) = ways if first_is_ddp else reversed(ways)
    whole = succeeded(first(2, stop_after(one, 8), train, tmp_path))
    rest = resumed(second, stop_after(other, 8), tmp_path)
    assert len(rest[0].losses) == 8
    assert rest[0].losses == pytest.approx(whole[0].losses[8:], abs=1e-4)
    assert rest[1].losses == pytest.approx(whole[1].losses[8:], abs=1e-4)


def test_a_run_resumed_under_horovod_gives_the_losses_of_one_that_was_not_stopped(
    tmp_path: Path,
) -> None:
    job = replace(
        HOROVOD, train=Train(epochs=2, accumulate=2), checkpoint=Checkpoint(every=8, keep=9)
    )
    whole = succeeded(run_horovod(2, job, train, tmp_path))
    assert resumed(run_horovod, job, tmp_path)[0].losses == whole[0].losses[8:]


# Horovod's own words.


def test_process_sets_of_the_settings_are_there_for_jobs(tmp_path: Path) -> None:
    def within(job: Job) -> float:
        import horovod.torch as hvd

        from raydist import process_set

        mine = hvd.rank()
        pair = process_set(1, 0) if mine < 2 else process_set(2, 3)
        time.sleep(
            0.5 if mine > 1 else 0
        )  # the first to leave must not end what the others have under way
        return float(hvd.allreduce(torch.tensor(float(mine)), op=hvd.Sum, process_set=pair))

    job = on_horovod(BASE, process_sets=[[0, 1], [3, 2]])
    assert ranks_of(4, within, tmp_path, job) == [1.0, 1.0, 5.0, 5.0]


def test_a_process_set_that_nobody_asked_for_is_refused_with_the_word_for_it(
    tmp_path: Path,
) -> None:
    def within(job: Job) -> str:
        from raydist import process_set

        with pytest.raises(ConfigError) as refusal:
            process_set(0, 2)
        return str(refusal.value)

    (text, *_) = ranks_of(3, within, tmp_path, on_horovod(BASE, process_sets=[[0, 1]]))
    assert (
        "there is no process set [0, 2] (known: [0, 1]); set backend.horovod.process_sets=[[0,2]]"
        in text
    )


@pytest.mark.parametrize("settings", [{}, {"fusion_mb": 1, "cycle_ms": 0.5}])
def test_a_job_with_its_own_loop_finds_horovod_initialised_and_may_init_again(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    def own(job: Job) -> tuple[int, int, list[float]]:
        import horovod.torch as hvd

        hvd.init()
        sums = [float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))]
        for _ in range(2):  # the rendezvous must not hand out the addresses of the time before
            hvd.shutdown()
            hvd.init()
            sums.append(float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)))
        return hvd.rank(), hvd.local_size(), sums

    assert ranks_of(3, own, tmp_path, on_horovod(BASE, **settings)) == [
        (rank, 3, [3.0] * 3) for rank in range(3)
    ]


def test_the_timeline_lies_in_the_run_folder(tmp_path: Path) -> None:
    job = replace(on_horovod(BASE, timeline=True), dir=str(tmp_path), train=Train(steps=2))
    succeeded(run_horovod(2, job, train, tmp_path))
    text = (tmp_path / "horovod-timeline.json").read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    assert {"NEGOTIATE_ALLREDUCE"} <= {event.get("name") for event in events if event}


def test_a_stalled_collective_fails_and_the_missing_ranks_are_named(
    tmp_path: Path, capfd: Any
) -> None:
    def stall(job: Job) -> None:
        if context.rank().rank == 1:
            while not (tmp_path / "failed").exists():
                time.sleep(0.05)
            return
        try:
            comm().sum(torch.ones(1))
        finally:
            (tmp_path / "failed").touch()

    results = run_horovod(3, on_horovod(BASE, stall_warn_s=1, stall_fail_s=2), stall, tmp_path)
    assert "HorovodInternalError" in results[0].error
    assert "HorovodInternalError" in results[2].error
    output = capfd.readouterr().err
    assert "Missing ranks" in output or "missing ranks" in output
    assert re.search(r"^1!?: \[", output, re.MULTILINE)  # "!": it is about to leave


def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path: Path) -> None:
    def fail(job: Job) -> None:
        if context.rank().rank == 1:
            raise ValueError("the third bolt is loose")
        comm().sum(torch.ones(1))

    results = run_horovod(2, HOROVOD, fail, tmp_path)
    assert "the third bolt is loose" in results[1].error
    assert "HorovodInternalError" in results[0].error


def test_ranks_of_torchrun_are_told_that_horovod_needs_another_start(tmp_path: Path) -> None:
    results = run_ranks(2, HOROVOD, lambda job: None, tmp_path)
    for one in results:
        assert "ConfigError: backend=horovod: torchrun has no rendezvous of Horovod" in one.error


def test_without_horovod_the_command_that_builds_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"backend=horovod: .*raydist horovod build"):
        backends.check_installed("horovod")
    backends.check_installed("gloo")
    with pytest.raises(ConfigError, match=r"backend=horovd: .*did you mean backend=horovod\?"):
        backends.check_installed("horovd")


def test_a_model_whose_parameters_are_partly_frozen_trains(tmp_path: Path) -> None:
    def frozen(job: Job) -> tuple[bool, bool]:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[0].requires_grad_(False)
        before = [value.clone() for value in net.parameters()]
        kept = [each for each in net.parameters() if each.requires_grad]
        wrapped = comm().wrap_optimizer(torch.optim.SGD(kept, lr=0.1), comm().wrap(net))
        F.mse_loss(net(torch.ones(3, 2)), torch.zeros(3, 2)).backward()  # type: ignore[no-untyped-call]
        comm().finish_gradients(wrapped)
        with comm().stepping(wrapped):
            wrapped.step()
        wrapped.zero_grad(set_to_none=True)
        same = [
            torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True)
        ]
        return all(same[:2]), any(same[2:])

    assert ranks_of(2, frozen, tmp_path) == [(True, False)] * 2
