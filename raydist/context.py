"""What a job may call: who am I, what is to be told, how far am I. Works the same under plain torchrun. (rank side)"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raydist.config import Checkpoint
from raydist.events import Event, event
from raydist.node.wire import PHASES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rank:
    """Who this process is among all; torchrun's words with torchrun's meaning."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    run_dir: Path = Path("runs/here")
    """The run folder, where checkpoints go."""

    @property
    def device(self) -> torch.device:
        """This rank's device: the GPU of its local rank where the job has GPUs, the CPU otherwise."""
        import torch

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpus == "" or not torch.cuda.is_available():
            return torch.device("cpu")
        each = torch.cuda.device_count() / self.local_world_size
        return torch.device("cuda", int(self.local_rank * each))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Rank:
        """The rank that torchrun's variables tell; without them, the only one."""
        one = int(env.get("LOCAL_RANK", "0"))
        return cls(
            rank=int(env.get("RANK", "0")),
            local_rank=one,
            node_rank=int(env.get("GROUP_RANK", env.get("NODE_RANK", "0"))),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1"))),
            run_dir=Path(env.get("RAYDIST_RUN_DIR", "runs/here")),
        )


class Leave:
    """The word to leave the loop after a step, because there will be other ranks. It comes from the seat.

    No collective finishes without rank 0: once it stands still after step n, no rank is through with step n + 1, and
    all can be told to leave after that one.
    """

    def __init__(self) -> None:
        self.asked = False
        self._step: int | None = None
        self._told = threading.Event()

    def hear(self, word: str) -> None:
        """`hold`: stand still after the step that is being made. `leave:N`: go on to step N, and leave after it."""
        if word.startswith("leave:"):
            self._step = int(word.removeprefix("leave:"))
            self._told.set()
            tell("leaving", step=self._step)
        self.asked = True

    def due(self, step: int) -> bool:
        """Whether this is the step to leave after."""
        if not self.asked:
            return False
        if self._step is None:
            tell("held", step=step)
            self._told.wait()
        return self._step is not None and step >= self._step

    def gone(self, step: int) -> NoReturn:
        """All is kept: say so, and wait for the end."""
        tell("left", step=step)
        while True:
            signal.pause()


@dataclass
class Context:
    """Where this process stands. One per process; `enter` puts another in its place."""

    rank: Rank
    emit: Callable[[Event], None]
    """Takes an event on its way; never blocks, never raises."""
    beat: Callable[[int, int], None]
    """Notes (step, index in PHASES) where the seat can read it even after the process is gone."""
    flush: Callable[[], None] = lambda: None
    """Returns when all that was emitted is out of this process."""
    step: int = 0
    going: bool = False
    """Its node is about to be taken away: each further step is worth a snapshot."""
    comm: Any = None
    """The backend's Comm, from joining until leaving."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """What is kept of the checkpoints, as the run's settings say."""
    memory: tuple[int, int] | None = None
    """Descriptors of this rank's snapshot memory and of that of the first rank here, -1 where there is none of that
    kind; None: nobody would come after this process to read it."""
    leave: Leave = field(default_factory=Leave)

    saver: Any = None
    """The snapshot memory by which checkpoints get to the disk that the job asked for, once there was one."""
    sharded: Any = None
    """What keeps sharded states, once there is one."""
    leaving: list[Callable[[], None]] = field(default_factory=list)
    """What a rank waits for when its job is done, before it leaves the others."""


def _plain() -> Context:
    """The context of a process that raydist did not start: torchrun's variables, and rank 0 prints."""
    me = Rank.from_env(os.environ)

    def show(happened: Event) -> None:
        if me.rank == 0 and happened["kind"] in ("report", "saved", "warning"):
            print(line(happened), flush=True)

    return Context(rank=me, emit=show, beat=lambda step, phase: None)


def line(happened: Event) -> str:
    values = happened.get("values", {k: v for k, v in happened.items() if k not in ("t", "kind", "rank", "step")})
    words = [f"step {happened['step']}"] if "step" in happened else []
    words += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
    return " · ".join(words)


_here: Context | None = None


def here() -> Context:
    """The context of this process."""
    global _here
    if _here is None:
        _here = _plain()
    return _here


def enter(context: Context | None) -> None:
    """Make `context` the one of this process; None goes back to what the environment tells."""
    global _here
    _here = context


def rank() -> Rank:
    """Who this process is: rank, local_rank, node_rank, world_size, local_world_size, device, run_dir."""
    return here().rank


def report(step: int | None = None, **values: Any) -> None:
    """Tell numbers (loss=…, accuracy=…) of a step. Costs microseconds, waits for nobody, is no barrier.

    Words with a meaning of their own: `steps` (how many there will be), `epoch`, `epochs`, `samples` (seen so far by
    all ranks); with them the progress bar knows its end. A tensor is read by `.item()`, which waits for its GPU.
    """
    context = here()
    if step is not None:
        context.step = step
        context.beat(step, PHASES.index("end"))
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    facts = {"rank": context.rank.rank, "values": plain} | ({} if step is None else {"step": step})
    context.emit(event("report", **facts))


def phase(name: str) -> None:
    """Note what this rank is doing now, one of PHASES; a hang or a death is then told with it."""
    context = here()
    context.beat(context.step, PHASES.index(name))


def stand_at(step: int) -> None:
    """Note that so many steps are done, of which others in another attempt or run have told."""
    here().step = step
    phase("start")


def tell(kind: str, **facts: Any) -> None:
    """Emit an event of this rank."""
    context = here()
    context.emit(event(kind, rank=context.rank.rank, **facts))
