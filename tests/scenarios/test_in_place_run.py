"""Killed ranks are replaced while the others keep their processes, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist
from raydist.reporting.result import Result
from raydist.shared.rank_names import name_ranks
from raydist.worker import context
from raydist.worker.torch_private import connects_anew
from tests import faults
from tests.faults import Fault, kill
from tests.leftovers import alive
from tests.scenarios.test_restart_run import events, losses

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not connects_anew(), reason="this torch cannot connect ranks anew"),
]
WORDS = (
    "scale=1x4",
    "group=inline",
    "watch.progress=none",
    "train.epochs=5",
    "data.batch_size=8",
    "snapshot.every=1",
    "restart.max=9",
    "hang.limit_s=90",
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runs are in an empty folder."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("in-place"))
        yield


def train(
    *words: str, struck: tuple[Fault, ...] = (), job: Any = faults.training, **more: Any
) -> Result[Any]:
    sized = any(word.startswith("scale=") for word in words)
    done = raydist.run(job, *(WORDS[1:] if sized else WORDS), *words, struck=struck, **more)
    hangs = [each["text"] for each in events(done, "hang")]
    assert "hang" not in [each["cause"] for each in events(done, "stop")], hangs
    return done


def pids(done: Result[Any]) -> list[dict[int, int]]:
    """Return the process of each rank in each attempt."""
    began = events(done, "began")
    ranks = len({event["rank"] for event in began})
    return [
        {event["rank"]: event["pid"] for event in began[first : first + ranks]}
        for first in range(0, len(began), ranks)
    ]


@pytest.fixture(scope="module")
def whole(folder: None) -> Result[Any]:
    """A run without a fault, whose ranks are connected once and for all."""
    return train()


def test_a_killed_rank_is_replaced_and_the_other_stays() -> None:
    words = [word for word in WORDS if not word.startswith(("scale=", "train.epochs="))]
    job, short = faults.training, ("scale=1x2", "train.epochs=2", *words)
    alone = raydist.run(job, *short)
    struck = (kill(1, 10), kill(0, 20, 1), kill(1, 25, 2))
    done = raydist.run(job, *short, "restart.in_place=on", struck=struck)
    assert (done.values, losses(done)) == (alone.values, losses(alone))
    kept = [event.get("kept") for event in events(done, "restarted")]
    # On a busy machine the other rank may be stuck, too: it is then forked again.
    assert any(found == stays for found, stays in zip(kept, ([0], [1], [0]), strict=True))


def test_only_killed_ranks_are_replaced(whole: Result[Any]) -> None:
    """With data.workers=1 too: test_storm_run."""
    struck = (
        kill(1, 10),
        kill(1, 0, 1),  # the new one, before its first step
        kill(0, 20, 2),
        kill(2, 30, 3),
        kill(3, 30, 3),  # two at once
        kill(0, 40, 4),  # the evaluation and the checkpoint after the last step are still to come
    )
    done = train("restart.in_place=on", struck=struck)
    assert done.status == "finished"
    assert (done.values, losses(done)) == (whole.values, losses(whole))
    replaced_alone(done, [{1}, {1}, {0}, {2, 3}, {0}])


def compiling(config: Any, struck: tuple[Fault, ...] = ()) -> tuple[dict[str, Any], int]:
    """Train a compiled model; return the result, and how many functions this process compiled."""
    from torch._dynamo.utils import counters

    return faults.compiled(config, struck), counters["frames"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["train.compile=blocks", "train.compile=true parallel=fsdp"])
def test_ranks_that_stay_keep_their_compiled_code(more: str) -> None:
    """And a new one, which compiles anew, goes on to the bit."""
    words = ("scale=1x2", "train.epochs=3", *more.split())

    def run(*more: str, struck: tuple[Fault, ...] = ()) -> Result[Any]:
        return raydist.run(compiling, *WORDS[1:], *words, *more, struck=struck)

    alone = run()
    done = run("restart.in_place=on", struck=(kill(1, 6), kill(1, 9, 1)))
    (found, compiled), (expected, once) = (
        [*zip(*each.values, strict=True)] for each in (done, alone)
    )
    assert (found, losses(done)) == (expected, losses(alone))
    assert [event.get("kept") for event in events(done, "restarted")] == [[0], [0]]
    assert compiled[0] == once[0] > 1


def replaced_alone(done: Result[Any], killed: Sequence[set[int]]) -> None:
    """Assert that ranks have kept their processes while others were killed, in each attempt."""
    ran = pids(done)
    stayed = [
        [rank for rank in range(4) if before[rank] == after[rank]]
        for before, after in itertools.pairwise(ran)
    ]
    # Of two at once, one may be replaced before the other has come to its step: it lives on.
    assert not any(gone <= {*kept} for gone, kept in zip(killed, stayed, strict=False))
    # On a busy machine, or in gloo, a rank may be stuck: then it is forked too.
    as_few = [{*range(4)} - gone == {*kept} for gone, kept in zip(killed, stayed, strict=False)]
    assert sum(as_few) > 1
    # a restart that made no step before the next failure, or the end, is in no event
    kept = {event["number"]: event.get("kept", []) for event in events(done, "restarted")}
    assert kept.items() <= dict(enumerate(stayed, 1)).items()
    assert not [pid for each in ran for pid in each.values() if alive(pid)]
    number, these = next((number, each) for number, each in kept.items() if each)
    shown = f"in place, {name_ranks(these)} kept their processes"
    assert shown in (done.dir / f"blame-{number}.txt").read_text()


def test_a_rank_that_hangs_is_replaced_and_the_others_stay(whole: Result[Any]) -> None:
    """It stays away from a collective in which the others wait; test_recoverable_run has one that
    a signal stops."""
    words = [word for word in WORDS if not word.startswith("hang.limit_s=")]
    more = ("restart.in_place=on", "hang.limit_s=10")
    done = raydist.run(faults.training, *words, *more, struck=(Fault("skip", 2, 20),))
    assert (done.values, losses(done)) == (whole.values, losses(whole))
    (back,) = events(done, "restarted")
    first, second = pids(done)
    kept = [rank for rank in range(4) if first[rank] == second[rank]]
    # On a busy machine, or in gloo, a rank may be stuck: then it is forked too.
    assert kept
    assert 2 not in kept
    assert back["kept"] == kept
    assert [event["cause"] for event in events(done, "stop")] == ["hang"]
    shown = f"in place, {name_ranks(kept)} kept their processes"
    assert shown in (done.dir / "blame-1.txt").read_text()
    assert not alive(first[2])


def uses_the_group(config: Any, struck: tuple[Fault, ...] = ()) -> dict[str, Any]:
    """A job whose ranks agree on something before they train."""
    torch.distributed.barrier()
    return faults.training(config, struck=struck)


def test_all_begin_anew_after_an_error_and_where_a_new_rank_cannot_go_alone(
    whole: Result[Any],
) -> None:
    struck = (kill(1, 10), Fault("raise", 1, 20, (1,)))
    done = train("restart.in_place=auto", struck=struck, job=uses_the_group)
    assert (done.values, losses(done)) == (whole.values, losses(whole))
    killed, raised = events(done, "restarted")
    why = "the job used torch.distributed before raydist.fit"
    # a rank that notices by itself that it has lost a peer is not asked
    assert killed["why_not_kept"].endswith((why, "it failed because it had lost a peer"))
    assert raised["why_not_kept"] == "rank 1 was not killed: raised"
    ran = pids(done)
    for number, back in enumerate((killed, raised)):
        assert "kept" not in back
        assert not {*ran[number].values()} & {*ran[number + 1].values()}
        assert back["why_not_kept"] in (done.dir / f"blame-{number + 1}.txt").read_text()


def stream(config: Any, struck: tuple[Fault, ...] = ()) -> dict[str, float]:
    """Train on a stream, which cannot go back."""

    class Numbers(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            draw = torch.Generator().manual_seed(1)
            while True:
                yield torch.randn(10, generator=draw), torch.randint(3, (), generator=draw)

    faults.add_faults(*struck)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 3))
    return raydist.fit(config, train=Numbers(), loss=faults.cross_entropy, model=model)


def test_a_stream_begins_anew_on_all_ranks() -> None:
    words = ("scale=1x2", "train.steps=20", "restart.in_place=auto")
    done = train(*words, struck=(kill(1, 10),), job=stream)
    assert losses(done) == losses(train(*words, job=stream))
    (back,) = events(done, "restarted")
    assert back["why_not_kept"]
    assert "kept" not in back


class Positions(nn.Module):
    """A model with a table that grows with its input and is in no checkpoint, as rotary ones."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > len(self.table):
            self.table = torch.arange(len(inputs)) / 100
        output: torch.Tensor = self.layer(inputs) + self.table[: len(inputs), None]
        return output


