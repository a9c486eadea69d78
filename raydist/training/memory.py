"""The most bytes that the training of a model takes on a rank, by their use. (rank side)

`python -m raydist.training.memory` answers tools.plan, which may run where torch is not installed.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from raydist.messages.server import LookAtModel
from raydist.settings import config
from raydist.settings.mesh import MeshShape, mesh_shape, microbatches
from raydist.shared.errors import ConfigError
from raydist.training import models, optim
from raydist.training.blocks import find_blocks, find_ends, named_layer
from raydist.training.heads import check_heads
from raydist.training.model_call import tensors_in
from raydist.training.recompute import KEPT
from raydist.training.stages import cut_model
from raydist.worker.torch_private import fake_tensors, note_operations

HOW = ("capturable", "foreach", "fused")
"""Arguments of optimizers that change how a step is made, not what is kept for the next one.

They may need a GPU.
"""


def states_of(settings: config.Optim) -> float:
    """Return how many tensors of its size the optimizer keeps for a parameter.

    It makes a step for that, which fake tensors do not allow.
    """
    args = {name: value for name, value in settings.args.items() if name not in HOW}
    value = nn.Parameter(torch.zeros(8, 8))
    value.grad = torch.zeros(8, 8)
    own = optim.optimizer(replace(settings, args=args), [value], settings.lr)
    own.step()
    kept = [each for each in own.state[value].values() if isinstance(each, torch.Tensor)]
    return sum(each.numel() for each in kept if each.dim()) / value.numel()


def memory_of(
    model: nn.Module, job: config.Job, shape: MeshShape, states: float | None = None
) -> dict[str, int]:
    """Return the bytes by their use at the peak, on the rank with the most. Their sum is the peak.

    `states`: what `states_of` returns; None: it is called.
    `model`: on meta, or fake. Activations are known if it is fake and has a method `example`, which
    makes an input of a number of samples; else the peak is that at the end of the backward pass.
    They are an upper bound: in a tp group they do not count the division of its layers.
    ConfigError: the model cannot be divided this way.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    blocks = find_blocks(model, job.parallel.blocks)
    check_heads(model, shape.tp)
    parts = cut_model(model, blocks, shape.pp) if shape.pp > 1 else [model]
    states = states_of(job.optim) if states is None else states
    passes = activations(model, parts, job, shape)
    found = [
        moment
        for part, of_pass in zip_longest(parts, passes)
        for moment in _moments(_of_part(part, blocks, job, shape, plan), of_pass, job, states)
    ]
    return max(found, key=lambda moment: sum(moment.values()))


class Groups(NamedTuple):
    """Bytes of what ranks gather, and send, as a whole."""

    block: int
    """The largest block."""
    embedding: int
    head: int
    rest: int
    """What is outside of blocks; the embedding and the head, too, if they are no groups of their
    own. Of a pipeline all of the stage."""


class Division(NamedTuple):
    """The bytes of a stage, or the whole model, on a rank."""

    own: int
    """Of this rank's parts of the parameters."""
    trained: int
    """Of those that are trained."""
    gathered: Groups
    """Of what is whole during a pass; in a pipeline with its gradients."""
    gradients: Groups
    """Of the gradients before they are divided, except in a pipeline."""


class Pass(NamedTuple):
    """The bytes of a forward pass, and of the backward pass through one block."""

    kept: int
    """Of what the forward passes keep for the backward passes."""
    loss: int
    recomputed: int
    """Of what one block computes again, and of the gradients of that; 0 without recomputation."""


