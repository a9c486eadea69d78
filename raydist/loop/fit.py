"""The training loop: epochs, evaluation, checkpoints, resume, and what is told of them. (rank side)"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from raydist import checkpoint, context
from raydist.backends import Comm
from raydist.checkpoint import Saved
from raydist.config import Job, as_saved
from raydist.errors import ConfigError, RaydistError, suggest
from raydist.loop import data, models, optim, random_state
from raydist.loop.evaluation import Metric, evaluate, same_buffers
from raydist.loop.keeping import Keeper, Kept
from raydist.loop.step import Loss, Stepper


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
    """Train a model as the settings say; give back the last loss of this rank and the last metrics of all.

    A sample is (input, …, target): the model is called with the inputs, `loss` and each metric with (output, target).
    `model`: None takes the one that `model=` names. `test`: evaluated as test_loss and `metrics`, each sample once.
    `collate`: makes a batch of a list of samples. Goes on from a checkpoint by itself where the run says so.
    """
    if context.here().comm is None:
        raise RaydistError("raydist.fit was called outside a run: end the file with raydist.main(job) and run the file")
    order = data.order(
        train, config.data, accumulate=config.train.accumulate, rank=context.rank().rank,
        world_size=context.rank().world_size, seed=config.seed, even=config.scale.max_nodes is None,
    )  # fmt: skip
    training = Training(config, order, {"test_loss": loss, **(metrics or {})} if test is not None else {})
    training.batches = data.loader(train, order, config.data, collate)
    if test is not None:
        rota = data.Rota(data.size_of(test, "test"), order.portion, order.rank, order.world_size)
        training.tests = data.loader(test, rota, config.data, collate)
    training.begin(model if model is not None else models.build(config.model), loss)
    return training.run()


class Training:
    """One training on one rank: how far it is, and what happens when."""

    def __init__(self, job: Job, order: data.Order, metrics: dict[str, Metric]) -> None:
        self.job, self.order, self.metrics = job, order, metrics
        self.device, self.comm = context.rank().device, cast("Comm", context.here().comm)
        self.batches: Any = None
        self.tests: Any = None
        self.step = self.samples = 0
        self.results: dict[str, float] = {}
        self.spent = {"step": 0.0, "evaluate": 0.0, "save": 0.0}
        self.evaluated, self.saved = -1, 0  # the step of the last evaluation, and of the last checkpoint
        self.told = Told(self.device)
        self.keeper = Keeper(job, self.comm)
        if (best := job.checkpoint.best) is not None:
            mode, _, metric = best.partition(":")
            if metric not in (known := ["loss", *metrics]):
                raise ConfigError(f"checkpoint.best={best}: {suggest(metric, known, f'checkpoint.best={mode}:')}")

    def begin(self, model: torch.nn.Module, loss: Loss) -> None:
        """Equip the model, from a snapshot or a checkpoint where there is one."""
        found = self._find()
        if found is not None:
            place = found.state["position"]
            self.step, self.samples = found.step, place["samples"]
            self.order.epoch, self.order.position = place["epoch"], place["position"]
        per_epoch, epochs = self.order.steps_per_epoch, self.job.train.epochs
        after = self.order.steps_left + (epochs - self.order.epoch - 1) * per_epoch
        self.steps = self.job.train.steps or self.step + (after if self.order.epoch < epochs else 0)
        self.epochs = epochs if self.job.train.steps is None else math.ceil(self.steps / per_epoch)
        self.resumed = self.step
        rate = optim.learning_rate(self.job.optim, self.order.global_batch)
        shares = [] if self.order.even else self.order.shares
        self.stepper = Stepper(self.job, model, loss, self.comm, self.device, rate, self.steps, shares)
        # From here on the ranks draw different numbers: equal dropout on all would be a smaller batch in disguise.
        random_state.seed_everything(self._seed(), self.job.deterministic)
        if found is not None:
            self._restore(found)
        self.keeper.begin(self.step)
        context.stand_at(self.step)
        context.tell("begin", steps=self.steps, epochs=self.epochs, samples=self.order.size, resumed=self.resumed)

    def _seed(self) -> int:
        return random_state.derive(self.job.seed, self.step, self.order.rank)

    def _find(self) -> Saved | Kept | None:
        """What to go on from; of a snapshot and a checkpoint the newer one."""
        kept = self.keeper.find()
        if kept is not None and kept.step >= checkpoint.resumed_step():
            self.saved = checkpoint.resumed_step()
            return kept
        found = self._agree(checkpoint.latest())
        self.saved = found.step if found else 0
        return found

    def _agree(self, found: Saved | None) -> Saved | None:
        """The checkpoint that all ranks found: without a disk that all nodes see they may have found different ones."""
        mine = torch.tensor([found.step if found else -1])
        steps = [int(each.item()) for each in self.comm.gather(mine)]
        if len(set(steps)) > 1:
            told = ", ".join(
                f"rank {rank}: {f'step {step}' if step >= 0 else 'none'}" for rank, step in enumerate(steps)
            )
            raise RaydistError(
                f"the ranks see different checkpoints ({told}): the run folder {context.rank().run_dir} must be on a "
                "disk that all nodes see; say hydra.run.dir=/shared/folder, or resume=none"
            )
        return found

    def _restore(self, found: Saved | Kept) -> None:
        state = found.state
        if self.step < self.steps:
            self._rehearse()
        self.stepper.load(state, found.path)
        random = found.random(self.order.rank, self.order.world_size)
        if random is not None:
            random_state.restore(random, self.device)
        else:
            random_state.seed_everything(self._seed(), self.job.deterministic)
        if isinstance(found, Kept):
            self.loss = found.mine["loss"]
            for name, buffer in self.stepper.model.named_buffers():
                buffer.copy_(found.mine["buffers"][name])

    def _rehearse(self) -> None:
        place = self.order.position
        if not self.order.steps_left:  # a snapshot may be of the last step of an epoch
            self.order.position = 0
        self.stepper.rehearse(iter(self.batches))
        self.order.position = place

    def run(self) -> dict[str, float]:
        """Everything, from where it stands to the end."""
        while self.step < self.steps:
            self._epoch()
        self.told.rest()
        self._evaluate()
        self._save()
        self.keeper.rest()
        context.tell("done", spent=self.spent, samples=(self.step - self.resumed) * self.order.global_batch)
        return ({"loss": self.loss.item()} if hasattr(self, "loss") else {}) | self.results

    def _epoch(self) -> None:
        """To the end of the epoch, or of the training."""
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
        if self.step < self.steps and context.here().leave.due(self.step):
            self._leave()

    def _leave(self) -> None:
        """The ranks are about to be others: keep the state of this step, and wait for the end."""
        self.told.rest()
        kept = self.keeper.hold(self.step, self._own, self._state)
        if not all(int(each.item()) for each in self.comm.gather(torch.tensor([int(kept)]))):
            self._save()
            self.keeper.rest()
        context.here().leave.gone(self.step)

    def _state(self) -> dict[str, Any]:
        """What a training goes on from, and is the same on all ranks."""
        return {**self.stepper.state(), "position": self._position()}

    def _position(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "position": self.order.position, "samples": self.samples}

    def _own(self) -> dict[str, Any]:
        """What differs from rank to rank."""
        buffers = dict(self.stepper.model.named_buffers())  # running means: some backends leave each rank its own
        return {
            "random": random_state.capture(self.device), "loss": self.loss, "buffers": buffers,
            "world_size": self.order.world_size,
        }  # fmt: skip

    def _evaluate(self) -> None:
        """Metrics of the model as it is now, if there are tests, and if that is not known already."""
        if self.tests is None or self.evaluated == self.step:
            return
        with self._spending("evaluate"):
            if self.order.world_size > 1:
                same_buffers(self.stepper.model, self.comm, self.order.rank)
            batches = (self.stepper.placed(batch) for batch in self.tests)
            with self.stepper.cast:
                found = evaluate(self.stepper.model, batches, self.metrics, self.comm, self.device)
        self.results, self.evaluated = found, self.step
        if self.order.rank == 0:
            context.report(step=self.step, **found)

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
        """Time that belongs to `what`."""
        self.told.rest()
        context.phase(what)
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.spent[what] += took
        context.tell("spent", what=what, s=took)
        self.keeper.go_on()


class Told:
    """Reports steps without making a GPU wait: a step is told once the GPU has come to its end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting: deque[tuple[torch.cuda.Event, int, torch.Tensor, dict[str, Any]]] = deque()

    def step(self, step: int, loss: torch.Tensor, **facts: Any) -> None:
        """Report a step with its loss, now or as soon as the loss is known."""
        if self.device.type != "cuda":
            context.report(step, loss=loss, **facts)
            return
        here = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
        known = torch.cuda.Event()  # type: ignore[no-untyped-call]
        known.record()
        self.waiting.append((known, step, here, facts))
        while self.waiting and self.waiting[0][0].query():  # type: ignore[no-untyped-call]
            self._tell()

    def rest(self) -> None:
        """Report all that is waiting."""
        while self.waiting:
            self.waiting[0][0].synchronize()
            self._tell()

    def _tell(self) -> None:
        _, step, loss, facts = self.waiting.popleft()
        context.report(step, loss=loss, **facts)
