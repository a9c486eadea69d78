"""A job's own checkpoints: save a state, find the one to continue from. (rank side)"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from raydist.settings.config import Checkpoint
from raydist.shared import env_names, kinds
from raydist.shared.errors import RaydistError
from raydist.state.checkpoint_files import Saved, Warn, load, newest, saved_at, write_and_prune
from raydist.state.object_store import StoragePath, parse_path, reason
from raydist.state.run_checkpoints import (
    finished_fits,
    fit_of,
    note_finished_fit,
    of_fit,
    training_of,
)
from raydist.state.write import SaveRequest, unloadable
from raydist.worker import context

if TYPE_CHECKING:
    from raydist.state.snapshot import SnapshotBuffer

__all__ = ["Saved", "latest", "load", "save"]


def save(
    step: SupportsIndex,
    state: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    settings: Checkpoint | None = None,
    *,
    wait: bool = False,
) -> StoragePath | None:
    """Save a state as the checkpoint of a step, and delete checkpoints that are not to be kept.

    Rank 0 writes. It is not a collective: all ranks may call it, and ranks other than 0 return None
    at once. Rank 0 returns the path, `checkpoints/step-00000400` in the run folder or below
    `storage=`.

    - `step`: optimizer steps done so far. A checkpoint of the same step is replaced.
    - `state`: a dict of tensors (on any device), None, bool, int, float, complex, str, bytes,
      torch.Size, torch.dtype, torch.device, and dicts, lists, tuples and sets of them: what
      `torch.load(weights_only=True)` can read. NumPy scalars are not among them.
    - `metrics`: name -> number, for `checkpoint.best=max:NAME`.
    - `settings`: how many checkpoints to keep. None: `checkpoint.keep` and `checkpoint.best` of the
      run.
    - `wait`: write before returning.

    Over Ray the state is copied in memory, and another process writes it while the training
    continues; the next `save` and the end of the job wait for it. A checkpoint on the disk is
    complete. It is written before `save` returns with `wait`, under torchrun, in a program
    (`script=`), with one rank of `group=inline`, and if the state has tensors that are sharded,
    sparse or Parameters, or does not fit into memory.

    While rank 0 writes or waits, the other ranks wait for it in their next collective, for
    `backend.timeout_s` seconds at most: set it above the time that a checkpoint takes.
    `raydist.fit` needs no such setting.

    TypeError: the state has a value of another type; the message names it. TypeError, ValueError:
    `step` is no step, as `raydist.report` says. OSError: the disk is
    full, if rank 0 writes before returning. An error of a write in the background is a warning; the
    checkpoints before it stay. An object store that cannot be reached is a warning too: the
    checkpoint is then in the run folder on rank 0's node.
    """
    step = context.whole_step(step, "save")
    if context.rank().rank != 0 or context.current().muted:
        return None
    context.phase("save")
    began, request = time.perf_counter(), save_request(step, state, metrics, settings)
    settle()
    if not wait and hand_over(request):
        return request.path
    path, trouble = write_and_prune(request)
    if trouble:
        context.warn(trouble)
    context.emit_event(
        kinds.Saved(
            rank=context.rank().rank, step=step, path=str(path), s=time.perf_counter() - began
        )
    )
    return path


def home() -> StoragePath:
    """Return the folder or URL of this run's checkpoints; during a fit, of that fit's."""
    return of_fit(_training(), context.current().fit)


def _training() -> StoragePath:
    named = os.environ.get(env_names.CHECKPOINTS)
    return parse_path(named) if named else context.rank().run_dir / "checkpoints"


def save_request(
    step: int,
    state: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    settings: Checkpoint | None = None,
) -> SaveRequest:
    """Return the request for a checkpoint of this run."""
    current = context.current()
    kept, world_size = settings or current.checkpoint, current.rank.world_size
    return SaveRequest(
        step,
        dict(state),
        {name: context.plain_value(value) for name, value in (metrics or {}).items()},
        world_size,
        str(home().absolute()),
        str(current.rank.run_dir),
        kept.keep,
        kept.best,
        dict(current.reported),
    )


def hand_over(request: SaveRequest, snapshot: int = -1) -> bool:
    """Have the node's writer process write a checkpoint in the background, if possible.

    `snapshot`: the slot of the snapshot that has the rest of the request's state. Return whether it
    is possible.
    """
    import torch

    from raydist.state.snapshot import NoRoom, take_apart

    if (memory := own_memory()) is None:
        return False
    if why := next(unloadable(request.state, "state"), None):
        raise TypeError(why)
    tensors: list[torch.Tensor] = []
    take_apart(request.state, tensors)
    # A sparse or sharded tensor, or a Parameter, would not be restored as what it was.
    if not all(type(each) is torch.Tensor and each.layout == torch.strided for each in tensors):
        return False
    try:
        memory.request_save(request, snapshot)
    except NoRoom:
        return False
    context.emit_event(kinds.Save(rank=context.rank().rank, kept=snapshot >= 0))
    return True


def own_memory() -> SnapshotBuffer | None:
    """Return this rank's snapshot memory; None if no process outlives the rank to read it."""
    from raydist.state.device import device_of
    from raydist.state.snapshot import SnapshotBuffer

    current = context.current()
    if current.memory is None or current.memory[0] < 0 or current.comm is None:
        return None
    if current.buffer is None:
        current.buffer = SnapshotBuffer(current.memory[0], device_of(current.rank.device))
        current.final_waits.append(current.buffer.rest)
    return current.buffer


