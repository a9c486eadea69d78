"""What a run came to: figures out of its events, and the Result that a person holds. (pure)"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from raydist.blame import End, cause, compact, failure_text, first_cause, is_victim, where
from raydist.errors import RaydistError, RunFailed, Stopped
from raydist.events import Event
from raydist.goodput import Spent, apart
from raydist.storage import Place, Remote, scheme

__all__ = ["Attempt", "End", "Figures", "Result", "conclude", "failure_text", "first_cause", "fold", "is_victim"]

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """What one try at the job left behind."""

    ends: Sequence[End] = ()
    """How each rank ended, by rank."""
    values: Sequence[Any] = ()
    exceptions: Mapping[int, BaseException] = field(default_factory=dict)
    """What ranks raised, as far as it could travel."""
    error: RaydistError | None = None
    """What ended it from outside the ranks: no cluster, no place, a signal."""
    earlier: Sequence[Attempt] = ()
    """The attempts before it."""
    why_last: str = ""
    """Why there was no other after it, where it failed."""
    resize: str = ""
    """In words, where it was ended because there are more nodes."""

    @property
    def cause(self) -> End | None:
        """The first cause of its failure."""
        return first_cause(self.ends)

    @property
    def reached(self) -> int:
        """The last step that any rank noted."""
        return max((end.step for end in self.ends), default=0)


@dataclass(frozen=True)
class Result(Generic[T]):
    """What a run came to."""

    status: str
    """finished, failed or stopped."""
    dir: Path
    """The run folder."""
    world_size: int
    values: tuple[T | None, ...] = ()
    """What the job's function returned, by rank."""
    exceptions: Mapping[int, BaseException] = field(default_factory=dict)
    """The exception of each rank that failed; a RaydistError with its text where there is no object."""
    ends: tuple[End, ...] = ()
    """How each rank ended, by rank."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last value of everything that rank 0 reported."""
    launch: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the launch: connect, place, actors, warm-up, rendezvous, first step."""
    wall_s: float = 0.0
    goodput: float = 0.0
    """Seconds spent in training steps that counted over all seconds of the run, 0 to 1."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Where the seconds went: steps, launch, failures, steps done again, evaluation, saves, rest."""
    recovery: Mapping[str, float] = field(default_factory=dict)
    """Where those of the failures went: detect, kill, place, fork, rendezvous, restore, first step."""
    throughput: float = 0.0
    """Samples per second of all ranks while in training steps; 0 where the job reported no `samples`."""
    checkpoint: Place | None = None
    """The newest checkpoint that was saved."""
    network: str = ""
    """Which network carried it, where it ran on several nodes."""
    work: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of each rank, by its number as text: seconds of its own work in a step, and of the whole step."""
    slow: Mapping[str, Any] = field(default_factory=dict)
    """`text` and `ranks` of those that held up the others, as the last event `slow` told; empty if nobody did."""
    warnings: tuple[str, ...] = ()
    """Each warning once, with its ranks or how often it came."""
    signal: int = 0
    """The signal that stopped the run."""
    error: RaydistError | None = None
    """What ended the run from outside the ranks."""
    restarts: tuple[End, ...] = ()
    """The first cause of each failure that a restart has mended."""
    why_last: str = ""
    """Why a failed run was not restarted, or not again."""

    @property
    def cause(self) -> End | None:
        """The first cause of a failure, the culprit rather than its victims."""
        return first_cause(self.ends)

    @property
    def failure(self) -> str:
        """Why it failed, for a person; empty if it did not."""
        if self.status != "failed":
            return ""
        if self.error:
            return self.error.message
        return failure_text(self.ends) + (f"\n  not restarted: {self.why_last}" if self.why_last else "")

    def to_json(self) -> dict[str, Any]:
        """The facts of result.json and of the last event; plain JSON, so no NaN."""
        facts = {
            "status": self.status, "dir": str(self.dir), "world_size": self.world_size, "metrics": dict(self.metrics),
            "launch": dict(self.launch), "wall_s": self.wall_s, "goodput": self.goodput,
            "spent": dict(self.spent), "recovery": dict(self.recovery), "throughput": self.throughput,
            "checkpoint": self.checkpoint and str(self.checkpoint), "warnings": list(self.warnings),
            "network": self.network, "work": dict(self.work), "slow": dict(self.slow),
            "signal": self.signal, "error": type(self.error).__name__ if self.error else "", "failure": self.failure,
            "cause": self.cause and asdict(self.cause), "restarts": [asdict(end) for end in self.restarts],
            "why_last": self.why_last,
        }  # fmt: skip
        return {name: _plain(value) for name, value in facts.items()}

    def save(self) -> None:
        """Write result.json into the run folder; on a full disk there is none rather than half of one."""
        self.dir.mkdir(parents=True, exist_ok=True)
        path = self.dir / "result.json"
        try:
            path.write_text(json.dumps(self.to_json(), indent=2, default=str) + "\n", encoding="utf-8")
        except OSError:
            path.unlink(missing_ok=True)

    def or_raise(self) -> Result[T]:
        """This very Result; RunFailed if the run failed."""
        if self.status == "failed":
            raise RunFailed(self.failure, result=self, exceptions=self.exceptions)
        return self


def conclude(folder: Path, tried: Attempt, stream: Iterable[Event], now: float | None = None) -> Result[Any]:
    """The Result of a run: what its ranks did, and what its events (`stream`) add up to.

    `now`: seconds since the epoch, the end of the run.
    """
    figures = fold(stream, time.time() if now is None else now)
    failed = [end for end in tried.ends if end.failed]
    texts = {end.rank: RaydistError(f"{where(end)} {cause(end)}") for end in failed}
    return Result(
        status=_status(tried.error, bool(failed)),
        dir=folder,
        world_size=len(tried.ends) or figures.world_size,
        values=tuple(tried.values),
        exceptions={**texts, **tried.exceptions},
        ends=tuple(tried.ends),
        metrics=figures.metrics,
        launch=figures.launch,
        wall_s=figures.wall_s,
        goodput=figures.goodput,
        spent=figures.spent.parts(figures.wall_s, figures.ended),
        recovery=figures.spent.recovery,
        throughput=figures.throughput,
        checkpoint=_saved(figures.saved) if figures.saved else None,
        network=figures.network,
        work=figures.work,
        slow=figures.slow,
        warnings=_warnings(figures.warned),
        signal=tried.error.signum if isinstance(tried.error, Stopped) else 0,
        error=tried.error,
        restarts=tuple(first for each in tried.earlier if (first := each.cause) is not None),
        why_last=tried.why_last,
    )


def _status(error: RaydistError | None, failed: bool) -> str:
    if isinstance(error, Stopped):
        return "stopped"
    return "failed" if error or failed else "finished"


@dataclass
class Figures:
    """What the events of a run add up to; a stream of any length in a few numbers."""

    world_size: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    saved: str = ""
    network: str = ""
    work: dict[str, list[float]] = field(default_factory=dict)
    slow: dict[str, Any] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    ended: float = 0.0
    """When the run ended, in seconds since the epoch."""
    done: int = 0
    """Samples of the steps of the last attempt over all ranks, as the loop itself counted."""
    samples: tuple[Event, ...] = ()
    """The first and the last of them that told its `samples`."""
    warned: dict[str, list[int | None]] = field(default_factory=dict)
    """The ranks that gave each warning; None where it came from no rank."""

    def add(self, happened: Event) -> None:
        """Take in one event. Of the ranks only 0 counts, except that all may warn."""
        rank = happened.get("rank")
        self.spent.add(happened)
        match happened["kind"]:
            case "warning":
                self.warned.setdefault(happened["text"], []).append(rank)
            case "plan":
                self.world_size = happened["world_size"]
            case "phase" if not self.spent.failures.found:  # later ones are part of a restart
                self.launch[happened["name"]] = self.launch.get(happened["name"], 0.0) + happened["s"]
            case "report" if rank == 0:
                self._add_report(happened)
            case "network":
                self.network = happened["text"]
            case "work":
                self.work = happened["ranks"]
            case "slow":
                self.slow = {"text": happened["text"], "ranks": happened["ranks"]}
            case "saved":
                self.saved = happened["path"]
            case "done" if rank == 0 and "step" in (happened.get("spent") or {}):
                self.done = happened.get("samples", 0)

    def _add_report(self, report: Event) -> None:
        self.metrics.update(report["values"])
        if "step" in report and isinstance(report["values"].get("samples"), int | float):
            self.samples = (*self.samples[:1], report)

    @property
    def step_s(self) -> float:
        """Seconds in training steps that counted."""
        return self.spent.step_s

    @property
    def goodput(self) -> float:
        return min(1.0, self.step_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def throughput(self) -> float:
        """Samples per second, by the loop's own count, else between the first and the last report.

        Of what was reported only the difference counts: `samples` of a resumed run include those before it.
        """
        if self.done and self.spent.counted_s:
            return self.done / self.spent.counted_s
        took = apart(self.samples)
        return (self.samples[-1]["values"]["samples"] - self.samples[0]["values"]["samples"]) / took if took else 0.0


def fold(events: Iterable[Event], now: float | None = None) -> Figures:
    """Add up the events of a run. `now`: its end in seconds since the epoch; without it the last event's time."""
    figures, began, ended = Figures(), None, 0.0
    for happened in events:
        if happened["kind"] == "run":  # a folder may be used again: only its last run counts
            figures, began = Figures(), None
        figures.add(happened)
        ended = happened["t"]
        began = ended if began is None else began
    figures.ended = ended if now is None else now
    figures.wall_s = 0.0 if began is None else max(0.0, figures.ended - began)
    return figures


def _saved(text: str) -> Place:
    """A checkpoint as it was told of."""
    return Remote(text) if scheme(text) else Path(text)


def _warnings(warned: Mapping[str, Sequence[int | None]]) -> tuple[str, ...]:
    return tuple(text + _from(ranks) for text, ranks in warned.items())


def _from(ranks: Sequence[int | None]) -> str:
    """Which ranks said it, or how often it was said."""
    named = {rank for rank in ranks if rank is not None}
    if named:
        return f" (rank{'s' if len(named) > 1 else ''} {compact(named)})"
    return f" ({len(ranks)} times)" if len(ranks) > 1 else ""


def _plain(value: Any) -> Any:
    """The value as strict JSON can hold it: a loss of NaN is told in words."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
