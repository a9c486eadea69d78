"""One optimizer step: forward, backward, averaged gradients, clipping, the step; and its state. (rank side)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from raydist import context
from raydist.backends import Comm
from raydist.config import Job
from raydist.errors import ConfigError
from raydist.loop import optim
from raydist.storage import Place

Loss = Callable[[Any, Any], torch.Tensor]
"""(output, target) -> the mean over the batch, a tensor without dimensions."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """A model with what trains it: optimizer, schedule, precision."""

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        loss: Loss,
        comm: Comm,
        device: torch.device,
        rate: float,
        steps: int,
        shares: Sequence[float] = (),
    ) -> None:
        """`shares`: what each micro-batch counts, where they are not all of one size on all ranks."""
        self.shares = shares
        self.settings, self.device, self.loss, self.comm = job.train, device, loss, comm
        self.format = torch.channels_last if job.train.channels_last else torch.preserve_format
        self.model = model.to(device).to(memory_format=self.format)
        optimizer = optim.optimizer(job.optim, [p for p in model.parameters() if p.requires_grad], rate)
        self.wrapped = comm.wrap(self.model)
        self.optimizer = comm.wrap_optimizer(optimizer, self.model)
        self.schedule = optim.schedule(job.optim, self.optimizer, steps)
        if job.train.compile:
            self.wrapped.compile()
        half = HALF.get(job.train.precision)
        self.cast = nullcontext() if half is None else torch.autocast(device.type, half)
        self.scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
        self.wrapped.train()

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, batches: Iterator[Any]) -> torch.Tensor:
        """Take the next micro-batches and make one optimizer step of them; the mean loss of this rank, detached."""
        loss = self._gradients(batches)
        self.comm.finish_gradients(self.optimizer)
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        with self.comm.stepping(self.optimizer):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return loss

    def rehearse(self, batches: Iterator[Any]) -> None:
        """Forward and backward without a step, before a state is loaded.

        DDP lays its buckets out anew after the first backward, and the layout decides in which order three or more
        ranks add up: a resumed run must not take its first real step in another layout than the unbroken one did.
        """
        self._gradients(batches)
        self.comm.finish_gradients(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self, batches: Iterator[Any]) -> torch.Tensor:
        shares = self.shares or [1 / self.settings.accumulate] * self.settings.accumulate
        full = sum(self.shares) or 1.0
        if len(shares) == 1:
            return self._backward(next_batch(batches), shares[0]) / full
        with self.comm.accumulating(self.wrapped):
            total = self._backward(next_batch(batches), shares[0])
            for share in shares[1:-1]:
                total += self._backward(next_batch(batches), share)
        return (total + self._backward(next_batch(batches), shares[-1])) / full

    def _backward(self, batch: Any, share: float) -> torch.Tensor:
        *inputs, target = self.placed(batch)
        context.phase("forward")
        with self.cast:
            loss = self.loss(self.wrapped(*inputs), target)
            if share != 1:
                loss = loss * share
        context.phase("backward")
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def placed(self, value: Any) -> Any:
        """A batch, or a part of one, on the device and in the memory order of the model."""
        if self.device.type == "cpu" and self.format is torch.preserve_format:
            return value
        if isinstance(value, torch.Tensor):
            order = self.format if value.dim() == 4 else torch.preserve_format
            return value.to(self.device, non_blocking=True, memory_format=order)
        if isinstance(value, dict):
            return {key: self.placed(inner) for key, inner in value.items()}
        return [self.placed(inner) for inner in value] if isinstance(value, list | tuple) else value

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, but for the data and the random numbers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any], path: Place) -> None:
        """Put a state back. Words win over it: another learning rate or weight decay counts from here on."""
        words = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in self.optimizer.param_groups]
        rates = self.schedule.base_lrs
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(f"resume={path}: that state does not fit this model and optimizer: {error}") from error
        self.schedule.load_state_dict({**state["schedule"], "base_lrs": rates})
        if state["scaler"]:  # it is empty if the run had none
            self.scaler.load_state_dict(state["scaler"])
        for group, said, full, shape in zip(
            self.optimizer.param_groups, words, rates, self.schedule.lr_lambdas, strict=True
        ):
            group.update(said, lr=full * shape(self.schedule.last_epoch))


def next_batch(batches: Iterator[Any]) -> Any:
    """The next batch; what waits for data is told as that."""
    context.phase("data")
    return next(batches)
