"""The state of a sharded model in the form of torch's DCP, and how it is filled. (rank side)"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raydist.shared.errors import ConfigError, RaydistError
from raydist.state.checkpoint_files import Saved, read_state
from raydist.state.snapshot import rebuilt
from raydist.state.snapshot_layout import State
from raydist.training import optim, sharded
from raydist.training.optim import split_names
from raydist.training.rank_model import RankModel
from raydist.training.reshard import divide, from_bytes, to_bytes
from raydist.training.sources import saved_part
from raydist.training.step import Stepper
from raydist.worker import checkpoint, context, random_state

if TYPE_CHECKING:
    from raydist.training.pipeline import Names

RANDOM = "random"
"""The key of the random generators' states, one row per rank."""
STATES = ("optimizer", "state")
"""The keys of the optimizer's state by parameter: a parameter that never got a gradient has no
state."""


WHOLE = ("model", "optimizer", "schedule", "scaler", "position", RANDOM)
"""The keys of the state of a model that is not sharded."""


@dataclass(frozen=True)
class RestoredState:
    """A restored state. Its tensors are in the model and in the optimizer already."""

    step: int
    state: State
    """What is not a tensor: the position in the data, the schedule, the settings of the run that
    saved the state."""
    loss: torch.Tensor
    generators: torch.Tensor | None

    def random(self, rank: int, world_size: int) -> torch.Tensor | None:
        """Return the state of this rank's random generators.

        None: another number of ranks has saved them.
        """
        return self.generators

    def source(self, rank: int, world_size: int) -> State | None:
        """Return the state of this rank's source; None: it is that of another number of ranks."""
        if self.state.get("part") == rank:
            return self.state.get("source")
        return saved_part(self.state, rank, world_size)

    def restore(self, stepper: Stepper, rehearse: Callable[[], None]) -> torch.Tensor:
        """Continue the schedule; return the loss.

        The tensors are in place already: it is too late for a rehearsal.
        """
        stepper.go_on(self.state)
        return self.loss


def state_of(model: RankModel, facts: State, loss: torch.Tensor | None) -> State:
    """Return the state for raydist.sharded, in the form of get_state_dict of torch's DCP.

    `torch.distributed.checkpoint.state_dict.get_state_dict` itself would create the state of a new
    optimizer by a step, which Adam counts. `facts`: what is not a tensor. They are stored as one
    value: DCP would split them into many, and expect as many when it loads.
    """
    mesh = getattr(model.comm, "mesh", None)
    return {
        "model": _on_mesh(model.module.state_dict(), mesh),
        "optimizer": _on_mesh(_by_name(model, _names(model), model.optimizer.state_dict()), mesh),
        "loss": loss,
        RANDOM: _row_of_each(model),
        "training": to_bytes({**facts, "scaler": {}}),
    }


def _by_name(model: RankModel, names: Sequence[str], kept: State) -> State:
    """Return an optimizer's state keyed by the names of its parameters, instead of by numbers.

    `names`: the names of the parameters, in the optimizer's order.
    """
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in kept["param_groups"]
    ]
    if model.pipeline is not None:
        # A checkpoint has the state of the whole model.
        for group, part in zip(
            groups, _whole_groups(model.pipeline.names, len(groups)), strict=True
        ):
            group["params"] = part
    for group in groups:
        group.pop("initial_lr", None)  # belongs to the schedule
    state = {names[index]: of_one for index, of_one in kept["state"].items() if of_one}
    return {"state": state, "param_groups": groups}


def _whole_groups(names: Names, count: int) -> list[list[str]]:
    """Return the names of a whole model's parameters, in one or two groups of the optimizer."""
    return [[*names.trained]] if count == 1 else [*split_names(names.trained, names.undecayed)]


def _on_mesh(value: Any, mesh: Any) -> Any:
    """Return the value with each DTensor placed on this mesh, of all ranks or of a stage.

    Without tp a layer is the same on the ranks of the mesh. The tensors share their memory with
    those of the model and of the optimizer.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(value, DTensor):
        return rebuilt(value, lambda inner: _on_mesh(inner, mesh))
    placed = dict(zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True))
    everywhere = [placed.get(name, Replicate()) for name in mesh.mesh_dim_names]
    return DTensor.from_local(
        value.to_local(),
        mesh,
        everywhere,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _names(model: RankModel) -> list[str]:
    """Return the names of the optimizer's parameters in the whole model, in its order."""
    first = model.pipeline.names.first if model.pipeline is not None else {}
    by_id = {id(value): first.get(name, name) for name, value in model.module.named_parameters()}
    return [by_id[id(value)] for group in model.optimizer.param_groups for value in group["params"]]


