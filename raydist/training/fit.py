"""raydist.fit: prepares data, model, loss and checkpoints of a training, and runs its loop. (rank
side)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.data import Dataset, default_collate

from raydist.settings.config import Job
from raydist.settings.mesh import check_chunks, mesh_shape
from raydist.shared import env_names
from raydist.shared.errors import ConfigError, nearest
from raydist.state.snapshot import cloned
from raydist.state.snapshot_layout import State
from raydist.training import data, models, optim, sources
from raydist.training.blocks import of_transformers, without_cache
from raydist.training.checkpointer import Checkpointer, ShardCheckpointer, WholeCheckpointer
from raydist.training.compiled import compiled
from raydist.training.evaluation import Metric
from raydist.training.held_out import held_out
from raydist.training.hooks import Hook, Hooks, check_call
from raydist.training.loop import TestSet, Training
from raydist.training.loss_chunks import chunked_loss
from raydist.training.model_call import OwnLoss, TrainStep
from raydist.training.outlive import outlive
from raydist.training.rank_model import RankModel
from raydist.training.step import Loss, Stepper
from raydist.training.token_loss import TokenLoss
from raydist.training.training_state import TrainingProgress, TrainingState
from raydist.training.waits import DataWait
from raydist.worker import context
from raydist.worker.backends import Comm


def fit(
    config: Job,
    *,
    train: Any,
    loss: Loss | None = None,
    test: Dataset[Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    model: torch.nn.Module | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    train_step: TrainStep | None = None,
    on_step: Hook | None = None,
    on_evaluate: Hook | None = None,
) -> dict[str, float]:
    """Train a model as the settings say; return its last loss and metrics, over all ranks.

    All ranks must call it, with the same data sets. B is the number of samples in one forward pass
    on one rank: `data.batch_size`, or `data.global_batch` / (`train.accumulate` x ranks) where that
    is set.

    - `config`: the settings, as the job's function gets them in its parameter `config`.
    - `train`: a map-style Dataset (`__len__` and `__getitem__`), such as `raydist.data.TokenFiles`.
      A sample is a sequence (input, …, target), or a dict of columns in that order; without `loss`
      it is what the model takes. Or a stream of samples (IterableDataset of torch or of datasets),
      a loader of batches for this rank (DataLoader, StatefulDataLoader), a ray.data.Dataset:
      docs/data.md says what each promises.
    - `collate`: makes a batch of a list of samples. The default is torch's `default_collate`: a
      sample (tensor of shape [3, 32, 32], int) becomes a batch [tensor of shape [B, 3, 32, 32],
      tensor of shape [B]].
    - `model`: a module, called as `model(*inputs)`. It is moved to the rank's device and trained in
      place. None: the model that `model=` names.
    - `loss`: `(output, target)` -> the mean over the batch, a tensor of shape []. None: the model
      computes its own, as those of transformers do. It is called with the whole batch: as
      `model(**batch)` if that is a dict, else as `model(*batch)`. What it returns is the loss, or
      has it as `.loss` or `["loss"]`, or is a tuple with one tensor of shape []. Metrics then get
      (output, batch).
    - `train_step`: `(model, batch)` -> what such a model returns. It takes the place of `loss`: it
      calls the model, once or several times, and computes the loss, the mean over the batch.
      `batch` is what `collate` returns, on the rank's device. `model` is the model as it is divided
      or wrapped: call no other. It gets the batches of `test` too, in evaluation mode and without
      gradients, and after a restart perhaps the first batch once more, without an update.
    - `on_step`: `(step, values)`, called on every rank after each optimizer step, before its state
      is kept. `step`: steps done, from 1. `values`: what is reported of the step, see below;
      `loss` and `grad_norm` are tensors of shape [] on the rank's device, the same on all ranks,
      and a GPU is waited for by whoever reads them (`.item()`).
    - `on_evaluate`: `(step, values)`, called on every rank after each evaluation. `values`:
      `test_loss` and each metric, floats, the same on all ranks.
    - `test`: a map-style Dataset like `train`, or a stream (IterableDataset), of which each rank
      reads all and takes its part. Over all ranks each sample is evaluated once, in batches of at
      most B; `target` must have a length. A stream without end needs `train.evaluate_batches`.
      None: no evaluation.
    - `metrics`: name -> `(output, target)` -> a tensor of shape [B] with one value per sample, or
      their mean with shape []. They are evaluated on `test`, together with `loss`.

    Returns a dict of floats. `loss`: the training loss of the last optimizer step, the mean over
    the samples of all ranks; if no step was left to do, that of the checkpoint. With `test` also
    `test_loss` and each metric: means over all test samples. All of them are equal on all ranks.

    Hooks (`on_step`, `on_evaluate`) may use collectives, on all ranks alike, and change the model;
    they must not draw random numbers, because the training would get others. They are called again
    for a step or an evaluation that a restart repeats. What a hook keeps for itself is not in
    checkpoints. What it raises ends the attempt, as an error of the model does.

    After each optimizer step it reports `loss` (the mean over the samples of all ranks), `lr`,
    `steps` (optimizer steps in all), `epoch` (from 1), `epochs`, `samples` (training samples used
    so far by all ranks), and `grad_norm` with `train.clip` or `train.grad_norm`; after each
    evaluation the results.

    It saves checkpoints as `checkpoint.every` says, and continues from a checkpoint or a snapshot
    if the run has one. A job may call it several times, in the same order in each run: the second
    one has its steps and its checkpoints (`checkpoints/fit-2/`) for itself. After a restart those
    that have finished make no step.

    ConfigError: `train` has no length and `train.steps` is not set; it is none of these, or `test`
    is neither a map-style Dataset nor a stream, or a stream that differs among ranks; the samples
    do not fill one optimizer step; the global batch cannot be divided among the ranks;
    `checkpoint.best` names an unknown metric; `model=` names no model;
    the checkpoint does not fit the model; there is no `loss`, but a pipeline, and the model is none
    of transformers; `train_step` or a hook cannot be called like this, or there is `loss` beside
    `train_step`. RaydistError: called outside a run, the ranks found different checkpoints, or
    there is no `loss` and the model or `train_step` returns none; NonFiniteError, a class of it:
    `train.nan=end` ends the training. What `model`, `loss`, `train_step`, a hook, a metric or a
    data set raises is passed on.
    """
    current = context.current()
    comm: Comm = context.joined("raydist.fit")
    hooks = Hooks(on_step, on_evaluate)
    hooks.check()
    make_batch = collate or default_collate
    with current.next_fit(), ExitStack() as until_end:
        me = current.rank
        if comm.sharded:  # the job may have passed fit other settings than those of the run
            comm = replace(cast("Any", comm), job=config)
        waits = DataWait(comm, me.device, config.data.workers)
        shape = mesh_shape(config.parallel, me.world_size, me.local_world_size)
        used_loss = chosen_loss(loss, train_step)
        rank, ranks = shape.data_rank(me.rank), shape.data
        order, batches = sources.ordered(train, config, rank, ranks, make_batch, waits.add)
        module = model if model is not None else models.build_model(config.model)
        if comm.sharded:
            check_whole(module)
        if shape.pp > 1:
            check_loss(used_loss, module, shape.pp)
        others = metrics or {}
        if config.train.recompute != "none":
            # A block that is computed again would add its keys and values to the cache once more.
            until_end.enter_context(without_cache(module))
        if config.train.compile:
            used_loss = until_end.enter_context(
                compiled(config, module, used_loss, sharded=comm.sharded)
            )
        if (chunks := config.train.loss_chunks) > 1:
            check_chunks(config, shape, loss is None)
            used_loss = by_chunk = until_end.enter_context(chunked_loss(module, used_loss, chunks))
            others = {name: by_chunk.of_scores(each) for name, each in others.items()}
        if config.train.loss_per == "token":
            used_loss = TokenLoss.of(used_loss, module)
        measured = {"test_loss": used_loss, **others} if test is not None else {}
        check_best(config.checkpoint.best, measured)
        kind = ShardCheckpointer if comm.sharded else WholeCheckpointer
        tests = None
        if test is not None:
            tests = TestSet(held_out(test, config, order, comm, make_batch), measured)
        rate = optim.learning_rate(config.optim, order.global_batch)

        def train_on() -> dict[str, float]:
            waits.begin()
            checkpointer: Checkpointer = kind(config, comm)
            trained = RankModel(config, module, comm, me.device, rate)
            state = begin_or_resume(config, trained, used_loss, order, batches, checkpointer)
            try:
                return Training(state, batches, tests, checkpointer, waits, hooks).run()
            finally:
                # The job may change the model now. What a broken GPU raises here is known already.
                with suppress(RuntimeError):
                    checkpointer.catch_up()

        return outlive(comm, order, module, train_on)


def chosen_loss(loss: Loss | None, train_step: TrainStep | None) -> Loss:
    """Return the loss of the job, or that of `train_step` or of the model.

    ConfigError: `train_step` does not take a model and a batch; the job gives both.
    """
    check_call("train_step", train_step, "model", "batch")
    if loss is not None and train_step is not None:
        raise ConfigError("train_step= computes the loss: give raydist.fit no loss= beside it")
    return loss or OwnLoss(train_step)


def check_whole(model: torch.nn.Module) -> None:
    """Raise ConfigError if a model has been divided among ranks, which can be done only once."""
    from torch.distributed.tensor import DTensor  # it is imported already if this is called

    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise ConfigError(
            "the model is divided already, by an earlier raydist.fit or by the job: give each "
            "raydist.fit a new one; what the one before has trained goes on with "
            "raydist.models.save_weights(model, FOLDER), and train.weights=FOLDER in the config "
            "that the next one gets"
        )


def check_loss(loss: Loss, model: torch.nn.Module, stages: int) -> None:
    """Raise ConfigError if a loss needs the whole model, and it is to be cut into stages."""
    if not isinstance(loss, OwnLoss):
        return
    cause = "only the last stage has the output, and fit has no loss= to call there"
    if loss.train_step is not None:
        cause = "train_step= calls the whole model, and each rank has one stage of it"
    elif of_transformers(model):
        return  # its last stage computes its loss
    raise ConfigError.of("parallel.pp", stages, cause, "parallel=fsdp parallel.pp=1")


def check_best(best: str | None, metrics: Collection[str]) -> None:
    """Raise ConfigError if `checkpoint.best` names none of these metrics, nor the loss."""
    if best is None:
        return
    mode, _, metric = best.partition(":")
    if metric not in (known := ["loss", *metrics]):
        guess = nearest(metric, known, f"checkpoint.best={mode}:")
        raise ConfigError.of(
            "checkpoint.best", best, "there is no such metric", guess=guess, known=known
        )


def of_this_run(job: Job, state: State) -> bool:
    """Return whether a state was kept or saved by an earlier attempt of this run.

    A later run evaluates it once more: its test samples may be others. A state in memory, which has
    no settings, is of this run; each restart by torchrun has another run folder.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    saved_in = state["config"].get("dir") if "config" in state else job.dir
    return saved_in == job.dir or env_names.RUN_DIR not in os.environ


def begin_or_resume(
    job: Job,
    model: RankModel,
    loss: Loss,
    order: data.Order,
    batches: Iterable[Any],
    checkpointer: Checkpointer,
) -> TrainingState:
    """Return the state of a new training, or that of the snapshot or checkpoint of the run."""
    found = checkpointer.find(model)
    step, position = (found.step, found.state["position"]) if found is not None else (0, {})
    if found is not None:
        source = found.source(order.rank, order.world_size)
        order.go_on(cloned(position), cloned(source))
        if not of_this_run(job, found.state):
            position = {**position, "results": {}}
    progress = TrainingProgress(job, order, step, position)
    schedule = optim.schedule(job.optim, model.optimizer, progress.course(job, order))
    uneven = [] if order.even else order.shares
    stepper = Stepper(job.train, model, loss, schedule, uneven)
    state = TrainingState(job, stepper, order, progress)
    # From here on the ranks draw different random numbers: the same dropout on all ranks would
    # lose some of its regularization.
    state.seed()
    if found is not None:
        state.restore(found, batches)
        state.keep_changes(position)
    checkpointer.begin(step)
    return state
