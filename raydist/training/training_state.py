"""How far a training is, and its whole state: what is kept, saved and continued. (rank side)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from raydist.settings.changeable import CHANGEABLE, Number, Values, value_of, with_values
from raydist.settings.config import Job
from raydist.settings.mesh import mesh_shape
from raydist.state.snapshot_layout import State
from raydist.training import optim, sources
from raydist.training.data import Order
from raydist.training.step import Stepper
from raydist.worker import context, random_state


class TrainingProgress:
    """The steps of a training: those that are done, and those to come."""

    def __init__(self, job: Job, order: Order, step: int, position: State) -> None:
        """Count on from a step. `position`: that of its state; empty at the beginning."""
        self.resumed = self.step = step
        self.samples: int = position.get("samples", 0)
        """Training samples used so far by all ranks."""
        self.loss: torch.Tensor | None = None
        """The loss of the last step; None: it is not known."""
        self.unevaluated: bool = position.get("unevaluated", False)
        """Whether an evaluation after the last step is to come (`train.evaluate_steps`)."""
        self.results: dict[str, float] = position.get("results", {})
        """Those of the evaluation after the last step; empty: there was none."""
        per_epoch, epochs = order.steps_per_epoch, job.train.epochs
        after = order.steps_left + (epochs - order.epoch - 1) * per_epoch
        self.steps = job.train.steps or step + (after if order.epoch < epochs else 0)
        self.epochs = epochs
        if job.train.steps is not None:
            self.epochs = math.ceil(self.steps / per_epoch) if per_epoch else 0
        warmup = job.optim.warmup
        self.warmed: int = self.samples + (warmup - step) * order.global_batch
        """The number of samples at the end of the warm-up."""
        if step > warmup:
            self.warmed = position.get("warmed", self.warmed)

    @property
    def more(self) -> bool:
        """Whether there are steps to come."""
        return self.step < self.steps

    def count_step(self, samples: int, loss: torch.Tensor) -> None:
        """Count a step. `samples`: its samples on all ranks."""
        self.step += 1
        self.samples += samples
        self.loss = loss
        self.results = {}

    def course(self, job: Job, order: Order) -> optim.Course:
        """Return the schedule at its position in samples: a new global batch does not move it.

        With `train.steps` the schedule counts steps, whose number does not change.
        """
        if job.train.steps is not None:
            return optim.Course(self.steps)
        steps = self.epochs * order.steps_per_epoch
        return optim.Course(steps, steps - self.steps, self.warmed / order.global_batch)


class FoundState(Protocol):
    """A state to continue from, in memory or on the disk."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def state(self) -> State:
        """The state; at least its `position`."""
        ...

    def source(self, rank: int, world_size: int) -> State | None:
        """Return the state of this rank's source.

        `rank`, `world_size`: among the ranks that get different samples. None: there is none, or it
        belongs to another number of ranks.
        """
        ...

    def random(self, rank: int, world_size: int) -> torch.Tensor | None:
        """Return the state of this rank's random generators.

        None: another number of ranks has kept them.
        """
        ...

    def restore(self, stepper: Stepper, rehearse: Callable[[], None]) -> torch.Tensor | None:
        """Load the state; return the loss of its step, if it is known.

        `rehearse`: runs forward and backward once, before the state is loaded.
        """
        ...


class TrainingState:
    """All that a training needs to continue."""

    def __init__(
        self, job: Job, stepper: Stepper, order: Order, progress: TrainingProgress
    ) -> None:
        self.job = job
        """With the settings that were changed since (`raydist set`)."""
        self.stepper = stepper
        self.order = order
        self.progress = progress
        self._initial_job = job
        self._changes: dict[str, list[Number]] = {}
        """By name: the value with which the run began, and the present one."""

    def position(self) -> State:
        """Return how far the training is, and the changed settings: equal on all ranks."""
        progress = self.progress
        return {
            **self.order.place(),
            "samples": progress.samples,
            "warmed": progress.warmed,
            "unevaluated": progress.unevaluated,
            "results": progress.results,
            "changed": {name: [*values] for name, values in self._changes.items()},
        }

    def change(self, values: Values) -> Values:
        """Go on with other values of these settings; return those before."""
        before = {name: value_of(self.job, name) for name in values}
        self.job = with_values(self.job, values)
        for name, value in values.items():
            self._changes[name] = [value_of(self._initial_job, name), value]
        self.stepper.set_clip(self.job.train)
        if "optim.lr" in values:
            rate = optim.learning_rate(self.job.optim, self.order.global_batch)
            self.stepper.set_rate(rate)
        return before

    def keep_changes(self, position: State) -> None:
        """Change the settings that had been changed when the state with this position was kept.

        If this run sets another value than that one did, its own value stays.
        """
        changed: dict[str, list[Number]] = position.get("changed", {})
        known = {name: pair for name, pair in changed.items() if name in CHANGEABLE}
        if same := {
            name: now for name, (first, now) in known.items() if value_of(self.job, name) == first
        }:
            self.change(same)

    def common(self) -> State:
        """Return the part that is equal on all ranks, of a model that is not sharded."""
        return {**self.stepper.state(), "position": self.position()}

    def own(self) -> State:
        """Return the part that differs among ranks."""
        model = self.stepper.model
        return {
            "random": random_state.capture(model.device),
            "loss": self.progress.loss,
            # With some backends the running means differ among ranks.
            "buffers": dict(model.module.named_buffers()),
            "world_size": context.rank().world_size,
            **self.order.own(),
        }

    def seed(self) -> None:
        """Seed the random generators for the next step."""
        # Stages that share samples draw different numbers; the ranks of a tp group compute the same
        # and draw the same.
        me = context.rank()
        shape = mesh_shape(self.job.parallel, me.world_size, me.local_world_size)
        seed = random_state.derive(self.job.seed, self.progress.step, me.rank // shape.tp)
        random_state.seed_everything(seed, self.job.deterministic)

    def restore(self, found: FoundState, batches: Iterable[Any]) -> None:
        """Restore the model, the optimizer and the random generators."""
        me = context.rank()
        self.progress.loss = found.restore(self.stepper, lambda: self._rehearse(batches))
        random = found.random(me.rank, me.world_size)
        if random is not None:
            random_state.restore(random, self.stepper.model.device)
        else:
            self.seed()

    def _rehearse(self, batches: Iterable[Any]) -> None:
        """Run forward and backward of the next step, as `Stepper.rehearse` explains."""
        order = self.order
        if not self.progress.more:
            return
        if isinstance(order, sources.Stream):
            self.stepper.rehearse(order.ahead())
            return
        position = order.position
        if not order.steps_left:  # a snapshot of the last step of an epoch
            order.position = 0
        self.stepper.rehearse(iter(batches))
        order.position = position
