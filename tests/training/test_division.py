"""How a model is divided: the shape of the mesh, refusals, memory, blocks, heads and groups."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import raydist
from raydist.settings.compose import compose
from raydist.settings.config import (
    Backend,
    Data,
    Job,
    Optim,
    Parallel,
    Snapshot,
    Target,
    Train,
)
from raydist.settings.mesh import (
    MeshShape,
    check_microbatches,
    check_words,
    mesh_shape,
    microbatches,
)
from raydist.shared.errors import ConfigError
from raydist.tools import plan
from raydist.training.blocks import find_blocks
from raydist.training.gpt import GPT
from raydist.training.heads import check_heads
from raydist.training.memory import memory_of
from raydist.training.models import MLP, SmallCNN
from raydist.training.parallel import styles
from raydist.worker import context
from raydist.worker.torch_private import fake_tensors
from tests.losses import next_token
from tests.ranks import run_ranks, succeeded
from tests.training.test_parallel import BASE
from tests.training.test_sharded import memory

# The shape of the mesh


@pytest.mark.parametrize(
    ("settings", "ranks", "per_node", "shape"),
    [
        (Parallel(), 16, 8, (16, 1, 1)),
        (Parallel("fsdp"), 16, 8, (1, 16, 1)),
        (Parallel("hsdp"), 16, 8, (2, 8, 1)),
        (Parallel("tp"), 16, 8, (1, 2, 8)),
        (Parallel(shard=8), 16, 8, (2, 8, 1)),
        (Parallel(tp=2), 16, 8, (1, 8, 2)),
        (Parallel(replicate=2), 16, 8, (2, 8, 1)),
        (Parallel("hsdp", tp=2), 16, 8, (2, 4, 2)),
        (Parallel("fsdp", shard=4, tp=2), 16, 8, (2, 4, 2)),
        (Parallel("fsdp"), 1, 1, (1, 1, 1)),
        (Parallel(shard=1, tp=1), 4, 4, (4, 1, 1)),
        (Parallel("pp"), 16, 8, (1, 1, 1, 16)),
        (Parallel("pp", replicate=4), 16, 8, (4, 1, 1, 4)),
        (Parallel("pp", tp=2, shard=2), 16, 8, (1, 2, 2, 4)),
        (Parallel(pp=2), 16, 8, (8, 1, 1, 2)),
        (Parallel("fsdp", pp=2), 16, 8, (1, 8, 1, 2)),
        (Parallel("hsdp", pp=4), 32, 4, (2, 4, 1, 4)),
        (Parallel("hsdp", pp=4), 16, 8, (1, 4, 1, 4)),
        (Parallel("tp", pp=2), 16, 4, (1, 2, 4, 2)),
        (Parallel("pp"), 1, 1, (1, 1, 1, 1)),
    ],
)
def test_the_shape_follows_from_the_scale(
    settings: Parallel, ranks: int, per_node: int, shape: Any
) -> None:
    assert mesh_shape(settings, ranks, per_node) == MeshShape(*shape)


@pytest.mark.parametrize(
    ("settings", "ranks", "per_node", "right"),
    [
        (Parallel("fsdp", shard=3), 16, 8, "parallel.shard=2"),
        (Parallel("fsdp", shard=64), 16, 8, "parallel.shard=16"),
        (Parallel(shard=4, replicate=3), 16, 8, "parallel.replicate=null"),
        (Parallel(tp=3), 16, 8, "parallel.tp=2"),
        (Parallel(tp=16), 16, 8, "parallel.tp=8"),
        (Parallel(pp=3), 16, 8, "parallel.pp=2"),
        (Parallel(pp=16, tp=2), 16, 8, "parallel.pp=8"),
        (Parallel("fsdp", pp=2, shard=16), 16, 8, "parallel.shard=8"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    settings: Parallel, ranks: int, per_node: int, right: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        mesh_shape(settings, ranks, per_node)
    assert refused.value.suggestion == right


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("scale=1x4 parallel.shard=3", "parallel.shard=2"),
        ("parallel=fsdp scale=2x8 parallel.tp=16", "parallel.tp=8"),
        ("parallel=pp parallel.pp=3 scale=2x2", "parallel.pp=2"),
        (
            "scale=1x8 parallel.shard=2 parallel.replicate=2 parallel.tp=4",
            "parallel.replicate=null",
        ),
        # with these a file, or what follows from the rest, decides
        ("scale=1x8 parallel.shard=2 parallel.tp=2", ""),
        ("scale=1x4 parallel.shard=3 scale.per_node=3", ""),
        ("parallel.shard=3 scale=cluster", ""),
        ("parallel.shard=2,3 scale=1x4", ""),
        ("parallel.shard=0 scale=1x4", ""),
    ],
)
def test_words_that_cannot_fit_are_refused_before_the_job_is_composed(
    words: str, right: str
) -> None:
    if not right:
        check_words(words.split())
        return
    with pytest.raises(ConfigError) as refused:
        check_words(words.split())
    assert refused.value.suggestion == right
    with pytest.raises(ConfigError, match=f"^{re.escape(str(refused.value))}$"):
        compose(["job=gpt", *words.split()])


def test_a_wrong_product_is_refused_without_composing() -> None:
    text = (
        "import sys; from raydist import train; print(train.main(sys.argv[1:]), 'hydra' in "
        "sys.modules)"
    )
    command = [sys.executable, "-c", text, "parallel.shard=3", "scale=1x4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "2 False\n"
    assert ended.stderr.startswith(
        "error: parallel.shard=3: replicate 1 x shard 3 x tp 1 are not the 4 ranks"
    )


@pytest.mark.parametrize(
    ("settings", "data", "right"),
    [
        (Parallel(pp=2), Data(batch_size=7), "data.batch_size=8"),
        (Parallel(pp=2), Data(global_batch=18), "data.global_batch=16"),
        (Parallel(pp=2, microbatches=4), Data(batch_size=8), ""),
        (Parallel(pp=4, microbatches=2), Data(batch_size=8), "parallel.microbatches=4"),
        (Parallel(pp=4, microbatches=2, schedule="gpipe"), Data(batch_size=8), ""),
        (Parallel("fsdp", microbatches=2), Data(batch_size=7), ""),
    ],
)
def test_a_batch_that_cannot_be_split_into_microbatches_is_refused(
    settings: Parallel, data: Data, right: str
) -> None:
    job, shape = replace(BASE, parallel=settings, data=data), mesh_shape(settings, 8, 8)
    if not right:
        check_microbatches(job, shape)
        return
    with pytest.raises(ConfigError) as refused:
        check_microbatches(job, shape)
    assert refused.value.suggestion == right


@pytest.mark.parametrize(
    ("settings", "data", "accumulate", "count"),
    [
        (Parallel("pp"), Data(batch_size=64), 1, 32),
        (Parallel("pp"), Data(batch_size=32), 1, 16),  # of two samples each, not 32 of one
        (Parallel(pp=4), Data(batch_size=24), 1, 12),
        (Parallel(pp=4), Data(global_batch=64), 1, 16),  # 32 for each of two pipelines
        (Parallel(pp=4), Data(global_batch=64), 4, 4),
        (Parallel(pp=4), Data(batch_size=12), 1, 6),
        (Parallel(pp=4), Data(batch_size=4), 1, 4),
        (Parallel(pp=4, microbatches=4), Data(batch_size=64), 1, 4),
    ],
)
def test_microbatches_by_default(
    settings: Parallel, data: Data, accumulate: int, count: int
) -> None:
    job = replace(BASE, parallel=settings, data=data, train=Train(accumulate=accumulate))
    shape = mesh_shape(settings, 8, 8)
    assert microbatches(job, shape) == count
    check_microbatches(job, shape)


# The memory of a rank


@pytest.mark.parametrize(
    ("settings", "optim", "trained", "frozen", "states"),
    [
        (
            Parallel("fsdp"),
            Optim("adamw"),
            2 * 2 * 5 + 3,
            3 * 8,
            2,
        ),  # of 8 rows 2 each, of 9 rows 3
        (Parallel("hsdp", shard=2), Optim("sgd"), 2 * 4 * 5 + 5, 5 * 8, 0),
        (
            Parallel("fsdp", tp=2),
            Optim("sgd", args={"momentum": 0.9}),
            2 * (4 * 5) // 2 + 5,
            5 * 8,
            1,
        ),
    ],
)
def test_the_memory_of_a_rank(
    settings: Parallel, optim: Optim, trained: int, frozen: int, states: int
) -> None:
    model: Any = nn.Sequential(
        nn.Linear(5, 8, bias=False), nn.Linear(8, 9), nn.Linear(5, 8, bias=False)
    )
    model[1].weight.requires_grad = False
    model.tp_plan = {"0": "colwise", "2": "colwise"}
    shape = mesh_shape(settings, 4, 4)
    assert memory_of(model, replace(BASE, parallel=settings, optim=optim), shape) == {
        "parameters": 4 * (trained + frozen),
        "gradients": 4 * trained,
        optim.name: 4 * trained * states,
        "gathered": 4 * (8 * 9 + 9) // shape.tp,
        "sent": 2 * 4 * (5 * 8) // shape.tp,
    }


def test_the_memory_of_the_largest_stage() -> None:
    with torch.device("meta"):
        model = GPT(layers=3, width=16, heads=2, kv_heads=1, hidden=40)
    block = sum(value.nbytes for value in model.blocks[0].parameters())
    largest = 2 * block + 4 * (
        16 + 256 * 16
    )  # two blocks of three, the last norm and the tied embedding
    job = replace(BASE, parallel=Parallel("fsdp", pp=2), optim=Optim("adamw"))
    memory = memory_of(model, job, mesh_shape(job.parallel, 8, 8))
    # for all micro-batches of a step a rank has the stage and its gradients whole
    assert memory == {
        "parameters": largest / 4, "gradients": largest / 4, "adamw": largest / 2, "gathered": 2 * largest, "sent": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings", [Parallel("fsdp"), Parallel(shard=2, tp=2), Parallel("fsdp", pp=2)]
)
def test_the_memory_is_that_of_real_ranks(settings: Parallel, tmp_path: Path) -> None:
    sizes: Any = {
        "layers": 3,
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 90 if settings.tp is None else 92,
    }
    job = replace(BASE, parallel=settings, train=Train(steps=1))

    def held(job: Job) -> dict[str, int]:
        sizes_of: dict[str, int] = {}

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            own = [value for group in optimizer.param_groups for value in group["params"]]
            sizes_of["parameters"] = sum(local(value).nbytes for value in own)
            sizes_of["gradients"] = sum(local(value.grad).nbytes for value in own)
            states = [
                local(each) for of_one in optimizer.state.values() for each in of_one.values()
            ]
            sizes_of["adamw"] = sum(
                each.nbytes for each in states if each.dim()
            )  # not the count of steps

        register_optimizer_step_post_hook(look)
        text = torch.arange(24 * 8, dtype=torch.uint8).view(24, 8)
        raydist.fit(job, model=GPT(**sizes), train=TensorDataset(text, text), loss=next_token)
        return sizes_of

    results = succeeded(run_ranks(4, job, held, tmp_path))
    with torch.device("meta"):
        model = GPT(**sizes)
    planned = memory_of(model, job, mesh_shape(settings, 4, 4))
    largest = max((one.value for one in results), key=lambda sizes_of: sum(sizes_of.values()))
    assert largest == {name: planned[name] for name in largest}


def between_passes(model: nn.Module) -> int:
    """Return the bytes of gradients that this rank holds now: of its shards, and of whole
    parameters."""
    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # torch 2.8 has one
            groups += [state._fsdp_param_group] if several is None else several
    whole = [each.unsharded_accumulated_grad for group in groups for each in group.fsdp_params]
    shards = [local(value.grad) for value in model.parameters() if value.grad is not None]
    partial = [
        group._partial_reduce_output for group in groups
    ]  # of a copy, before copies are averaged
    return sum(each.nbytes for each in (*whole, *shards, *partial) if each is not None)


@pytest.mark.parametrize("settings", [Parallel("fsdp"), Parallel("hsdp", shard=2)])
def test_gradients_stay_in_shards_between_the_passes_of_a_step(
    settings: Parallel, tmp_path: Path
) -> None:
    sizes: Any = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 90}
    job = replace(BASE, parallel=settings, train=Train(steps=2, accumulate=3, precision="bf16"))

    def held(job: Job) -> list[int]:
        model, seen = GPT(**sizes), list[int]()

        def noting(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            seen.append(between_passes(model))
            return next_token(scores, following)

        text = torch.arange(24 * 8, dtype=torch.uint8).view(24, 8)
        raydist.fit(job, model=model, train=TensorDataset(text, text), loss=noting)
        return seen

    results = succeeded(run_ranks(4, job, held, tmp_path))
    with torch.device("meta"):
        planned = memory_of(GPT(**sizes), job, mesh_shape(settings, 4, 4))["gradients"]
    assert {one.value[0] for one in results} == {0}
    most = max(max(one.value) for one in results)
    assert 0 < most <= planned


def local(value: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def test_the_activations_are_those_that_forward_passes_keep() -> None:
    model, kept = GPT(layers=4, width=32, heads=4, kv_heads=2, hidden=96), dict[int, torch.Tensor]()

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model(model.example(6, context=16))
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    real = sum(value.untyped_storage().nbytes() for at, value in kept.items() if at not in own)

    def planned(settings: Parallel, precision: str = "fp32") -> int:
        job = replace(
            BASE,
            parallel=settings,
            train=Train(precision=precision),
            job=Target(args={"context": 16}),
        )
        with fake_tensors():
            model = GPT(layers=4, width=32, heads=4, kv_heads=2, hidden=96)
            return memory_of(model, job, mesh_shape(settings, 4, 4))["activations"]

    assert planned(Parallel("fsdp")) == real  # of 24 samples 6 are this rank's
    assert real / 2 < planned(Parallel("fsdp"), "bf16") < real
    one_of_four = planned(
        Parallel(pp=4, microbatches=12)
    )  # 4 of 12 parts of 24 samples are on their way
    assert real / 4 / 6 * 8 == pytest.approx(one_of_four, rel=0.3)
    gpipe = planned(Parallel(pp=4, microbatches=12, schedule="gpipe"))  # all 12, of the last stage
    assert gpipe == pytest.approx(3 * one_of_four, rel=0.2)


def test_the_plan_says_the_memory_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "job=gpt",
        "model.size=8b",
        "model.vocab=128256",
        "model.tied=false",
        "parallel=fsdp",
        "scale=1x8",
    ]
    assert plan.main([*words, "group=inline", "backend=gloo", "train.precision=bf16"]) == 0
    # 8.03e9 parameters in fp32 on 8 ranks; the last layer and a block in bf16, the gradient of the
    # scores, and that of the last layer with its copy
    output = capsys.readouterr().out
    begin, end = r"parameters 3.74 \+ adamw 7.48 \+ gathered 1.38", r"loss 0.98 \+ sent 3.91"
    found = re.search(
        rf"{begin} \+ activations (\S+) \+ {end} = (\S+) GiB at the peak on each rank\n", output
    )
    assert found, output
    rest = 3.74 + 7.48 + 1.38 + 0.98 + 3.91
    assert float(found[2]) == pytest.approx(rest + float(found[1]), abs=0.03)
    assert plan.main(["job=gpt", "parallel=fsdp", "scale=1x2", "group=inline"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"parameters [1-9]\.\d\d \+ .* = \d+\.\d\d MiB at the peak", output), output


# Blocks, heads and groups


class Named(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.more = (
            Layer(),
            Layer(),
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "named", "blocks"),
    [
        (Named(), "", ["Layer", "Layer"]),
        (Named(), "Linear", ["Linear"] * 6),
        (MLP(), "", ["Linear", "Linear"]),
        (SmallCNN(), "", ["Conv2d", "Conv2d"]),
        (GPT(layers=3, width=16), "", ["Block"] * 3),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(Layer(), Layer())), "",
         ["Linear", "Linear", "Layer", "Layer"]),
    ],
)  # fmt: skip
def test_the_blocks_of_a_model(model: nn.Module, named: str, blocks: list[str]) -> None:
    assert [type(each).__name__ for each in find_blocks(model, named)] == blocks


def test_a_model_without_blocks_or_plan_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no class repeats .* set parallel\.blocks=CLASS or parallel=ddp \(known: Lin",
    ):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(
        ConfigError, match=r"parallel\.blocks=Linaer: .* did you mean parallel\.blocks=Linear"
    ):
        find_blocks(MLP(), "Linaer")
    with pytest.raises(ConfigError, match=r"parallel\.tp: MLP has no plan"):
        styles(MLP())
    for layers, words in (
        ({"head": "colwise"}, "no module has this name"),
        ({"1": "colwsie"}, "did you mean .*colwise"),
    ):
        model: Any = MLP()
        model.tp_plan = layers
        with pytest.raises(ConfigError, match=words):
            styles(model)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "right"),
    [
        (8, 4, 4, ""),
        (8, 2, 4, "parallel.tp=2"),
        (6, 6, 4, "parallel.tp=2"),
        (9, 3, 2, "parallel.tp=1"),
    ],
)
def test_heads_that_the_ranks_of_a_tp_group_cannot_share_are_refused(
    heads: int, kv_heads: int, tp: int, right: str
) -> None:
    named: Any = nn.Module()  # as Hugging Face's models name them
    named.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    for model in (GPT(layers=2, width=16 * heads, heads=heads, kv_heads=kv_heads), named):
        if not right:
            check_heads(model, tp)
            continue
        with pytest.raises(ConfigError) as refused:
            check_heads(model, tp)
        assert (refused.value.key, refused.value.value, refused.value.suggestion) == (
            "parallel.tp",
            tp,
            right,
        )
    own: Any = GPT(layers=2, width=16 * heads, heads=heads, kv_heads=kv_heads)
    own.tp_plan = {"blocks.*.feed_forward.up": "colwise", "blocks.*.feed_forward.down": "rowwise"}
    check_heads(own, tp)  # its attention stays whole


@pytest.mark.parametrize(
    ("settings", "ranks"), [(Parallel("pp"), 3), (Parallel("tp", tp=2, pp=2), 4)]
)
def test_every_rank_makes_every_group_with_the_timeout_of_the_backend(
    settings: Parallel, ranks: int, tmp_path: Path
) -> None:
    """Those of the mesh, of tied weights in the first and last stage, of the snapshots."""

    def groups(job: Job) -> Any:
        here = context.current()
        here.memory = memory(), -1
        text = torch.arange(96, dtype=torch.uint8).view(12, 8)
        model = GPT(layers=3, width=16, heads=2, kv_heads=2, hidden=32)
        raydist.fit(job, model=model, train=TensorDataset(text, text), loss=next_token)
        world: Any = dist.distributed_c10d._world
        backends = [group._get_backend(torch.device("cpu")) for group in world.pg_map]
        return world.group_count, [each.options._timeout.total_seconds() for each in backends]

    job = replace(
        BASE, backend=Backend("gloo", timeout_s=77), parallel=settings, data=Data(batch_size=6)
    )
    results = succeeded(
        run_ranks(
            ranks,
            replace(job, snapshot=Snapshot(1), train=Train(steps=2)),
            groups,
            tmp_path,
        )
    )
    assert len({names for names, _ in (one.value for one in results)}) == 1
    for one in results:
        limits = one.value[1]
        assert len(limits) > 2
        assert {*limits} == {77}
