"""One optimizer step: forward, backward, averaging, clipping, update; and its state. (rank side)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from raydist.settings.config import Job, Optim
from raydist.shared.errors import ConfigError
from raydist.state.object_store import StoragePath
from raydist.state.snapshot_layout import State
from raydist.training import optim
from raydist.training.meta import make_values, on_meta
from raydist.worker import context
from raydist.worker.backends import Comm
from raydist.worker.torch_private import scaler_state

if TYPE_CHECKING:
    from raydist.training.pipeline import Pipeline

Loss = Callable[[Any, Any], torch.Tensor]
"""(output, target) -> the mean over the batch, a tensor of shape []."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


class Stepper:
    """A model with its optimizer, schedule and precision."""

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        loss: Loss,
        comm: Comm,
        device: torch.device,
        rate: float,
        shares: Sequence[float] = (),
    ) -> None:
        """Set up the model for training.

        `shares`: the weight of each micro-batch, if their sizes differ among ranks.
        """
        self.shares = shares
        self.settings, self.device, self.loss, self.comm = job.train, device, loss, comm
        speed_up_gpu(job, device)
        last = not comm.sharded and channels_last(job, model, device)  # shards are contiguous
        self.format = torch.channels_last if last else torch.preserve_format
        if not comm.sharded and on_meta(model):
            make_values(model, [*model.modules()], device, job.seed)
        # a part of a model is moved when it is sharded: the whole model may not fit on the device
        self.model = model if comm.sharded else model.to(device).to(memory_format=self.format)
        # Pretrained models come in evaluation mode; otherwise the job has chosen the mode of each
        # module.
        if not model.training:
            model.train()
        self.wrapped = comm.wrap(self.model)
        self.pipeline = cast("Pipeline", self.wrapped) if comm.pipelined else None
        if self.pipeline is not None:
            self.model = self.pipeline.part
        trained = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = optim.optimizer(job.optim, trained, rate, optim.fused(job, trained))
        self.optimizer = comm.wrap_optimizer(optimizer, self.model)
        self.gradients_checked = False
        self.evaluated = self.pipeline or self.model
        if job.train.compile and not comm.sharded:
            self.wrapped.compile()
            # DDP's own forward may be a collective, so an evaluation bypasses it.
            if self.wrapped is not self.model:
                self.evaluated = cast("torch.nn.Module", torch.compile(self.model))
        half = None if comm.sharded else HALF.get(job.train.precision)
        self.cast = nullcontext() if half is None else torch.autocast(device.type, half)
        self.scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def plan(self, settings: Optim, course: optim.Course) -> None:
        """Create the schedule of the learning rate, now that the number of steps is known."""
        self.schedule = optim.schedule(settings, self.optimizer, course)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, batches: Iterator[Any]) -> torch.Tensor:
        """Make one optimizer step from the next micro-batches; return the mean loss of all samples.

        The loss is detached, of shape [].
        """
        loss = self._gradients(batches)
        self.comm.finish_gradients(self.optimizer)
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.comm.clip(self.model, self.settings.clip)
        if not self.gradients_checked:
            self.gradients_checked = True
            optim.check_gradients(self.optimizer)
        with self.comm.stepping(self.optimizer):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return loss()

    def rehearse(self, batches: Iterator[Any]) -> None:
        """Run forward and backward without a step, before a state is loaded.

        DDP rebuilds its buckets after the first backward, and their layout determines the order in
        which three or more ranks sum gradients. The first real step of a resumed run must have the
        layout of an uninterrupted run.
        """
        self._gradients(batches)()
        self.comm.finish_gradients(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self, batches: Iterator[Any]) -> Callable[[], torch.Tensor]:
        """Run forward and backward of a step; return a function that waits for the mean loss.

        The ranks' losses travel during the last backward pass: a message after it would make each
        step longer. The mean is over all samples.
        """
        *first, last = self.shares or [1 / self.settings.accumulate] * self.settings.accumulate
        total: torch.Tensor | int = 0
        with self.comm.accumulating(self.wrapped) if first else nullcontext():
            for share in first:
                loss = self._forward(next_batch(batches), share)
                total = total + loss.detach()
                self._backward(loss)
        loss = self._forward(next_batch(batches), last)
        mean = self.comm.start_mean(total + loss.detach())
        self._backward(loss)
        return mean

    def _forward(self, batch: Any, share: float) -> torch.Tensor:
        """Return the loss of a batch x `share`. With a pipeline this includes the backward pass."""
        *inputs, target = self._copied(batch)
        if self.pipeline is not None:
            return self.pipeline.step(inputs, target, self.loss, share)
        context.phase("forward")
        with self.cast:
            loss = self.loss(self.wrapped(*inputs), target)
            return loss if share == 1 else loss * share

    def _backward(self, loss: torch.Tensor) -> None:
        if self.pipeline is None:
            context.phase("backward")
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _copied(self, batch: Any) -> Any:
        """Return a batch on the device.

        A GPU copies it in a separate stream, while it still computes the previous step.
        """
        if self.copies is None or any(tensor.is_cuda for tensor in tensors_in(batch)):
            return self.to_device(batch)
        with torch.cuda.stream(self.copies):
            copied = self.to_device(batch)
        here = torch.cuda.current_stream(self.device)
        here.wait_stream(self.copies)
        for tensor in tensors_in(copied):
            tensor.record_stream(here)  # the memory is reused only after this step
        return copied

    def to_device(self, value: Any) -> Any:
        """Return a batch, or a part of one, on the device and in the memory format of the model."""
        if self.device.type == "cpu" and self.format is torch.preserve_format:
            return value
        if isinstance(value, torch.Tensor):
            memory_format = self.format if value.dim() == 4 else torch.preserve_format
            return value.to(self.device, non_blocking=True, memory_format=memory_format)
        if isinstance(value, dict):
            return {key: self.to_device(inner) for key, inner in value.items()}
        return (
            [self.to_device(inner) for inner in value] if isinstance(value, list | tuple) else value
        )

    def state(self) -> State:
        """Return the state that the next step depends on, without data and random generators."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": scaler_state(self.scaler),
        }

    def load(self, state: State, path: StoragePath) -> None:
        """Load a state; the current settings override it.

        A new learning rate or weight decay applies from this step on.
        """
        settings = [
            {k: v for k, v in group.items() if k not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]
        try:
            self.model.load_state_dict(state["model"])
            # with the current groups, because torch moves Adam's step onto the device if they are
            # fused
            ours = zip(state["optimizer"]["param_groups"], settings, strict=True)
            groups = [{**saved, **now} for saved, now in ours]
            self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        except (RuntimeError, ValueError, KeyError) as error:
            cause = f"this state does not fit the model and the optimizer: {error}"
            raise ConfigError.of("resume", str(path), cause, "resume=none") from error
        optim.align_state(self.optimizer)
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
        groups = zip(self.optimizer.param_groups, rates, self.schedule.lr_lambdas, strict=True)
        for group, base_rate, factor in groups:
            group["lr"] = base_rate * factor(self.schedule.last_epoch)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)


def next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch; the phase of the rank is `data` while it waits for it."""
    context.phase("data")
    return next(batches)
