"""The rank's context, for jobs: rank, reports, step; works under torchrun too. (rank side)"""

from __future__ import annotations

import math
import operator
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypedDict

from raydist.settings.config import Checkpoint, Job
from raydist.settings.mesh import MeshShape, mesh_shape
from raydist.shared import env_names, kinds
from raydist.shared.errors import RaydistError
from raydist.shared.kinds import Event
from raydist.worker.agreed import AgreedActions, StepLimit
from raydist.worker.heartbeat import PHASES

if TYPE_CHECKING:
    import torch

    from raydist.state.snapshot import SnapshotBuffer
    from raydist.worker.in_place import InPlace

MAX_TEXT = 100_000
"""Maximum characters of the message and of the traceback of an exception in an event."""


@dataclass(frozen=True)
class Rank:
    """The rank of this process, with torchrun's names and meanings."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    run_dir: Path = Path("runs/here")
    """The run folder, where checkpoints go."""

    @property
    def device(self) -> torch.device:
        """This rank's device: the GPU of its local rank where the job has GPUs, the CPU otherwise.

        With fewer GPUs than ranks they share them in turn, as torch assumes where a program names
        no device.

        RaydistError: raydist gave this rank GPUs, and torch finds none. It would train on the CPU
        for hours.
        """
        import torch

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpus == "":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            if gpus and env_names.SCRATCH in os.environ:  # an agent started it
                why = (
                    f"torch {torch.__version__} finds no GPU, and this rank has "
                    f"CUDA_VISIBLE_DEVICES={gpus}"
                )
                raise RaydistError(
                    f"{why}: install a torch with CUDA on its node, or set scale.gpus=0"
                )
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Rank:
        """Return the rank in torchrun's variables; without them rank 0 of 1."""
        return cls(
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            node_rank=int(env.get("GROUP_RANK", env.get("NODE_RANK", "0"))),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1"))),
            run_dir=Path(env.get(env_names.RUN_DIR, "runs/here")),
        )


class StopRequest(StepLimit):
    """The request to stop after a step that is the same on all ranks.

    Other ranks can continue after it. After the last step of a raydist.fit no rank stops: all do so
    after the first step of the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._common: tuple[int, int] | None = None
        """The fit's number and its step after which all ranks stop."""

    def stop_after(self, step: int, fit: int = 0) -> None:
        """Let the rank continue to this step, and stop after it. `fit`: as Context.fit."""
        with self._lock:
            self._common = (fit, step)
            self._known.set()

    def due(self, step: int) -> bool:
        """Note that a step is done; report whether to stop after it.

        Pauses while that is not known yet.
        """
        while True:
            with self._lock:
                self._done, at = step, (self._fit, step)
                if self._limit is None or at < (self._limit_fit, self._limit):
                    return False
                if self._common is not None:
                    return at >= self._common
            self._known.wait()

    def leave(self, step: int) -> NoReturn:
        """Emit `left` now that the state of this step is kept, and wait to be ended."""
        emit_event(kinds.Left(rank=rank().rank, step=step))
        while True:
            signal.pause()


