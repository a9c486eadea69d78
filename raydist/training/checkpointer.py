"""How the states of a training are kept, saved and found again, by kind of model. (rank side)"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from raydist.settings.config import Job, as_saved
from raydist.shared.errors import ConfigError, RaydistError
from raydist.state.checkpoint_files import Saved, read_state
from raydist.state.device import device_of
from raydist.state.snapshot_layout import State
from raydist.training import optim, sharded
from raydist.training.dcp_state import find_shards, other_state, state_of
from raydist.training.rank_model import RankModel
from raydist.training.snapshot_interval import SnapshotInterval, least_steps
from raydist.training.snapshotter import Restored, Snapshotter
from raydist.training.sources import saved_part
from raydist.training.step import Stepper
from raydist.training.training_state import FoundState, TrainingState
from raydist.worker import checkpoint, context, groups, random_state
from raydist.worker.backends import Comm


class Checkpointer(Protocol):
    """Keeps the states of a training in memory, and saves them as checkpoints.

    All ranks must call each method, in the same order.
    """

    saved_step: int
    """The step of the last checkpoint."""

    def find(self, model: RankModel) -> FoundState | None:
        """Return the newest state to continue from; None for a new start."""
        ...

    def begin(self, step: int) -> None:
        """Begin after this step: drop the states of later ones, which will be made again."""
        ...

    def go_on(self) -> None:
        """Exclude the time since the last step from the measured steps."""
        ...

    def keep(self, state: TrainingState) -> None:
        """Keep the state after a step in memory, if it is due."""
        ...

    def catch_up(self) -> None:
        """Have a GPU end its copies of the last state. It must precede each change of the state."""
        ...

    def note_change(self, step: int) -> None:
        """Note that the state of this step, which may have been kept, is now changed."""
        ...

    def hold(self, state: TrainingState) -> bool:
        """Keep the state in memory whether or not it is due; report whether this rank has."""
        ...

    def save(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Save the state as a checkpoint. It may be written while the training continues."""
        ...

    def rest(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        ...


class WholeCheckpointer:
    """The states of a model that each rank has whole: one of them writes."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self.job = job
        self.comm = comm
        self.snapshots = Snapshotter(job, comm)
        self.saved_step = 0

    def find(self, model: RankModel) -> FoundState | None:
        found = self.newest()
        if isinstance(found, SavedWhole):
            if found.sharded:
                return find_shards(model)
            if why := other_state(found.state):
                raise ConfigError.of("resume", str(found.path), why, "resume=none")
        return found

    def newest(self) -> Restored | SavedWhole | None:
        """Return the newest state in memory or on the disk; None for a new start. A collective."""
        kept, resumed = self.snapshots.find(), checkpoint.resumed_step()
        if kept is not None and kept.step >= resumed:
            self.saved_step = resumed
            lacks = kept.own is None and kept.step == resumed
            return (self._exact(kept) if lacks else None) or kept
        found = agree(checkpoint.latest(), self.comm)
        if found is None:
            return None
        self.saved_step = found.step
        return SavedWhole(found.path, found.meta)

    def _exact(self, kept: Restored) -> SavedWhole | None:
        """Return the checkpoint of the same step if it has the random generators of all ranks.

        A state in memory lacks them if a node is new, as in the place of a drained one, whose ranks
        had their parts written to the disk before they left. A collective.
        """
        me = context.rank()
        if kept.mine["world_size"] != me.world_size:
            return None
        latest = checkpoint.latest()
        found = None
        if latest is not None and latest.step == kept.step:
            found = SavedWhole(latest.path, latest.meta)
        has_all = found is not None and found.random(me.rank, me.world_size) is not None
        on_all = self.comm.gather(torch.tensor([int(has_all)]))
        return found if all(int(each.item()) for each in on_all) else None

    def begin(self, step: int) -> None:
        self.snapshots.begin(step)

    def go_on(self) -> None:
        self.snapshots.go_on()

    def keep(self, state: TrainingState) -> None:
        can_wait = state.stepper.model.watch.changed_by_steps_only
        self.snapshots.step(state.progress.step, state.own, state.common, can_wait)

    def catch_up(self) -> None:
        self.snapshots.catch_up()

    def note_change(self, step: int) -> None:
        self.snapshots.note_change(step)

    def hold(self, state: TrainingState) -> bool:
        return self.snapshots.hold(state.progress.step, state.own, state.common)

    def save(self, state: TrainingState, metrics: dict[str, float]) -> None:
        self.save_parts(
            state.progress.step,
            state.own,
            state.common,
            metrics,
            lambda: {"position": state.position(), **state.order.owns()},
        )

    def save_parts(
        self,
        step: int,
        own: Callable[[], State],
        common: Callable[[], State],
        metrics: dict[str, float],
        more: Callable[[], State] = dict,
    ) -> None:
        """Save the state of a step as a checkpoint; `own` and `common` as for Snapshotter.step.

        `more`: what the checkpoint has in addition, or instead.
        """
        self.rest()  # the previous checkpoint
        # On all ranks: if only rank 0 kept it, its memory would soon have no step that the others
        # have, and a stop would leave a state without their random generators.
        self.snapshots.hold(step, own, common)
        drawn = torch.stack(self.comm.gather(random_state.capture(context.rank().device)))
        extra = {**more(), "random": drawn}
        if context.rank().rank != 0 or self.snapshots.to_disk(step, extra, metrics):
            groups.wait_for_all(self.comm, self.snapshots.can_go_on)
        else:
            # No process writes for the rank: this takes until everything is saved.
            whole = {**common(), **extra, "config": as_saved(self.job)}
            groups.work_in_turns(
                self.comm, lambda: checkpoint.save(step, whole, metrics, self.job.checkpoint)
            )
        self.saved_step = step

    def rest(self) -> None:
        groups.wait_for_all(self.comm, self.snapshots.rest)


class ShardCheckpointer:
    """The states of a sharded model: each rank keeps its shards, the next node a copy of them."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self.job = job
        self.comm = comm
        self.saved_step = 0
        current = context.current()
        self.keeps = current.memory is not None and job.snapshot.every != 0
        self.interval = SnapshotInterval(
            job.snapshot.every,
            comm,
            device_of(current.rank.device),
            sharded.copied,
            sharded.copy_s,
            least_steps(job),
        )
        self._kept_step = -1
        """The last step whose state was kept."""

    def find(self, model: RankModel) -> FoundState | None:
        latest = agree(checkpoint.continued_from(), self.comm)
        self.saved_step = latest.step if latest else 0
        return find_shards(model)

    def begin(self, step: int) -> None:
        if self.keeps:
            sharded.begin_fit()
        self.go_on()

    def go_on(self) -> None:
        self.interval.go_on()

    def keep(self, state: TrainingState) -> None:
        if self.keeps:
            self.interval.step(
                state.progress.step,
                lambda alongside: self._keep(state, alongside),
                state.stepper.model.watch.changed_by_steps_only,
            )

    def catch_up(self) -> None:
        if self.keeps:
            self.interval.catch_up(sharded.catch_up)

    def note_change(self, step: int) -> None:
        self.catch_up()  # a checkpoint has the shards as they are when it is saved

    def _keep(self, state: TrainingState, alongside: bool = False) -> None:
        source = {**state.order.own(), "part": state.order.rank}
        sharded.begin_keep(state.progress.step, self._shards(state, source), alongside)
        self._kept_step = state.progress.step

    def _keep_at_once(self, state: TrainingState) -> None:
        """Keep the state in memory whether or not it is due."""
        if self.keeps and self._kept_step != state.progress.step:
            self._keep(state)

    def hold(self, state: TrainingState) -> bool:
        self._keep_at_once(state)
        return self.keeps and sharded.copied()

    def save(self, state: TrainingState, metrics: dict[str, float]) -> None:
        step, source = state.progress.step, state.order.owns()
        self._keep_at_once(state)  # so that a restart need not wait until it is on the disk
        sharded.save(step, self._shards(state, source), metrics, self.job.checkpoint)
        self.saved_step = step

    def _shards(self, state: TrainingState, source: State) -> State:
        facts = {
            "position": state.position(),
            "schedule": state.stepper.schedule.state_dict(),
            **source,
            "config": as_saved(self.job),
        }
        return state_of(state.stepper.model, facts, state.progress.loss)

    def rest(self) -> None:
        groups.wait_for_all(self.comm, sharded.rest)


class SavedWhole(Saved):
    """A checkpoint of a model that is not sharded.

    Its state is mapped, and read as it is used: the ranks of a node share the pages of the file.
    """

    @cached_property
    def state(self) -> State:
        return read_state(self.path, mapped=True)

    def source(self, rank: int, world_size: int) -> State | None:
        return saved_part(self.state, rank, world_size)

    def random(self, rank: int, world_size: int) -> torch.Tensor | None:
        drawn: torch.Tensor = self.state["random"]
        return drawn[rank] if len(drawn) == world_size else None

    def restore(self, stepper: Stepper, rehearse: Callable[[], None]) -> torch.Tensor | None:
        rehearse()
        stepper.load(self.state, self.path)
        optim.copy_host_state(stepper.model.optimizer)
        return torch.tensor(self.metrics["loss"]) if "loss" in self.metrics else None


def agree(found: Saved | None, comm: Comm) -> Saved | None:
    """Return the checkpoint if all ranks found the same one. A collective.

    RaydistError: they did not, because the nodes see different disks.
    """
    own = torch.tensor([found.step if found else -1])
    steps = [int(each.item()) for each in comm.gather(own)]
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
