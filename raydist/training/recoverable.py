"""raydist.Recoverable: a loop of one's own goes back to its last state after a failure. (rank
side)

    for step in training.steps(1000):      # the generator: find a state, go back to it, keep others
        with training.step():              # ends quietly if another rank was killed meanwhile
            ...

After a step that has lost a peer the generator waits for the next attempt of the job (in_place),
and gives the step after the one that all ranks have in memory.

The order in which ranks add their gradients depends on DDP's buckets, which DDP makes anew after
the first backward pass. A rank that begins with a state would therefore add them in another order
once. So the ranks make their first step twice: the first time only for the buckets, and then they
go back once more. raydist.fit does the same (Stepper.rehearse).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, RaydistError
from raydist.state.snapshot import cloned
from raydist.state.snapshot_layout import State
from raydist.state.write import unloadable
from raydist.training.checkpointer import SavedWhole, WholeCheckpointer
from raydist.training.outlive import (
    buffer_sizes,
    meet_again,
    no_common_state,
    resized,
    used_before,
)
from raydist.training.snapshotter import Restored, load_buffers
from raydist.worker import checkpoint, context, random_state
from raydist.worker.backends.ddp import DDPComm
from raydist.worker.in_place import NOT_INSIDE, InPlace


class Recoverable:
    """The state of a loop of one's own, which goes on from its last step after a failure.

        training = raydist.Recoverable(config, model=model, optimizer=optimizer)
        for step in training.steps(1000):
            with training.step():
                loss = cross_entropy(training.model(inputs[step]), targets[step])
                loss.backward()
                optimizer.step()
                raydist.report(step=step, loss=loss)

    - `config`: the settings, as the job's function gets them.
    - `model`: a module that each rank has whole, on the rank's device, not wrapped.
      `training.model` is this model in torch's DistributedDataParallel. Call that one, by this
      name: after a failure it is another object, since DDP keeps what is left of a step that was
      not finished.
    - `optimizer`: that of `model.parameters()`.
    - `others`: what else the steps change, by any names: objects with `state_dict` and
      `load_state_dict` (a schedule, a scaler, a sampler), torch.Generator, or tensors. After a
      restart each rank has its own. A checkpoint on the disk has those of rank 0; if the number of
      ranks changes, or a node is lost or drained, all ranks get those of one rank.

    `steps(count)` gives the number of each step to make, from 1 to `count`: in a run that was
    restarted, or that continues another one, from the step after the newest state. The step that
    comes first then is made twice, and its first time does not count: its reports are dropped.
    After each step the state is kept in memory as `snapshot.every` says, and saved as
    `checkpoint.every` says (null: only after the last step). A loop that is left by `break` keeps
    nothing of its last step.

    `step()` is the block of one step, which begins without gradients. If another rank was killed
    meanwhile, the block ends where it is. Therefore put all that belongs to the step into it,
    collectives and reports too.

    The random generators of Python, numpy and torch belong to the state. What is kept elsewhere
    does not go back: take the samples by the number of the step, or give the sampler as one of
    `others`.

    With `restart.in_place=auto` the ranks that were not killed keep their processes. Otherwise, and
    if the job has used torch.distributed before `steps`, all begin anew, from the same state. The
    results have the same bits in every case, on a CPU with the same number of ranks.

    TypeError: the model is wrapped, or one of `others` has no state.
    """

    def __init__(
        self,
        config: Job,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise TypeError("model= is wrapped already: give raydist.Recoverable the model itself")
        self.model = model
        """The model as the steps call it."""
        self._job = config
        self._module = model
        self._parts = {"optimizer": optimizer, **others}
        for name, part in self._parts.items():
            part_state(part, name)
        self._keeper: WholeCheckpointer | None = None
        self._in_place: InPlace | None = None
        """Keeps this process if another rank is killed; None: it ends then."""
        self._entered = False
        """Whether the block of this step was entered."""

    def steps(self, count: int) -> Iterator[int]:
        """Yield the number of each step to make until `count` are done. All ranks call it, once.

        RaydistError: called outside a run, or a step was not inside `step()`. ConfigError: the
        model is divided, the backend is Horovod, or the state to continue from does not fit.
        TypeError: a state has a value that a checkpoint cannot have.
        """
        comm = whole_comm()
        with context.current().next_fit():
            self._in_place = context.current().in_place
            if self._in_place is not None:
                if why := used_before("the steps of raydist.Recoverable"):
                    self._in_place.refuse(why)
                    self._in_place = None
                else:
                    self._in_place.enter()
            try:
                yield from self._attempts(comm, count)
            finally:
                context.current().muted = False
                self.model = self._module

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make one step inside the block, which ends where it is if another rank was killed."""
        self._entered = True
        self._module.zero_grad(set_to_none=True)
        try:
            yield
        except Exception as error:
            if self._in_place is None or not self._in_place.is_called(error):
                raise
            # `steps` will notice; until then the step has no result
            context.current().muted = True

    def _attempts(self, comm: DDPComm, count: int) -> Iterator[int]:
        """Yield the steps of each attempt in which this process takes part."""
        in_place, begins_again = self._in_place, False
        sizes = buffer_sizes(self._module)
        while True:
            try:
                if begins_again and in_place is not None:
                    meet_again(comm, in_place)
                yield from self._attempt(comm, count)
                if in_place is not None:
                    in_place.leave()
                return
            except GeneratorExit:  # the loop was left
                if in_place is not None:
                    in_place.refuse(NOT_INSIDE)
                raise
            except Exception as error:
                if in_place is None or not in_place.is_called(error):
                    raise
            in_place.park(no_common_state(comm) or resized(self._module, sizes))
            begins_again = True

    def _attempt(self, comm: DDPComm, count: int) -> Iterator[int]:
        """Yield the steps from the newest state on; raise an error once a peer is lost."""
        context.current().muted = False
        self.model = comm.wrap(self._module)
        self._keeper = keeper = WholeCheckpointer(self._job, comm)
        found = keeper.newest()
        done = found.step if found is not None else 0
        self._restore(found)
        keeper.begin(done)
        self._announce(done, count)
        if found is not None and done < count and self.model is not self._module:
            context.current().muted = True
            yield from self._make(done + 1)
            context.current().muted = False
            self._restore(found)
            keeper.go_on()
        found = None
        while done < count:
            yield from self._make(done + 1)
            done += 1
            if context.current().newest < done:  # nobody has reported it
                context.report(step=done)
            keeper.snapshots.step(done, self._own, self._common)
            if done < count and context.current().stop_request.due(done):
                self._stop_after(done, comm)
            if self._job.checkpoint.every and done % self._job.checkpoint.every == 0:
                self._save(done)
        if keeper.saved_step != done:
            self._save(done)
        keeper.rest()

    def _make(self, step: int) -> Iterator[int]:
        """Have the loop make a step. PeerLost: another rank was killed meanwhile."""
        self._entered = False
        context.phase("forward")
        yield step
        if not self._entered:
            raise RaydistError(
                f"step {step} was not made inside the block `with training.step():`, where a step "
                "begins without gradients and can be left"
            )
        if self._in_place is not None:
            self._in_place.check()

    def _announce(self, done: int, count: int) -> None:
        """Tell the driver where this attempt begins."""
        context.set_step(done)
        context.current().stop_request.enter_fit(context.current().fit, done)
        context.emit_event(
            kinds.Begin(
                rank=context.rank().rank,
                steps=count,
                resumed=done,
                checkpoint=checkpoint.newest_path(),
                fit=context.later_fit(context.current().fit),
            )
        )

    def _stop_after(self, step: int, comm: DDPComm) -> None:
        """Keep this step's state and wait to be stopped: the set of ranks is about to change."""
        assert self._keeper is not None
        kept = self._keeper.snapshots.hold(step, self._own, self._common)
        if not all(int(each.item()) for each in comm.gather(torch.tensor([int(kept)]))):
            self._save(step)
            self._keeper.rest()
        context.current().stop_request.leave(step)

    def _save(self, step: int) -> None:
        """Save the state as the checkpoint of a step. A collective."""
        assert self._keeper is not None
        context.phase("save")
        self._keeper.save_parts(step, self._own, self._common, reported_numbers())
        self._keeper.go_on()

    def _common(self) -> State:
        """Return the state that is equal on all ranks, and rank 0's part of what may differ."""
        parts = {name: part_state(part, name) for name, part in self._parts.items()}
        return {"model": self._module.state_dict(), "parts": parts}

    def _own(self) -> State:
        """Return the state that may differ among ranks."""
        me = context.rank()
        return {
            "random": random_state.capture(me.device),
            "loss": reported_numbers().get("loss"),
            "buffers": dict(self._module.named_buffers()),
            "world_size": me.world_size,
            "parts": {
                name: part_state(part, name)
                for name, part in self._parts.items()
                if name != "optimizer"
            },
        }

    def _restore(self, found: Restored | SavedWhole | None) -> None:
        """Load a state; None: begin with the state that the job has made."""
        self._module.zero_grad(set_to_none=True)
        if found is None:
            if why := next(unloadable(self._common(), "the state"), None):
                raise TypeError(why)
            return
        if isinstance(found, SavedWhole) and found.sharded:
            cause = "it was saved in shards, and raydist.Recoverable takes whole states"
            raise ConfigError.of("resume", str(found.path), cause, "resume=none")
        me = context.rank()
        own = found.mine if isinstance(found, Restored) else {}
        try:
            self._module.load_state_dict(found.state["model"])
            load_buffers(self._module, own.get("buffers", {}))
            for name, part in self._parts.items():
                # a copy, because optimizers go on with the tensors that they are given
                state = own.get("parts", {}).get(name, found.state["parts"][name])
                load_part(part, cloned(state))
        except (RuntimeError, ValueError, KeyError) as error:
            cause = f"this state does not fit what raydist.Recoverable has: {error}"
            raise ConfigError.of("resume", str(found.path), cause, "resume=none") from error
        random = found.random(me.rank, me.world_size)
        if random is not None:
            random_state.restore(random, me.device)
        else:  # another number of ranks, or one whose node was lost
            seed = random_state.derive(self._job.seed, found.step, me.rank)
            random_state.seed_everything(seed, self._job.deterministic)


