"""Reports of rank 0 -> points of a curve: each step once over all attempts, and final. (pure)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raydist.shared import kinds
from raydist.shared.kinds import Event

TOTALS = ("steps", "epochs")
"""Reported names that give the length of the training; they are not curves."""
HELD_S = 30.0
"""Longest time that a step waits for a snapshot or a checkpoint.

A loop may save once an hour, or never.
"""


@dataclass
class Point:
    """What rank 0 reported for one step."""

    step: int
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

    newest_released: int = -1
    """The newest step that was released, in this run or in the one that it resumes.

    It is never released again.
    """
    repeats: bool = True
    """Whether a restart can repeat steps.

    If not, a step is final once a later one is reported.
    """
    attempt: int = 0
    newest_safe: int = -1
    """The newest step in a snapshot or a checkpoint."""
    points: dict[int, Point] = field(default_factory=dict)

    def add(self, event: Event) -> list[Point]:
        """Process one event; return the points that it makes final, in the order of their steps."""
        match event:
            case kinds.StartsAttempt():
                self.attempt += 1
            case kinds.Saved():
                self.newest_safe = max(self.newest_safe, event.step)
            case kinds.Begin(rank=0) if event.resumed is not None:
                self._drop_after(event.resumed)
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
        step = max(self.points, default=None) if report.step is None else report.step
        if step is None:
            return
        self._drop_after(step - 1)
        self.newest_safe = max(self.newest_safe, -1 if report.kept is None else report.kept)
        if step > self.newest_released:
            self.points.setdefault(step, Point(step, report.t, self.attempt)).values.update(
                numbers(report.values)
            )

    def _drop_after(self, step: int) -> None:
        """Forget later steps of earlier attempts: this attempt repeats them."""
        self.points = {
            at: one for at, one in self.points.items() if at <= step or one.attempt == self.attempt
        }

    def _take_final(self, now: float) -> list[Point]:
        """Return final steps before the newest one, to which an evaluation may still add values."""
        newest = max(self.points, default=-1)
        covered = [
            at for at in self.points if at < newest and (at <= self.newest_safe or not self.repeats)
        ]
        late = [at for at, one in self.points.items() if at < newest and now - one.t > HELD_S]
        return self._tell([at for at in self.points if at <= max(covered + late, default=-1)])

    def _tell(self, steps: list[int]) -> list[Point]:
        self.newest_released = max([self.newest_released, *steps])
        return [self.points.pop(step) for step in sorted(steps)]


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
