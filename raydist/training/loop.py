"""The training loop: epochs, evaluation, checkpoints, resume, reports. (rank side)"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from raydist.settings.config import Job, as_saved
from raydist.settings.mesh import mesh_shape
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, RaydistError, nearest
from raydist.state.checkpoint_files import MappedState, Saved
from raydist.state.device import Mark, device_of
from raydist.state.snapshot import cloned
from raydist.state.snapshot_layout import State
from raydist.training import data, models, optim, sharded, sources
from raydist.training import sharded_state as shards
from raydist.training.evaluation import Metric, evaluate, same_buffers
from raydist.training.snapshotter import Restored, Snapshotter
from raydist.training.step import Loss, Stepper
from raydist.training.waits import DataWait
from raydist.worker import checkpoint, context, groups, random_state
from raydist.worker.backends import Comm


def fit(
    config: Job,
    *,
    train: Any,
    loss: Loss,
    test: Dataset[Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    model: torch.nn.Module | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> dict[str, float]:
    """Train a model as the settings say; return its last loss and its last metrics, which are those
    of all ranks.

    All ranks must call it, with the same data sets. B is the number of samples in one forward pass
    on one rank: `data.batch_size`, or `data.global_batch` / (`train.accumulate` x ranks) where that
    is set.

    - `config`: the settings, as the job's function gets them in its parameter `config`.
    - `train`: a map-style Dataset (`__len__` and `__getitem__`), such as `raydist.data.TokenFiles`.
      A sample is a sequence (input, …, target), or a dict of columns in that order. Or a stream of
      samples (IterableDataset of torch or of datasets), a loader of batches for this rank
      (DataLoader, StatefulDataLoader), a ray.data.Dataset: docs/data.md says what each promises.
    - `collate`: makes a batch of a list of samples. The default is torch's `default_collate`: a
      sample (tensor of shape [3, 32, 32], int) becomes a batch [tensor of shape [B, 3, 32, 32],
      tensor of shape [B]].
    - `model`: a module, called as `model(*inputs)`. It is moved to the rank's device and trained in
      place. None: the model that `model=` names.
    - `loss`: `(output, target)` -> the mean over the batch, a tensor of shape [].
    - `test`: a map-style Dataset like `train`. Over all ranks each sample is evaluated once, in
      batches of at most B; `target` must have a length. None: no evaluation.
    - `metrics`: name -> `(output, target)` -> a tensor of shape [B] with one value per sample, or
      their mean with shape []. They are evaluated on `test`, together with `loss`.

    Returns a dict of floats. `loss`: the training loss of the last optimizer step, the mean over
    the samples of all ranks; if no step was left to do, that of the checkpoint. With `test` also
    `test_loss` and each metric: means over all test samples. All of them are equal on all ranks.

    After each optimizer step it reports `loss` (the mean over the samples of all ranks), `lr`,
    `steps` (optimizer steps in all), `epoch` (from 1), `epochs`, `samples` (training samples used
    so far by all ranks); after each evaluation the results.

    It saves checkpoints as `checkpoint.every` says, and continues from a checkpoint or a snapshot
    if the run has one. A job may call it several times, in the same order in each run: the second
    one has its steps and its checkpoints (`checkpoints/fit-2/`) for itself. After a restart those
    that have finished make no step.

    ConfigError: `train` has no length and `train.steps` is not set; it is none of these, or `test`
    is not a map-style Dataset; the samples do not fill one optimizer step; the global batch cannot
    be divided among the ranks; `checkpoint.best` names an unknown metric; `model=` names no model;
    the checkpoint does not fit the model. RaydistError: called outside a run, or the ranks found
    different checkpoints. What `model`, `loss`, a metric or a data set raises is passed on.
    """
    current = context.current()
    if current.comm is None:
        raise RaydistError(
            "raydist.fit was called outside a run: end the file with raydist.main(job) and run "
            "the file"
        )
    with current.next_fit():
        return _fit(config, train, loss, test, metrics, model, collate)


def _fit(
    config: Job,
    train: Any,
    loss: Loss,
    test: Dataset[Any] | None,
    metrics: Mapping[str, Metric] | None,
    model: torch.nn.Module | None,
    collate: Callable[[list[Any]], Any] | None,
) -> dict[str, float]:
    me = context.rank()
    shape = mesh_shape(config.parallel, me.world_size, me.local_world_size)
    order, batches = sources.ordered(train, config, shape.data_rank(me.rank), shape.data, collate)
    training = Training(
        config, order, {"test_loss": loss, **(metrics or {})} if test is not None else {}
    )
    training.batches = batches
    if test is not None:
        size, together = data.size_of(test, "test"), training.comm.sharded
        sampler = data.EvalSampler(size, order.portion, order.rank, order.world_size, together)
        training.tests = data.loader(test, sampler, config.data, collate)
        training.counted = sampler.counted
    training.begin(model if model is not None else models.build_model(config.model), loss)
    return training.run()


class Training:
    """The training on one rank: its position, steps, evaluations and checkpoints."""

    def __init__(self, job: Job, order: data.Order, metrics: dict[str, Metric]) -> None:
        self.job, self.order, self.metrics = job, order, metrics
        self.me, self.device, self.comm = (
            context.rank(),
            context.rank().device,
            cast("Comm", context.current().comm),
        )
        if self.comm.sharded:  # the job may have passed fit other settings than those of the run
            self.comm = replace(cast("Any", self.comm), job=job)
        self.batches: Any = None
        self.tests: Any = None
        self.counted = 0  # batches of `tests` that contain samples of this rank
        self.step = self.samples = 0
        self.results: dict[str, float] = {}
        self.spent = {"step": 0.0, "evaluate": 0.0, "save": 0.0}
        # The step of the last evaluation, and of the last checkpoint.
        self.evaluated, self.saved = -1, 0
        self.told = MetricReporter(self.device)
        self.keeper = (shards.ShardSnapshotter if self.comm.sharded else Snapshotter)(
            job, self.comm
        )
        self.waits = DataWait(self.comm, self.device, order.kind, job.data.workers)
        if isinstance(order, sources.Stream):
            order.note_wait = self.waits.add
        if (best := job.checkpoint.best) is not None:
            mode, _, metric = best.partition(":")
            if metric not in (known := ["loss", *metrics]):
                guess = nearest(metric, known, f"checkpoint.best={mode}:")
                raise ConfigError.of(
                    "checkpoint.best", best, "there is no such metric", guess=guess, known=known
                )

    def begin(self, model: torch.nn.Module, loss: Loss) -> None:
        """Set up the model, and restore a snapshot or a checkpoint if the run has one."""
        rate = optim.learning_rate(self.job.optim, self.order.global_batch)
        uneven = [] if self.order.even else self.order.shares
        self.stepper = Stepper(self.job, model, loss, self.comm, self.device, rate, uneven)
        saved = self._find()
        if saved is not None:
            position = saved.state["position"]
            self.step, self.samples = saved.step, position["samples"]
            self.order.go_on(cloned(position), cloned(sources.own_part(saved, self.order)))
        per_epoch, epochs = self.order.steps_per_epoch, self.job.train.epochs
        after = self.order.steps_left + (epochs - self.order.epoch - 1) * per_epoch
        self.steps = self.job.train.steps or self.step + (after if self.order.epoch < epochs else 0)
        self.epochs = (
            epochs
            if self.job.train.steps is None
            else math.ceil(self.steps / per_epoch)
            if per_epoch
            else 0
        )
        self.resumed = self.step
        self.stepper.plan(
            self.job.optim, self._course(saved.state["position"] if saved is not None else {})
        )
        # From here on the ranks draw different random numbers: the same dropout on all ranks would
        # lose some of its regularization.
        random_state.seed_everything(self._seed(), self.job.deterministic)
        if saved is not None:
            self._restore(saved)
        self.keeper.begin(self.step)
        context.set_step(self.step)
        context.current().stop_request.begin(self.step)
        context.emit_event(
            kinds.Begin(
                rank=context.rank().rank,
                steps=self.steps,
                epochs=self.epochs,
                samples=self.order.size,
                resumed=self.resumed,
            )
        )
        # No step will report the loss.
        if self.step == self.steps and self.me.rank == 0 and hasattr(self, "loss"):
            context.emit_event(
                kinds.Recalled(
                    rank=context.rank().rank, step=self.step, values={"loss": self.loss.item()}
                )
            )

    def _course(self, position: State) -> optim.Course:
        """Return the schedule at its position in samples: a new global batch does not move it.

        With `train.steps` the schedule counts steps, whose number does not change.
        """
        batch, warmup = self.order.global_batch, self.job.optim.warmup
        # The number of samples at the end of the warm-up.
        self.warmed = self.samples + (warmup - self.step) * batch
        if self.step > warmup:
            self.warmed = position.get("warmed", self.warmed)
        if self.job.train.steps is not None:
            return optim.Course(self.steps)
        steps = self.epochs * self.order.steps_per_epoch
        return optim.Course(steps, steps - self.steps, self.warmed / batch)

    def _seed(self) -> int:
        # Stages that share samples draw different numbers; the ranks of a tp group compute the same
        # and draw the same.
        shape = mesh_shape(self.job.parallel, self.me.world_size, self.me.local_world_size)
        return random_state.derive(self.job.seed, self.step, self.me.rank // shape.tp)

    def _find(self) -> Saved | Restored | shards.Found | None:
        """Return the newer of snapshot and checkpoint to resume from; None for a new start."""
        if self.comm.sharded:
            return self._find_shards()
        kept = self.keeper.find()
        if kept is not None and kept.step >= checkpoint.resumed_step():
            self.saved = checkpoint.resumed_step()
            return kept
        found = self._agree(checkpoint.latest())
        self.saved = found.step if found else 0
        if found is None or found.sharded:
            return found and shards.find_shards(self.stepper)
        return MappedState(found.path, found.meta)

    def _find_shards(self) -> Saved | shards.Found | None:
        latest = self._agree(checkpoint.latest())
        self.saved = latest.step if latest else 0
        return shards.find_shards(self.stepper)

    def _agree(self, found: Saved | None) -> Saved | None:
        """Return the checkpoint if all ranks found the same one.

        RaydistError: they did not, because the nodes see different disks.
        """
        own = torch.tensor([found.step if found else -1])
        steps = [int(each.item()) for each in self.comm.gather(own)]
        if len(set(steps)) > 1:
            text = ", ".join(
                f"rank {rank}: {f'step {step}' if step >= 0 else 'none'}"
                for rank, step in enumerate(steps)
            )
            raise RaydistError(
                f"the ranks see different checkpoints ({text}): the run folder "
                f"{context.rank().run_dir} must be on a "
                "disk that all nodes see; set hydra.run.dir=/shared/folder, or resume=none"
            )
        return found

    def _restore(self, saved: Saved | Restored | shards.Found) -> None:
        if isinstance(saved, shards.Found):
            self.stepper.go_on(saved.state)
            self.loss = saved.loss
        else:
            if self.step < self.steps:
                self._rehearse()
            self.stepper.load(saved.state, saved.path)
            if isinstance(saved, Saved):
                optim.copy_host_state(self.stepper.optimizer)
            if isinstance(saved, Saved) and "loss" in saved.metrics:
                self.loss = torch.tensor(saved.metrics["loss"])
        random = saved.random(self.me.rank, self.me.world_size)
        if random is not None:
            random_state.restore(random, self.device)
        else:
            random_state.seed_everything(self._seed(), self.job.deterministic)
        if isinstance(saved, Restored):
            self.loss = saved.mine["loss"].clone()  # a later step soon overwrites this memory
            for name, buffer in self.stepper.model.named_buffers():
                buffer.copy_(saved.mine["buffers"][name])

    def _rehearse(self) -> None:
        if isinstance(self.order, sources.Stream):
            self.stepper.rehearse(self.order.ahead())
            return
        position = self.order.position
        if not self.order.steps_left:  # a snapshot of the last step of an epoch
            self.order.position = 0
        self.stepper.rehearse(iter(self.batches))
        self.order.position = position

    def run(self) -> dict[str, float]:
        """Train from the current step to the end; return the last loss and the last metrics."""
        while self.step < self.steps:
            self._epoch()
        self.told.rest()
        self._evaluate()
        self._save()
        groups.wait_for_rank_0(self.comm, self.keeper.rest)
        timed = max(0, self.step - self.resumed - 1)  # without the first step
        context.emit_event(
            kinds.Done(
                rank=context.rank().rank, spent=self.spent, samples=timed * self.order.global_batch
            )
        )
        return ({"loss": self.loss.item()} if hasattr(self, "loss") else {}) | self.results

    def _epoch(self) -> None:
        """Train to the end of the epoch, or of the training."""
        order, every = self.order, self.job.checkpoint.every
        batches, began = self.waits.timed(iter(self.batches)), time.perf_counter()
        self.keeper.go_on()
        while self.step < self.steps and order.more:
            self._step(batches)
            # The first step compiles: the driver counts it as a part of the launch or restart.
            if self.step == self.resumed + 1:
                began = time.perf_counter()
            if every and self.step % every == 0 and (order.kind != "map" or order.more):
                self.spent["step"] += time.perf_counter() - began
                self._save()
                began = time.perf_counter()
        self.spent["step"] += time.perf_counter() - began
        if (self.step < self.steps or order.kind == "map") and not order.more:
            order.next_epoch()
            evaluate_every = self.job.train.evaluate_every
            if evaluate_every and order.epoch % evaluate_every == 0:
                self._evaluate()
            if every is None or self.step % every == 0:
                self._save()

    def _step(self, batches: Iterator[Any]) -> None:
        rate = self.stepper.rate
        self.loss = self.stepper.step(batches)
        self.step += 1
        self.samples += self.order.global_batch
        self.order.position += self.order.global_batch
        progress = {
            "steps": self.steps,
            "epoch": self.order.epoch + 1,
            "epochs": self.epochs,
            "samples": self.samples,
        }
        self.told.step(self.step, self.loss, **progress, lr=rate)
        self.waits.step()
        self.keeper.step(self.step, self._own, self._state)
        if self.step < self.steps and context.current().stop_request.due(self.step):
            self._leave()

    def _leave(self) -> None:
        """Keep this step's state and wait to be stopped: the set of ranks is about to change."""
        self.told.rest()
        kept = self.keeper.hold(self.step, self._own, self._state)
        if not all(int(each.item()) for each in self.comm.gather(torch.tensor([int(kept)]))):
            self._save()
            groups.wait_for_rank_0(self.comm, self.keeper.rest)
        context.current().stop_request.stopped(self.step)

    def _state(self) -> State:
        """Return the state that is equal on all ranks; for a sharded model, the whole state."""
        if self.comm.sharded:
            return self._shards({**self.order.own(), "part": self.order.rank})
        return {**self.stepper.state(), "position": self._position()}

    def _shards(self, source: State) -> State:
        facts = {
            "position": self._position(),
            "schedule": self.stepper.schedule.state_dict(),
            **source,
        }
        return shards.state_of(self.stepper, {**facts, "config": as_saved(self.job)}, self.loss)

    def _position(self) -> State:
        return {**self.order.place(), "samples": self.samples, "warmed": self.warmed}

    def _own(self) -> State:
        """Return the part of the state that differs among ranks."""
        # With some backends the running means differ among ranks.
        buffers = dict(self.stepper.model.named_buffers())
        return {
            "random": random_state.capture(self.device),
            "loss": self.loss,
            "buffers": buffers,
            "world_size": self.me.world_size,
            **self.order.own(),
        }

    def _evaluate(self) -> None:
        """Evaluate the model on the test samples, unless this step has been evaluated already."""
        if self.tests is None or self.evaluated == self.step:
            return
        with self._spending("evaluate"):
            if self.stepper.pipeline is not None:
                self.stepper.pipeline.same_buffers()
            elif self.me.world_size > 1:
                same_buffers(self.stepper.model, self.comm, self.me.rank)
            batches = (self.stepper.to_device(batch) for batch in self.tests)
            with self.stepper.cast:
                model = self.stepper.evaluated
                results = evaluate(
                    model, batches, self.metrics, self.comm, self.device, self.counted
                )
        self.results, self.evaluated = results, self.step
        if self.me.rank == 0:
            context.report(step=self.step, **results)

    def _save(self) -> None:
        """Save a checkpoint of the current step, unless it has been saved already."""
        if self.saved == self.step:
            return
        with self._spending("save"):
            metrics = {
                "loss": self.loss.item(),
                **(self.results if self.evaluated == self.step else {}),
            }
            if self.comm.sharded:
                sharded.save(
                    self.step, self._shards(self.order.owns()), metrics, self.job.checkpoint
                )
            else:
                self._save_whole(metrics)
        self.saved = self.step

    def _save_whole(self, metrics: dict[str, float]) -> None:
        """Save the whole state: rank 0 writes it, or has its snapshot written in the background."""
        groups.wait_for_rank_0(self.comm, self.keeper.rest)  # the previous checkpoint
        drawn = torch.stack(self.comm.gather(random_state.capture(self.device)))
        beside = {"position": self._position(), "random": drawn, **self.order.owns()}
        if self.me.rank != 0 or self.keeper.to_disk(
            self.step, self._own, self._state, beside, metrics
        ):
            groups.wait_for_rank_0(self.comm, lambda within_s: True)
        else:
            self._write({**self._state(), **beside, "config": as_saved(self.job)}, metrics)

    def _write(self, state: State, metrics: dict[str, float]) -> None:
        """Save on rank 0, in another thread, while all ranks wait.

        If no process writes for the rank, this takes until everything is saved.
        """

        def save() -> None:
            # A new thread starts on GPU 0, and would create a context there.
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            checkpoint.save(self.step, state, metrics, self.job.checkpoint)

        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(save)
            groups.wait_for_rank_0(
                self.comm, lambda within_s: bool(futures.wait([saving], within_s).done)
            )
            saving.result()

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        """Measure the time of an evaluation or a checkpoint (`what`), and report it."""
        self.told.rest()
        context.phase(what)
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.spent[what] += took
        context.emit_event(kinds.Spent(rank=context.rank().rank, what=what, s=took))
        self.keeper.go_on()


class MetricReporter:
    """Reports a step once the GPU has finished it, so that the GPU never waits for a report."""

    def __init__(self, device: torch.device) -> None:
        self.device = device_of(device)
        self.waiting: deque[tuple[Mark, int, torch.Tensor, dict[str, Any]]] = deque()

    def step(self, step: int, loss: torch.Tensor, **facts: Any) -> None:
        """Report a step with its loss, at once or as soon as the GPU has computed the loss."""
        if not self.device.lags(loss):
            context.report(step, loss=loss, **facts)
            return
        on_host = torch.empty((), dtype=loss.dtype, pin_memory=loss.is_cuda)
        self.device.copy(on_host, loss)
        self.waiting.append((self.device.mark(), step, on_host, facts))
        while self.waiting and self.waiting[0][0].done():
            self._report_next()

    def rest(self) -> None:
        """Report all waiting steps."""
        while self.waiting:
            self.waiting[0][0].wait()
            self._report_next()

    def _report_next(self) -> None:
        _, step, loss, facts = self.waiting.popleft()
        context.report(step, loss=loss, **facts)
