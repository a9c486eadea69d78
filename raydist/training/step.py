"""One optimizer step: forward, backward, averaging, clipping, update; and its state. (rank side)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.optim.lr_scheduler import LambdaLR

from raydist.settings.config import Train
from raydist.shared.errors import ConfigError
from raydist.state.object_store import StoragePath
from raydist.state.snapshot_layout import State
from raydist.training import optim
from raydist.training.model_call import model_call
from raydist.training.rank_model import RankModel
from raydist.training.token_loss import TokenLoss, own_loss
from raydist.worker import context
from raydist.worker.torch_private import scaler_state

Loss = Callable[[Any, Any], torch.Tensor]
"""(output, target) -> the mean over the batch, a tensor of shape []."""


class StepFigures(NamedTuple):
    """What is known of an optimizer step, on all ranks."""

    loss: torch.Tensor
    """The mean over all samples of all ranks, detached, of shape []."""
    norm: torch.Tensor | None
    """The norm of the gradient before clipping, of shape []; None: it was not computed."""
    finite: bool
    """False: the loss or the gradient was not, and no weight was changed (`train.nan`)."""


class Stepper:
    """Makes the optimizer steps of a model."""

    def __init__(
        self,
        settings: Train,
        model: RankModel,
        loss: Loss,
        schedule: LambdaLR,
        shares: Sequence[float] = (),
    ) -> None:
        """`shares`: the weight of each micro-batch, if their sizes differ among ranks."""
        self.model = model
        self.loss = loss
        self.schedule = schedule
        self.shares = shares or [1 / settings.accumulate] * settings.accumulate
        self.nan = settings.nan
        self.set_clip(settings)
        self.batches: list[Any] = []
        """This rank's batches of the current step, kept with `train.nan=end`."""
        self.gradients_checked = False
        self.loaded: StoragePath | None = None
        """The checkpoint whose state the next step is the first one to use."""
        scaled = settings.precision == "fp16" and not model.comm.sharded
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=scaled)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.model.optimizer.param_groups[0]["lr"])

    def set_clip(self, settings: Train) -> None:
        """Clip the gradient from now on as these settings say."""
        self.max_norm = settings.clip
        self.takes_norm = settings.clip is not None or settings.grad_norm or self.nan != "ignore"

    def set_rate(self, rate: float) -> None:
        """Go on with another learning rate, at the same point of the schedule."""
        groups = self.model.optimizer.param_groups
        self.schedule.base_lrs = [rate] * len(groups)
        for group in groups:
            group["initial_lr"] = rate
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        groups = self.model.optimizer.param_groups
        rates, factors = self.schedule.base_lrs, self.schedule.lr_lambdas
        for group, base_rate, factor in zip(groups, rates, factors, strict=True):
            group["lr"] = base_rate * factor(self.schedule.last_epoch)

    def forward_backward(self, batches: Iterator[Any]) -> Callable[[], torch.Tensor]:
        """Run forward and backward of the next micro-batches, one step's.

        Return a function that waits for the loss of the step: the mean over all samples of all
        ranks, detached, of shape []. The ranks' losses travel during the last backward pass: a
        message after it would make each step longer.
        """
        with self.model.watch.watching():
            return self._passes(batches)

    def _passes(self, batches: Iterator[Any]) -> Callable[[], torch.Tensor]:
        """Do what `forward_backward` says."""
        self.batches.clear()
        comm = self.model.comm
        loaded: Iterator[Any] = map(self._next, [batches] * len(self.shares))
        shares: Sequence[float | torch.Tensor] = self.shares
        if isinstance(self.loss, TokenLoss):
            loaded = iter(step := [*loaded])
            shares = [self._share_of_target(self.loss, step)] * len(step)
        *first, last = shares
        total: torch.Tensor | int = 0
        with comm.accumulating(self.model.wrapped) if first else nullcontext():
            for share in first:
                loss = self._forward(next(loaded), share)
                total = total + loss.detach()
                self._backward(loss)
        loss = self._forward(next(loaded), last)
        mean = comm.start_mean(total + loss.detach())
        self._backward(loss)
        return mean

    def _next(self, batches: Iterator[Any]) -> Any:
        batch = next_batch(batches)
        if self.nan == "end":
            self.batches.append(batch)
        return batch

    def _share_of_target(self, loss: TokenLoss, step: Sequence[Any]) -> torch.Tensor:
        """Return the weight of one target in the average over all ranks. A collective.

        `step`: this rank's batches.
        """
        own = own_loss(loss)
        count = sum(loss.count(model_call(batch, own).target) for batch in step)
        assert isinstance(count, torch.Tensor)
        # Ranks that compute a sample together all count its targets, and are counted here too.
        every = self.model.comm.sum(count.to(self.model.device))
        return context.rank().world_size / every.clamp(min=1)

    def _forward(self, batch: Any, share: float | torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch x `share`. With a pipeline this includes the backward pass."""
        call = model_call(self.model.copier.copy_ahead(batch), own_loss(self.loss))
        if self.model.pipeline is not None:
            parts = 1 if isinstance(self.loss, TokenLoss) else self.model.pipeline.microbatches
            weighed = partial(self._weighed, share=share / parts)
            return self.model.pipeline.step(call, weighed)
        context.phase("forward")
        with self.model.cast:
            output = call.output(self.model.wrapped)
            return self._weighed(output, call.target, share)

    def _weighed(self, output: Any, target: Any, share: float | torch.Tensor) -> torch.Tensor:
        """Return the loss of an output x `share`, that of the batch or of each of its targets."""
        loss = self.loss(output, target)
        if isinstance(share, torch.Tensor):
            return cast("TokenLoss", self.loss).weighed(loss, target, share)
        return loss if share == 1 else loss * share

    def _backward(self, loss: torch.Tensor) -> None:
        if self.model.pipeline is None:
            context.phase("backward")
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, mean_loss: Callable[[], torch.Tensor]) -> StepFigures:
        """Update the parameters with the gradients of all ranks, and the learning rate.

        `mean_loss`: what `forward_backward` returned.
        """
        comm, optimizer = self.model.comm, self.model.optimizer
        comm.finish_gradients(optimizer)
        norm = None
        if self.takes_norm:
            self.scaler.unscale_(optimizer)
            norm = comm.clip(self.model.module, self.max_norm or math.inf)
        # The loss is waited for after the step, unless the step depends on it.
        loss = mean_loss() if self.nan != "ignore" else None
        finite = loss is None or self._finite(loss, norm)
        if finite:
            self._step()
        else:
            self.scaler.update()  # which ends what unscale_ began, and reduces the scale
        optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return StepFigures(mean_loss() if loss is None else loss, norm, finite)

    def _finite(self, loss: torch.Tensor, norm: torch.Tensor | None) -> bool:
        """Report whether the loss and the gradient are finite, on all ranks alike.

        With fp16 gradients may overflow: the scaler skips those steps.
        """
        gradient = norm is None or self.scaler.is_enabled() or bool(norm.isfinite())
        return gradient and bool(loss.isfinite())

    def _step(self) -> None:
        comm, optimizer = self.model.comm, self.model.optimizer
        if not self.gradients_checked:
            self.gradients_checked = True
            optim.check_gradients(optimizer)
        try:
            with comm.stepping(optimizer):
                self.scaler.step(optimizer)
        except KeyError as error:
            if self.loaded is None:
                raise
            cause = (
                f"its optimizer has no {error}: {type(optimizer).__name__} cannot go on from the "
                "state of another optimizer, or of one with other arguments"
            )
            raise ConfigError.of("resume", str(self.loaded), cause, "resume=none") from error
        self.loaded = None
        self.scaler.update()

    def rehearse(self, batches: Iterator[Any]) -> None:
        """Run forward and backward without a step, before a state is loaded.

        DDP rebuilds its buckets after the first backward, and their layout determines the order in
        which three or more ranks sum gradients. The first real step of a resumed run must have the
        layout of an uninterrupted run.
        """
        self.forward_backward(batches)()
        self.model.comm.finish_gradients(self.model.optimizer)
        self.model.optimizer.zero_grad(set_to_none=True)

    def state(self) -> State:
        """Return the state that the next step depends on, without data and random generators."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.model.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": scaler_state(self.scaler),
        }

    def load(self, state: State, path: StoragePath) -> None:
        """Load a state; the current settings override it.

        A new learning rate or weight decay applies from this step on.
        """
        optimizer = self.model.optimizer
        try:
            self.model.module.load_state_dict(state["model"])
            # with the current groups, because torch moves Adam's step onto the device if they are
            # fused
            pairs = zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
            groups = [optim.continued(*pair, self.model.settings) for pair in pairs]
            optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        except (RuntimeError, ValueError, KeyError) as error:
            cause = f"this state does not fit the model and the optimizer: {error}"
            raise ConfigError.of("resume", str(path), cause, "resume=none") from error
        optim.align_state(optimizer)
        self.loaded = path
        self.go_on(state)

    def go_on(self, state: State) -> None:
        """Continue the schedule and the scaler of a state, with the current learning rate."""
        rates = self.schedule.base_lrs
        self.schedule.load_state_dict({**state["schedule"], "base_lrs": rates})
        if state["scaler"]:  # empty if the run had no scaler
            numbers = {
                k: v.item() if isinstance(v, torch.Tensor) else v
                for k, v in state["scaler"].items()
            }
            self.scaler.load_state_dict(numbers)
        self._follow_schedule()


def next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch; the phase of the rank is `data` while it waits for it."""
    context.phase("data")
    return next(batches)
