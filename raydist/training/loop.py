"""The training loop: epochs, evaluation, checkpoints, resume, reports. (rank side)"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from raydist.settings.changeable import Number, Values, value_of
from raydist.settings.config import Job
from raydist.shared import env_names, kinds
from raydist.shared.errors import NonFiniteError
from raydist.state.device import Mark, device_of
from raydist.training.checkpointer import Checkpointer
from raydist.training.evaluation import Metric
from raydist.training.held_out import Counted
from raydist.training.hooks import Hooks
from raydist.training.step import StepFigures
from raydist.training.training_state import TrainingState
from raydist.training.waits import DataWait
from raydist.worker import checkpoint, context, profiling
from raydist.worker.agreed import Action


class TestSet(NamedTuple):
    """The test samples of one rank, and what is measured on them."""

    batches: Iterable[Counted]
    metrics: Mapping[str, Metric]


class Training:
    """The training on one rank: epochs, steps, evaluations and checkpoints."""

    def __init__(
        self,
        state: TrainingState,
        batches: Iterable[Any],
        tests: TestSet | None,
        checkpointer: Checkpointer,
        waits: DataWait,
        hooks: Hooks,
    ) -> None:
        self.state = state
        self.batches = batches
        self.tests = tests
        self.checkpointer = checkpointer
        self.waits = waits
        self.hooks = hooks
        self.reporter = MetricReporter(state.stepper.model.device)
        self.seconds = {"step": 0.0, "evaluate": 0.0, "save": 0.0}
        self.skipped = 0
        """Steps of this attempt that changed no weight (`train.nan=skip`)."""

    @property
    def job(self) -> Job:
        """The settings, which may change from step to step."""
        return self.state.job

    def run(self) -> dict[str, float]:
        """Train from the current step to the end; return the last loss and the last metrics."""
        progress = self.state.progress
        order = self.state.order
        stepper = self.state.stepper
        self._announce()
        # A checkpoint is saved after the evaluation of its step, a snapshot is kept before it.
        if progress.unevaluated:
            self._evaluate()
        save_now = False
        while progress.more:
            batches, began = self.waits.timed(iter(self.batches)), time.perf_counter()
            self.checkpointer.go_on()
            while progress.more and order.more:
                rate = stepper.rate
                mean_loss = stepper.forward_backward(batches)
                self.checkpointer.catch_up()
                figures = stepper.update(mean_loss)
                if not figures.finite:
                    self._not_finite(figures)
                progress.count_step(order.global_batch, figures.loss)
                order.position += order.global_batch
                self._report(figures, rate)
                self.waits.step(order.kind)
                # Before the state is kept, which has the settings of the next step.
                actions = context.current().actions.due(progress.step)
                for action in actions:
                    if action.what == "set":
                        self._change(action.step, action.values)
                evaluate = progress.unevaluated = self._evaluates_after(progress.step)
                self.checkpointer.keep(self.state)
                if progress.more and context.current().stop_request.due(progress.step):
                    self._leave(save=any(action.what == "save" for action in actions))
                save_now = profiling.do_after_step(progress.step, actions)
                # The first step compiles: the driver counts it as a part of the launch or restart.
                if progress.step == progress.resumed + 1:
                    began = time.perf_counter()
                save_every = self.job.checkpoint.every
                due = save_now or (save_every and progress.step % save_every == 0)
                # The last step, and that of an epoch of a map-style data set, are saved after
                # their evaluation.
                save = due and progress.more and (order.kind != "map" or order.more)
                if evaluate or save:
                    self.seconds["step"] += time.perf_counter() - began
                    if evaluate:
                        self._evaluate()
                    if save:
                        self._save()
                    began = time.perf_counter()
            self.seconds["step"] += time.perf_counter() - began
            if (progress.more or order.kind == "map") and not order.more:
                order.next_epoch()
                train, save_every = self.job.train, self.job.checkpoint.every
                evaluate_every = 0 if train.evaluate_steps else train.evaluate_every
                if evaluate_every and order.epoch % evaluate_every == 0:
                    self._evaluate()
                due = save_every is None or save_now or progress.step % save_every == 0
                if due and progress.more:
                    self._save()
        self._finish_steps()
        self._evaluate()
        self._save()
        self.checkpointer.rest()
        timed = max(0, progress.step - progress.resumed - 1)  # without the first step
        samples, rank = timed * order.global_batch, context.rank().rank
        context.current().samples_per_s = samples / self.seconds["step"] if samples else 0.0
        context.emit_event(kinds.Done(rank=rank, spent=self.seconds, samples=samples))
        return ({} if progress.loss is None else {"loss": progress.loss.item()}) | progress.results

    def _announce(self) -> None:
        """Tell the driver where this attempt begins."""
        progress, rank = self.state.progress, context.rank().rank
        context.set_step(progress.step)
        context.current().stop_request.enter_fit(context.current().fit, progress.step)
        self._begin_changes()
        context.emit_event(
            kinds.Begin(
                rank=rank,
                steps=progress.steps,
                epochs=progress.epochs,
                samples=self.state.order.size,
                resumed=progress.resumed,
                checkpoint=checkpoint.newest_path(),
                fit=context.later_fit(context.current().fit),
            )
        )
        # No step will report the loss, and no evaluation its results.
        finished = progress.step == progress.steps
        if finished and progress.loss is not None and rank == 0:
            values = {"loss": progress.loss.item(), **progress.results}
            context.emit_event(kinds.Recalled(rank=rank, step=progress.step, values=values))

    def _begin_changes(self) -> None:
        """Repeat what earlier attempts had changed: at once, or after the step of then."""
        current, done = context.current(), self.state.progress.step
        current.actions.enter_fit(current.fit, done)
        made = json.loads(os.environ.get(env_names.CHANGES, "[]"))
        mine = [(step, values) for fit, step, values in made if fit == current.fit]
        missed: dict[str, Number] = {}
        for step, values in mine:
            missed |= values if step <= done else {}
        if any(value_of(self.job, name) != value for name, value in missed.items()):
            self._change(done, missed)
        later = [Action(step, "set", values, current.fit) for step, values in mine if step > done]
        current.actions.repeat(later)

    def _change(self, step: int, values: Values) -> None:
        """Go on with these settings after this step."""
        before = self.state.change(values)
        if context.rank().rank == 0:
            context.emit_event(kinds.Changed(rank=0, step=step, before=before, after=values))

    def _evaluates_after(self, step: int) -> bool:
        """Report whether `train.evaluate_steps` asks for an evaluation after this step."""
        every = self.job.train.evaluate_steps
        return every is not None and step > 0 and step % every == 0

    def _not_finite(self, figures: StepFigures) -> None:
        """Warn of a step that changed no weight, or end the training: as `train.nan` says."""
        step, norm = self.state.progress.step + 1, figures.norm
        assert norm is not None
        what = (
            f"step {step}: the loss is {figures.loss.item():g}, the gradient's norm {norm.item():g}"
        )
        if self.job.train.nan == "end":
            raise NonFiniteError(f"{what} (train.nan=end); {self._save_batches(step)}")
        self.skipped += 1
        # The first, then the second, fourth, …: bad data may last for thousands of steps.
        if context.rank().rank == 0 and self.skipped & (self.skipped - 1) == 0:
            context.warn(f"{what}, so it changed no weight (train.nan=skip); {self.skipped} so far")

    def _save_batches(self, step: int) -> str:
        """Save this rank's batches of a step; return where they are, or why they are not."""
        me = context.rank()
        path = me.run_dir / "nan" / f"step-{step:08d}" / f"rank-{me.rank}.pt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.state.stepper.batches, path)
        except Exception as error:  # of the disk, or a batch that cannot be pickled
            return f"the batches could not be saved: {error}"
        return f"torch.load reads its batches in {path}"

    def _report(self, figures: StepFigures, rate: float) -> None:
        """Report the step that has these figures and was made with this learning rate."""
        progress, order = self.state.progress, self.state.order
        known = {"loss": figures.loss}
        # train.nan needs the norm too, but does not report it.
        wanted = self.job.train.clip is not None or self.job.train.grad_norm
        if wanted and figures.norm is not None:
            known["grad_norm"] = figures.norm
        facts = {
            "steps": progress.steps,
            "epoch": order.epoch + 1,
            "epochs": progress.epochs,
            "samples": progress.samples,
            "lr": rate,
        }
        self.reporter.step(progress.step, known, order.next_hash(), **facts)
        if self.hooks.on_step is not None:
            self.hooks.on_step(progress.step, {**known, **facts})

    def _finish_steps(self) -> None:
        """Report all steps, and wait for those that the GPU has not finished: a part of their time.

        The host runs ahead of a GPU, so without this a short training would seem too fast.
        """
        began = time.perf_counter()
        self.reporter.rest()
        self.seconds["step"] += time.perf_counter() - began

    def _leave(self, save: bool) -> None:
        """Keep this step's state and wait to be stopped: the set of ranks is about to change.

        `save`: whether a person has typed `raydist save`, too.
        """
        self.reporter.rest()
        kept = self.checkpointer.hold(self.state)
        comm = self.state.stepper.model.comm
        if save or not all(int(each.item()) for each in comm.gather(torch.tensor([int(kept)]))):
            self._save()
            self.checkpointer.rest()
        context.current().stop_request.leave(self.state.progress.step)

    def _evaluate(self) -> None:
        """Evaluate the model on the test samples, unless this step has been evaluated already."""
        progress = self.state.progress
        step = progress.step
        progress.unevaluated = False
        if self.tests is None or progress.results:
            return
        with self._spending("evaluate"):
            tests, model = self.tests, self.state.stepper.model
            progress.results = model.evaluate(tests.batches, tests.metrics)
        if context.rank().rank == 0:
            context.report(step=step, **progress.results)
        if self.hooks.on_evaluate is not None:
            self.checkpointer.note_change(step)
            self.hooks.on_evaluate(step, dict(progress.results))

    def _save(self) -> None:
        """Save a checkpoint of the current step, unless it has been saved already."""
        progress = self.state.progress
        if progress.loss is None or self.checkpointer.saved_step == progress.step:
            return
        with self._spending("save"):
            self.checkpointer.save(self.state, {"loss": progress.loss.item(), **progress.results})

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        """Measure the time of an evaluation or a checkpoint (`what`), and report it."""
        self._finish_steps()
        context.phase(what)
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.seconds[what] += took
        context.emit_event(kinds.Spent(rank=context.rank().rank, what=what, s=took))
        self.checkpointer.go_on()


