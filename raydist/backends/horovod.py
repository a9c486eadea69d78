"""Horovod: gradients averaged in its own background thread; its seven steps, so that no job needs them. (rank side)

Init, pin the device, wrap the optimizer and broadcast from rank 0 are here; scaling the rate (optim.py), saving on rank
0 only (checkpoint.py) and sharding the data (data.py) are the same for every backend.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import horovod.torch.optimizer
import torch

from raydist import context
from raydist.config import Job
from raydist.errors import ConfigError

OPS = {"average": hvd.Average, "sum": hvd.Sum}
COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}

# For groups, Horovod would have rank 0 send the parameters' names, pickled. Every rank has them of the same model.
horovod.torch.optimizer.broadcast_object = lambda names, **_: names

_process_sets: dict[tuple[int, ...], hvd.ProcessSet] = {}


@dataclass(frozen=True)
class Contiguous:
    """A compression of Horovod's for gradients in any memory order: Horovod itself refuses channels-last ones."""

    inner: Any

    def compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        packed: tuple[torch.Tensor, Any] = self.inner.compress(gradient.contiguous())
        return packed

    def decompress(self, packed: torch.Tensor, kind: Any) -> torch.Tensor:
        gradient: torch.Tensor = self.inner.decompress(packed, kind)
        return gradient


@dataclass(frozen=True)
class Horovod:
    """The Comm of Horovod."""

    job: Job

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        packed = {name: value.contiguous() for name, value in tensors.items()}
        hvd.broadcast_parameters(packed, root_rank=0)
        with torch.no_grad():
            for name, value in tensors.items():
                value.copy_(packed[name])  # itself, but for memory orders that Horovod refuses
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
        settings = self.job.backend.horovod
        wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[(name, each) for name, each in model.named_parameters() if each.requires_grad],
            compression=Contiguous(COMPRESSIONS[settings.compression]),
            backward_passes_per_step=self.job.train.accumulate,
            op=OPS[settings.op],
            groups=groups(model, settings.groups),
        )
        broadcast_state(optimizer, wrapped)
        # Horovod made a class for this optimizer alone. Its zero_grad knows no set_to_none: torch's own does.
        del type(wrapped).zero_grad
        return wrapped

    def accumulating(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Nothing to do: the optimizer counts backward passes, and sends gradients in the last of a step."""
        return nullcontext()

    def finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.synchronize()  # type: ignore[attr-defined]

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        return optimizer.skip_synchronize()  # type: ignore[attr-defined, no-any-return]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        # Horovod adds up no integers of less than 32 bits.
        small = tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.bool)
        total: torch.Tensor = hvd.allreduce((tensor.int() if small else tensor).contiguous(), op=hvd.Sum)
        return total.to(tensor.dtype)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(hvd.allgather(tensor.contiguous().unsqueeze(0)).unbind())


def groups(model: torch.nn.Module, number: int | None) -> list[list[torch.Tensor]] | None:
    """The parameters in so many groups of neighbours."""
    if number is None:
        return None
    trained: list[torch.Tensor] = [each for each in model.parameters() if each.requires_grad]
    size = -(-len(trained) // number)
    return [trained[start : start + size] for start in range(0, len(trained), size)]


def broadcast_state(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    """Give the wrapped optimizer of every rank what rank 0 had before the wrapping, which forgets it.

    Horovod's own broadcast_optimizer_state unpickles what comes over the network, and fills an empty state by a step
    with gradients of zero: Adam would count it, and weight decay would shrink the parameters before the training began.
    """
    packed = io.BytesIO()
    torch.save(optimizer.state_dict(), packed)
    mine = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
    size = hvd.broadcast(torch.tensor([len(mine)]), root_rank=0)
    state = mine if hvd.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    hvd.broadcast_(state, root_rank=0)
    wrapped.load_state_dict(torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True))


def process_set(*ranks: int) -> hvd.ProcessSet:
    """The process set of these ranks, one of backend.horovod.process_sets: `hvd.allreduce(x, process_set=…)`."""
    ranks = tuple(sorted(ranks))
    if ranks not in _process_sets:
        known = ", ".join(str(list(each)) for each in _process_sets) or "none"
        raise ConfigError(
            f"there is no process set {list(ranks)} (known: {known}); "
            f"say backend.horovod.process_sets=[[{','.join(map(str, ranks))}]]"
        )
    return _process_sets[ranks]


@contextmanager
def join(job: Job, env: Mapping[str, str]) -> Iterator[Horovod]:
    """Be one of Horovod's ranks inside the `with` block."""
    if "HOROVOD_RANK" not in env and int(env.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("backend=horovod needs a rendezvous that torchrun has not: start it with raydist.train")
    device = context.rank().device
    if device.type == "cuda":
        if not hvd.nccl_built():
            raise ConfigError(
                "this Horovod was built for CPUs, and the ranks have GPUs: "
                "python -m raydist.tools.horovod build --cuda, or say scale.gpus=0"
            )
        torch.cuda.set_device(device)
    sets = [hvd.ProcessSet(ranks) for ranks in job.backend.horovod.process_sets]
    hvd.init(process_sets=sets)
    _process_sets.update({tuple(each.ranks): each for each in sets})
    yield Horovod(job)
    # Not in a `finally`: leaving waits for the others, and a rank that failed has to end, so that they are ended.
    if hvd.is_initialized():
        hvd.barrier()  # one rank's shutdown ends all: what others still have under way, in a process set, would be lost
        hvd.shutdown()
    _process_sets.clear()
