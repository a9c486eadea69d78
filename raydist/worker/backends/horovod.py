"""The Horovod backend: a background thread averages gradients. (rank side)

A job needs none of the seven steps in Horovod's documentation: init, pinning the device, wrapping
the optimizer and broadcasting from rank 0 are here; scaling the rate (optim.py), saving on rank 0
only (checkpoint.py) and sharding the data (data.py) are the same for every backend.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import horovod.torch as hvd
import horovod.torch.optimizer
import torch

from raydist.settings.config import Job
from raydist.shared.errors import ConfigError
from raydist.worker import context

OPS = {"average": hvd.Average, "sum": hvd.Sum}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}

# For groups, Horovod would broadcast rank 0's parameter names as a pickle. Every rank has the same
# names already.
horovod.torch.optimizer.broadcast_object = lambda names, **_: names

_process_sets: dict[tuple[int, ...], hvd.ProcessSet] = {}


@dataclass(frozen=True)
class Contiguous:
    """A Horovod compression for any memory format: Horovod refuses channels-last gradients."""

    inner: Any

    def compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        packed: tuple[torch.Tensor, Any] = self.inner.compress(gradient.contiguous())
        return packed

    def decompress(self, packed: torch.Tensor, kind: Any) -> torch.Tensor:
        gradient: torch.Tensor = self.inner.decompress(packed, kind)
        return gradient


@dataclass(frozen=True)
class HorovodComm:
    """The Comm of Horovod."""

    job: Job
    sharded: ClassVar[bool] = False
    pipelined: ClassVar[bool] = False

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        tensors = {
            name: value
            for name, value in model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        packed = {name: value.contiguous() for name, value in tensors.items()}
        hvd.broadcast_parameters(packed, root_rank=0)
        with torch.no_grad():
            for name, value in tensors.items():
                # A no-op, except for tensors that had to be copied to be contiguous.
                value.copy_(packed[name])
        return model

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        settings = self.job.backend.horovod
        wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[
                (name, each) for name, each in model.named_parameters() if each.requires_grad
            ],
            compression=Contiguous(COMPRESSIONS[settings.compression]),
            backward_passes_per_step=self.job.train.accumulate,
            op=OPS[settings.op],
            groups=gradient_groups(model, settings.groups),
        )
        broadcast_state(optimizer, wrapped)
        # Horovod created a class for this optimizer. Its zero_grad has no set_to_none; torch's has.
        del type(wrapped).zero_grad
        return wrapped

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Do nothing: the optimizer sends gradients in the last backward pass of a step.

        It counts the passes.
        """
        return nullcontext()

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.synchronize()  # type: ignore[attr-defined]

    def clip(self, model: torch.nn.Module, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return optimizer.skip_synchronize()  # type: ignore[attr-defined, no-any-return]

    def start_mean(self, loss: torch.Tensor) -> Callable[[], torch.Tensor]:
        handle = hvd.allreduce_async(
            loss.to(torch.promote_types(loss.dtype, torch.float32)), name="raydist.loss"
        )
        return lambda: hvd.synchronize(handle)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        # Horovod can't sum integers of less than 32 bits.
        small = tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.bool)
        total: torch.Tensor = hvd.allreduce(
            (tensor.int() if small else tensor).contiguous(), op=hvd.Sum
        )
        return total.to(tensor.dtype)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(hvd.allgather(tensor.contiguous().unsqueeze(0)).unbind())


def gradient_groups(model: torch.nn.Module, number: int | None) -> list[list[torch.Tensor]] | None:
    """Return the trainable parameters in at most `number` groups of neighbours; None: no groups."""
    if number is None:
        return None
    trained: list[torch.Tensor] = [each for each in model.parameters() if each.requires_grad]
    size = -(-len(trained) // number)
    return [trained[start : start + size] for start in range(0, len(trained), size)]


def broadcast_state(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    """Give every rank's wrapped optimizer the state that rank 0's had before the wrapping.

    The wrapping drops the state. Horovod's broadcast_optimizer_state unpickles data from the
    network, and fills an empty state by a step with zero gradients, which Adam would count and in
    which weight decay would change the parameters.
    """
    packed = io.BytesIO()
    torch.save(optimizer.state_dict(), packed)
    mine = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
    size = hvd.broadcast(torch.tensor([len(mine)]), root_rank=0)
    state = mine if hvd.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    hvd.broadcast_(state, root_rank=0)
    wrapped.load_state_dict(torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True))


def find_process_set(ranks: tuple[int, ...]) -> hvd.ProcessSet:
    """Return the process set of these ranks, in ascending order. ConfigError: there is none."""
    if ranks not in _process_sets:
        known = ", ".join(str(list(each)) for each in _process_sets) or "none"
        key = "backend.horovod.process_sets"
        cause = f"there is no process set {list(ranks)} (known: {known})"
        raise ConfigError.of(key, None, cause, f"{key}=[[{','.join(map(str, ranks))}]]")
    return _process_sets[ranks]


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[HorovodComm]:
    """Join Horovod's ranks; leave them at the end of the block."""
    if "HOROVOD_RANK" not in env and int(env.get("WORLD_SIZE", "1")) > 1:
        cause = "torchrun has no rendezvous of Horovod; start it with raydist train"
        raise ConfigError.of("backend", "horovod", cause, "backend=gloo")
    device = context.rank().device
    if device.type == "cuda":
        if not hvd.nccl_built():
            cause = (
                "Horovod was built for CPUs, and the ranks have GPUs; run raydist horovod "
                "build --cuda"
            )
            raise ConfigError.of("backend", "horovod", cause, "scale.gpus=0")
        torch.cuda.set_device(device)
    sets = [hvd.ProcessSet(ranks) for ranks in job.backend.horovod.process_sets]
    hvd.init(process_sets=sets)
    _process_sets.update({tuple(each.ranks): each for each in sets})
    yield HorovodComm(job)
    # Not in a `finally`: shutdown waits for other ranks, and a failed rank must end, so that the
    # driver ends the others.
    if hvd.is_initialized():
        # one rank's shutdown aborts the collectives that others still run in a process set
        hvd.barrier()
        hvd.shutdown()
    _process_sets.clear()
