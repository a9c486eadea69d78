"""The training loop on real gloo ranks."""

from __future__ import annotations

import functools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, TensorDataset

import raydist
from raydist.settings.config import Backend, Checkpoint, Data, Job, Optim, Parallel, Scale, Train
from raydist.state import checkpoint_files, write
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import LOCK, WORD, blank_page
from raydist.training import loop, sharded
from raydist.training.evaluation import accuracy
from raydist.training.loop import MetricReporter
from raydist.training.rank_model import speed_up_gpu
from raydist.training.step import Stepper
from raydist.worker import context, groups
from tests.ranks import RankResult, run_ranks, succeeded

SIZE, FEATURES = 96, 6
BASE = Job(
    backend=Backend(name="gloo"),
    data=Data(global_batch=12),
    optim=Optim(name="adamw", lr=0.01, schedule="cosine", warmup=3),
    train=Train(epochs=2),
    seed=5,
)


def samples(count: int = SIZE, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(features, (features.sum(dim=1) > 0).long())


class Left(Exception):
    """A rank would wait to be ended."""


class Noted(Dataset[Any]):
    """Notes which samples were asked for, and adds noise from all three generators, as augmentation
    does."""

    def __init__(self) -> None:
        self.inner, self.seen = samples(), list[int]()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        import random

        import numpy as np

        self.seen.append(index)
        features, label = self.inner[index]
        return features + 0.1 * torch.randn(FEATURES) + 0.1 * random.random() + 0.1 * float(
            np.random.rand()
        ), label


def model(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 2),
    )


def train(
    job: Job, make_model: Any = model, loss: Any = F.cross_entropy
) -> tuple[dict[str, float], list[int], dict[str, torch.Tensor]]:
    """Train; return the figures of fit, the samples that this rank saw, and the parameters."""
    noted, net = Noted(), make_model()
    given = raydist.fit(job, model=net, train=noted, loss=loss)
    return given, noted.seen, {name: value.clone() for name, value in net.state_dict().items()}


def stop_after(job: Job, steps: int) -> Job:
    """Return the job of the same training cut short, with the schedule of the whole."""
    return replace(job, checkpoint=Checkpoint(every=steps, keep=9))


# Resuming


def resumed(
    world: int, job: Job, run_dir: Path, step: int, function: Any = train
) -> list[RankResult]:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    return succeeded(
        run_ranks(world, job, function, run_dir / "second", {"RAYDIST_RESUME": str(path)})
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RankResult]]:
    """Two ranks, 16 steps, a checkpoint every 5."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    return run_dir, succeeded(run_ranks(2, stop_after(BASE, 5), train, run_dir))


@pytest.mark.parametrize("step", [5, 10])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
    unbroken: tuple[Path, list[RankResult]], step: int
) -> None:
    run_dir, whole = unbroken
    again = resumed(2, BASE, run_dir, step)
    for before, after in zip(whole, again, strict=True):
        assert after.losses == before.losses[step:]
        assert len(after.losses) == 16 - step
        for name, value in before.value[2].items():
            assert torch.equal(value, after.value[2][name]), name


@pytest.mark.parametrize("parallel", [Parallel(), Parallel("fsdp")], ids=["whole", "shards"])
def test_a_checkpoint_of_another_loop_is_refused(tmp_path: Path, parallel: Parallel) -> None:
    def train(job: Job) -> str:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        path = raydist.checkpoint.save(2, {"model": model.state_dict(), "step": 2}, wait=True)
        os.environ["RAYDIST_RESUME"] = str(path)
        data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
        with pytest.raises(raydist.ConfigError) as caught:
            raydist.fit(job, model=model, train=data, loss=F.mse_loss)
        return str(caught.value)

    job = Job(backend=Backend("gloo"), data=Data(batch_size=8), parallel=parallel)
    (result,) = succeeded(run_ranks(1, job, train, tmp_path))
    assert "step-00000002" in result.value
    assert "another loop has saved it, not raydist.fit: it has no optimizer" in result.value
    assert "resume=none" in result.value


def test_a_fused_optimizer_resumes_bitwise_and_its_state_fits_one_that_is_not(
    tmp_path: Path,
) -> None:
    fused = replace(BASE, optim=Optim("adamw", lr=0.01, fused=True))
    whole = succeeded(run_ranks(2, stop_after(fused, 5), train, tmp_path))
    again = resumed(2, fused, tmp_path, 5)
    assert again[0].losses == whole[0].losses[5:]
    assert last_optimizer(tmp_path / "second")["fused"]
    begin = {"RAYDIST_RESUME": str(tmp_path / "checkpoints" / "step-00000005")}
    alone = replace(fused, optim=replace(fused.optim, fused=False))
    plain = succeeded(run_ranks(2, alone, train, tmp_path / "third", begin))
    assert plain[0].losses == pytest.approx(whole[0].losses[5:], abs=1e-4)
    assert not last_optimizer(tmp_path / "third")[
        "fused"
    ]  # losses tell nothing: on some CPUs both are bitwise equal


def last_optimizer(run_dir: Path) -> Any:
    """Return the optimizer's settings in the newest checkpoint."""
    path = checkpoint_files.newest(run_dir / "checkpoints")
    assert path is not None
    return path.state["optimizer"]["param_groups"][0]


