"""A model in pipeline stages, over torch.distributed.pipelining. (rank side)

The ranks of a stage share it as the ranks of a sharded model do (parallel.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from raydist.settings.config import Job
from raydist.settings.mesh import check_microbatches, mesh_shape, microbatches
from raydist.shared.errors import ConfigError
from raydist.training import stages
from raydist.training.hf_stages import OUTPUTS, call_of, output_with
from raydist.training.meta import on_meta
from raydist.training.model_call import ModelCall, tensors_in
from raydist.training.optim import without_decay
from raydist.training.parallel import ShardedComm
from raydist.worker import context
from raydist.worker.backends import ddp
from raydist.worker.groups import new_group, new_mesh
from raydist.worker.torch_private import gpipe

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)
"""The dtypes that a model may output, by the number that the ranks exchange."""
MAX_DIMS = 8
"""Limit on the dimensions of the output."""


@dataclass(frozen=True)
class PipelineComm(ShardedComm):
    """The Comm of a model in stages. The ranks of a stage are consecutive."""

    tied: dict[str, Tied] = field(default_factory=dict)
    """Parameters of this rank that other stages have as well, by their names in this stage."""
    pipelined: ClassVar[bool] = True

    @cached_property
    def everyone(self) -> DeviceMesh:
        shape = self.shape
        return new_mesh(
            self.device.type, pp=shape.pp, replicate=shape.replicate, shard=shape.shard, tp=shape.tp
        )

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks of this stage: replicate x shard x tp."""
        return self.everyone["replicate", "shard", "tp"]

    def release(self) -> None:
        super().release()
        self.tied.clear()

    def wrap(self, model: nn.Module) -> nn.Module:
        blocks, empty = self.prepare(model), on_meta(model)
        parts = stages.cut_model(model, blocks, self.shape.pp)
        stage = self.everyone.get_local_rank("pp")
        part, names = parts[stage], Names.of(model, parts[stage])
        tied = stages.shared(model, parts)
        self.shard(part, blocks, model, last=stage == self.shape.pp - 1)
        stages.forget_others(model, part)
        groups = self._groups_of({*tied.values()})
        here = {whole: name for name, whole in names.first.items()}
        # In the order of the model, so that stages that share a group use it in the same order.
        for whole, held in tied.items():
            if whole in here and whole in names.trained:
                self.tied[here[whole]] = Tied(part.get_parameter(here[whole]), held, groups[held])
                stages.keep_tied(model, whole, self.tied[here[whole]].parameter)
        for each in self.tied.values() if empty else ():
            each.take_from_first()
        pipeline = Pipeline(part, self, names, self._shard_group())
        model.forward = pipeline.everywhere
        return pipeline

    def _groups_of(self, tied: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Return by stages the group of their ranks that have this rank's position in a stage.

        A collective of all ranks.
        """
        size, found = self.mesh.size(), dict[tuple[int, ...], Any]()
        for held in sorted(tied):
            for position in range(size):
                ranks = [stage * size + position for stage in held]
                group = new_group(ranks)
                if dist.get_rank() in ranks:
                    found[held] = group
        return found

    def _shard_group(self) -> Any:
        """Return the group of the ranks that have the parts of this rank's parameters, over gloo.

        None: this rank has them whole. A collective of all ranks.
        """
        if self.shape.shard == 1:
            return None
        own = None
        for ranks in self.everyone.mesh.transpose(2, 3).reshape(-1, self.shape.shard).tolist():
            group = new_group(ranks, backend="gloo")
            own = group if dist.get_rank() in ranks else own
        return own

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        yield  # a schedule always ends with the sum over the ranks of a stage

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for each in self.tied.values():
            dist.all_reduce(cast("DTensor", each.parameter.grad).to_local(), group=each.group)

    def holders(self, name: str) -> int:
        return self.mesh.size() * (len(self.tied[name].stages) if name in self.tied else 1)


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages have: its gradient is the sum of theirs."""

    parameter: nn.Parameter
    stages: tuple[int, ...]
    group: Any
    """The ranks of these stages that have the same position in their stage."""

    def take_from_first(self) -> None:
        """Take the values from the first of these stages."""
        dist.broadcast(
            cast("DTensor", self.parameter).to_local().detach(), group=self.group, group_src=0
        )


@dataclass(frozen=True)
class Names:
    """The names that the trained parameters have in the whole model, in its order."""

    trained: list[str]
    first: dict[str, str]
    """The first name of a parameter in the whole model (a tied one has several), by its name in a
    stage."""
    undecayed: Set[str]
    """Those without weight decay, with `optim.groups=no_decay`."""

    @classmethod
    def of(cls, model: nn.Module, part: nn.Module) -> Names:
        by_id = {id(value): name for name, value in model.named_parameters()}
        trained = [name for name, value in model.named_parameters() if value.requires_grad]
        first = {name: by_id[id(value)] for name, value in part.named_parameters()}
        return cls(trained, first, without_decay(model))


class Pipeline(nn.Module):
    """This rank's stage, and the schedule by which it works with the other stages."""

    def __init__(self, part: nn.Module, comm: PipelineComm, names: Names, shard_group: Any) -> None:
        super().__init__()
        self.part = part
        self.names = names
        self._comm = comm
        self._shard_group = shard_group
        self._group = comm.everyone.get_group("pp")
        self._stage = comm.everyone.get_local_rank("pp")
        self._stages = comm.shape.pp
        self.microbatches = microbatches(comm.job, comm.shape)
        self._loss: Callable[..., torch.Tensor] | None = None
        self._train: tuple[Any, PipelineScheduleSingle] | None = None
        self._evaluate: tuple[Any, PipelineScheduleSingle] | None = None
        self._call = call_of(part)
        """The part's own, if it is one of a model of transformers."""

    def step(self, call: ModelCall, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Run forward and backward of a batch in micro-batches; return the sum of their losses.

        The loss is the mean over the pipeline's ranks: the ranks of the last stage, which have the
        loss, return a multiple of it, all others 0. ConfigError: the micro-batches would differ.
        """
        inputs, named = self._given(call.inputs, call.named)
        if len(inputs[0]) % self.microbatches:
            cause = (
                f"a batch of {len(inputs[0])} samples cannot be split into so many equal parts: "
                "choose another number, or drop_last=True for your loader"
            )
            raise ConfigError.of("parallel.microbatches", self.microbatches, cause)
        target = call.target
        if self._call is not None:
            whole = not isinstance(target, torch.Tensor)
            loss, target = self._call.loss_of(loss, whole), inputs[0] if whole else target
        self._loss = loss
        shapes = shapes_of(inputs, named)
        kept: AbstractContextManager[None] = nullcontext()
        if self._needs_new(self._train, shapes):
            self._train = shapes, self._schedule(self.microbatches)
            kept = self._gradients_kept()
        assert self._train is not None
        schedule = self._train[1]
        losses: list[torch.Tensor] = []
        # where torch has the argument, outputs are not kept to the end of the step
        quiet: Any = (
            {"return_outputs": False}
            if "return_outputs" in inspect.signature(schedule.step).parameters
            else {}
        )
        context.phase("forward")
        with kept:
            schedule.step(
                *self._of_first(inputs),
                target=target if self._last else None,
                losses=losses,
                **named,
                **quiet,
            )
        if not losses:
            return torch.zeros((), device=self._comm.device)
        return torch.stack(losses).sum().detach().float() * self._stages

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Add to the gradients those of earlier passes of the same step.

        A new schedule tries the stage first, to know the shapes; torch 2.15 then clears what that
        has added to the gradients, and all that was in them.
        """
        earlier = [(each, each.grad) for each in self.part.parameters() if each.grad is not None]
        for each, _ in earlier:
            each.grad = None
        yield
        for each, gradient in earlier:
            each.grad = gradient if each.grad is None else each.grad + gradient

    def _needs_new(self, known: tuple[Any, Any] | None, shapes: list[tuple[Any, ...]]) -> bool:
        """Report whether a batch needs another schedule than the last one. A collective.

        A new schedule tries the stage first, which gathers its parameters. So all ranks that have
        parts of them begin a new one if one of them must, whatever the shapes of their batches:
        otherwise one would gather while another already sums gradients, and both would wait.
        """
        needs = known is None or known[0] != shapes
        if self._shard_group is None:
            return needs
        # on the host, because with NCCL it would wait for the work of the GPU
        count = torch.tensor(int(needs))
        dist.all_reduce(count, group=self._shard_group)
        return bool(count)

    def _schedule(self, count: int) -> PipelineScheduleSingle:
        kind = get_schedule_class(self._comm.job.parallel.schedule)

        def part_of_loss(output: Any, target: Any) -> torch.Tensor:
            assert self._loss is not None
            return self._loss(output, target)

        return cast(
            "PipelineScheduleSingle",
            kind(self._new_stage(), count, part_of_loss, scale_grads=False),
        )

    def _new_stage(self) -> PipelineStage:
        return PipelineStage(
            self.part, self._stage, self._stages, self._comm.device, group=self._group
        )

    def _given(
        self, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return what the first stage takes of a batch, and what each stage takes, by name."""
        if self._call is None:
            return inputs, named
        tokens, others = self._call.bind(inputs, named)
        return (tokens,), others

    def _of_first(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return inputs if self._stage == 0 else ()

    @property
    def _last(self) -> bool:
        return self._stage == self._stages - 1

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output on the ranks of the last stage, None on all others.

        All ranks must call it.
        """
        given, more = self._given(inputs, named)
        shapes = shapes_of(given, more)
        if self._needs_new(self._evaluate, shapes):
            count = self.microbatches if len(given[0]) % self.microbatches == 0 else 1
            # A loss of the model's own is the mean over the whole batch.
            count = 1 if self._call is not None else count
            self._evaluate = shapes, gpipe(self._new_stage(), count)
        assert self._evaluate is not None
        with torch.no_grad():
            output = self._evaluate[1].step(*self._of_first(given), **more)
        return self._call.output_of(output) if self._call is not None and self._last else output

    def everywhere(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output, a tensor, on all ranks. All ranks must call it.

        Of a model of transformers it is an object with `logits`, and `loss` if it has labels.
        """
        output = self(*inputs, **named)
        if self._call is None:
            return self._of_last(output)
        has = [name for name in OUTPUTS if getattr(output, name, None) is not None]
        found = torch.tensor([name in has for name in OUTPUTS]).to(self._comm.comm_device)
        dist.broadcast(found, group=self._group, group_src=self._stages - 1)
        names = [name for name, each in zip(OUTPUTS, found.tolist(), strict=True) if each]
        return output_with({name: self._of_last(getattr(output, name, None)) for name in names})

    def _of_last(self, output: Any) -> torch.Tensor:
        """Return a tensor of the last stage on all ranks."""
        # Numbers, because torch's collectives of objects unpickle them.
        facts = torch.zeros(2 + MAX_DIMS, dtype=torch.int64)
        if self._last:
            facts[: 2 + output.dim()] = torch.tensor(
                [DTYPES.index(output.dtype), output.dim(), *output.shape]
            )
        facts = facts.to(self._comm.comm_device)
        dist.broadcast(facts, group=self._group, group_src=self._stages - 1)
        dtype, dims, *shape = facts.tolist()
        empty = torch.empty(shape[:dims], dtype=DTYPES[dtype], device=self._comm.device)
        result = output.contiguous() if self._last else empty
        dist.broadcast(result, group=self._group, group_src=self._stages - 1)
        return result

    def same_buffers(self) -> None:
        """Copy the buffers of a stage's first rank to all its ranks."""
        for buffer in self.part.buffers():
            for dim in self._comm.mesh.mesh_dim_names or ():
                dist.broadcast(buffer, group=self._comm.mesh.get_group(dim), group_src=0)


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[ShardedComm]:
    """Join the ranks as ddp.join does.

    ConfigError: `parallel=` or the batch does not fit the number of ranks.
    """
    me = context.rank()
    shape = mesh_shape(job.parallel, me.world_size, me.local_world_size)
    check_microbatches(job, shape)
    if shape.pp > 1 and me.device.type == "cuda" and job.backend.name == "gloo":
        cause = "it cannot send what is on a GPU to the next stage"
        raise ConfigError.of(
            "backend", job.backend.name, cause, "backend=nccl", "parallel=fsdp parallel.pp=1"
        )
    with ddp.join(job, env) as comm:
        kind = PipelineComm if shape.pp > 1 else ShardedComm
        yield kind(comm.settings, comm.device, job, shape, listens=comm.listens, store=comm.store)


def shapes_of(inputs: Sequence[Any], named: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the shapes and types of a batch, which the buffers of a schedule have."""
    return [(each.shape, each.dtype) for each in tensors_in([*inputs, *named.values()])]
