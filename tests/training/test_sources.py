"""Sources without an index: exact resume, each sample once, uneven ends; each with the real
library."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

import raydist
from raydist.recovery.attempts import rescale
from raydist.settings.config import (
    Backend,
    Checkpoint,
    Data,
    Job,
    Optim,
    Parallel,
    Scale,
    Snapshot,
    Train,
)
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.training import deal, waits
from raydist.worker import context
from tests.ranks import run_ranks, succeeded
from tests.training.test_sharded import memory

SIZE, STEPS, STOP = 96, 20, 10
JOB = Job(
    backend=Backend(name="gloo"),
    data=Data(batch_size=6),
    optim=Optim(name="adamw", lr=0.01),
    train=Train(steps=STEPS),
    checkpoint=Checkpoint(every=5, keep=9),
    seed=5,
)
"""Two ranks with 8 steps in an epoch: step 10 is in the middle of the second."""


def tensors(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, of which the first is the number of the sample; and labels."""
    features = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    features[:, 0] = torch.arange(size)
    return features, (features[:, 1] > 0).long()


class Net(nn.Module):
    """Notes the numbers of the samples that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), list[list[int]]()
        self.tp_plan = {"layer": "colwise_rep"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([int(number) for number in x[:, 0]])
        out: torch.Tensor = self.layer(x[:, 1:])
        return out


class Shuffled(IterableDataset[Any]):
    """A stream in an order drawn by torch, with noise: nothing of it is seeded, and it has no
    state."""

    def __iter__(self) -> Iterator[Any]:
        x, y = tensors()
        for index in torch.randperm(SIZE).tolist():
            noise = torch.cat([torch.zeros(1), 0.1 * torch.randn(3)])
            yield x[index] + noise, y[index]


class Placed(IterableDataset[Any]):
    """A stream that knows its place."""

    def __init__(self) -> None:
        self.at = self.loads = 0

    def __iter__(self) -> Iterator[Any]:
        x, y = tensors()
        while self.at < SIZE:
            self.at += 1
            yield x[self.at - 1], y[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loads = state["at"], self.loads + 1


class OwnLoader:
    """A loader that knows its place, of nobody's library."""

    def __init__(self) -> None:
        self.at = self.loads = 0

    def __iter__(self) -> Iterator[Any]:
        x, y = tensors()
        numbers = torch.split(
            torch.arange(SIZE)[raydist.rank().rank :: raydist.rank().world_size], 6
        )
        while self.at < len(numbers):
            self.at += 1
            yield x[numbers[self.at - 1]], y[numbers[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loads = state["at"], self.loads + 1


def sampler() -> Any:
    me = raydist.rank()
    return DistributedSampler(range(SIZE), me.world_size, me.rank)  # type: ignore[arg-type]


def plain_loader() -> Any:
    return DataLoader(TensorDataset(*tensors()), batch_size=6, sampler=sampler())


def drawing_loader() -> Any:
    """A loader whose sampler has a generator of its own."""
    me, drawn = raydist.rank(), torch.Generator().manual_seed(7)
    part = Subset(TensorDataset(*tensors()), range(me.rank, SIZE, me.world_size))
    return DataLoader(part, batch_size=6, shuffle=True, generator=drawn)


def batch_sampler_loader() -> Any:
    return DataLoader(TensorDataset(*tensors()), batch_sampler=BatchSampler(sampler(), 6, True))


def stateful_loader(**words: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(TensorDataset(*tensors()), batch_size=6, sampler=sampler(), **words)


def drawing_stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    me = raydist.rank()
    part = Subset(TensorDataset(*tensors()), range(me.rank, SIZE, me.world_size))
    torch.manual_seed(7)  # its sampler has a generator with a seed from here
    return StatefulDataLoader(part, batch_size=6, shuffle=True)


def hugging_face() -> Any:
    import datasets

    x, y = tensors()
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")


def streaming(shards: int, buffer: int = 0) -> Any:
    dataset = hugging_face().to_iterable_dataset(num_shards=shards)
    return dataset.shuffle(seed=3, buffer_size=buffer) if buffer else dataset


SOURCES: dict[str, Callable[[], Any]] = {
    "iterable": Shuffled,
    "stateful iterable": Placed,
    "DataLoader": plain_loader,
    "DataLoader with a generator": drawing_loader,
    "DataLoader with a batch_sampler": batch_sampler_loader,
    "own loader": OwnLoader,
}
TORCHDATA: dict[str, Callable[[], Any]] = {
    "StatefulDataLoader": stateful_loader,
    "StatefulDataLoader that draws": drawing_stateful_loader,
    "StatefulDataLoader with workers": functools.partial(stateful_loader, num_workers=2),
}
DATASETS: dict[str, Callable[[], Any]] = {
    "datasets": hugging_face,
    "datasets streamed in shards": functools.partial(streaming, 4),
    "datasets streamed in 3 shards": functools.partial(streaming, 3),
    "datasets streamed and shuffled": functools.partial(streaming, 4, 20),
}
for library, group in (("torchdata", TORCHDATA), ("datasets", DATASETS)):
    if importlib.util.find_spec(library):
        SOURCES |= group


def fit(job: Job, source: Any) -> tuple[list[float], list[list[int]]]:
    """Train; return the loss of each step, and the samples of each forward pass."""
    net, losses = Net(), list[float]()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = nn.functional.cross_entropy(output, target)
        losses.append(value.item())
        return value

    raydist.fit(job, model=net, train=source, loss=loss)
    return losses, net.seen


def note_warning(warnings: list[str], happened: Event) -> None:
    if isinstance(happened, kinds.Warning):
        warnings.append(happened.text)


def fit_all(
    job: Job, step: int = 0, names: Collection[str] = SOURCES
) -> dict[str, tuple[list[float], list[list[int]], list[str], int]]:
    """Train with each source in a separate folder, from the checkpoint of `step` on."""
    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in a rank; a child of tests.ranks has "forkserver"
    here, home, done = context.current(), context.rank().run_dir, {}
    for name, make in ((name, SOURCES[name]) for name in names):
        here.rank = replace(here.rank, run_dir=home / name / str(step))
        here.newest = here.fits = 0  # each training is the first of its run
        warnings: list[str] = []
        here.emit = functools.partial(note_warning, warnings)
        os.environ["RAYDIST_RESUME"] = (
            str(home / name / "0" / "checkpoints" / f"step-{step:08d}") if step else ""
        )
        words = replace(
            job, data=replace(job.data, workers=int(name == "datasets streamed in 3 shards"))
        )
        source = make()
        done[name] = (*fit(words, source), warnings, getattr(source, "loads", 0))
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Of each rank what each source came to: undisturbed, and from step 10 on in new processes."""
    folder = tmp_path_factory.mktemp("sources")
    whole = succeeded(run_ranks(2, JOB, fit_all, folder))
    again = succeeded(run_ranks(2, JOB, functools.partial(fit_all, step=STOP), folder))
    return [result.value for result in whole], [result.value for result in again]


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_with_the_same_samples(
    name: str, trained: Any
) -> None:
    for whole, again in zip(*trained, strict=True):
        losses, seen, *_ = whole[name]
        assert len(losses) == STEPS
        # the first step is looked at twice: once before the state is loaded
        assert again[name][1][1:] == seen[STOP:]
        assert again[name][0][1:] == losses[STOP:]
        assert again[name][3] == (
            name in ("stateful iterable", "own loader")
        )  # by their state, not read again


@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_has_each_sample_once(name: str, trained: Any) -> None:
    for epoch in (0, 1):
        parts = [result[name][1][8 * epoch : 8 * epoch + 8] for result in trained[0]]
        assert sorted(number for part in parts for step in part for number in step) == list(
            range(SIZE)
        )


@pytest.mark.parametrize("every", [4, None])
def test_a_run_that_was_stopped_between_two_epochs_goes_on_with_the_same_samples(
    every: int | None, tmp_path: Path
) -> None:
    """The next epoch of a source with a state lacked its first step, or had the order of the one
    before. Without `every` the state is that of the next epoch."""
    names = [name for name in SOURCES if "state" in name.lower() or name.startswith("own")]
    job = replace(JOB, train=Train(steps=12), checkpoint=Checkpoint(every=every, keep=9))
    whole = succeeded(run_ranks(2, job, functools.partial(fit_all, names=names), tmp_path))
    again = succeeded(run_ranks(2, job, functools.partial(fit_all, step=8, names=names), tmp_path))
    for first, second in zip(whole, again, strict=True):
        for name in names:
            losses, seen, *_ = first.value[name]
            assert second.value[name][1][1:] == seen[8:], name
            assert second.value[name][0][1:] == losses[8:], name


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("DataLoader")])
def test_a_loader_has_another_order_in_each_epoch(name: str, trained: Any) -> None:
    for result in trained[0]:
        seen = result[name][1]
        assert seen[:8] != seen[8:16]


def popping(job: Job) -> list[float]:
    """Train with a step that changes its batch: trainers of transformers take the labels out."""
    x, y = tensors()
    samples: Any = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    losses: list[float] = []

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        batch["x"] /= 2
        return nn.functional.cross_entropy(model(batch["x"]), labels)

    def note(step: int, values: Any) -> None:
        losses.append(float(values["loss"]))

    source = DataLoader(samples, batch_size=6)
    raydist.fit(job, model=Net(), train=source, train_step=step, on_step=note)
    return losses


def test_a_step_may_change_its_batch(tmp_path: Path) -> None:
    """The first step after a resume got the batch of its rehearsal; and without the labels
    train.loss_per=token counted another column."""
    job = replace(JOB, train=Train(steps=4, loss_per="token"), checkpoint=Checkpoint(every=2))
    path = tmp_path / "checkpoints" / "step-00000002"
    (whole,) = succeeded(run_ranks(1, job, popping, tmp_path, {"RAYDIST_RESUME": ""}))
    (rest,) = succeeded(run_ranks(1, job, popping, tmp_path / "2", {"RAYDIST_RESUME": str(path)}))
    assert rest.value == whole.value[2:]


SHARDED = replace(JOB, parallel=Parallel("fsdp", blocks="Linear"), snapshot=Snapshot(1))
IN_SHARDS = ("stateful iterable", "DataLoader", "own loader")


def test_a_source_goes_on_in_mid_epoch_with_a_model_in_shards(tmp_path: Path) -> None:
    whole = succeeded(run_ranks(2, SHARDED, functools.partial(fit_all, names=IN_SHARDS), tmp_path))
    again = succeeded(
        run_ranks(2, SHARDED, functools.partial(fit_all, step=STOP, names=IN_SHARDS), tmp_path)
    )
    for name in IN_SHARDS:
        for first, second in zip(whole, again, strict=True):
            losses, seen, *_ = first.value[name]
            assert len(losses) == STEPS
            assert second.value[name][:2] == (losses[STOP:], seen[STOP:])
            assert second.value[name][3] == (name in ("stateful iterable", "own loader"))


def test_each_rank_of_a_model_in_shards_has_the_place_of_its_own_loader_in_memory(
    tmp_path: Path,
) -> None:
    def struck(job: Job) -> Any:
        here, source = context.current(), OwnLoader()
        here.memory = memory(), -1
        before = fit(replace(job, train=Train(steps=STOP)), source)
        here.sharded, os.environ["TORCHELASTIC_RESTART_COUNT"] = None, "1"
        here.fits = 0  # a restarted rank begins the job again
        source = OwnLoader()
        after = fit(job, source)
        return [*before[0], *after[0]], [*before[1], *after[1]], source.loads

    job = replace(SHARDED, checkpoint=Checkpoint(every=100))
    path = {"RAYDIST_RESUME": "", "TORCHELASTIC_RESTART_COUNT": "0"}
    whole = succeeded(
        run_ranks(2, job, lambda words: fit(words, OwnLoader()), tmp_path / "whole", path)
    )
    again = succeeded(run_ranks(2, job, struck, tmp_path / "struck", path))
    assert [result.value for result in again] == [(*result.value, 1) for result in whole]


class Features(IterableDataset[Any]):
    """Samples of a stream that knows its place, without their numbers."""

    def __init__(self) -> None:
        self.placed = Placed()

    def __iter__(self) -> Iterator[Any]:
        return ((x[1:], y) for x, y in self.placed)

    def state_dict(self) -> dict[str, int]:
        return self.placed.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.placed.load_state_dict(state)


def test_the_stages_of_a_pipeline_read_the_same_stream(tmp_path: Path) -> None:
    def learn(job: Job) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        raydist.fit(job, model=model, train=Features(), loss=nn.functional.cross_entropy)

    pipeline = replace(JOB, parallel=Parallel("pp"))
    (alone,) = succeeded(run_ranks(1, JOB, learn, tmp_path / "alone"))
    whole = succeeded(run_ranks(2, pipeline, learn, tmp_path / "whole"))
    checkpoint = str(tmp_path / "whole" / "checkpoints" / f"step-{STOP:08d}")
    again = succeeded(
        run_ranks(2, pipeline, learn, tmp_path / "again", {"RAYDIST_RESUME": checkpoint})
    )
    for first, second in zip(whole, again, strict=True):
        assert first.losses == pytest.approx(alone.losses, abs=1e-5)
        assert second.losses == first.losses[STOP:]


READS_ALL = "each of 2 ranks reads all of it, and takes its part of each batch"
READS_AGAIN = "a resumed run reads the epoch again up to its position"
ANEW = "with another number of ranks the epoch starts again"
GOES_THROUGH = "each rank goes through all of its data set (a DistributedSampler gives it its part)"
SAID = {
    "iterable": [f"train=Shuffled: {READS_ALL}; {READS_AGAIN}"],
    "stateful iterable": [f"train=Placed: {READS_ALL}"],
    "DataLoader": [f"train=DataLoader: {ANEW}; {READS_AGAIN}"],
    "DataLoader with a generator": [f"train=DataLoader: {ANEW}; {GOES_THROUGH}; {READS_AGAIN}"],
    "DataLoader with a batch_sampler": [f"train=DataLoader: {ANEW}; {READS_AGAIN}"],
    "own loader": [f"train=OwnLoader: {ANEW}"],
    "StatefulDataLoader": [f"train=StatefulDataLoader: {ANEW}"],
    "StatefulDataLoader that draws": [f"train=StatefulDataLoader: {ANEW}; {GOES_THROUGH}"],
    "StatefulDataLoader with workers": [f"train=StatefulDataLoader: {ANEW}"],
    "datasets": [],
    "datasets streamed in shards": [f"train=IterableDataset: {ANEW}"],
    "datasets streamed in 3 shards": [f"train=IterableDataset: {READS_ALL}"],
    "datasets streamed and shuffled": [f"train=IterableDataset: {ANEW}; {READS_AGAIN}"],
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_source_does_not_promise_is_said_once_by_rank_0(name: str, trained: Any) -> None:
    for first, second in trained:
        assert first[name][2] == SAID[name]
        assert second[name][2] == []


@pytest.mark.skipif("datasets" not in SOURCES, reason="datasets is not installed")
def test_a_shuffle_buffer_is_found_in_every_part_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets
    from datasets import iterable_dataset

    plain, shuffled = streaming(4), streaming(4, 20)
    mixed = datasets.interleave_datasets([plain, shuffled.take(8)])
    assert deal.keeps_its_place(plain.map(dict))
    assert not any(map(deal.keeps_its_place, (shuffled, shuffled.map(dict), mixed)))
    # A version that calls the buffer otherwise.
    monkeypatch.delattr(iterable_dataset, "BufferShuffledExamplesIterable")
    assert not deal.keeps_its_place(plain)


@pytest.mark.skipif("datasets" not in SOURCES, reason="datasets is not installed")
def test_ranks_that_shuffle_their_shards_differently_are_refused(tmp_path: Path) -> None:
    from datasets import concatenate_datasets

    def learn(job: Job) -> list[int]:
        unseeded = streaming(4).shuffle(buffer_size=20)
        for source in (unseeded, concatenate_datasets([streaming(2), unseeded]).map(dict)):
            with pytest.raises(raydist.ConfigError, match=r"give \.shuffle a seed"):
                fit(job, source)
        seen = fit(job, streaming(4, 20))[1]
        return [number for step in seen for number in step]

    job = replace(JOB, train=Train(steps=8))
    one, other = succeeded(run_ranks(2, job, learn, tmp_path))
    assert sorted(one.value + other.value) == [*range(SIZE)]


@pytest.mark.skipif("datasets" not in SOURCES, reason="datasets is not installed")
def test_of_shuffles_that_have_no_generator_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from datasets import iterable_dataset

    marks: list[int] = []

    def all_of(own: torch.Tensor) -> list[torch.Tensor]:
        marks.append(int(own))
        return [own]

    one, other = streaming(4, 20), streaming(4).shuffle(buffer_size=20)
    for each in (one, other):
        deal.check_shuffles(each, all_of)
    for each in (one, other):  # a version that calls it otherwise
        for buffer in deal.shuffles_of(each) or ():
            del buffer.generator
        deal.check_shuffles(each, all_of)
    monkeypatch.delattr(iterable_dataset, "BufferShuffledExamplesIterable")
    deal.check_shuffles(one, all_of)
    assert marks[0] != marks[1]
    assert marks[2] == marks[3] == marks[4]


@pytest.mark.parametrize("world", [1, 3])
def test_a_stream_goes_on_with_another_number_of_ranks(world: int, tmp_path: Path) -> None:
    def learn(job: Job) -> list[list[int]]:
        return fit(job, Placed())[1]

    job = replace(JOB, data=Data(global_batch=12))
    path = {"RAYDIST_RESUME": str(tmp_path / "checkpoints" / f"step-{STOP:08d}")}
    whole = succeeded(run_ranks(2, job, learn, tmp_path))
    again = succeeded(run_ranks(world, job, learn, tmp_path / "again", path))
    for step in range(STOP, STEPS):
        before = sorted(number for result in whole for number in result.value[step])
        assert before == sorted(
            number for result in again for number in result.value[1 + step - STOP]
        )


def test_a_loader_begins_the_epoch_anew_with_another_number_of_ranks(tmp_path: Path) -> None:
    def learn(job: Job) -> list[list[int]]:
        return fit(job, plain_loader())[1]

    path = {"RAYDIST_RESUME": str(tmp_path / "checkpoints" / f"step-{STOP:08d}")}
    succeeded(run_ranks(2, JOB, learn, tmp_path))
    (result,) = succeeded(run_ranks(1, JOB, learn, tmp_path / "again", path))
    (text,) = [e["text"] for e in result.kind("warning") if "starts again" in e["text"]]
    assert text.startswith(
        "train=DataLoader: the parts of 2 ranks do not fit these: epoch 2 starts again"
    )
    assert sorted(number for step in result.value[1:] for number in step)[: 6 * 10] == sorted(
        number for step in result.value[1:11] for number in step
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_that_end_at_different_steps_stop_together(accumulate: int, tmp_path: Path) -> None:
    def learn(job: Job) -> list[list[int]]:
        size = (48, 31)[raydist.rank().rank]  # 8 and 5 batches
        return fit(job, DataLoader(TensorDataset(*tensors(size)), batch_size=6, drop_last=True))[1]

    job = replace(JOB, train=Train(steps=8, accumulate=accumulate))
    first, second = succeeded(run_ranks(2, job, learn, tmp_path))
    each = 5 if accumulate == 1 else 4  # batches of an epoch
    for result in (first, second):
        epochs = [e["values"]["epoch"] for e in result.kind("report")]
        assert epochs == [1 + step * accumulate // each for step in range(8)]
        assert [step[0] for step in result.value] == [
            step * 6 % (6 * each) for step in range(8 * accumulate)
        ]
    left = (
        "train=DataLoader has more batches here than on other ranks: each epoch ends with the "
        "shortest"
    )
    assert left in [e["text"] for e in first.kind("warning")]
    assert left not in [e["text"] for e in second.kind("warning")]


def test_a_length_makes_epochs(tmp_path: Path) -> None:
    def learn(job: Job) -> list[list[int]]:
        return fit(job, plain_loader())[1]

    first, _ = succeeded(run_ranks(2, replace(JOB, train=Train(epochs=2)), learn, tmp_path))
    (begin,) = first.kind("begin")
    assert (begin["steps"], begin["epochs"], begin["samples"], len(first.value)) == (
        16,
        2,
        SIZE,
        16,
    )


class Divided(Placed):
    """Each rank has separate samples."""

    def __iter__(self) -> Iterator[Any]:
        return (
            pair
            for index, pair in enumerate(super().__iter__())
            if index % 2 == raydist.rank().rank
        )


class Short(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*tensors(11), strict=True)


@pytest.mark.parametrize(
    ("make", "job", "say"),
    [
        (
            Short,
            replace(JOB, train=Train(epochs=2)),
            "train.steps: train=Short has no length, so train.epochs=2 sets no",
        ),
        (Divided, JOB, "train=Divided gives different samples on different ranks"),
        (
            Short,
            JOB,
            "ended before the first step of epoch 1, and each epoch calls iter() again: it has too "
            "few samples: a step takes 12; set data.batch_size=1",
        ),
        (
            lambda: DataLoader(TensorDataset(*tensors(5)), batch_size=6, drop_last=True),
            replace(JOB, train=Train(epochs=2)),
            "train=DataLoader has too few batches: a step takes 1 on each rank; give the loader a",
        ),
        (
            lambda: iter(Placed()),
            JOB,
            "train=generator is an iterator, which can be read only once",
        ),
        (lambda: 3, JOB, "train=int has no length or no index"),
        (plain_loader, replace(JOB, data=Data(global_batch=24)), "set data.global_batch=12"),
        (
            plain_loader,
            replace(JOB, parallel=Parallel(tp=2, blocks="Linear")),
            "different batches on ranks that compute a sample together: its sampler must have 1 parts",
        ),
    ],
)
def test_what_can_not_be_is_refused(make: Any, job: Job, say: str, tmp_path: Path) -> None:
    for result in run_ranks(2, job, lambda words: fit(words, make()), tmp_path):
        assert "ConfigError" in result.error
        assert say in result.error


class OwnSampler(BatchSampler):
    """One of the user's, whose batches have 6 samples, not those of data.batch_size."""


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_loader_decides_the_size_of_batches_on_any_number_of_ranks(
    first: int, tmp_path: Path
) -> None:
    """With scale=1..3, data.global_batch of the first ranks was asked of it, and ended the run;
    and one with a batch_sampler counted as many samples as data.batch_size says."""

    def samples(job: Job) -> list[int]:
        here, seen = context.current(), list[Event]()
        here.emit = seen.append
        loader = DataLoader(TensorDataset(*tensors()), batch_sampler=OwnSampler(sampler(), 6, True))
        fit(job, loader)
        reports = [each for each in seen if isinstance(each, kinds.Report)]
        return [int(each.values["samples"]) for each in reports]

    job = replace(JOB, scale=Scale(nodes=1, max_nodes=3), data=Data(batch_size=4))
    job = rescale(replace(job, train=Train(steps=3)), first, 2, 1)
    assert job.data.global_batch == 4 * first
    for result in succeeded(run_ranks(2, job, samples, tmp_path)):
        passes = job.train.accumulate
        assert result.value == [12 * passes * step for step in (1, 2, 3)]


class Odd(Placed):
    """Its state would need code to be read back."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": Path(str(self.at))}


def test_a_state_that_would_run_code_is_not_kept_and_the_source_is_read_again(
    tmp_path: Path,
) -> None:
    def learn(job: Job) -> list[float]:
        return fit(job, Odd())[0]

    path = {"RAYDIST_RESUME": str(tmp_path / "checkpoints" / f"step-{STOP:08d}")}
    (whole,), (again,) = (
        succeeded(run_ranks(1, JOB, learn, folder, env))
        for folder, env in ((tmp_path, {}), (tmp_path / "again", path))
    )
    assert again.value[1:] == whole.value[STOP:]
    (text,) = [e["text"] for e in whole.kind("warning")]
    assert (
        "the state of train=Odd['at'] is a pathlib.PosixPath, which can't be loaded without "
        "running code" in text
    )
    assert text.endswith("a resumed run reads the epoch again up to its position")


@pytest.mark.parametrize(
    ("rows", "kind", "workers", "say"),
    [
        ([(1.0, 20.0)], "map", 0, ""),
        ([(5.0, 9.0)], "map", 0, ""),
        (
            [(4.0, 20.0)],
            "map",
            0,
            "the training waits for data more than 10% of the time: data.workers=2 loads",
        ),
        (
            [(1.0, 20.0), (4.0, 20.0)],
            "map",
            2,
            "rank 1 waits for data more than 10% of the time: data.workers=4 loads",
        ),
        (
            [(4.0, 20.0)],
            "stream",
            0,
            "the training waits for data more than 10% of the time: data.workers=1 reads",
        ),
        (
            [(4.0, 20.0)],
            "loader",
            0,
            "the training waits for data more than 10% of the time: give the loader more workers",
        ),
    ],
)
def test_when_a_wait_for_data_is_said(
    rows: list[tuple[float, float]], kind: str, workers: int, say: str
) -> None:
    finding = waits.finding(rows, kind, workers)
    assert (finding is not None) == bool(say)
    if finding:
        rank, text = finding
        assert text.startswith(say)
        assert rows[rank] == max(rows)


class Slow(TensorDataset):
    """Loading takes longer than computing on one of two ranks."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(0.02 if raydist.rank().rank == 1 else 0.0)
        return [self[index] for index in indices]


def test_the_rank_that_waits_for_data_is_named(tmp_path: Path) -> None:
    def learn(job: Job) -> None:
        waits.LEAST_S = 0.0
        fit(job, Slow(*tensors()))

    first, second = succeeded(run_ranks(2, replace(JOB, train=Train(steps=40)), learn, tmp_path))
    texts = [e["text"] for e in second.kind("warning")]
    assert [text.partition(" for")[0] for text in texts] == ["rank 1 waits"]
    assert first.kind("warning") == []


def test_each_step_of_a_stream_has_the_checksum_of_what_was_read() -> None:
    def hashes(items: Any, **also: Any) -> list[str]:
        dealt = deal.Deal("stream", items, 4, lambda taken: [taken], (0,), False, **also)
        return [step.hash for step in islice(dealt, 6)]

    first = hashes(Shuffled(), hashed=True)
    assert len({*first}) == 6
    assert hashes(Shuffled(), hashed=True) == first
    assert hashes(Shuffled(), hashed=True, begin=8)[:4] == first[2:]
    assert not {*hashes(Shuffled(), hashed=True, epoch=1)} & {*first}
    assert hashes(Shuffled()) == [""] * 6
    # a sample without bytes
    assert hashes([lambda: 1] * 24, hashed=True) == [""] * 6


class SeedsItself(OwnLoader):
    """A loader that seeds its generator anew for each epoch, as many samplers do."""

    def __init__(self, seed: int = 7) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(self.seed + epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())


def test_a_loader_that_seeds_itself_has_the_seed_of_the_epoch() -> None:
    """In the process that has read the earlier epochs, and in one that has not."""

    def read(items: Any, epoch: int) -> list[Any]:
        dealt = deal.Deal("loader", items, 1, list, (0,), False, epoch=epoch)
        return [step.batches[0] for step in dealt]

    whole = SeedsItself()
    epochs = [read(whole, epoch) for epoch in range(3)]
    assert read(SeedsItself(), 2) == epochs[2]
    assert epochs[2] == torch.randperm(SIZE, generator=torch.Generator().manual_seed(9)).tolist()


def test_a_generator_that_a_loader_shares_with_its_sampler_is_as_the_job_left_it() -> None:
    drawn, same = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for each in (drawn, same):
        torch.rand(3, generator=each)  # the job has split its data, for example
    numbers = TensorDataset(torch.arange(SIZE))
    dealt = deal.Deal(
        "loader", DataLoader(numbers, 6, shuffle=True, generator=drawn), 1, list, (0,), False
    )
    found = [step.batches[0][0] for step in dealt]
    plain = [batch[0] for batch in DataLoader(numbers, 6, shuffle=True, generator=same)]
    assert torch.equal(torch.cat(found), torch.cat(plain))
