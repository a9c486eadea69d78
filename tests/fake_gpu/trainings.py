"""Jobs of the tests on fake GPUs: `job=…/tests/fake_gpu/trainings.py:NAME`."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import raydist
from bench import keeping, recovery
from raydist.state.device import CudaMark
from raydist.state.snapshot import SnapshotBuffer
from raydist.training.snapshotter import Snapshotter
from raydist.worker import context
from tests import faults
from tests.faults import kill


def samples(width: int) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(256, width), torch.randint(3, (256,)))


def replicas(config: Any, struck: int = 0, alongside: Sequence[int] = ()) -> None:
    """Train copies of a model, kill rank 1 after so many steps, report the sum of its weights.

    `alongside`: the states of which steps, of the first attempt, are still copied in the forward
    pass of the next step."""
    faults.add_faults(*[kill(1, struck)] * (struck > 0))
    data = samples(10)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    copied = list[int]()

    def note_copies() -> None:
        here = context.current()
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if here.rank.rank > 0 or here.memory is None or not first:
            return  # other ranks have generators only, which are on the host
        if (
            here.step in range(2, struck, 2)
            and here.step not in SnapshotBuffer(here.memory[0]).steps
        ):
            copied.append(here.step)
        assert here.step < struck - 1 or copied == [*alongside]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if alongside:
            note_copies()
        return faults.cross_entropy(output, target)

    raydist.fit(config, train=data, loss=loss, model=model)
    weights = torch.cat([whole(each).flatten() for each in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    assert all(torch.equal(weights, each) for each in others), "the weights of two ranks differ"
    raydist.report(weights=weights.double().sum().item())


def whole(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_hosts(config: Any, go: str) -> None:
    """Print where this rank is, and train copies of a model, slowly until there is a file `go`."""
    uuid = str(torch.cuda.get_device_properties(raydist.rank().device).uuid)
    variables = [os.environ.get(each) for each in ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME")]
    print("place", json.dumps([socket.gethostname(), uuid, *variables]))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0 if os.path.exists(go) else 2)
        return nn.functional.cross_entropy(output, target)

    raydist.fit(config, train=samples(10), loss=loss, model=nn.Linear(10, 3))


def reported_late(config: Any, folder: str) -> None:
    """Train copies of a model; in the first two attempts the host of rank 1 seems to run ahead of
    its GPU from the third step to the seventh, so that these are reported together, and rank 1 is
    to be killed before their end: by a fault, then by the bench."""
    attempt, calls = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0
    late, done = raydist.rank().rank == 1 and attempt < 2, CudaMark.done

    def seen_done(self: CudaMark) -> bool:
        return not (late and 3 <= calls < 7) and done(self)

    CudaMark.done = seen_done  # type: ignore[method-assign]
    faults.add_faults(kill(1, 5))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls, step = calls + 1, context.current().step
        if calls == 3:
            recovery.STRUCK = step + 3
        if late and attempt == 1:
            recovery.strike(Path(folder), step, 1, 2)
        return faults.cross_entropy(output, target)

    raydist.fit(config, train=samples(10), loss=loss, model=nn.Linear(10, 3))


def blocks(config: Any) -> None:
    """Run a training of the bench in which each kept state is a copy that the GPU is late with;
    report whether it was done at each begin and end of a block."""
    here = raydist.rank().device
    source, into = torch.ones(100, device=here), torch.empty(100, pin_memory=True)

    def keep(self: Snapshotter, *_: Any) -> None:
        into.copy_(source, non_blocking=True)

    def read_clock() -> float:
        """Return NaN while the GPU works."""
        return time.perf_counter() if torch.cuda.current_stream().query() else math.nan

    vars(keeping)["time"] = SimpleNamespace(perf_counter=read_clock)
    keeping.BLOCK = 2
    Snapshotter.step = keep  # type: ignore[method-assign,assignment]
    pairs, _ = keeping.kept(1)
    raydist.report(done=all(math.isfinite(time) for pair in pairs for time in pair))


def accumulated(config: Any) -> None:
    """Train a model in shards; report the bytes of gradients that a rank holds between two passes
    of its second step, as a fraction of the bytes of the model."""
    allocated: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        allocated.append(torch.cuda.memory_allocated())
        return nn.functional.cross_entropy(output, target)

    data = samples(256)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    size = sum(each.nbytes for each in model.parameters())
    raydist.fit(config, train=data, loss=loss, model=model)
    first = config.train.accumulate
    raydist.report(held=(allocated[first + 1] - allocated[first]) / size)


class PartlyUsed(nn.Module):
    """A model one of whose layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head, self.unused = nn.Linear(10, 3), nn.Linear(10, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs).relu()
        output: torch.Tensor = self.head(inputs)
        return output


def without_states(config: Any, struck: int) -> None:
    """Train by two optimizers, one after the other, that have no state of some parameters; each
    time rank 1 is killed after so many steps."""
    for number, name in enumerate(("sgd", "adamw")):
        faults.add_faults(kill(1, struck, number))
        torch.manual_seed(0)
        settings = replace(config, optim=replace(config.optim, name=name, args={}))
        raydist.fit(settings, train=samples(10), loss=faults.cross_entropy, model=PartlyUsed())


def collectives(config: Any, other: int = -1, asleep: int = -1) -> None:
    """Sum ones again and again; at step 20 the rank `other` makes another collective, the rank
    `asleep` none."""
    here = raydist.rank().device
    for step in range(1, 100_000):
        if step == 20 and dist.get_rank() == other:
            dist.broadcast(torch.ones(4, device=here), 0)
        if step == 20 and dist.get_rank() == asleep:
            time.sleep(10_000)
        ones = torch.ones(3, device=here)
        dist.all_reduce(ones)
        assert ones.sum().item() == 3 * dist.get_world_size()
        raydist.report(step=step)
        time.sleep(0.05)  # the driver sees several of the steps, and knows their pace


def levers(config: Any) -> None:
    """Report which levers a step of the training has: a fused optimizer, TF32, cuDNN's search."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        raydist.report(
            fused=all(group["fused"] is True for group in optimizer.param_groups),
            tf32=torch.get_float32_matmul_precision() == "high",
            search=torch.backends.cudnn.benchmark,
        )

    register_optimizer_step_post_hook(note)
    raydist.fit(config, train=samples(10), loss=faults.cross_entropy, model=nn.Linear(10, 3))


def own_gpus(config: Any) -> None:
    """Report how many GPUs, or MIG instances, the ranks have between them."""
    here = raydist.rank().device
    uuid = str(torch.cuda.get_device_properties(here).uuid)
    own = torch.tensor([*uuid.encode()], device=here)
    all_own = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_own, own)
    raydist.report(gpus=len({tuple(each.tolist()) for each in all_own}))
