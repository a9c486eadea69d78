"""A rank's model: on its device, wrapped by the backend, with its optimizer. (rank side)"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch

from raydist.settings.config import Job
from raydist.training import optim
from raydist.training.blocks import find_blocks
from raydist.training.evaluation import Metric, evaluate, same_buffers
from raydist.training.meta import make_values, on_meta
from raydist.training.model_call import tensors_in
from raydist.training.recompute import recompute
from raydist.training.weights import WeightFiles
from raydist.worker import context
from raydist.worker.backends import Comm

if TYPE_CHECKING:
    from raydist.training.pipeline import Pipeline

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

_begun: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
"""The models that had their first values, and the number of the raydist.fit that gave them."""


def channels_last(job: Job, model: torch.nn.Module, device: torch.device) -> bool:
    """Report whether images are in channels-last order.

    train.fast turns it on only on a GPU, and not for models with 3-d convolutions.
    """
    fast = (
        job.train.fast
        and device.type == "cuda"
        and all(each.dim() < 5 for each in model.parameters())
    )
    return job.train.channels_last or fast


def speed_up_gpu(job: Job, device: torch.device) -> None:
    """Switch TF32 and cuDNN's search on or off, as the settings say."""
    if device.type != "cuda":
        return
    train = job.train
    torch.set_float32_matmul_precision("high" if train.tf32 or train.fast else "highest")
    torch.backends.cudnn.benchmark = (train.cudnn_search or train.fast) and not job.deterministic


def begin_weights(job: Job, model: torch.nn.Module, device: torch.device, sharded: bool) -> None:
    """Give a model its first values where it has none, and those of `train.weights`.

    One on meta that is to be divided gets them later, a block at a time. One that an earlier
    raydist.fit of this process has trained keeps its values.
    """
    fit = context.current().fit
    trained = _begun.setdefault(model, fit) < fit
    files = None if trained else WeightFiles.of(job)
    if files is not None:
        files.check(model)
    if not on_meta(model):
        if files is not None:
            files.fill(model, model.modules())
    elif not sharded:
        make_values(model, [*model.modules()], device, job.seed, files)


class RankModel:
    """The model, or the part of it, that one rank trains, with its optimizer."""

    def __init__(
        self, job: Job, model: torch.nn.Module, comm: Comm, device: torch.device, rate: float
    ) -> None:
        """Set up the model for training. `rate`: the learning rate after the warm-up."""
        self.comm = comm
        self.device = device
        speed_up_gpu(job, device)
        last = not comm.sharded and channels_last(job, model, device)  # shards are contiguous
        memory_format = torch.channels_last if last else torch.preserve_format
        self.copier = BatchCopier(device, memory_format)
        begin_weights(job, model, device, comm.sharded)
        # a part of a model is moved when it is sharded: the whole model may not fit on the device
        self.module = model if comm.sharded else model.to(device).to(memory_format=memory_format)
        # Pretrained models come in evaluation mode; otherwise the job has chosen the mode of each
        # module.
        if not model.training:
            model.train()
        if job.train.recompute != "none":
            blocks = find_blocks(self.module, job.parallel.blocks, "train.recompute=none")
            recompute(blocks, job.train.recompute)
        self.wrapped = comm.wrap(self.module)
        self.pipeline = cast("Pipeline", self.wrapped) if comm.pipelined else None
        if self.pipeline is not None:
            self.module = self.pipeline.part
        names = self.pipeline.names.first if self.pipeline is not None else {}
        trained = {
            names.get(name, name): each
            for name, each in self.module.named_parameters()
            if each.requires_grad
        }
        undecayed = (
            optim.without_decay(self.module)
            if self.pipeline is None
            else self.pipeline.names.undecayed
        )
        groups = optim.in_groups(job.optim, trained, undecayed)
        fused = optim.fused(job, [*trained.values()])
        optimizer = optim.optimizer(job.optim, groups, rate, fused)
        self.watch = StateWatch(self.module, optimizer, device)
        self.settings = optim.arguments(job.optim)
        """The names of the optimizer's settings in a group; what else is in it is state."""
        self.optimizer = comm.wrap_optimizer(optimizer, self.module)
        self.evaluation_model = self.pipeline or self.module
        if job.train.compile is True and not comm.sharded:
            self.wrapped.compile()
            # DDP's own forward may be a collective, so an evaluation bypasses it.
            if self.wrapped is not self.module:
                self.evaluation_model = cast("torch.nn.Module", torch.compile(self.module))
        half = None if comm.sharded else HALF.get(job.train.precision)
        self.cast = nullcontext() if half is None else torch.autocast(device.type, half)

    def evaluate(
        self, batches: Iterable[tuple[Any, bool]], metrics: Mapping[str, Metric]
    ) -> dict[str, float]:
        """Return the mean of each metric over the samples of all ranks.

        `batches`: each with whether it has samples of this rank.
        """
        me = context.rank()
        if self.pipeline is not None:
            self.pipeline.same_buffers()
        elif me.world_size > 1:
            same_buffers(self.module, self.comm, me.rank)
        copied = ((self.copier.copy(batch), counts) for batch, counts in batches)
        with self.cast:
            figures = evaluate(self.evaluation_model, copied, metrics, self.comm, self.device)
        if self.comm.sharded:
            from raydist.training.parallel import reshard  # its imports take long

            # A hook that changes parameters would change gathered copies of them.
            reshard(self.module)
        return figures