def whole_comm() -> DDPComm:
    """Return the Comm of this rank. RaydistError, ConfigError: it has none for whole models."""
    comm = context.joined("raydist.Recoverable")
    if not isinstance(comm, DDPComm):
        cause = "raydist.Recoverable averages gradients with torch's DistributedDataParallel"
        raise ConfigError.of("backend", "horovod", cause, "backend=gloo", "backend=nccl")
    if comm.sharded:
        cause = "raydist.Recoverable takes models that each rank has whole (else raydist.sharded)"
        raise ConfigError.of("parallel", "a divided model", cause, "parallel=ddp")
    return comm


def part_state(part: Any, name: str) -> Any:
    """Return the state of an optimizer, a tensor, …; TypeError: it has none."""
    if isinstance(part, torch.Tensor):
        return part.detach()
    if isinstance(part, torch.Generator):
        return part.get_state()
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    raise TypeError(
        f"{name}= is a {type(part).__qualname__}: raydist.Recoverable takes tensors, "
        "torch.Generator, and objects with state_dict() and load_state_dict()"
    )


def load_part(part: Any, state: Any) -> None:
    """Set the state of an object that `part_state` accepts."""
    if isinstance(part, torch.Tensor):
        part.detach().copy_(state)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def reported_numbers() -> dict[str, float]:
    """Return the last number of each name that this rank has reported, if it is rank 0."""
    reported = context.current().reported
    return {name: float(each) for name, each in reported.items() if type(each) in (int, float)}