def _moments(
    division: Division, of_pass: Pass | None, job: config.Job, states: float
) -> Iterator[dict[str, int]]:
    """Yield the bytes by their use at each moment that may be the peak.

    With `of_pass` they have `activations`, which may be 0.
    """
    held = {"parameters": division.own, job.optim.title: int(states * division.trained)}
    gradients = {"gradients": division.trained}
    whole, sent = division.gathered, division.gradients
    # A block's gradients are whole, and so is the copy of them that ranks send.
    in_block, sends_block = {"gathered": whole.rest + whole.block}, {"sent": 2 * sent.block}
    # What is outside of blocks is sent last, when nothing is gathered any more.
    outside = sent.embedding, sent.rest
    ends = [in_block | sends_block, {"sent": sum(outside) + max(outside)}]
    if of_pass is None:
        yield from (held | gradients | end for end in ends)
        return
    yield from (held | gradients | {"activations": 0} | end for end in ends)
    begun = held | (gradients if job.train.accumulate > 1 else {})
    kept, loss = {"activations": of_pass.kept}, of_pass.loss
    # The head, or else the last block, stays gathered between the passes.
    yield begun | {"gathered": whole.rest + (whole.head or whole.block)} | kept | {"loss": loss}
    if sent.head:  # then it waits for the head's gradient with the last block
        both = {"gathered": whole.rest + whole.head + whole.block}
        yield begun | both | kept | {"loss": loss // 3, "sent": 2 * sent.head}
    yield begun | in_block | kept | {"recomputed": of_pass.recomputed} | sends_block


def activations(
    model: nn.Module, parts: Sequence[nn.Module], job: config.Job, shape: MeshShape
) -> list[Pass]:
    """Return what the passes of each part take. Empty if that cannot be determined here.

    The loss is taken to be the cross entropy of the output in fp32, which has three tensors of its
    size at once: the logarithms of the probabilities, which the forward pass keeps, their gradient,
    and the gradient of the output. A pipeline keeps the output, too. Other losses have no more.
    What a model keeps for a loss of its own is among its activations.
    """
    example: Any = getattr(model, "example", None)
    if example is None or any(value.is_meta for value in model.parameters()):
        return []
    count = microbatches(job, shape) if shape.pp > 1 else 1
    each = job.train.accumulate * shape.data * count
    samples = math.ceil((job.data.global_batch or job.data.batch_size * each // count) / each)
    known = inspect.signature(example).parameters
    given = example(
        samples, **{name: value for name, value in job.job.args.items() if name in known}
    )
    half = torch.bfloat16 if job.train.precision == "bf16" else None
    how = job.train.recompute
    blocks = [] if how == "none" else find_blocks(model, job.parallel.blocks)
    found = []
    for stage, part in enumerate(parts):
        values = {
            name: _cast(value, half)
            for name, value in (*part.named_parameters(), *part.named_buffers())
        }
        kept = Kept({_storage(value) for value in values.values()})
        with kept.watch(part, blocks, selective=how == "selective"):
            given = torch.func.functional_call(part, values, given)
        on_their_way = count if job.parallel.schedule == "gpipe" else min(count, shape.pp - stage)
        last = stage == len(parts) - 1
        scores = sum(each.numel() for each in tensors_in(given) if each.is_floating_point())
        loss = (3 if shape.pp == 1 else 4) * scores * torch.float32.itemsize if last else 0
        if (chunks := job.train.loss_chunks) > 1:
            head = named_layer(model, "get_output_embeddings")
            # the gradient of the last layer: of a chunk, and of those before it
            loss = loss // chunks + (0 if head is None else 2 * _size(head))
        found.append(Pass(on_their_way * sum(kept.bytes.values()), loss, kept.largest_block))
    return found


class Kept:
    """The tensors that a forward pass keeps for the backward pass, by their storage."""

    def __init__(self, known: Set[int]) -> None:
        """`known`: the storages that do not count."""
        self.known_storages = known
        self.bytes: dict[int, int] = {}
        """The bytes of each storage that is kept between the passes."""
        self.largest_block = 0
        """The most bytes of what a block computes again in the backward pass, and of the gradients
        that this pass has at once: two of its largest tensor."""
        self._block: dict[int, int] | None = None
        """What the block keeps that is computed now, if it computes it again later."""
        self._alive: list[torch.Tensor] = []
        """What was counted: another tensor could get the number of a storage that is freed."""

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        self._count(value, self.bytes if self._block is None else self._block)
        return value

    def keep_output(self, operation: Any, output: Any) -> None:
        """Count the output of an operation if it is one in a block that `selective` keeps."""
        if operation in KEPT and self._block is not None:
            for each in tensors_in(output):
                self._count(each, self.bytes)

    def _count(self, value: torch.Tensor, to: dict[int, int]) -> None:
        if _storage(value) not in self.known_storages:
            to[_storage(value)] = value.untyped_storage().nbytes()
            self._alive.append(value)

    @contextmanager
    def watch(
        self, model: nn.Module, blocks: Sequence[nn.Module], selective: bool
    ) -> Iterator[None]:
        """Count inside the block of the `with`. `blocks`: those that compute again."""

        def begin(block: nn.Module, inputs: Any, named: Any) -> None:
            for each in tensors_in((inputs, named)):
                self.keep(each)
            self._block = {}

        def end(block: nn.Module, inputs: Any, output: Any) -> None:
            again = (self._block or {}).items()
            own = [bytes_ for storage, bytes_ in again if storage not in self.bytes]
            self.largest_block = max(self.largest_block, sum(own) + 2 * max(own, default=0))
            self._block = None

        here = [each for each in model.modules() if each in blocks]
        hooks = [each.register_forward_pre_hook(begin, with_kwargs=True) for each in here]
        hooks += [each.register_forward_hook(end) for each in here]
        with (
            torch.autograd.graph.saved_tensors_hooks(self.keep, lambda value: value),
            note_operations(self.keep_output) if selective else nullcontext(),
        ):
            yield
        for hook in hooks:
            hook.remove()


def _storage(value: torch.Tensor) -> int:
    """Return a number that is the same for tensors that share memory.

    Tensors without values have no address.
    """
    return int(StorageWeakRef(value.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def _cast(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a parameter or a buffer in the type used for computation."""
    made = value.detach().to(dtype if value.is_floating_point() else None)
    return made.requires_grad_(value.requires_grad)


def check_model(settings: Mapping[str, Any], named: str, stages: int, tp: int) -> None:
    """Raise ConfigError if `model=` cannot be divided: no blocks, or too few blocks or heads.

    `named`: parallel.blocks. A model that cannot be built here, without a GPU or a package of the
    ranks, is left for the ranks to check.
    """
    try:
        with torch.device("meta"):
            model = models.build_model(settings)
    except ConfigError:
        return
    blocks = find_blocks(model, named)
    check_heads(model, tp)
    if stages > 1:
        cut_model(model, blocks, stages)


def reply_to_check(request: LookAtModel, reply_fd: int) -> NoReturn:
    """Write why the model cannot be divided, or nothing. Runs in a child of the fork server."""
    sys.path[:] = request.sys_path
    with os.fdopen(reply_fd, "w") as reply:
        try:
            check_model(request.model, request.blocks, request.stages, request.tp)
        except ConfigError as error:
            json.dump({"message": error.message, **error.facts}, reply)
    os._exit(0)


def _of_part(
    part: nn.Module,
    blocks: Sequence[nn.Module],
    job: config.Job,
    shape: MeshShape,
    plan: Iterable[str],
) -> Division:
    """Return the bytes of a stage, or the whole model."""
    own = trained = 0
    for name, value in part.named_parameters():
        layer = name.rpartition(".")[0]
        bytes_ = part_bytes(
            value,
            shape.shard,
            shape.tp if any(fnmatch.fnmatch(layer, each) for each in plan) else 1,
        )
        own += bytes_
        trained += bytes_ * value.requires_grad
    smaller = 2 if job.train.precision == "bf16" else 1
    if shape.pp > 1:
        # a stage stays gathered for all micro-batches of a step, as do its gradients, which are in
        # fp32
        stage = _size(part, frozen=True) // smaller + _size(part)
        return Division(own, trained, Groups(0, 0, 0, stage // shape.tp), Groups(0, 0, 0, 0))
    inside = [each for each in part.modules() if each in blocks]
    chunks = job.train.loss_chunks
    whole = [size // smaller for size in _groups(part, inside, shape.tp, chunks, frozen=True)]
    return Division(own, trained, Groups(*whole), _groups(part, inside, shape.tp, chunks))


def _groups(
    model: nn.Module, blocks: Sequence[nn.Module], tp: int, chunks: int, frozen: bool = False
) -> Groups:
    """Return the bytes of what is gathered together, on a rank. `frozen`: as for `_size`."""
    sizes = [_size(each, frozen) for each in blocks]
    embedding, head = (
        0 if each is None else _size(each, frozen) for each in find_ends(model, blocks, chunks)
    )
    rest = _size(model, frozen) - sum(sizes) - embedding - head
    return Groups(max(sizes) // tp, embedding, head, rest)


def _size(module: nn.Module, frozen: bool = False) -> int:
    """Return the bytes of the parameters. `frozen`: with those that are not trained."""
    return sum(each.nbytes for each in module.parameters() if frozen or each.requires_grad)


def part_bytes(value: torch.Tensor, shard: int, tp: int) -> int:
    """Return the bytes of the first of `shard` parts of a tensor, cut along its first dimension."""
    rows = value.shape[0] if value.dim() else 1
    return value.nbytes // rows * math.ceil(rows / shard) // tp


def main() -> None:
    """Answer a request from the standard input with what `memory_of` returns.

    The request is {"job": …, "ranks": …, "per_node": …}. If `memory_of` raises ConfigError, print
    {"refused": the arguments of the error}.
    """
    request = json.load(sys.stdin)
    job = config.from_dict(request["job"])
    shape = mesh_shape(job.parallel, request["ranks"], request["per_node"])
    try:
        states = states_of(job.optim)
        # A model may print, and the standard output is for the answer.
        with redirect_stdout(sys.stderr), fake_tensors():
            model = models.build_model(job.model)
            found: Mapping[str, Any] = memory_of(model, job, shape, states)
    except ConfigError as error:
        found = {"refused": {"message": error.message, **error.facts}}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
