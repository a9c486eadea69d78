"""torch.compile for the loss, and for a whole model by its blocks: train.compile. (rank side)

Blocks that are alike are compiled once for all of them, so that the first step does not take longer
the deeper a model is, and each one is a part of DDP's backward pass for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from raydist.settings.config import Job
from raydist.training.blocks import find_blocks, without_cache
from raydist.training.model_call import OwnLoss
from raydist.worker.torch_private import allow_compilations, forget_compiled


@contextmanager
def compiled(job: Job, model: nn.Module, loss: Any, sharded: bool) -> Iterator[Any]:
    """Compile the loss, and with `train.compile=blocks` those of a model that is not `sharded`.

    Give the loss; at the end the model is as it was. A whole model is compiled when it is wrapped
    (RankModel), the blocks of a sharded one when it is divided. Of the losses that models compute
    themselves those of transformers are compiled, which have a property for it. What a `train_step`
    does around the model is not compiled. ConfigError: the model has no blocks.
    """
    with ExitStack() as until_end:
        blocks: list[nn.Module] = []
        if sharded or job.train.compile == "blocks":
            without = "parallel=ddp" if sharded else "train.compile=true"
            blocks = find_blocks(model, job.parallel.blocks, without)
            allow_compilations(4 * len({_form(block) for block in blocks}))
        for block in [] if sharded else blocks:
            block.compile()
            until_end.callback(forget_compiled, block)
        if blocks:
            # Each layer of a model of transformers would be compiled for its place in the cache.
            until_end.enter_context(without_cache(model))
        if not isinstance(loss, OwnLoss):
            yield compiled_loss(loss, job.train.loss_chunks)
            return
        named = isinstance(getattr(type(model), "loss_function", None), property)
        if loss.train_step is None and named and blocks:
            changed: Any = model
            own = changed.loss_function
            changed.loss_function = torch.compile(own)
            until_end.callback(setattr, model, "loss_function", own)
        yield loss


def compiled_loss(loss: Any, chunks: int = 1) -> Any:
    """Return a loss (output, target) that torch.compile makes one kernel, or a few, of.

    Then the scores of a large vocabulary are read and written less often. `chunks`: how many parts
    of the positions it gets (`train.loss_chunks`). They are computed again in the backward pass,
    which needs the code of the forward pass: code for any size may differ from that for one.
    """

    def called(output: Any, target: Any) -> Any:  # torch.compile refuses functions of torch's
        return loss(output, target)

    return torch.compile(called, dynamic=False if chunks > 1 else None)


def _form(block: nn.Module) -> Any:
    """Return what is the same for blocks that one compiled code serves."""
    values = (*block.named_parameters(), *block.named_buffers())
    return type(block), tuple((name, value.shape, value.dtype) for name, value in values)
