"""A model divided among ranks: the same training under every `parallel=`, and from one division to
another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.config import (
    Backend,
    Checkpoint,
    Data,
    Job,
    Optim,
    Parallel,
    Snapshot,
    Train,
)
from raydist.state.checkpoint_files import saved_at
from raydist.training.evaluation import accuracy
from raydist.training.gpt import GPT, Block
from raydist.training.models import SmallCNN
from raydist.worker import context
from tests.conftest import ROOT
from tests.losses import next_token
from tests.ranks import RankResult, run_ranks, succeeded
from tests.training.test_sharded import memory

STEPS = 12
BASE = Job(
    backend=Backend("gloo"),
    data=Data(global_batch=24),
    optim=Optim("adamw", lr=0.005, warmup=5),
    train=Train(steps=STEPS, clip=0.5),
    checkpoint=Checkpoint(every=4, keep=9),
    seed=5,
)
FSDP = Parallel("fsdp")
PP = Parallel(pp=2, microbatches=2)


def digits(job: Job) -> dict[str, float]:
    """Train a small CNN on digits; 43 test samples are not the same number on each rank."""
    data = load_digits()
    images, labels = (
        torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1),
        torch.tensor(data.target),
    )
    torch.manual_seed(raydist.rank().rank)  # the parameters are rank 0's
    model: Any = SmallCNN(width=8)
    model.tp_plan = {"classify.2": "colwise_rep"}
    train, test = (
        TensorDataset(images[part], labels[part]) for part in (slice(400), slice(1000, 1043))
    )
    return raydist.fit(
        job,
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
    )


def lines_of_bytes() -> TensorDataset:
    """64 inputs of 32 bytes, each with the bytes that follow its own."""
    text = torch.randint(
        256, (2049,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    )
    return TensorDataset(text[:2048].view(64, 32), text[1:].view(64, 32))


def gpt(job: Job) -> dict[str, float]:
    train = lines_of_bytes()
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=4, kv_heads=2, hidden=96)
    return raydist.fit(job, model=model, train=train, loss=noted_loss)


TYPES = set[torch.dtype]()
"""Of the scores."""


def types_since() -> set[torch.dtype]:
    """Return the types since the last call."""
    new = {*TYPES}
    TYPES.clear()
    return new


def noted_loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    TYPES.add(scores.dtype)
    return next_token(scores, following)


def common_losses(results: list[RankResult]) -> list[float]:
    """Return the loss of each step, which is the mean over the ranks, and so the same on all."""
    losses = results[0].losses
    assert [one.losses for one in results] == [losses] * len(results)
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@cache
def trained(
    folder: Path, name: str, settings: Parallel, ranks: int = 4
) -> tuple[list[Any], list[list[float]]]:
    """Train both models on these ranks; return the figures of fit and the losses of each model."""

    def both(job: Job) -> list[Any]:
        here, figures = context.current(), []
        for train in (digits, gpt):
            here.rank = replace(here.rank, run_dir=folder / name / train.__name__)
            here.newest = here.fits = 0  # each training is the first of its run
            figures.append(train(job))
        return figures

    results = succeeded(run_ranks(ranks, replace(BASE, parallel=settings), both, folder / name))
    losses = common_losses(results)
    return results[0].value, [losses[:STEPS], losses[STEPS:]]


# The same losses under every division


@pytest.mark.parametrize(
    ("name", "settings", "alone"),
    [
        ("fsdp", Parallel("fsdp"), 4),
        ("hsdp", Parallel("hsdp", shard=2), 4),
        ("pp", PP, 4),  # two micro-batches of a rank are the batches of two ranks
        (
            "tp",
            Parallel(tp=2),
            2,
        ),  # with two ranks to a sample, batch norm sees the samples of two ranks of ddp
    ],
)
def test_the_losses_are_those_of_ddp(
    folder: Path, tmp_path: Path, name: str, settings: Parallel, alone: int
) -> None:
    figures, wanted = trained(folder, f"ddp{alone}", Parallel(), alone)
    values, losses = trained(folder, name, settings)
    for one, other in zip(losses, wanted, strict=True):
        assert len(one) == STEPS
        assert one[-1] < one[0]
        assert one == pytest.approx(other, abs=1e-6)
    at = folder / name / "digits" / "checkpoints" / f"step-{STEPS:08d}"
    assert saved_at(at).reported["loss"] == saved_at(at).metrics["loss"]
    if (
        name == "pp"
        # its batch norm averages over two batches a step: what evaluates its checkpoint has the
        # same
    ):
        (alone_told,) = succeeded(run_ranks(1, BASE, digits, tmp_path, {"RAYDIST_RESUME": str(at)}))
        figures = [alone_told.value]
    assert values[0]["accuracy"] == figures[0]["accuracy"]
    assert values[0]["test_loss"] == pytest.approx(figures[0]["test_loss"], abs=1e-5)


def test_a_fused_optimizer_takes_shards(folder: Path, tmp_path: Path) -> None:
    _, (_, wanted) = trained(folder, "ddp4", Parallel(), 4)
    fused = replace(BASE.optim, fused=True)
    train = replace(BASE.train, steps=4)
    job = replace(BASE, parallel=Parallel(shard=2, tp=2), optim=fused, train=train)
    losses = common_losses(succeeded(run_ranks(4, job, gpt, tmp_path)))
    assert losses == pytest.approx(wanted[:4], abs=1e-5)


LEVERS = {
    # the steps of sgd depend on the norm of the gradients; those of adamw do not
    "clip": replace(BASE, optim=Optim("sgd", lr=0.5), train=Train(steps=6, clip=0.1, accumulate=2)),
    "unclipped": replace(BASE, optim=Optim("sgd", lr=0.5), train=Train(steps=6)),
    # these gradients are far below the limit
    "bf16": replace(
        BASE, optim=Optim("sgd", lr=0.5), train=Train(steps=6, clip=1e3, precision="bf16")
    ),
}


@cache
def levered(
    folder: Path, name: str, settings: Parallel, levers: tuple[str, ...]
) -> dict[str, tuple[list[float], Any]]:
    """Train gpt on four ranks with each lever; return its losses and the types of the outputs of
    its layers."""

    def each(job: Job) -> list[Any]:
        here, seen = context.current(), []
        for lever in levers:
            here.rank, kinds = replace(here.rank, run_dir=folder / name / lever), set[Any]()
            with noted(kinds) if lever == "bf16" else nullcontext():
                gpt(replace(LEVERS[lever], parallel=settings))
            seen.append((kinds, types_since()))
        return seen

    results = succeeded(run_ranks(4, replace(BASE, parallel=settings), each, folder / name))
    losses = iter(common_losses(results))
    return {
        lever: (list(islice(losses, LEVERS[lever].train.steps)), seen)
        for lever, seen in zip(levers, results[-1].value, strict=True)  # a rank with the loss
    }


@contextmanager
def noted(kinds: set[Any]) -> Iterator[None]:
    """Inside the block the types of what each class of modules gives are noted."""

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        kinds.add((type(module).__name__, output.dtype))

    hook = nn.modules.module.register_module_forward_hook(note)
    yield
    hook.remove()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fsdp", Parallel("fsdp")), ("tp", Parallel(tp=2)), ("pp", Parallel(pp=2))],
)
def test_clip_accumulate_and_bf16_do_what_they_do_under_ddp(
    folder: Path, name: str, settings: Parallel
) -> None:
    wanted = levered(folder, "ddp-levers", Parallel(), ("clip", "unclipped", "bf16"))
    values = levered(folder, f"{name}-levers", settings, ("clip", "bf16"))
    assert values["clip"][0] == pytest.approx(wanted["clip"][0], abs=1e-6)
    assert values["clip"][0][-1] > wanted["unclipped"][0][-1] + 0.01
    for losses, (kinds, _) in (values["bf16"], wanted["bf16"]):
        assert losses == pytest.approx(wanted["bf16"][0], abs=0.01)
        assert ("FeedForward", torch.bfloat16) in kinds
    assert values["bf16"][1][1] == {torch.float32}  # what loss gets


def test_blocks_are_compiled_one_by_one_in_a_stage_too(folder: Path, tmp_path: Path) -> None:
    """By dynamo; the code generator behind it, which takes long, is not what differs here."""

    def compiled(job: Job) -> int:
        torch.compile = partial(torch.compile, backend="eager")
        gpt(job)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    job = replace(
        BASE, parallel=Parallel("fsdp", pp=2), train=replace(BASE.train, steps=4, compile=True)
    )
    results = succeeded(run_ranks(4, job, compiled, tmp_path))
    assert all(one.value for one in results)
    _, (_, wanted) = trained(folder, "ddp4", Parallel(), 4)
    assert common_losses(results) == pytest.approx(wanted[:4], abs=1e-5)


PLAIN = """
import json, sys
import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from raydist.training.gpt import GPT, Block
for path in sys.argv[1:]:
    model = GPT(layers=2, width=32, heads=4, kv_heads=2, hidden=96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    text = torch.arange(64)[None] % 256
    print(json.dumps([model(text).square().mean().item(), int(optimizer.state[model.norm.weight]["step"])]))
"""


# From one division to another


def resumed(
    ranks: int, settings: Parallel, checkpoint: Path, to: Path, steps: int = STEPS
) -> list[float]:
    job = replace(BASE, parallel=settings, train=replace(BASE.train, steps=steps))
    return common_losses(
        succeeded(run_ranks(ranks, job, gpt, to, {"RAYDIST_RESUME": str(checkpoint)}))
    )


def test_a_state_in_shards_goes_on_with_any_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    _, (_, whole) = trained(folder, "fsdp", Parallel("fsdp"))
    at, losses = folder / "fsdp" / "gpt", whole[:4]
    for begin, ranks, end in ((4, 3, 8), (8, 4, STEPS)):
        to = tmp_path / str(ranks)
        losses = losses + resumed(
            ranks, Parallel("fsdp"), at / "checkpoints" / f"step-{begin:08d}", to, end
        )
        at = to
    assert len(losses) == STEPS
    assert losses == pytest.approx(whole, abs=1e-5)


def in_memory(
    memories: list[int],
    to: Path,
    end: int,
    restart: int,
    settings: Parallel = FSDP,
    per_node: int = 1,
    train: Callable[[Job], Any] = gpt,
    optim: Optim = BASE.optim,
) -> list[float]:
    """Run an attempt of ranks on nodes of so many, each with this memory, to the end of a step;
    return the losses."""

    def attempt(job: Job) -> Any:
        here = context.current()
        me = here.rank.rank
        here.memory = os.open(f"/proc/{pid}/fd/{memories[me]}", os.O_RDWR), -1
        here.rank = context.Rank(
            me, me % per_node, me // per_node, here.rank.world_size, per_node, run_dir=to
        )
        return train(job)

    pid, job = os.getpid(), replace(BASE, parallel=settings, snapshot=Snapshot(1), optim=optim)
    job = replace(job, train=replace(BASE.train, steps=end))
    env = {"RAYDIST_RESUME": "", "TORCHELASTIC_RESTART_COUNT": str(restart)}
    return common_losses(succeeded(run_ranks(len(memories), job, attempt, to, env)))


def test_a_state_in_shards_goes_on_from_memory_with_any_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    _, (_, whole) = trained(folder, "fsdp", Parallel("fsdp"))
    a, b, c, d, e, f = (memory() for _ in range(6))
    losses = in_memory([a, b, c, d], tmp_path / "four", 3, 0)
    for restart, (memories, end) in enumerate(
        (([a, c, d], 6), ([c, d], 9), ([e, c, f, d], STEPS)), 1
    ):
        losses = losses + in_memory(memories, tmp_path / str(end), end, restart)
    assert len(losses) == STEPS
    assert losses == pytest.approx(whole, abs=1e-5)


def test_under_tp_it_goes_on_from_memory_too(folder: Path, tmp_path: Path) -> None:
    """Under hsdp: tests/training/test_ends.py."""
    settings, memories = Parallel(tp=2), [memory() for _ in range(4)]
    _, (_, whole) = trained(folder, "tp", settings)
    losses = in_memory(memories, tmp_path / "begin", 3, 0, settings, 4)
    assert losses + in_memory(memories, tmp_path / "end", 6, 1, settings, 4) == whole[:6]


class Unused(GPT):
    """A GPT with a layer that its forward never uses, as the head of another task."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=32, heads=4, kv_heads=2, hidden=96)
        self.never = nn.Linear(4, 6)


def unused(job: Job) -> dict[str, float]:
    train = lines_of_bytes()
    torch.manual_seed(0)
    return raydist.fit(job, model=Unused(), train=train, loss=next_token)


@pytest.mark.parametrize(
    ("train", "optim"),
    [
        (gpt, Optim("sgd", lr=0.5)),
        (unused, Optim("sgd", 0.1, {"momentum": 0.9})),
    ],
    ids=["no-state", "momentum"],
)
def test_what_has_no_state_in_the_optimizer_goes_on_too(
    train: Callable[[Job], Any], optim: Optim, tmp_path: Path
) -> None:
    """From the memory of as many ranks, and of fewer; from the disk, in shards and whole."""
    job = replace(
        BASE,
        optim=optim,
        parallel=FSDP,
        train=replace(BASE.train, steps=6),
        checkpoint=Checkpoint(every=2, keep=9),
    )
    whole = common_losses(succeeded(run_ranks(2, job, train, tmp_path / "whole")))
    a, b = memory(), memory()
    losses = in_memory([a, b], tmp_path / "begin", 2, 0, train=train, optim=optim)
    losses += in_memory([a, b], tmp_path / "same", 4, 1, train=train, optim=optim)
    assert losses == whole[:4]
    assert in_memory([b], tmp_path / "one", 6, 2, train=train, optim=optim) == pytest.approx(
        whole[4:], abs=1e-5
    )
    at = {"RAYDIST_RESUME": str(tmp_path / "whole" / "checkpoints" / "step-00000004")}
    for name, ranks, settings in (("shards", 2, FSDP), ("alone", 1, Parallel())):
        results = succeeded(
            run_ranks(ranks, replace(job, parallel=settings), train, tmp_path / name, at)
        )
        assert common_losses(results) == pytest.approx(whole[4:], abs=1e-5)


def test_a_state_in_shards_goes_on_under_another_division(folder: Path, tmp_path: Path) -> None:
    _, (_, whole) = trained(folder, "fsdp", Parallel("fsdp"))
    _, (_, divided) = trained(folder, "tp", Parallel(tp=2))
    at = folder / "fsdp" / "gpt" / "checkpoints" / "step-00000008"
    assert resumed(4, Parallel("fsdp"), at, tmp_path / "same") == whole[8:]
    assert resumed(1, Parallel(), at, tmp_path / "one") == pytest.approx(whole[8:], abs=1e-5)
    at = folder / "tp" / "gpt" / "checkpoints" / "step-00000008"
    assert resumed(4, Parallel("fsdp"), at, tmp_path / "from-tp") == pytest.approx(
        divided[8:], abs=1e-5
    )


def test_a_pipeline_goes_on_under_another_division(folder: Path, tmp_path: Path) -> None:
    _, (_, whole) = trained(folder, "pp", PP)
    at = folder / "pp" / "gpt" / "checkpoints" / "step-00000008"
    for name, ranks, settings in (
        ("tp", 4, Parallel(pp=2, tp=2, microbatches=4)),
        ("shard", 4, Parallel("fsdp", pp=2, schedule="gpipe")),
        ("fsdp", 2, Parallel("fsdp")),
    ):
        assert resumed(ranks, settings, at, tmp_path / name) == pytest.approx(whole[8:], abs=1e-5)
    results = run_ranks(
        2, replace(BASE, parallel=Parallel("pp")), digits, tmp_path, {"RAYDIST_RESUME": str(at)}
    )
    assert all("this state does not fit the model" in one.error for one in results)


def on_torch_2_8(job: Job) -> tuple[int, dict[str, float]]:
    """Train with a schedule that refuses fewer micro-batches than stages, as that of torch 2.8."""
    refused = list[int]()

    class Schedule(pipelining.ScheduleGPipe):
        def __init__(self, stage: Any, n_microbatches: int) -> None:
            if n_microbatches < stage.num_stages:
                refused.append(n_microbatches)
                raise ValueError("n_microbatches must be at least the number of stages")
            super().__init__(stage, n_microbatches)

    library: Any = pipelining
    library.ScheduleGPipe = Schedule
    figures = digits(job)
    return len(refused), figures


def test_torch_2_8_evaluates_batches_that_cannot_be_split(tmp_path: Path) -> None:
    job = replace(BASE, parallel=PP, train=Train(steps=2))
    values = [
        [one.value for one in succeeded(run_ranks(2, job, train, tmp_path / train.__name__))]
        for train in (digits, on_torch_2_8)
    ]
    assert [figures for _, figures in values[1]] == values[0]
    assert all(refused for refused, _ in values[1])


def test_plain_torch_loads_it_in_one_process(folder: Path) -> None:
    trained(folder, "tp", Parallel(tp=2))
    trained(folder, "pp", PP)
    trained(folder, "fsdp", Parallel("fsdp"))
    saved = [
        str(folder / name / "gpt" / "checkpoints" / "step-00000012")
        for name in ("fsdp", "tp", "pp")
    ]
    ended = subprocess.run(
        [sys.executable, "-c", PLAIN, *saved], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    (one, steps), *others = map(json.loads, ended.stdout.splitlines())
    assert steps == STEPS
    assert [other for other, _ in others] == pytest.approx([one, one], rel=1e-4)


# A model on meta


def whole_blocks(model: GPT) -> list[int]:
    """Return a list to which the number of undivided blocks is added each time that a block is made
    in this rank."""
    reset, whole = Block.reset_parameters, list[int]()

    def counted(block: Block) -> None:
        ups = [each.feed_forward.up.weight for each in model.blocks]  # type: ignore[union-attr]
        whole.append(sum(not up.is_meta and not hasattr(up, "full_tensor") for up in ups))
        reset(block)

    Block.reset_parameters = counted  # type: ignore[assignment, method-assign]
    return whole


def test_a_model_on_meta_is_made_block_by_block(tmp_path: Path) -> None:
    def peaks(job: Job) -> Any:
        with torch.device("meta"):
            model = GPT(layers=3, width=32, heads=4, kv_heads=2, hidden=96)
        whole = whole_blocks(model)
        text = torch.arange(64, dtype=torch.uint8).view(2, 32)
        raydist.fit(job, model=model, train=TensorDataset(text, text), loss=next_token)
        values = {name: value.full_tensor().detach() for name, value in model.named_parameters()}  # type: ignore[attr-defined]
        return max(whole), values

    job = replace(BASE, parallel=Parallel("fsdp"), train=Train(steps=1), data=Data(global_batch=2))
    one, two = succeeded(run_ranks(2, replace(job, optim=Optim("sgd", 1e-9)), peaks, tmp_path))
    (most, values), (_, others) = one.value, two.value
    assert most == 1
    assert all(torch.equal(values[name], others[name]) for name in values)
    for name, spread in (
        ("embedding.weight", 0.02),
        ("blocks.2.attention.out.weight", 0.02 / 6**0.5),
    ):
        assert float(values[name].std()) == pytest.approx(spread, rel=0.1)
    assert float(values["norm.weight"].mean()) == 1
    assert not torch.equal(
        values["blocks.0.attention.out.weight"], values["blocks.1.attention.out.weight"]
    )


def test_a_whole_state_goes_on_in_shards(folder: Path, tmp_path: Path) -> None:
    """Of four ranks of ddp under fsdp; of two under tp, which has other generators then."""
    for name, ranks, settings in (("ddp4", 4, Parallel("fsdp")), ("ddp2", 2, Parallel(tp=2))):
        _, (_, whole) = trained(folder, name, Parallel(), ranks)
        at = folder / name / "gpt" / "checkpoints" / "step-00000008"
        assert resumed(4, settings, at, tmp_path / name) == pytest.approx(whole[8:], abs=1e-5)