def growing(config: Any, struck: tuple[Fault, ...] = ()) -> dict[str, float]:
    """Train a model whose buffer has grown in the ranks that stay, not in a new one."""
    faults.add_faults(*struck)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 10), torch.randint(3, (256,)))
    return raydist.fit(config, train=data, loss=faults.cross_entropy, model=Positions())


def test_a_buffer_that_has_grown_begins_anew_on_all_ranks() -> None:
    words = ("scale=1x2", "train.steps=20", "restart.in_place=auto")
    done = train(*words, struck=(kill(1, 10),), job=growing)
    assert losses(done) == losses(train(*words, job=growing))
    (back,) = events(done, "restarted")
    assert "kept" not in back
    assert back["why_not_kept"].endswith(
        ("the buffer table of the model has changed its size", "it had lost a peer")
    )


class Block(nn.Module):
    """A block in which ranks are struck: in its forward pass at even steps, in backward at odd."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        step = context.current().step
        if step % 2 == 0:
            faults.strike(step)
        outputs: torch.Tensor = inputs + self.dropout(self.down(self.up(inputs).relu()))
        if step % 2 and outputs.requires_grad:
            outputs.register_hook(lambda gradient: faults.strike(step))  # type: ignore[no-untyped-call]
        return outputs


class Blocks(nn.Module):
    """A model that can be divided in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(10, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(16, 3)
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def get_input_embeddings(self) -> nn.Module:
        return self.first

    def get_output_embeddings(self) -> nn.Module:
        return self.last

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def divided(config: Any, struck: tuple[Fault, ...] = (), made: Any = Blocks) -> dict[str, Any]:
    """Train a model that is divided; return its final state to the last bit."""
    faults.add_faults(*struck)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 10, generator=generator)
    data = TensorDataset(inputs, torch.randint(3, (256,), generator=generator))
    torch.manual_seed(0)
    model = made()
    loss = nn.functional.cross_entropy
    figures = raydist.fit(config, train=data, test=data, loss=loss, model=model)
    state = {name: each for name, each in model.state_dict().items() if not each.is_meta}
    whole = {name: getattr(each, "full_tensor", lambda e=each: e)() for name, each in state.items()}
    weights = {name: each.tolist() for name, each in whole.items()}
    return {"figures": figures, "weights": weights, "random": torch.get_rng_state().tolist()}


