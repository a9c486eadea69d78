"""Figures: the sums over a run's events. Result: what `raydist.run` returns. (pure)"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from raydist.recovery.blame import describe_end, first_cause, where
from raydist.reporting.failures import Failures
from raydist.reporting.goodput import Spent, apart
from raydist.shared import kinds
from raydist.shared.errors import RaydistError, RunFailed, Stopped
from raydist.shared.kinds import Event
from raydist.shared.outcome import Attempt, End
from raydist.shared.rank_names import of_ranks
from raydist.shared.record_names import RESULT
from raydist.shared.whole_file import write_at_once
from raydist.state.object_store import Remote, StoragePath, scheme

T = TypeVar("T")
WARNINGS = 1000
"""Maximum number of different warnings that are counted.

Some contain a number that changes from step to step.
"""


@dataclass(frozen=True)
class Result(Generic[T]):
    """The result of a run.

    `result.json` in the run folder has all of it but `values` and `exceptions`.
    """

    status: str
    """finished, failed or stopped."""
    dir: Path
    """The run folder."""
    world_size: int
    """Number of ranks."""
    values: tuple[T | None, ...] = ()
    """What the job's function returned, by rank."""
    exceptions: Mapping[int, BaseException] = field(default_factory=dict)
    """Of each rank that failed, its exception; a RaydistError with its text if the object could not
    be pickled."""
    ends: tuple[End, ...] = ()
    """How each rank ended, by rank."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last value of each name that rank 0 reported."""
    launch: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the launch: connect, place, actors, warm-up, rendezvous, first
    step."""
    wall_s: float = 0.0
    """Seconds from the beginning of the run to its end."""
    goodput: float = 0.0
    """Time in training steps that counted, as a fraction of the time of the run: 0 to 1."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the run: steps, launch, queue, failures, repeated steps, evaluation,
    saves, rest."""
    recovery: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the failures: detect, kill, place, fork, rendezvous, restore, first
    step."""
    throughput: float = 0.0
    """Samples per second of all ranks together during training steps; 0 if the job did not report
    `samples`."""
    checkpoint: StoragePath | None = None
    """The newest checkpoint that was saved."""
    network: str = ""
    """Which network carried the traffic of the ranks; empty for a run on one node."""
    work: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By rank, as text: seconds of the rank's own work in a step, and seconds of the whole step
    (medians)."""
    slow: Mapping[str, Any] = field(default_factory=dict)
    """`text` and `ranks` of ranks that slowed the others, from the last such report; empty without
    one."""
    warnings: tuple[str, ...] = ()
    """Each warning once, with its ranks or its count."""
    signal: int = 0
    """The number of the signal that stopped the run; 0 without one."""
    error: RaydistError | None = None
    """The error that ended the run from outside the ranks: no cluster, no place, a signal."""
    restarts: tuple[End, ...] = ()
    """The first cause of each failure after which the run was restarted."""
    why_last: str = ""
    """Why a failed run was not restarted, or not again."""
    failure: str = ""
    """Why the run failed, as text for a person; empty if it did not fail."""

    @property
    def cause(self) -> End | None:
        """The End of the rank that failed first; None if no rank failed."""
        return first_cause(self.ends)

    def to_json(self) -> dict[str, Any]:
        """The content of result.json and of the event `result`, as plain JSON without NaN."""
        facts = {
            "status": self.status,
            "dir": str(self.dir),
            "world_size": self.world_size,
            "metrics": dict(self.metrics),
            "launch": dict(self.launch),
            "wall_s": self.wall_s,
            "goodput": self.goodput,
            "spent": dict(self.spent),
            "recovery": dict(self.recovery),
            "throughput": self.throughput,
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "warnings": list(self.warnings),
            "network": self.network,
            "work": dict(self.work),
            "slow": dict(self.slow),
            "signal": self.signal,
            "error": type(self.error).__name__ if self.error else "",
            "failure": self.failure,
            "cause": self.cause and asdict(self.cause),
            "restarts": [asdict(end) for end in self.restarts],
            "why_last": self.why_last,
        }
        return {name: strict_json(value) for name, value in facts.items()}

    def save(self) -> None:
        """Write result.json into the run folder as a whole or, on a full disk, not at all."""
        self.dir.mkdir(parents=True, exist_ok=True)
        path = self.dir / RESULT
        try:
            text = json.dumps(self.to_json(), indent=2, default=str) + "\n"
            write_at_once(path, text.encode())
        except OSError:
            path.unlink(missing_ok=True)  # that of an earlier run in this folder

    def __str__(self) -> str:
        """Return what a command prints at the end of the run.

        That is how it ended, then a line for each figure.
        """
        from raydist.reporting import wording

        facts = self.to_json()
        rows = wording.table(wording.summary(facts))
        return "\n".join([wording.headline(facts, None), *filter(None, [self.failure]), *rows])

    def _repr_html_(self) -> str:
        from raydist.reporting.notebook import result_html

        return result_html(self.to_json())

    def or_raise(self) -> Result[T]:
        """This very Result; RunFailed if the run failed."""
        if self.status == "failed":
            raise RunFailed(self.failure, result=self, exceptions=self.exceptions)
        return self


def make_result(
    folder: Path, tried: Attempt, figures: Figures, now: float | None = None
) -> Result[Any]:
    """Return the Result of a run, from the outcome of its last attempt and its figures.

    `now`: the end of the run in seconds since the epoch; None: now.
    """
    figures.ended_at = time.time() if now is None else now
    failed = [end for end in tried.ends if end.failed]
    texts = {end.rank: RaydistError(f"{where(end)} {describe_end(end)}") for end in failed}
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
        spent=figures.spent.parts(figures.wall_s, figures.ended_at),
        recovery=figures.spent.recovery,
        throughput=figures.throughput,
        checkpoint=_saved(figures.checkpoint) if figures.checkpoint else None,
        network=figures.network,
        work=figures.work,
        slow=figures.slow,
        warnings=_warnings(figures.warnings),
        signal=tried.error.signum if isinstance(tried.error, Stopped) else 0,
        error=tried.error,
        restarts=tuple(
            first for each in tried.earlier if (first := first_cause(each.ends)) is not None
        ),
        why_last=tried.why_last,
        failure=_failure(tried),
    )


def _status(error: RaydistError | None, failed: bool) -> str:
    if isinstance(error, Stopped):
        return "stopped"
    return "failed" if error or failed else "finished"


def _failure(tried: Attempt) -> str:
    if tried.error is not None:
        return "" if isinstance(tried.error, Stopped) else tried.error.message
    not_again = f"\n  not restarted: {tried.why_last}" if tried.failure and tried.why_last else ""
    return tried.failure + not_again


@dataclass
class Figures:
    """The sums over the events of a run, in memory of constant size."""

    world_size: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    network: str = ""
    work: Mapping[str, Sequence[float]] = field(default_factory=dict)
    slow: Mapping[str, Any] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    began: float | None = None
    """Time of the first event, in seconds since the epoch."""
    ended_at: float = 0.0
    """Time of the end of the run, or of the last event."""
    counted_samples: int = 0
    """Samples of all ranks in the last attempt after its first step, as counted by the loop."""
    samples: tuple[kinds.Report, ...] = ()
    """The first and the last report with `samples`."""
    warnings: dict[str, Counter[int | None]] = field(default_factory=dict)
    """How often each warning came from each rank; None for the driver."""

    def add(self, happened: Event) -> None:
        """Process one event. Only rank 0's events count, except for warnings."""
        self.began = happened.t if self.began is None else self.began
        self.ended_at = happened.t
        self.spent.add(happened)
        match happened:
            case kinds.Warning():
                if happened.text in self.warnings or len(self.warnings) < WARNINGS:
                    self.warnings.setdefault(happened.text, Counter())[happened.rank] += 1
            case kinds.HasPlan():
                self.world_size = happened.world_size
            case kinds.Phase() if self.spent.launching:
                self.launch[happened.name] = self.launch.get(happened.name, 0.0) + happened.s
            case kinds.Report(rank=0):
                self._add_report(happened)
            case kinds.Recalled():
                self.metrics.update(happened.values)
            case kinds.Network():
                self.network = happened.text
            case kinds.Work():
                self.work = happened.ranks
            case kinds.Slow():
                self.slow = {"text": happened.text, "ranks": happened.ranks}
            case kinds.Saved():
                self.checkpoint = happened.path
            case kinds.Done(rank=0) if happened.spent and "step" in happened.spent:
                self.counted_samples = happened.samples

    def _add_report(self, report: kinds.Report) -> None:
        self.metrics.update(report.values)
        if report.step is not None and isinstance(report.values.get("samples"), int | float):
            self.samples = (*self.samples[:1], report)

    @property
    def failures(self) -> Failures:
        """The failures of the run. Nothing else derives them from events."""
        return self.spent.failures

    @property
    def wall_s(self) -> float:
        """The seconds from the first event to the end."""
        return 0.0 if self.began is None else max(0.0, self.ended_at - self.began)

    @property
    def step_s(self) -> float:
        """The seconds in training steps that counted."""
        return self.spent.step_s

    @property
    def known_goodput(self) -> float | None:
        """The goodput; None before a second step was reported: a program may report none."""
        return self.goodput if self.step_s > 0 else None

    @property
    def goodput(self) -> float:
        return min(1.0, self.step_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def throughput(self) -> float:
        """The samples per second: by the loop's own count, else from the first to the last report.

        Reports count by their difference, because `samples` of a resumed run include those of
        earlier runs.
        """
        if self.counted_samples and self.spent.counted_s:
            return self.counted_samples / self.spent.counted_s
        took = apart(self.samples)
        return (
            (self.samples[-1].values["samples"] - self.samples[0].values["samples"]) / took
            if took
            else 0.0
        )


def _saved(text: str) -> StoragePath:
    """Return the path of a checkpoint in an event."""
    return Remote(text) if scheme(text) else Path(text)


def _warnings(warned: Mapping[str, Counter[int | None]]) -> tuple[str, ...]:
    return tuple(_warning(text, ranks) for text, ranks in warned.items())


def _warning(text: str, ranks: Counter[int | None]) -> str:
    """Format a warning with its ranks, or with how often it occurred."""
    if named := {rank for rank in ranks if rank is not None}:
        return of_ranks(text, named)
    return f"{text} ({ranks.total()} times)" if ranks.total() > 1 else text


def strict_json(value: Any) -> Any:
    """Return a value that strict JSON can hold: NaN and infinity become text."""
    if isinstance(value, Mapping):
        return {str(name): strict_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
