"""Sharded models on a DeviceMesh: fully_shard by blocks, tensor parallelism by plan. (rank side)"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from raydist.settings.config import Job
from raydist.settings.mesh import MeshShape, mesh_shape
from raydist.shared.errors import ConfigError
from raydist.training.blocks import find_blocks, find_ends
from raydist.training.heads import check_heads
from raydist.training.meta import make_values, on_meta, take_values
from raydist.training.weights import WeightFiles
from raydist.worker import context
from raydist.worker.backends import ddp
from raydist.worker.backends.ddp import DDPComm
from raydist.worker.groups import new_mesh
from raydist.worker.torch_private import multiply_all


@dataclass(frozen=True)
class ShardedComm(DDPComm):
    """The Comm of a model whose parameters are DTensors."""

    job: Job
    shape: MeshShape
    sharded: ClassVar[bool] = True

    @property
    def everyone(self) -> DeviceMesh:
        """All ranks, in their order."""
        return self.mesh

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that share these parameters: replicate x shard x tp."""
        shape = self.shape
        return new_mesh(self.device.type, replicate=shape.replicate, shard=shape.shard, tp=shape.tp)

    def release(self) -> None:
        super().release()
        for name in ("everyone", "mesh"):
            vars(self).pop(name, None)

    def wrap(self, model: nn.Module) -> nn.Module:
        self.shard(model, self.prepare(model), model)
        return model

    def prepare(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of the model, after copying rank 0's parameters to all ranks.

        Parameters on meta are not copied.
        """
        blocks = find_blocks(model, self.job.parallel.blocks)
        same_as_rank0(model, self)
        check_heads(model, self.shape.tp)
        if self.job.train.compile:
            for block in blocks:
                block.compile()
        return blocks

    def shard(
        self,
        part: nn.Module,
        blocks: Sequence[nn.Module],
        model: nn.Module,
        last: bool = True,
    ) -> None:
        """Divide the parameters of a part of the model among the ranks of the mesh.

        Values on meta are created. `blocks`: those of the whole model. `last`: this part produces
        the output.
        """
        here, inside = {*part.modules()}, {inner for block in blocks for inner in block.modules()}
        layers, empty = divided_layers(model) if self.shape.tp > 1 else {}, on_meta(model)
        # over all ranks: torch 2.8 makes no submesh of a submesh
        data = (
            self.everyone["shard"]
            if self.shape.replicate == 1
            else self.everyone["replicate", "shard"]
        )
        files = WeightFiles.of(self.job) if empty else None
        half = torch.bfloat16 if self.job.train.precision == "bf16" else None
        sums = torch.float32 if half else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=sums)
        free = self.shape.pp == 1  # a stage is gathered once per step, not for each micro-batch
        chunks = self.job.train.loss_chunks
        embedding, head = find_ends(model, blocks, chunks) if free else (None, None)
        own = [each for each in blocks if each in here]
        # The backward pass begins with the last one.
        kept = head or own[-1]

        def divide(each: nn.Module) -> None:
            again = free and each is not kept
            fully_shard(each, mesh=data, mp_policy=policy, reshard_after_forward=again)

        for block in own:
            self._make(model, [*block.modules()], layers, files)
            divide(block)
        # all of them on each stage: the model's own reset_parameters may draw one after another
        outside = [each for each in model.modules() if each not in inside]
        self._make(model, outside, layers, files)
        take_values(part, model)
        for each in filter(None, (embedding, head)):
            divide(each)
        # the loss is in fp32
        whole = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=sums, output_dtype=sums if last and chunks == 1 else None
        )
        fully_shard(part, mesh=data, mp_policy=whole)
        _prefetch([each for each in (embedding, *own, head) if each is not None])
        if dist.get_backend() == "gloo":
            # Its mean is a sum in torch 2.8: each gradient was as many times too large as there are
            # ranks. With this, fully_shard divides.
            for each in part.modules():
                if isinstance(each, FSDPModule):
                    each.set_force_sum_reduction_for_comms(True)
        if empty:
            self._same_on_copies(part)

    def _make(
        self,
        model: nn.Module,
        part: Sequence[nn.Module],
        layers: Mapping[nn.Module, ParallelStyle],
        files: WeightFiles | None,
    ) -> None:
        """Create the values of these modules that are on meta, and divide layers by the tp plan."""
        make_values(model, part, self.device, self.job.seed, files)
        for module in part:
            if module in layers:
                parallelize_module(module, self.everyone["tp"], layers[module])

    def _same_on_copies(self, part: nn.Module) -> None:
        """Copy the created values from the first rank with this part of the model to the others.

        These ranks have drawn the same numbers, unless their GPUs differ or a reset_parameters has
        a separate generator.
        """
        for value in (*part.parameters(), *part.buffers()):
            own, divided = value.detach(), set[str]()
            if isinstance(value, DTensor):
                own = value.to_local().detach()
                placed = zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True)
                divided = {name for name, each in placed if not each.is_replicate()}
            for dim in ("replicate", "shard", "tp"):
                if own.numel() and dim not in divided and self.everyone[dim].size() > 1:
                    dist.broadcast(own, group=self.mesh.get_group(dim), group_src=0)

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        # Each pass reduces its gradients among the ranks that share the parameters: otherwise each
        # rank would hold those of the whole model between passes. Copies of the model average their
        # gradients, which are sharded, in the last pass.
        root = cast("FSDPModule", model)
        root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            root.set_requires_all_reduce(True)

    def clip(self, model: nn.Module, norm: float) -> torch.Tensor:
        # One sum over all ranks: each adds its parts of the gradients, and divides a part that
        # several ranks hold by their number. torch's clip_grad_norm_ takes only DTensors of one
        # mesh; layers that tp divides have another mesh.
        alike: dict[int, list[torch.Tensor]] = {}
        trained = (
            (name, cast("DTensor", each.grad))
            for name, each in model.named_parameters()
            if each.grad is not None
        )
        for name, gradient in trained:
            cut = (
                dim for dim, placed in enumerate(gradient.placements) if not placed.is_replicate()
            )
            parts = math.prod(gradient.device_mesh.size(dim) for dim in cut)
            alike.setdefault(self.holders(name) // parts, []).append(gradient.to_local())
        own = [
            torch.nn.utils.get_total_norm(parts) ** 2 / copies for copies, parts in alike.items()
        ]
        total = self.sum(sum(own, torch.zeros((), device=self.device))).sqrt()
        multiply_all(
            [part for parts in alike.values() for part in parts],
            (norm / (total + 1e-6)).clamp(max=1),
        )
        return total

    def holders(self, name: str) -> int:
        """Return the number of ranks that have this parameter, or a part of it."""
        return dist.get_world_size()


def reshard(model: nn.Module) -> None:
    """Drop the gathered parameters that a forward pass without a backward pass has left."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _prefetch(groups: Sequence[nn.Module]) -> None:
    """Have each of these modules, in the order of a forward pass, gather the next one.

    Otherwise the host would first have to launch all of the module's kernels. In a backward pass
    fully_shard does that by itself, in the order of the forward pass.
    """
    for each, following in pairwise(cast("Sequence[FSDPModule]", groups)):
        each.set_modules_to_forward_prefetch([following])
    # its gradient does not depend on its weight
    if isinstance(groups[0], nn.Embedding) and isinstance(groups[0], FSDPModule):
        groups[0].set_unshard_in_backward(False)


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""The words of a plan, as in Hugging Face's models; with `_rep` the layer outputs, or takes, whole
activations. The last two are those of transformers 5 for the last layer and the embedding."""


def styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the model's plan: by module name, with * for any part of it, how to divide the layer.

    ConfigError: there is no plan, a name matches no module, or a word is unknown.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind, names = type(model).__name__, [name for name, _ in model.named_modules()]
    if not plan:
        cause = (
            f"{kind} has no plan of its layers: set model.tp_plan = {{'blocks.*.up': "
            f"'colwise', …}} in the job"
        )
        raise ConfigError.of("parallel.tp", None, cause, "parallel=fsdp")
    for name, word in plan.items():
        if not fnmatch.filter(names, name):
            raise ConfigError.of(
                "parallel.tp", None, f"{kind}.tp_plan has {name!r}, but no module has this name"
            )
        if isinstance(word, str) and word not in STYLES:
            raise ConfigError.unknown(f"tp_plan[{name!r}]", word, STYLES)
    return {name: STYLES[word]() if isinstance(word, str) else word for name, word in plan.items()}


def divided_layers(model: nn.Module) -> dict[nn.Module, ParallelStyle]:
    """Return the layers that the model's plan names, and how each is divided.

    ConfigError: as in `styles`.
    """
    found = {}
    for pattern, style in styles(model).items():
        words = pattern.split(".")
        for name, module in model.named_modules():
            path = name.split(".")  # a * stands for one part of the name, as in parallelize_module
            if len(path) == len(words) and all(map(fnmatch.fnmatch, path, words)):
                found[module] = style
    return found


def same_as_rank0(model: nn.Module, comm: DDPComm) -> None:
    """Copy rank 0's parameters and buffers to all ranks, as DDP does.

    A job may have created different ones on each rank.
    """
    with torch.no_grad():
        for value in (each for each in (*model.parameters(), *model.buffers()) if not each.is_meta):
            sent = value.to(comm.comm_device).contiguous()
            dist.broadcast(sent, 0)
            value.copy_(sent)


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[ShardedComm]:
    """Join the ranks as ddp.join does.

    ConfigError: `parallel=` does not fit the number of ranks.
    """
    me = context.rank()
    shape = mesh_shape(job.parallel, me.world_size, me.local_world_size)
    with ddp.join(job, env) as comm:
        yield ShardedComm(
            comm.settings, comm.device, job, shape, listens=comm.listens, store=comm.store
        )