class StateWatch:
    """Finds out whether nothing but the optimizer's steps changes the state of a model on a GPU.

    Only then may the state still be copied during the next forward and backward pass.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._module = module
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.changed_by_steps_only = False
        """Not known before the first pass."""
        self._possible = device.type == "cuda"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward and backward pass."""
        if not self._possible:
            yield
            return
        versions = self._versions()
        yield
        # As embeddings with max_norm do. A layer that changes its weights does so in each pass.
        changed = versions != self._versions()
        if not self.changed_by_steps_only:
            self._possible = self._is_trained_only()
        self._possible = self._possible and not changed
        self.changed_by_steps_only = self._possible

    def _versions(self) -> list[int]:
        """Return how often each tensor was changed.

        A snapshot has the buffers that `state_dict` leaves out, too.
        """
        return [each._version for each in (*self._parameters, *self._module.buffers())]

    def _is_trained_only(self) -> bool:
        """Report whether the state has nothing but parameters that the optimizer changes.

        A forward pass changes buffers, as those of batch norm, and maybe parameters without
        gradient, as those of a model that follows another one.
        """
        trained = {id(each) for each in self._parameters}
        return all(id(each) in trained for each in self._module.state_dict(keep_vars=True).values())


class BatchCopier:
    """Copies batches to the device of a model, and to its memory format."""

    def __init__(self, device: torch.device, memory_format: torch.memory_format) -> None:
        self.device = device
        self.format = memory_format
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy_ahead(self, batch: Any) -> Any:
        """Return a batch on the device.

        A GPU copies it in a separate stream, while it still computes the previous step. Not so what
        moves itself: its tensors, whose memory must not be reused too early, are not known.
        """
        if (
            self.stream is None
            or has_mover(batch)
            or any(tensor.is_cuda for tensor in tensors_in(batch))
        ):
            return self.copy(batch)
        with torch.cuda.stream(self.stream):
            copied = self.copy(batch)
        here = torch.cuda.current_stream(self.device)
        here.wait_stream(self.stream)
        for tensor in tensors_in(copied):
            tensor.record_stream(here)  # the memory is reused only after this step
        return copied

    def copy(self, value: Any) -> Any:
        """Return a batch, or a part of one, on the device and in the memory format of the model."""
        if self.device.type == "cpu" and self.format is torch.preserve_format:
            return value
        if isinstance(value, torch.Tensor):
            memory_format = self.format if value.dim() == 4 else torch.preserve_format
            return value.to(self.device, non_blocking=True, memory_format=memory_format)
        if isinstance(value, Mapping) and not moves_itself(value):
            items = {key: self.copy(inner) for key, inner in value.items()}
            if type(value) is dict or not isinstance(value, MutableMapping):
                return items
            mapping = copy.copy(value)
            try:
                mapping.update(items)
            except Exception:  # that of transformers' ModelOutput refuses
                return items
            return mapping
        if moves_itself(value):
            value = copy.copy(value)  # some change themselves
            try:
                return value.to(self.device, non_blocking=True)
            except TypeError:
                return value.to(self.device)
        if not isinstance(value, list | tuple):
            return value
        parts = [self.copy(inner) for inner in value]
        return type(value)(*parts) if hasattr(value, "_fields") else parts  # a NamedTuple


def has_mover(value: Any) -> bool:
    """Report whether a batch has an object with a method `to` of its own, such as a graph."""
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, Mapping) and not moves_itself(value):
        return any(map(has_mover, value.values()))
    return moves_itself(value) or (isinstance(value, list | tuple) and any(map(has_mover, value)))


def moves_itself(value: Any) -> bool:
    """Report whether a value has a method `to`; a column or a field may have the name, too.

    A mapping moves itself if it is on one device, as a tensordict, which moves back what is put
    into it. Of others, such as those of transformers, each tensor is known.
    """
    kind = type(value)
    on_one = not isinstance(value, Mapping) or hasattr(kind, "device")
    return on_one and callable(getattr(kind, "to", None))