def settle() -> None:
    """Wait until the checkpoint that the first rank of this node requested is on the disk."""
    current = context.current()
    if current.memory is not None and current.memory[1] >= 0 and current.comm is not None:
        from raydist.state.snapshot import SnapshotBuffer

        SnapshotBuffer(current.memory[1]).rest()


def latest() -> Saved | None:
    """Return the checkpoint to continue from, or None for a new start.

    After a restart it is the newest complete checkpoint of this run, otherwise what `resume=`
    chose. All ranks may call it; it is not a collective. `Saved.step` is the number of optimizer
    steps done, `Saved.state` what `save` got. If the checkpoint is one of this run, the values that
    rank 0 had reported when it was saved are reported again: a driver that was killed may not have
    received them.
    """
    if (found := continued_from()) is not None:
        recall(found)
    return found


def recall(saved: Saved) -> None:
    """Report the values once more that a checkpoint of this run has; it is loaded now."""
    rank = context.rank().rank
    here = saved.path.parent == home().absolute()
    if saved.reported and here and env_names.RESUME in os.environ and rank == 0:
        context.emit_event(kinds.Recalled(rank=rank, step=saved.step, values=saved.reported))


def continued_from() -> Saved | None:
    """Return what `latest` returns, and report nothing: a newer state may be in memory."""

    def warn(text: str) -> None:
        if context.rank().rank == 0:
            context.warn(text)

    named = os.environ.get(env_names.RESUME)
    if named is None:
        return newest(home(), warn)
    if not named:
        return None
    path, restarted = parse_path(named), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    number = max(1, context.current().fit)
    if fit_of(path) < number:
        return None  # this raydist.fit has saved nothing
    if fit_of(path) > number:
        return _finished_fit(path, number, warn)
    if (
        restarted
        and path.parent == home().absolute()
        and not (path.exists() and saved_at(path).sharded)
    ):
        # The driver has not read the checkpoint, because most restarts don't need it.
        return newest(home(), warn, at_most=resumed_step())
    return saved_at(path)


def _finished_fit(path: StoragePath, number: int, warn: Warn) -> Saved | None:
    """Return the last state of a fit that had finished before a later one saved `path`.

    If an earlier run has done it, this run notes where it ended, because it will save nothing of
    it, and later attempts and runs begin with checkpoints of this one. RaydistError: that state is
    gone.
    """
    training = training_of(path)
    found = newest(of_fit(training, number), warn)
    named = finished_fits(training).get(str(number))
    if found is None and named is not None:
        found = newest(parse_path(named).parent, warn)
        if found is None:
            raise RaydistError(
                f"{path} is of the job's raydist.fit number {fit_of(path)}; the last state of "
                f"number {number} is needed too, and is not there any more: {named}; put it back, "
                "or type resume=none"
            )
    if found is not None and found.path.parent != home().absolute() and context.rank().rank == 0:
        try:
            note_finished_fit(_training(), number, found.path)
        except Exception as error:  # each store has its own
            warn(f"where raydist.fit number {number} ended could not be noted: {reason(error)}")
    return found


def newest_path() -> str:
    """Return the checkpoint that the driver found for this attempt; empty: none."""
    return os.environ.get(env_names.RESUME, "")


def resumed_step() -> int:
    """Return the step of the checkpoint that `latest` returns, by its name alone; 0 if none.

    It is also 0 if the checkpoint belongs to another raydist.fit of the job.
    """
    path = Path(os.environ.get(env_names.RESUME, ""))
    if not path.name.startswith("step-") or fit_of(path) != max(1, context.current().fit):
        return 0
    return int(path.name[5:])
