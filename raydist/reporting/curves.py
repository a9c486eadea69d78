"""Reports -> curves: each step once across attempts, thinned to what a screen can show. (pure)"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raydist.reporting.points import series
from raydist.reporting.progress import PROGRESS_NAMES
from raydist.shared import kinds

SHOWN = 1200
"""Maximum number of points of a curve that a page receives: more than a chart has pixels."""

Point = tuple[int, float, float | None]
"""(step, seconds since the epoch, value); None: the value is not a finite number."""


class Piece(NamedTuple):
    """Points that a page receives, as columns."""

    steps: list[int]
    times: list[float]
    values: list[float | None]
    means: list[float | None]
    """By point, the mean of the values since the point before, itself included: what a smoothed
    curve is made of, since the points that are left are the extremes. Empty: no value was left out.
    """


@dataclass
class Curve:
    """One value over steps.

    Steps only grow: a step that is reported again replaces itself and everything after it.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    cuts: int = 0
    """How often points were replaced: until this changes, a reader needs only the added points."""

    def add(self, step: int, t: float, value: float) -> None:
        """Add a point."""
        if self.steps and step <= self.steps[-1]:
            at = bisect_left(self.steps, step)
            del self.steps[at:], self.times[at:], self.values[at:]
            self.cuts += 1
        self.steps.append(step)
        self.times.append(t)
        self.values.append(value)

    def piece(
        self, low: float = -math.inf, high: float = math.inf, by: str = "step", most: int = SHOWN
    ) -> Piece:
        """Return the points between two steps (`by="time"`: times), thinned to `most`.

        Each stretch keeps its extremes.
        """
        column: Sequence[float] = self.times if by == "time" else self.steps
        first, last = bisect_left(column, low), bisect_right(column, high)
        chosen = thinned(self.values, first, last, most)
        means = [] if len(chosen) == last - first else map(as_sent, means_of(self.values, chosen))
        return self._columns(chosen)._replace(means=list(means))

    def since(self, count: int) -> Piece:
        """Return all points from this index on."""
        return self._columns(range(count, len(self.steps)))

    def _columns(self, chosen: Sequence[int]) -> Piece:
        values = (self.values[i] for i in chosen)
        return Piece(
            [self.steps[i] for i in chosen],
            [round(self.times[i], 2) for i in chosen],
            [as_sent(value) for value in values],
            [],
        )


def as_sent(value: float) -> float | None:
    """Return a value as a page receives it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def add_report(curves: dict[str, Curve], report: kinds.Report, step: int) -> None:
    """Add what rank 0 reported for a step.

    Every number that does not measure progress has a curve.
    """
    for name, value in report.values.items():
        if name not in PROGRESS_NAMES and isinstance(value, int | float):
            curve = curves.setdefault(series(name, report.fit), Curve())
            curve.add(step, report.t, float(value))


def thinned(values: Sequence[float], first: int, last: int, most: int) -> Sequence[int]:
    """Return at most `most` indices from `first` to `last`.

    Each stretch keeps its lowest value, its highest, and one that is not a number.
    """
    if last - first <= most:
        return range(first, last)
    size = math.ceil((last - first) / (most // 3))
    chosen = {first, last - 1}
    for begin in range(first, last, size):
        part = values[begin : min(begin + size, last)]
        if math.isfinite(sum(part)):
            chosen |= {begin + part.index(min(part)), begin + part.index(max(part))}
        else:
            finite = [value for value in part if math.isfinite(value)]
            edges = {min(finite), max(finite)} if finite else set()
            chosen |= {begin + part.index(edge) for edge in edges}
            chosen.add(begin + next(i for i, value in enumerate(part) if not math.isfinite(value)))
    return sorted(chosen)


def means_of(values: Sequence[float], chosen: Sequence[int]) -> Iterator[float]:
    """Yield for each chosen index the mean of the finite values after the one before.

    NaN if there is none.
    """
    begin = chosen[0]
    for at in chosen:
        part = values[begin : at + 1]
        begin = at + 1
        if not math.isfinite(sum(part)):
            part = [value for value in part if math.isfinite(value)]
        yield sum(part) / len(part) if part else math.nan