class MetricReporter:
    """Reports a step once the GPU has finished it, so that the GPU never waits for a report."""

    def __init__(self, device: torch.device) -> None:
        self.device = device_of(device)
        self.queue: deque[tuple[Mark, int, dict[str, Any], str | None]] = deque()

    def step(
        self,
        step: int,
        figures: Mapping[str, torch.Tensor],
        samples_hash: str | None = None,
        **facts: Any,
    ) -> None:
        """Report a step with its figures, at once or as soon as the GPU has computed them.

        `samples_hash`: the checksum of its samples, if it has one.
        """
        if not any(self.device.lags(value) for value in figures.values()):
            context.emit_report(step, {**figures, **facts}, samples_hash=samples_hash)
            return
        on_host = {}
        for name, value in figures.items():
            on_host[name] = torch.empty((), dtype=value.dtype, pin_memory=value.is_cuda)
            self.device.copy(on_host[name], value)
        self.queue.append((self.device.mark(), step, {**on_host, **facts}, samples_hash))
        while self.queue and self.queue[0][0].done():
            self._report_next()

    def rest(self) -> None:
        """Report all waiting steps."""
        while self.queue:
            self.queue[0][0].wait()
            self._report_next()

    def _report_next(self) -> None:
        _, step, values, samples_hash = self.queue.popleft()
        context.emit_report(step, values, samples_hash=samples_hash)
