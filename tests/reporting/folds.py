"""Readers of events, applied to a list of events."""

from __future__ import annotations

from collections.abc import Iterable

from raydist.reporting.failures import Failure, Failures
from raydist.reporting.result import Figures
from raydist.shared.kinds import Event


def fold_failures(events: Iterable[Event]) -> list[Failure]:
    """Return the failures of a run."""
    failures = Failures()
    for event in events:
        failures.add(event)
    return failures.found


def fold_figures(events: Iterable[Event], now: float | None = None) -> Figures:
    """Return the figures of a run. `now` is its end in seconds since the epoch; without it the run
    ends with the last event."""
    figures = Figures()
    for event in events:
        figures.add(event)
    figures.ended_at = figures.ended_at if now is None else now
    return figures