@pytest.mark.parametrize(
    "words",
    [
        (
            "parallel=hsdp",
            "parallel.shard=2",
            "checkpoint.every=6",
            "train.gc=10",
            "train.loss_chunks=2",
        ),
        ("parallel=fsdp", "parallel.tp=2"),
        ("parallel=pp", "parallel.schedule=gpipe"),
    ],
    ids=" ".join,
)
def test_only_killed_ranks_of_a_divided_model_are_replaced(words: tuple[str, ...]) -> None:
    words = (*words, "optim=adamw", "train.steps=24")
    alone = train(*words, job=divided)
    struck = (
        kill(1, 10),
        kill(1, 0, 1),  # the new one, before its first step
        kill(0, 15, 2),
        kill(2, 20, 3),
        kill(3, 20, 3),  # two at once
        kill(0, 24, 4),  # in the evaluation after the last step
    )
    done = train("restart.in_place=on", *words, struck=struck, job=divided)
    assert done.status == "finished"
    assert (done.values, losses(done)) == (alone.values, losses(alone))
    replaced_alone(done, [{1}, {1}, {0}, {2, 3}, {0}])


def leave_out_bias(model: nn.Module, state: dict[str, Any], *more: Any) -> None:
    del state["last.bias"]


class Partly(Blocks):
    """A model that saves only a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last.bias.requires_grad_(False)
        self.register_state_dict_post_hook(leave_out_bias)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "struck",
    [(kill(1, 10),), (Fault("lose", 0, 10), kill(1, 10))],
    ids=["killed", "others fail first"],
)
def test_a_model_that_no_snapshot_has_whole_begins_anew_on_all_ranks(
    struck: tuple[Fault, ...],
) -> None:
    words = ("scale=1x2", "parallel=fsdp", "restart.in_place=auto", "train.steps=14")
    done = train(*words, struck=struck, job=divided, made=Partly)
    (back,) = events(done, "restarted")
    assert back["why_not_kept"].endswith("the model's state_dict leaves out last.bias")
    assert "kept" not in back


def test_a_run_that_may_not_continue_leaves_no_process() -> None:
    words = ("scale=1x2", "restart.in_place=on", "restart.max=1")
    with pytest.raises(raydist.RunFailed) as failed:
        train(*words, struck=(kill(1, 10), kill(1, 20, 1)))
    done = failed.value.result
    ran = pids(done)
    assert len(ran) == 2
    assert not [pid for each in ran for pid in each.values() if alive(pid)]
    assert str(done.checkpoint).endswith(("step-00000019", "step-00000020"))


def test_on_ray(whole: Result[Any], on_ray: Path) -> None:
    struck = (kill(2, 10), kill(2, 20, 1), kill(2, 30, 2))
    done = train("restart.in_place=on", "group=ray", struck=struck)
    assert (done.values, losses(done)) == (whole.values, losses(whole))
    assert [0, 1, 3] in [event.get("kept") for event in events(done, "restarted")]
