"""Reports of rank 0 -> points of a curve: each step once over all attempts, and final. (pure)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.state.run_checkpoints import fit_of

TOTALS = ("steps", "epochs")
"""Reported names that give the length of the training; they are not curves."""
HELD_S = 30.0
"""Longest time that a step waits for a snapshot or a checkpoint.

A loop may save once an hour, or never.
"""


class Position(NamedTuple):
    """A step of one of the job's calls of raydist.fit, in the order in which a job does them."""

    fit: int
    """From 1; 1 without raydist.fit, too."""
    step: int

    @classmethod
    def of(cls, fit: int | None, step: int) -> Position:
        """`fit`: as events have it, None for the first."""
        return cls(fit or 1, step)


BEFORE_ALL = Position(1, -1)
START = Position(1, 0)


@dataclass
class Point:
    """What rank 0 reported for one step."""

    at: Position
    t: float
    """When the step was first reported, in seconds since the epoch."""
    attempt: int
    values: dict[str, float] = field(default_factory=dict)


@dataclass
class Points:
    """A buffer that holds a step until no restart can repeat it.

    That is the case once a later step is reported, and a snapshot or a checkpoint contains the
    step. If a step is released because it has waited HELD_S, and is repeated nevertheless, its
    first values stay: a tracker cannot take a point back, and must not have two.
    """

    newest_released: Position = BEFORE_ALL
    """The newest step that was released, in this run or in the one that it resumes.

    It is never released again.
    """
    repeats: bool = True
    """Whether a restart can repeat steps.

    If not, a step is final once a later one is reported.
    """
    attempt: int = 0
    newest_safe: Position = BEFORE_ALL
    """The newest step in a snapshot or a checkpoint."""
    points: dict[Position, Point] = field(default_factory=dict)
    reported: Position = START
    """The newest step that this attempt has reported.

    A report without a step belongs to it, or to step 0: what a job reports before it trains.
    """

    def add(self, event: Event) -> list[Point]:
        """Process one event; return the points that it makes final, in the order of their steps."""
        match event:
            case kinds.StartsAttempt():
                self.attempt += 1
                self.reported = START
            case kinds.Saved():
                saved = Position(fit_of(Path(event.path)), event.step)
                self.newest_safe = max(self.newest_safe, saved)
            case kinds.Begin(rank=0) if event.resumed is not None:
                self._drop_after(Position.of(event.fit, event.resumed))
            case kinds.Report(rank=0):
                self._take(event)
                return self._take_final(event.t)
            case kinds.Result():
                return self.rest()
        return []

    def rest(self) -> list[Point]:
        """Return all points that are held: the run is over."""
        return self._tell(list(self.points))

    def _take(self, report: kinds.Report) -> None:
        if report.step is not None:
            self.reported = Position.of(report.fit, report.step)
            self._drop_after(Position.of(report.fit, report.step - 1))
        at = self.reported
        if report.kept is not None:
            self.newest_safe = max(self.newest_safe, Position.of(report.fit, report.kept))
        values = numbers(report.values)
        if at > self.newest_released and (values or report.step is not None):
            self.points.setdefault(at, Point(at, report.t, self.attempt)).values.update(values)

    def _drop_after(self, last: Position) -> None:
        """Forget later steps that earlier attempts did in this fit: this attempt repeats them.

        Not those of later fits: a restart begins this one, which has finished, once more.
        """
        self.points = {
            at: one
            for at, one in self.points.items()
            if at.fit != last.fit or at.step <= last.step or one.attempt == self.attempt
        }

    def _take_final(self, now: float) -> list[Point]:
        """Return final steps before the newest one, to which an evaluation may still add values."""
        newest = max(self.points, default=BEFORE_ALL)
        covered = [
            at for at in self.points if at < newest and (at <= self.newest_safe or not self.repeats)
        ]
        late = [at for at, one in self.points.items() if at < newest and now - one.t > HELD_S]
        final = max(covered + late, default=BEFORE_ALL)
        return self._tell([at for at in self.points if at <= final])

    def _tell(self, final: list[Position]) -> list[Point]:
        self.newest_released = max([self.newest_released, *final])
        return [self.points.pop(at) for at in sorted(final)]


def series(name: str, fit: int | None) -> str:
    """Return the name of a curve: each raydist.fit of a job has its own, `fit2/loss` and so on."""
    return f"fit{fit}/{name}" if fit is not None and fit > 1 else name


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers and form a curve."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in TOTALS
    }


def node_numbers(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the event `nodes` as flat names: `system/node-1/gpu0/util`."""
    found: dict[str, object] = {}
    for host, facts in nodes.items():
        at = f"system/{host}"
        found |= {f"{at}/cpu": facts["cpu"], f"{at}/memory": share(facts["memory"])}
        for number, gpu in enumerate(facts["gpus"]):
            found |= {f"{at}/gpu{number}/{name}": share(value) for name, value in gpu.items()}
        for port, (received, sent) in facts["ports"].items():
            found |= {f"{at}/{port}/received": received, f"{at}/{port}/sent": sent}
    return numbers(found)


def share(value: Any) -> Any:
    """Return (used, total) as a share from 0 to 1; anything else unchanged."""
    return value[0] / value[1] if isinstance(value, list | tuple) else value