def test_resume_of_three_ranks_is_bitwise_too(tmp_path: Path) -> None:
    # With two ranks a + b = b + a hides in which order DDP's buckets add up; with three it shows.
    wide = functools.partial(train, make_model=wide_model)
    whole = succeeded(run_ranks(3, stop_after(BASE, 4), wide, tmp_path))
    again = resumed(3, BASE, tmp_path, 4, wide)
    assert again[0].losses == whole[0].losses[4:]


def wide_model() -> nn.Module:
    layers = [
        nn.Linear(FEATURES, 301),
        nn.Tanh(),
        nn.Linear(301, 203),
        nn.Tanh(),
        nn.Linear(203, 307),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, nn.Linear(307, 2))


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    unbroken: tuple[Path, list[RankResult]], tmp_path: Path, world: int
) -> None:
    run_dir, whole = unbroken
    again = resumed(world, BASE, run_dir, 5)
    rehearsed = 12 // world  # the first portion is looked at twice: once before the state is loaded
    for step in range(5, 16):
        before = [index for result in whole for index in result.value[1][step * 6 : (step + 1) * 6]]
        at = rehearsed + (step - 5) * 12 // world
        after = [index for result in again for index in result.value[1][at : at + 12 // world]]
        assert sorted(before) == sorted(after)
    assert [e["step"] for e in again[0].kind("report")] == list(range(6, 17))


def test_an_epoch_sees_every_sample_once_and_epochs_differ(
    unbroken: tuple[Path, list[RankResult]],
) -> None:
    seen = [result.value[1] for result in unbroken[1]]
    first, second = (sorted(index for one in seen for index in one[at : at + 48]) for at in (0, 48))
    assert first == second == list(range(SIZE))
    assert seen[0][:48] != seen[0][48:]


def test_loader_workers_change_nothing(unbroken: tuple[Path, list[RankResult]]) -> None:
    run_dir, whole = unbroken
    again = resumed(2, replace(BASE, data=replace(BASE.data, workers=1)), run_dir, 5)
    assert [result.losses for result in again] == [result.losses[5:] for result in whole]


# Events, random numbers


def test_the_events_of_a_training(unbroken: tuple[Path, list[RankResult]]) -> None:
    first, second = unbroken[1]
    (begin,) = first.kind("begin")
    assert (begin["steps"], begin["epochs"], begin["samples"], begin["resumed"]) == (16, 2, SIZE, 0)
    last = first.kind("report")[-1]
    assert last["step"] == 16
    values = last["values"]
    assert (values["steps"], values["epoch"], values["epochs"], values["samples"]) == (
        16,
        2,
        2,
        192,
    )
    assert 0 < values["lr"] < 0.01
    (done,) = first.kind("done")
    assert done["samples"] == 192 - 12  # without the first step
    assert set(done["spent"]) == {"step", "evaluate", "save"}
    assert done["spent"]["step"] > done["spent"]["evaluate"] == 0
    assert [e["step"] for e in first.kind("saved")] == [5, 10, 15, 16]
    assert second.kind("saved") == []
    assert first.value[0]["loss"] == first.losses[-1]


class Clock:
    """In place of `time` in the loop: it goes on only when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, s: float) -> None:
        self.now += s


def test_the_speed_is_that_of_whole_steps_and_of_nothing_else(tmp_path: Path) -> None:
    """Of 16 short passes and a long update: what is longest was taken for an evaluation. What a GPU
    still has to do for the last steps was left out."""

    def learn(job: Job) -> tuple[float, float, float]:
        clock = Clock()
        vars(loop)["time"] = clock
        rest, never = MetricReporter.rest, raydist.models.samples_per_s()

        def lagging(reporter: MetricReporter) -> None:
            clock.spend(0.5)
            rest(reporter)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            clock.spend(1.0)
            return F.cross_entropy(output, target)

        def evaluated(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            clock.spend(1000.0)
            return accuracy(output, target)

        MetricReporter.rest = lagging  # type: ignore[assignment,method-assign]
        register_optimizer_step_post_hook(lambda *_: clock.spend(80.0))
        raydist.fit(
            job,
            model=nn.Linear(FEATURES, 2),
            train=samples(),
            test=samples(8),
            loss=loss,
            metrics={"accuracy": evaluated},
        )
        first = raydist.models.samples_per_s()
        raydist.fit(
            replace(job, train=Train(epochs=0)),
            model=nn.Linear(FEATURES, 2),
            train=samples(),
            loss=loss,
        )
        return never, first, raydist.models.samples_per_s()

    words = {"steps": 5, "accumulate": 16, "evaluate_steps": 2}
    job = replace(BASE, train=Train(**words), data=Data(batch_size=1))  # type: ignore[arg-type]
    (result,) = succeeded(run_ranks(1, job, learn, tmp_path))
    (done, *_) = result.kind("done")
    # before the evaluations of steps 2, 4 and 5, and of the save at the end
    waits = done["spent"]["step"] - 4 * (16 + 80)
    assert 0 < waits <= 3.0
    never, speed, none = result.value
    assert speed == done["samples"] / done["spent"]["step"] == 4 * 16 / (4 * 96 + waits)
    assert never == none == 0.0


def test_a_request_to_stop_in_the_last_step_stops_the_next_fit(tmp_path: Path) -> None:
    """It was lost: the next fit did all its steps on nodes that were drained, or as many as this."""

    def train_twice(job: Job) -> list[tuple[int, int]]:
        here = context.current()
        made: list[tuple[int, int]] = []

        def ask(step: int, _: Any) -> None:
            made.append((here.fit, step))
            if made == [(1, 1), (1, 2), (1, 3)]:
                here.stop_request.stop_after(*here.stop_request.hold_in_fit())

        def leave(step: int) -> NoReturn:
            raise Left(str(step))

        here.stop_request.leave = leave  # type: ignore[method-assign]
        call: Any = {"model": model(), "train": samples(), "loss": F.cross_entropy}
        raydist.fit(job, **call, on_step=ask)
        with pytest.raises(Left, match="1"):
            raydist.fit(job, **call, on_step=ask)
        return made

    results = succeeded(run_ranks(2, with_train(steps=3), train_twice, tmp_path))
    assert [each.value for each in results] == [[(1, 1), (1, 2), (1, 3), (2, 1)]] * 2


def test_ranks_draw_different_dropout(tmp_path: Path) -> None:
    def draw(job: Job) -> float:
        raydist.fit(job, model=model(), train=samples(), loss=F.cross_entropy)
        return float(torch.rand(()))

    one, two = succeeded(run_ranks(2, replace(BASE, train=Train(steps=1)), draw, tmp_path))
    assert one.value != two.value


def test_parameters_begin_alike_from_the_seed(tmp_path: Path) -> None:
    def first(job: Job) -> float:
        return float(model()[0].weight[0, 0])  # type: ignore[index]

    values = {result.value for result in succeeded(run_ranks(2, BASE, first, tmp_path))}
    assert len(values) == 1
    assert values != {
        result.value for result in succeeded(run_ranks(1, replace(BASE, seed=6), first, tmp_path))
    }


# Steps: accumulation, loss, clipping


def plain(job: Job) -> tuple[list[torch.Tensor], int]:
    """Train without anything random; return the parameters, and how many collectives the steps
    took."""
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))
    group: Any = torch.distributed.group.WORLD
    before = group._get_sequence_number_for_group()
    raydist.fit(job, model=net, train=samples(), loss=F.cross_entropy)
    return [
        value.detach().clone() for value in net.parameters()
    ], group._get_sequence_number_for_group() - before


def with_train(**words: Any) -> Job:
    return replace(
        BASE, train=Train(**words), optim=Optim(lr=0.1), checkpoint=Checkpoint(every=999)
    )


def test_accumulation_is_the_big_batch_and_gradients_travel_once(tmp_path: Path) -> None:
    small, big = (
        succeeded(run_ranks(2, with_train(epochs=1, accumulate=a), plain, tmp_path / str(a)))
        for a in (3, 1)
    )
    for value, other in zip(small[0].value[0], big[0].value[0], strict=True):
        torch.testing.assert_close(value, other)
    assert small[0].value[1] == big[0].value[1]


def test_accumulation_of_two_in_one_process(tmp_path: Path) -> None:
    small, big = (
        succeeded(run_ranks(1, with_train(epochs=1, accumulate=a), plain, tmp_path / str(a)))
        for a in (2, 1)
    )
    for value, other in zip(small[0].value[0], big[0].value[0], strict=True):
        torch.testing.assert_close(value, other)
    assert small[0].losses == pytest.approx(big[0].losses)


def test_the_loss_is_the_mean_over_all_samples_on_every_rank(tmp_path: Path) -> None:
    """Three ranks have 1 or 2 samples of each pass: the loss of one rank, or a mean by ranks, is
    another number."""

    def learn(job: Job) -> float:
        net = nn.Linear(FEATURES, 2)
        return raydist.fit(job, model=net, train=samples(), loss=F.cross_entropy)["loss"]

    job = replace(
        with_train(epochs=1, accumulate=2), data=Data(global_batch=10), scale=Scale(max_nodes=2)
    )
    whole, *three = succeeded(
        run_ranks(1, job, learn, tmp_path / "1") + run_ranks(3, job, learn, tmp_path / "3")
    )
    assert [result.losses for result in three] == [three[0].losses] * 3
    assert three[0].losses == pytest.approx(whole.losses, abs=1e-5)
    assert [result.value for result in three] == [three[0].losses[-1]] * 3


def test_ranks_end_with_the_same_parameters(tmp_path: Path) -> None:
    one, two = succeeded(run_ranks(2, with_train(epochs=1), plain, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(one.value[0], two.value[0], strict=True))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_bounds_the_step(tmp_path: Path, precision: str) -> None:
    def moved(job: Job) -> float:
        net = nn.Linear(FEATURES, 2)
        before = torch.cat([value.detach().flatten() for value in net.parameters()])
        raydist.fit(job, model=net, train=samples(), loss=F.cross_entropy)
        return float(
            (torch.cat([value.detach().flatten() for value in net.parameters()]) - before).norm()
        )

    job = replace(with_train(steps=1, clip=0.01, precision=precision), data=Data(global_batch=12))
    (result,) = succeeded(run_ranks(1, job, moved, tmp_path))
    # plain SGD: the step is the rate (0.1) times the gradient's norm, which the clipping holds at
    # 0.01
    assert result.value == pytest.approx(0.001, rel=1e-3)


# Checkpoints and precision


@pytest.mark.parametrize(
    ("world", "parallel", "writer"),
    [
        (2, Parallel(), "the rank"),
        (2, Parallel(), "another process"),
        (4, Parallel("hsdp", shard=2), "the ranks"),  # of the first replica
        (2, Parallel("fsdp"), "other processes"),
    ],
    ids=["rank", "process", "ranks", "processes"],
)
def test_a_checkpoint_that_takes_long_lets_no_rank_wait_in_one_collective(
    tmp_path: Path, world: int, parallel: Parallel, writer: str
) -> None:
    """The other ranks waited in the next all-reduce, until its timeout ended the run."""
    turns, waits = tmp_path / "turns", tmp_path / "waits"
    waits.write_text("")
    last = world - 1

    def wait_for_turns() -> None:
        """The store is slow: until the last rank has made three more collectives."""
        turns.write_text("")
        until = time.monotonic() + 60
        while len(turns.read_text()) < 3:
            assert time.monotonic() < until, f"rank {last} waits in one collective"
            time.sleep(0.01)
        waits.open("a").write(".")

    def slowed(function: Any) -> Any:
        def slow(*args: Any) -> Any:
            if raydist.rank().rank == 0:
                wait_for_turns()
            return function(*args)

        return slow

    def write_slowly(memory: SnapshotBuffer, page: int) -> None:
        """In place of the writer process of the node."""
        while memory.locked_slot < 0:
            time.sleep(0.01)
        wait_for_turns()
        os.pwrite(page, blank_page()[:WORD], LOCK)

    def learn(job: Job) -> float:
        here = context.current()
        groups.TURN_S = 0.05
        gather = type(here.comm).gather

        def noted(comm: Any, tensor: torch.Tensor) -> Any:
            if here.rank.rank == last and turns.exists():
                turns.open("a").write(".")
            return gather(comm, tensor)

        type(here.comm).gather = noted
        if writer == "the rank":
            vars(checkpoint_files)["write"] = slowed(write.write)
        elif writer == "the ranks":
            for name in ("write_part", "commit"):
                vars(sharded)[name] = slowed(vars(sharded)[name])
        else:
            here.emit = lambda event: None  # the emit of tests/ranks.py drops sharded checkpoints
            descriptor = os.memfd_create("test")
            os.pwrite(descriptor, blank_page(), 0)
            here.memory = descriptor, descriptor
            if here.rank.rank == 0:
                slow = SnapshotBuffer(descriptor), descriptor
                threading.Thread(target=write_slowly, args=slow, daemon=True).start()
        return raydist.fit(job, model=model(), train=samples(), loss=F.cross_entropy)["loss"]

    job = replace(BASE, train=Train(steps=2), checkpoint=Checkpoint(every=0), parallel=parallel)
    succeeded(run_ranks(world, job, learn, tmp_path))
    assert len(waits.read_text()) == (2 if writer == "the ranks" else 1)


def test_a_resumed_state_is_read_from_its_file_without_a_copy_and_then_released(
    tmp_path: Path,
) -> None:
    """Each rank of a node read all of it into its own memory."""

    def maps() -> bool:
        return "/state.pt" in Path("/proc/self/maps").read_text()

    def learn(job: Job) -> tuple[list[bool], list[bool]]:
        loading, training = list[bool](), list[bool]()
        load = Stepper.load

        def noted(stepper: Stepper, state: Any, path: Any) -> None:
            loading.append(maps())
            load(stepper, state, path)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            training.append(maps())
            return F.cross_entropy(output, target)

        Stepper.load = noted  # type: ignore[assignment,method-assign]
        raydist.fit(job, model=model(), train=samples(), loss=loss)
        return loading, training

    job = replace(BASE, optim=Optim("adamw"))
    succeeded(run_ranks(1, replace(job, train=Train(steps=2)), learn, tmp_path))
    (saved,) = (tmp_path / "checkpoints").iterdir()
    (result,) = succeeded(
        run_ranks(
            1, replace(job, train=Train(steps=4)), learn, tmp_path, {"RAYDIST_RESUME": str(saved)}
        )
    )
    loading, training = result.value
    assert loading == [True]
    assert training[-1] is False


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_precision_of_the_forward_pass(tmp_path: Path, precision: str, dtype: str) -> None:
    seen: set[str] = set()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.add(str(output.dtype))
        return F.cross_entropy(output, target)

    def learn(job: Job) -> tuple[set[str], str, list[str]]:
        net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 2))
        raydist.fit(job, model=net, train=samples(), test=samples(24, 1), loss=loss)
        saved = checkpoint_files.newest(raydist.rank().run_dir / "checkpoints")
        assert saved is not None
        return seen, str(net[0].weight.dtype), sorted(saved.state["scaler"])

    (result,) = succeeded(
        run_ranks(1, replace(BASE, train=Train(epochs=4, precision=precision)), learn, tmp_path)
    )
    seen, weights, scaler = result.value
    assert seen == {f"torch.{dtype}"}
    assert weights == "torch.float32"
    assert ("scale" in scaler) == (precision == "fp16")
    assert result.losses[-1] < result.losses[0]


def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are too large for fp16 until the scaler has come down."""
    return 100 * F.cross_entropy(output, target)


def test_fp16_resumes_with_its_scaler(tmp_path: Path) -> None:
    job, learn = (
        replace(BASE, train=Train(epochs=2, precision="fp16")),
        functools.partial(train, loss=steep),
    )
    (whole,) = succeeded(run_ranks(1, stop_after(job, 5), learn, tmp_path))
    saved = checkpoint_files.verify(tmp_path / "checkpoints" / "step-00000005")
    assert saved.state["scaler"]["scale"] < 65536
    (again,) = resumed(1, job, tmp_path, 5, learn)
    assert again.losses == whole.losses[5:]


# Evaluation


def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    # 29 samples over 2 ranks: one rank has one more, and batch norm sees each rank's own.
    def learn(job: Job) -> tuple[dict[str, float], dict[str, float]]:
        net, test = model(), samples(29, 1)
        given = raydist.fit(
            job,
            model=net,
            train=samples(),
            test=test,
            loss=F.cross_entropy,
            metrics={"accuracy": accuracy},
        )
        assert net.training
        net.eval()
        output, target = net(test.tensors[0]), test.tensors[1]
        alone = {
            "test_loss": F.cross_entropy(output, target).item(),
            "accuracy": accuracy(output, target).mean().item(),
        }
        return given, alone

    results = succeeded(run_ranks(2, BASE, learn, tmp_path))
    for one in results:
        given, alone = one.value
        assert {name: given[name] for name in alone} == pytest.approx(alone, rel=1e-5)
    assert [e["step"] for e in results[0].kind("report") if "accuracy" in e["values"]] == [8, 16]
    assert not [e for e in results[1].kind("report") if "accuracy" in e["values"]]


def learn_and_test(job: Job) -> dict[str, float]:
    return raydist.fit(
        job,
        model=model(),
        train=samples(),
        test=samples(20, 1),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
    )


@pytest.mark.parametrize(
    ("words", "evaluated", "saved"),
    [
        ({"epochs": 3, "evaluate_every": 2}, [16, 24], [8, 16, 24]),
        ({"epochs": 3, "evaluate_every": 0}, [24], [8, 16, 24]),
        ({"epochs": 1, "steps": 11}, [8, 11], [8, 11]),
        ({"epochs": 0}, [0], []),
    ],
)
def test_when_it_evaluates_and_saves(
    tmp_path: Path, words: dict[str, Any], evaluated: list[int], saved: list[int]
) -> None:
    (result,) = succeeded(
        run_ranks(1, replace(BASE, train=Train(**words)), learn_and_test, tmp_path)
    )
    assert [e["step"] for e in result.kind("report") if "accuracy" in e["values"]] == evaluated
    assert [e["step"] for e in result.kind("saved")] == saved


def test_a_checkpoint_knows_its_metrics_and_the_best_is_kept(tmp_path: Path) -> None:
    job = replace(BASE, train=Train(epochs=6), checkpoint=Checkpoint(keep=1, best="min:test_loss"))
    (result,) = succeeded(run_ranks(1, job, learn_and_test, tmp_path))
    kept = sorted((tmp_path / "checkpoints").iterdir())
    losses = {
        e["step"]: e["values"]["test_loss"]
        for e in result.kind("report")
        if "test_loss" in e["values"]
    }
    best = min(losses, key=lambda step: losses[step])
    assert {path.name for path in kept} == {f"step-{step:08d}" for step in (best, 48)}
    newest = checkpoint_files.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.metrics["test_loss"] == losses[48]
    assert newest.state["config"]["seed"] == 5
    assert newest.meta.world_size == 1


# Resuming with other settings


def test_settings_override_a_checkpoint(unbroken: tuple[Path, list[RankResult]]) -> None:
    run_dir, whole = unbroken
    half = replace(
        BASE, optim=replace(BASE.optim, lr=BASE.optim.lr / 2, args={"weight_decay": 0.5})
    )
    again = resumed(2, half, run_dir, 10)
    before = [e["values"]["lr"] for e in whole[0].kind("report")][10:]
    assert [e["values"]["lr"] for e in again[0].kind("report")] == pytest.approx(
        [rate / 2 for rate in before]
    )
    newest = checkpoint_files.newest(run_dir / "second" / "checkpoints")
    assert newest is not None
    assert newest.state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def test_a_finished_training_is_not_trained_again(unbroken: tuple[Path, list[RankResult]]) -> None:
    again = resumed(2, BASE, unbroken[0], 16)
    assert again[0].kind("begin")[0]["resumed"] == 16
    assert [one.value[1] for one in again] == [[], []]
    assert [one.kind("report") for one in again] == [[], []]
    (recalled,) = again[0].kind("recalled")
    last = unbroken[1][0].kind("report")[-1]
    assert (recalled["step"], recalled["values"]["loss"]) == (last["step"], last["values"]["loss"])
    assert again[0].value[0] == unbroken[1][0].value[0]
    assert again[1].kind("recalled") == []


def test_fewer_steps_than_are_done_are_not_trained(unbroken: tuple[Path, list[RankResult]]) -> None:
    again = resumed(2, replace(BASE, train=Train(steps=4)), unbroken[0], 10)
    assert [one.kind("report") for one in again] == [[], []]
    assert [one.kind("recalled") for one in again] == [[], []]


def test_further_epochs_continue_at_the_end(unbroken: tuple[Path, list[RankResult]]) -> None:
    again = resumed(2, replace(BASE, train=Train(epochs=3)), unbroken[0], 16)
    assert [e["step"] for e in again[0].kind("report")] == list(range(17, 25))


def test_a_checkpoint_of_another_model_is_refused_with_its_path(
    unbroken: tuple[Path, list[RankResult]],
) -> None:
    path = unbroken[0] / "checkpoints" / "step-00000010"
    results = run_ranks(
        2,
        BASE,
        functools.partial(train, make_model=wide_model),
        unbroken[0] / "third",
        {"RAYDIST_RESUME": str(path)},
    )
    assert all("ConfigError" in one.error and "step-00000010" in one.error for one in results)


def test_ranks_that_find_different_checkpoints_are_an_error(
    unbroken: tuple[Path, list[RankResult]],
) -> None:
    def blind(job: Job) -> Any:
        if raydist.rank().rank == 1:
            import os

            os.environ["RAYDIST_RESUME"] = ""
        return train(job)

    path = unbroken[0] / "checkpoints" / "step-00000010"
    results = run_ranks(2, BASE, blind, unbroken[0] / "fourth", {"RAYDIST_RESUME": str(path)})
    assert all("rank 0: step 10, rank 1: none" in one.error for one in results)


# Levers of speed


def switched(job: Job) -> tuple[str, bool]:
    """Return torch's settings after a fit with the opposite settings, followed by one with these.
    It needs no GPU."""
    speed_up_gpu(replace(job, train=Train(fast=not job.train.fast)), torch.device("cuda"))
    speed_up_gpu(job, torch.device("cuda"))
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("words", "deterministic", "precision", "search"),
    [
        ({}, False, "highest", False),
        ({"tf32": True}, True, "high", False),
        ({"cudnn_search": True}, False, "highest", True),
        ({"fast": True}, False, "high", True),
        ({"fast": True}, True, "high", False),
    ],
)
def test_fp32_on_a_gpu_is_as_fast_as_the_settings_say(
    words: dict[str, bool], deterministic: bool, precision: str, search: bool, tmp_path: Path
) -> None:
    job = replace(BASE, train=Train(**words), deterministic=deterministic)  # type: ignore[arg-type]
    assert succeeded(run_ranks(1, job, switched, tmp_path))[0].value == (precision, search)


def test_channels_last_reaches_the_model(tmp_path: Path) -> None:
    def learn(job: Job) -> tuple[bool, bool]:
        layer, seen = nn.Conv2d(3, 4, 3), list[bool]()
        net = nn.Sequential(layer, nn.Flatten(), nn.Linear(4 * 36, 2))
        layer.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
        )
        images = TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 2)
        raydist.fit(job, model=net, train=images, test=images, loss=F.cross_entropy)
        return all(seen), layer.weight.is_contiguous(memory_format=torch.channels_last)

    (result,) = succeeded(
        run_ranks(1, replace(BASE, train=Train(epochs=1, channels_last=True)), learn, tmp_path)
    )
    assert result.value == (True, True)


# Refusals


def test_an_unknown_best_is_refused_with_the_nearest(tmp_path: Path) -> None:
    job = replace(BASE, checkpoint=Checkpoint(best="max:acuracy"))
    (result,) = run_ranks(1, job, learn_and_test, tmp_path)
    assert (
        "checkpoint.best=max:acuracy: there is no such metric; did you mean "
        "checkpoint.best=max:accuracy?" in result.error
    )


def test_fit_outside_a_run_is_an_error() -> None:
    with pytest.raises(raydist.RaydistError, match=r"raydist\.main\(job\)"):
        raydist.fit(BASE, model=model(), train=samples(), loss=F.cross_entropy)