def _row_of_each(model: RankModel) -> torch.Tensor:
    """Return the states of all ranks' random generators, [ranks, n].

    On a mesh each rank holds its own row.
    """
    own, me = random_state.capture(model.device)[None], context.rank()
    mesh = getattr(model.comm, "everyone", None)
    if mesh is None:
        return own.repeat(me.world_size, 1)
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(own.to(model.device), mesh, [Shard(0)] * mesh.ndim, run_check=False)


def other_state(state: State) -> str:
    """Return why a whole state is none of raydist.fit, empty if it is one."""
    missing = ", ".join(key for key in WHOLE if key not in state)
    return f"another loop has saved it, not raydist.fit: it has no {missing}" if missing else ""


def find_shards(model: RankModel) -> RestoredState | None:
    """Fill the model and the optimizer with the newest state; return None if there is none.

    The state comes from memory or from the disk. All ranks must call it. ConfigError: the state has
    other keys or shapes.
    """
    latest = checkpoint.continued_from()
    in_memory = model.comm.sharded and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not in_memory and latest is None:
        return None
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    # Creates the optimizer's state, which is filled below.
    fresh = [{**group} for group in model.optimizer.param_groups]
    get_optimizer_state_dict(model.module, model.optimizer)
    state = state_of(model, {}, torch.zeros((), device=model.device))
    load = sharded.load if model.comm.sharded else sharded.load_from_disk
    trained = _grouped(state)
    try:
        part = model.comm.pipelined
        step = load(state, of_ranks=RANDOM, optional=STATES, part=part)
        if not step and latest is not None and model.comm.sharded:
            step = _divide(latest, model, state, part)
            checkpoint.recall(latest)
        if (odd := {*trained} ^ {*_grouped(state)}) and step:
            raise RaydistError(f"it has other parameters: {', '.join(sorted(odd)[:4])}")
    except RaydistError as error:
        cause = f"this state does not fit the model and the optimizer: {error}"
        raise ConfigError.of(
            "resume", str(latest.path if latest else "auto"), cause, "resume=none"
        ) from error
    if not step:
        model.optimizer.state.clear()
        for group, before in zip(model.optimizer.param_groups, fresh, strict=True):
            group.update(before)
        return None
    _take_rest(model, state)
    # tensors are filled in place; the optimizer's settings remain the current ones
    rows = sharded.local(state[RANDOM]).cpu() if RANDOM in state else None
    own = None if rows is None else rows[0 if model.comm.sharded else context.rank().rank]
    return RestoredState(step, from_bytes(state["training"]), state["loss"], own)


def _grouped(state: State) -> list[str]:
    """Return the names of the optimizer's parameters, by group."""
    return [name for group in state["optimizer"]["param_groups"] for name in group["params"]]


def _take_rest(model: RankModel, state: State) -> None:
    """Give the optimizer what of a loaded state is not filled in place.

    That is all but tensors. A parameter that had no state when this one was kept has none again.
    """
    optimizer, kept = model.optimizer, state["optimizer"]
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    for name, value in zip(_names(model), trained, strict=True):
        if name not in kept["state"]:
            optimizer.state.pop(value, None)
            continue
        optimizer.state[value].update(
            {
                key: each
                for key, each in kept["state"][name].items()
                if not isinstance(each, torch.Tensor)
            }
        )
    for group, saved in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        own = {"params": group["params"], "lr": group["lr"]}
        group.update(optim.continued(group, saved, model.settings) | own)


def _divide(saved: Saved, model: RankModel, state: State, part: bool) -> int:
    """Fill the state from a whole one, as ddp saves it, which rank 0 reads; return its step.

    A collective.
    """
    whole = None
    if context.rank().rank == 0:
        kept = read_state(saved.path, mapped=True, of_all=False)
        if why := other_state(kept):
            raise RaydistError(why)
        facts = {
            key: kept[key] for key in ("position", "schedule", "config", "sources") if key in kept
        }
        training = to_bytes({**facts, "scaler": {}})
        names = _names(model)
        if model.pipeline is not None:
            groups = _whole_groups(model.pipeline.names, len(kept["optimizer"]["param_groups"]))
            names = [name for group in groups for name in group]
        whole = {
            "model": kept["model"],
            "optimizer": _by_name(model, names, kept["optimizer"]),
            "loss": torch.tensor(saved.meta.metrics["loss"]),
            RANDOM: kept[RANDOM],
            "training": training,
        }
    divide(whole, state, RANDOM, STATES, str(saved.path), part)
    context.set_step(saved.step)
    return saved.step