@dataclass
class Context:
    """The state of this rank. A process has one; `enter` replaces it."""

    rank: Rank
    emit: Callable[[Event], None]
    """Sends an event; never blocks, never raises."""
    beat: Callable[[int, int], None]
    """Writes (step, index in PHASES) to memory that the agent can read even after the process has
    ended."""
    flush: Callable[[], None] = lambda: None
    """Returns once all emitted events are sent."""
    step: int = 0
    reported: dict[str, bool | int | float | str] = field(default_factory=dict)
    """The last value of each name that rank 0 reported."""
    newest: int = 0
    """The newest step that was reported."""
    counts_anew: bool = False
    """Whether a step before the newest was reported, and the user was warned."""
    muted: bool = False
    """Whether reports and checkpoints are dropped: the step that makes them is not to count."""
    kept: int = 0
    """The newest step that a snapshot of this rank has; 0: there is none."""
    comm: Any = None
    """The backend's Comm, while the rank has joined the others."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """The run's settings of checkpoints."""
    memory: tuple[int, int] | None = None
    """Descriptors of this rank's snapshot memory and of that of the node's first rank, -1 for a
    missing one; None: no other process could read them after this one has ended."""
    fits: int = 0
    """How many times the job has called raydist.fit."""
    fit: int = 0
    """The number of the current one, from 1; 0: none."""
    samples_per_s: float = 0.0
    """Of the last one that has finished, as `samples_per_s` says."""
    common: int = -1
    """A step whose state every rank had in memory, when this one last knew; -1: none. Of shards,
    each rank has it still, or all have a later one."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    actions: AgreedActions = field(default_factory=AgreedActions)

    in_place: InPlace | None = None
    """Keeps this process if another rank is killed; None: it ends then."""
    buffer: SnapshotBuffer | None = None
    """The snapshot memory of this rank, once it is used."""
    sharded: Any = None
    """Keeps sharded states in memory; set at the first use."""
    final_waits: list[Callable[[], object]] = field(default_factory=list)
    """Functions that wait for unfinished work, called when the job has returned, before the rank
    leaves the others."""

    def begin_again(self) -> None:
        """Begin another attempt in this process."""
        self.newest = self.kept = 0
        self.stop_request = StopRequest()
        self.actions = AgreedActions(self.actions.armed)

    @contextmanager
    def next_fit(self) -> Iterator[None]:
        """Enter the next raydist.fit of the job inside the block."""
        self.fits += 1
        self.fit = self.fits
        self.newest = self.kept = 0
        try:
            yield
        finally:
            self.fit = 0
            self.actions.leave_fit()


def _context_from_env() -> Context:
    """Create the context of a process that raydist did not start, from torchrun's variables.

    Rank 0 prints its events.
    """
    rank = Rank.from_env(os.environ)

    def emit(event: Event) -> None:
        if rank.rank == 0 and (line := event_line(event)):
            print(line, flush=True)

    return Context(rank=rank, emit=emit, beat=lambda step, phase: None)


def event_line(event: Event) -> str:
    """Return what rank 0 prints of an event without a driver, such as `step 4 · loss 0.25`.

    It is empty for an event that is not shown.
    """
    step: int | None = None
    values: Mapping[str, Any]
    match event:
        case kinds.Report():
            step, values = event.step, event.values
        case kinds.Saved():
            step, values = event.step, {"path": event.path, "s": event.s}
        case kinds.Warning():
            values = {"text": event.text}
        case _:
            return ""
    parts = [] if step is None else [f"step {step}"]
    parts += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
    return " · ".join(parts)


_here: Context | None = None


def current() -> Context:
    """Return the context of this process."""
    global _here
    if _here is None:
        _here = _context_from_env()
    return _here


def joined(name: str) -> Any:
    """Return the backend's Comm of this rank.

    `name`: what needs it, such as raydist.fit. RaydistError: the rank has none.
    """
    if (comm := current().comm) is None:
        raise RaydistError(
            f"{name} was used outside a run: end the file with raydist.main(job) and run the file"
        )
    return comm


def enter(context: Context | None) -> None:
    """Make `context` that of this process; None: the one from torchrun's variables."""
    global _here
    _here = context


def rank() -> Rank:
    """Return the Rank of this process: its number, its local rank, its device, the run folder.

    It works under `raydist train`, under torchrun (from torchrun's variables), and in a plain
    process, which is rank 0 of 1.
    """
    return current().rank


def mesh(config: Job) -> MeshShape:
    """Return how `parallel=` divides the ranks: their number is pp * replicate * shard * tp.

    - `config`: the settings of the job.

    The result has these four, and `data`: the number of ranks with different samples.
    """
    me = rank()
    return mesh_shape(config.parallel, me.world_size, me.local_world_size)


def samples_per_s() -> float:
    """Return the training samples per second of the last raydist.fit, of all ranks together.

    The time is that of whole steps on this rank, as in `throughput` of the Result: without the
    first step of this attempt, evaluations and checkpoints. 0.0: it made no second step.
    """
    return current().samples_per_s


def report(step: SupportsIndex | None = None, **values: Any) -> None:
    """Report numbers of a training step: report(step=3, loss=0.1).

    It is not a collective and takes microseconds.

    - `step`: optimizer steps done so far, over all epochs: an int, or what has an integer's value,
      as a NumPy integer. It is also the rank's heartbeat, from which hangs are detected. None: the
      values belong to no step.
    - `values`: numbers, or tensors with one element. `.item()` reads a tensor, which waits for its
      GPU.

    TypeError: `step` is no integer. ValueError: it is negative, or does not fit into 64 bits.

    Four names have a meaning for the progress bar: `steps` (optimizer steps in all), `epoch` (from
    1), `epochs`, and `samples` (training samples used so far by all ranks), from which the
    throughput in samples per second follows.

    The last value of each name that rank 0 reported is in `Result.metrics`. `events.jsonl` has all
    reports of rank 0 up to 64 MB, later ones up to 26 MB a day; of the other ranks only some.
    Without raydist's launcher rank 0 prints its reports.
    """
    emit_report(step, values)


