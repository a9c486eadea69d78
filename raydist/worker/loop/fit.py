"""The training loop: epochs, evaluation, checkpoints, resume, reports. (rank side)"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from raydist.settings.config import Job, as_saved
from raydist.shared.errors import ConfigError, RaydistError, nearest
from raydist.state.checkpoint_files import Saved
from raydist.state.snapshot_layout import State
from raydist.worker import checkpoint, context
from raydist.worker.backends import Comm
from raydist.worker.loop import data, models, optim, random_state
from raydist.worker.loop.evaluation import Metric, evaluate, same_buffers
from raydist.worker.loop.snapshotter import Restored, Snapshotter
from raydist.worker.loop.step import Loss, Stepper


def fit(
    config: Job,
    *,
    train: Dataset[Any],
    loss: Loss,
    test: Dataset[Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    model: torch.nn.Module | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> dict[str, float]:
    """Train a model as the settings say; return the last loss of this rank and the last metrics of all ranks.

    All ranks must call it, with the same data sets. B is the number of samples in one forward pass on one rank:
    `data.batch_size`, or `data.global_batch` / (`train.accumulate` x ranks) where that is set.

    - `config`: the settings, as the job's function gets them in its parameter `config`.
    - `train`: a map-style Dataset (`__len__` and `__getitem__`). A sample is a sequence (input, …, target).
    - `collate`: makes a batch of a list of samples. The default is torch's `default_collate`: a sample
      (tensor of shape [3, 32, 32], int) becomes a batch [tensor of shape [B, 3, 32, 32], tensor of shape [B]].
    - `model`: a module, called as `model(*inputs)`. It is moved to the rank's device and trained in place. None: the
      model that `model=` names.
    - `loss`: `(output, target)` -> the mean over the batch, a tensor of shape [].
    - `test`: a map-style Dataset like `train`. Over all ranks each sample is evaluated once, in batches of at most B;
      `target` must have a length. None: no evaluation.
    - `metrics`: name -> `(output, target)` -> a tensor of shape [B] with one value per sample, or their mean with
      shape []. They are evaluated on `test`, together with `loss`.

    Returns a dict of floats. `loss`: the training loss of the last optimizer step, the mean over this rank's samples;
    it is missing if no step was left to do. With `test` also `test_loss` and each metric: means over all test samples,
    equal on all ranks.

    After each optimizer step it reports `loss` (of this rank), `lr`, `steps` (optimizer steps in all), `epoch` (from
    1), `epochs`, `samples` (training samples used so far by all ranks); after each evaluation the results.

    It saves checkpoints as `checkpoint.every` says, and continues from a checkpoint or a snapshot if the run has one.

    ConfigError: a data set has no length or no index; the samples do not fill one optimizer step; the global batch
    cannot be divided among the ranks; `checkpoint.best` names an unknown metric; `model=` names no model; the
    checkpoint does not fit the model. RaydistError: called outside a run, or the ranks found different checkpoints.
    What `model`, `loss`, a metric or a data set raises is passed on.
    """
    if context.current().comm is None:
        raise RaydistError("raydist.fit was called outside a run: end the file with raydist.main(job) and run the file")
    order = data.order(
        train, config.data, accumulate=config.train.accumulate, rank=context.rank().rank,
        world_size=context.rank().world_size, seed=config.seed, even=config.scale.max_nodes is None,
    )  # fmt: skip
    training = Training(config, order, {"test_loss": loss, **(metrics or {})} if test is not None else {})
    training.batches = data.loader(train, order, config.data, collate)
    if test is not None:
        sampler = data.EvalSampler(data.size_of(test, "test"), order.portion, order.rank, order.world_size)
        training.tests = data.loader(test, sampler, config.data, collate)
    training.begin(model if model is not None else models.build_model(config.model), loss)
    return training.run()


class Training:
    """The training on one rank: its position, and its steps, evaluations and checkpoints."""

    def __init__(self, job: Job, order: data.Order, metrics: dict[str, Metric]) -> None:
        self.job, self.order, self.metrics = job, order, metrics
        self.device, self.comm = context.rank().device, cast("Comm", context.current().comm)
        self.batches: Any = None
        self.tests: Any = None
        self.step = self.samples = 0
        self.results: dict[str, float] = {}
        self.spent = {"step": 0.0, "evaluate": 0.0, "save": 0.0}
        self.evaluated, self.saved = -1, 0  # the step of the last evaluation, and of the last checkpoint
        self.told = MetricReporter(self.device)
        self.keeper = Snapshotter(job, self.comm)
        if (best := job.checkpoint.best) is not None:
            mode, _, metric = best.partition(":")
            if metric not in (known := ["loss", *metrics]):
                guess = nearest(metric, known, f"checkpoint.best={mode}:")
                raise ConfigError.of("checkpoint.best", best, "there is no such metric", guess=guess, known=known)

    def begin(self, model: torch.nn.Module, loss: Loss) -> None:
        """Set up the model, and restore a snapshot or a checkpoint if the run has one."""
        saved = self._find()
        if saved is not None:
            position = saved.state["position"]
            self.step, self.samples = saved.step, position["samples"]
            self.order.epoch, self.order.position = position["epoch"], position["position"]
        per_epoch, epochs = self.order.steps_per_epoch, self.job.train.epochs
        after = self.order.steps_left + (epochs - self.order.epoch - 1) * per_epoch
        self.steps = self.job.train.steps or self.step + (after if self.order.epoch < epochs else 0)
        self.epochs = epochs if self.job.train.steps is None else math.ceil(self.steps / per_epoch)
        self.resumed = self.step
        rate = optim.learning_rate(self.job.optim, self.order.global_batch)
        shares = [] if self.order.even else self.order.shares
        self.stepper = Stepper(self.job, model, loss, self.comm, self.device, rate, self.steps, shares)
        # From here on ranks draw different random numbers: equal dropout on all would lose some of its regularization.
        random_state.seed_everything(self._seed(), self.job.deterministic)
        if saved is not None:
            self._restore(saved)
        self.keeper.begin(self.step)
        context.set_step(self.step)
        context.current().stop_request.begin(self.step)
        context.emit_event("begin", steps=self.steps, epochs=self.epochs, samples=self.order.size, resumed=self.resumed)

    def _seed(self) -> int:
        return random_state.derive(self.job.seed, self.step, self.order.rank)

    def _find(self) -> Saved | Restored | None:
        """The snapshot or checkpoint to resume from, whichever is newer; None to start anew."""
        kept = self.keeper.find()
        if kept is not None and kept.step >= checkpoint.resumed_step():
            self.saved = checkpoint.resumed_step()
            return kept
        found = self._agree(checkpoint.latest())
        self.saved = found.step if found else 0
        return found

    def _agree(self, found: Saved | None) -> Saved | None:
        """The checkpoint, if all ranks found the same. RaydistError: they did not, as nodes see different disks."""
        own = torch.tensor([found.step if found else -1])
        steps = [int(each.item()) for each in self.comm.gather(own)]
        if len(set(steps)) > 1:
            text = ", ".join(
                f"rank {rank}: {f'step {step}' if step >= 0 else 'none'}" for rank, step in enumerate(steps)
            )
            raise RaydistError(
                f"the ranks see different checkpoints ({text}): the run folder {context.rank().run_dir} must be on a "
                "disk that all nodes see; set hydra.run.dir=/shared/folder, or resume=none"
            )
        return found

    def _restore(self, saved: Saved | Restored) -> None:
        state = saved.state
        if self.step < self.steps:
            self._rehearse()
        self.stepper.load(state, saved.path)
        random = saved.random(self.order.rank, self.order.world_size)
        if random is not None:
            random_state.restore(random, self.device)
        else:
            random_state.seed_everything(self._seed(), self.job.deterministic)
        if isinstance(saved, Restored):
            self.loss = saved.mine["loss"]
            for name, buffer in self.stepper.model.named_buffers():
                buffer.copy_(saved.mine["buffers"][name])

    def _rehearse(self) -> None:
        position = self.order.position
        if not self.order.steps_left:  # a snapshot of the last step of an epoch
            self.order.position = 0
        self.stepper.rehearse(iter(self.batches))
        self.order.position = position

    def run(self) -> dict[str, float]:
        """Train from the current step to the end; the last loss and the last metrics."""
        while self.step < self.steps:
            self._epoch()
        self.told.rest()
        self._evaluate()
        self._save()
        self.keeper.rest()
        context.emit_event("done", spent=self.spent, samples=(self.step - self.resumed) * self.order.global_batch)
        return ({"loss": self.loss.item()} if hasattr(self, "loss") else {}) | self.results

    def _epoch(self) -> None:
        """Train to the end of the epoch, or of the training."""
        order, every = self.order, self.job.checkpoint.every
        batches, began = iter(self.batches), time.perf_counter()
        self.keeper.go_on()
        while order.steps_left and self.step < self.steps:
            self._step(batches)
            if every and self.step % every == 0 and order.steps_left:
                self.spent["step"] += time.perf_counter() - began
                self._save()
                began = time.perf_counter()
        self.spent["step"] += time.perf_counter() - began
        if not order.steps_left:
            order.epoch, order.position = order.epoch + 1, 0
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
        self.told.step(
            self.step, self.loss, steps=self.steps, epoch=self.order.epoch + 1, epochs=self.epochs,
            samples=self.samples, lr=rate,
        )  # fmt: skip
        self.keeper.step(self.step, self._own, self._state)
        if self.step < self.steps and context.current().stop_request.due(self.step):
            self._leave()

    def _leave(self) -> None:
        """The ranks are about to be others: keep the state of this step, and wait for the end."""
        self.told.rest()
        kept = self.keeper.hold(self.step, self._own, self._state)
        if not all(int(each.item()) for each in self.comm.gather(torch.tensor([int(kept)]))):
            self._save()
            self.keeper.rest()
        context.current().stop_request.stopped(self.step)

    def _state(self) -> State:
        """The part of the state that is equal on all ranks."""
        return {**self.stepper.state(), "position": self._position()}

    def _position(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "position": self.order.position, "samples": self.samples}

    def _own(self) -> State:
        """The part of the state that differs among ranks."""
        buffers = dict(self.stepper.model.named_buffers())  # running means differ among ranks with some backends
        return {
            "random": random_state.capture(self.device), "loss": self.loss, "buffers": buffers,
            "world_size": self.order.world_size,
        }  # fmt: skip

    def _evaluate(self) -> None:
        """Evaluate the model on the test samples, unless this step is evaluated already."""
        if self.tests is None or self.evaluated == self.step:
            return
        with self._spending("evaluate"):
            if self.order.world_size > 1:
                same_buffers(self.stepper.model, self.comm, self.order.rank)
            batches = (self.stepper.to_device(batch) for batch in self.tests)
            with self.stepper.cast:
                results = evaluate(self.stepper.model, batches, self.metrics, self.comm, self.device)
        self.results, self.evaluated = results, self.step
        if self.order.rank == 0:
            context.report(step=self.step, **results)

    def _save(self) -> None:
        """A checkpoint of the step that is done, if there is none yet."""
        if self.saved == self.step:
            return
        with self._spending("save"):
            drawn = torch.stack(self.comm.gather(random_state.capture(self.device)))
            metrics = {"loss": self.loss.item(), **(self.results if self.evaluated == self.step else {})}
            beside = {"position": self._position(), "random": drawn}
            if self.order.rank == 0 and not self.keeper.to_disk(self.step, self._own, self._state, beside, metrics):
                state = {**self._state(), **beside, "config": as_saved(self.job)}
                checkpoint.save(self.step, state, metrics, self.job.checkpoint)
        self.saved = self.step

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        """Measure the time of an evaluation or a checkpoint (`what`), and report it."""
        self.told.rest()
        context.phase(what)
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.spent[what] += took
        context.emit_event("spent", what=what, s=took)
        self.keeper.go_on()


class MetricReporter:
    """Reports steps without making a GPU wait: it reports a step once the GPU has finished it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting: deque[tuple[torch.cuda.Event, int, torch.Tensor, dict[str, Any]]] = deque()

    def step(self, step: int, loss: torch.Tensor, **facts: Any) -> None:
        """Report a step with its loss, at once or as soon as the GPU has computed the loss."""
        if self.device.type != "cuda":
            context.report(step, loss=loss, **facts)
            return
        on_host = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self.waiting.append((copied, step, on_host, facts))
        while self.waiting and self.waiting[0][0].query():  # type: ignore[no-untyped-call]
            self._report_next()

    def rest(self) -> None:
        """Report all waiting steps."""
        while self.waiting:
            self.waiting[0][0].synchronize()
            self._report_next()

    def _report_next(self) -> None:
        _, step, loss, facts = self.waiting.popleft()
        context.report(step, loss=loss, **facts)