def emit_report(step: SupportsIndex | None, values: Mapping[str, Any], **more: Any) -> None:
    """Report values of a step, as `report` does. `more`: other fields of the event."""
    context = current()
    count = None if step is None else whole_step(step)
    if context.muted:
        return
    if count is not None:
        context.step = count
        context.beat(count, PHASES.index("end"))
        _note_order(context, count)
    plain = {name: plain_value(value) for name, value in values.items()}
    if context.rank.rank == 0:
        context.reported |= {
            name: value for name, value in plain.items() if type(value) in (bool, int, float, str)
        }
    optional: dict[str, Any] = {
        "step": count,
        "kept": context.kept or None,
        "fit": later_fit(context.fits),
        **more,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    context.emit(kinds.Report(rank=context.rank.rank, values=plain, **given))


def later_fit(number: int) -> int | None:
    """Return the number of a raydist.fit as events have it: None for the first."""
    return number if number > 1 else None


def whole_step(step: SupportsIndex, call: str = "report") -> int:
    """Return a step as an int.

    `call`: what the job has called, for errors. TypeError, ValueError: as `report` says.
    """
    try:
        number = operator.index(step)
    except TypeError:
        why = f"{call}(step={step!r}): step counts optimizer steps, so it must be an integer"
        raise TypeError(f"{why}; type step=int(...)") from None
    if not 0 <= number < 1 << 63:
        raise ValueError(
            f"{call}(step={number}): step counts optimizer steps, so it must be from 0 to 2**63 - 1"
        )
    return number


def plain_value(value: Any) -> Any:
    """Return a reported value without its tensor or array.

    An int that is too large for a float becomes infinite.
    """
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, int) and abs(plain) > sys.float_info.max:
        return math.copysign(math.inf, -1 if plain < 0 else 1)
    return plain


def _note_order(context: Context, step: int) -> None:
    """Warn once if steps decrease, as in a loop that counts them from 0 in each epoch."""
    if step < context.newest and not context.counts_anew and context.rank.rank == 0:
        context.counts_anew = True
        text = (
            f"step {step} was reported after step {context.newest}: a tracker keeps the first "
            "report of a step, the "
            "page the last; report the optimizer steps of all epochs together"
        )
        warn(text)
    context.newest = max(context.newest, step)


def phase(name: str) -> None:
    """Note the current activity of this rank, one of PHASES, for reports of hangs and failures."""
    context = current()
    context.beat(context.step, PHASES.index(name))


def set_step(step: int) -> None:
    """Set the step at which this rank starts, without a report.

    An earlier attempt or run has reported it.
    """
    current().step = step
    phase("start")


class ExceptionFacts(TypedDict):
    """An exception as it appears in an event."""

    type: str
    message: str
    traceback: str
    step: int
    """The step of the rank."""


def exception_facts(error: BaseException) -> ExceptionFacts:
    """Return the facts of the event `raised`; of long texts, the beginning and the end."""
    return {
        "type": type(error).__name__,
        "message": shorten(str(error)),
        "traceback": shorten("".join(traceback.format_exception(error))),
        "step": current().step,
    }


def exit_event(exit_: SystemExit) -> kinds.Raised | None:
    """Return the event of a rank that called `sys.exit`; None if it ended well.

    As in Python, of a number the last byte counts, and anything else is a failure, "" too.
    """
    code = 0 if exit_.code is None else exit_.code
    number = code & 0xFF if isinstance(code, int) else None
    if number == 0:
        return None
    return kinds.Raised(rank=rank().rank, code=number or 0, **exception_facts(exit_))


def shorten(text: str) -> str:
    """Return a text of about MAX_TEXT characters at most: the beginning and the end of this one.

    Each event is one message to the agent, and a line of events.jsonl.
    """
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def emit_event(event: kinds.OfRank) -> None:
    """Emit an event of this rank."""
    current().emit(event)


def warn(text: str) -> None:
    """Emit a warning of this rank."""
    context = current()
    context.emit(kinds.Warning(rank=context.rank.rank, text=text))
