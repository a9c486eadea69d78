"""The readers of events, over a list of events."""

from __future__ import annotations

from collections.abc import Iterable

from raydist.reporting.failures import Failure, Failures
from raydist.reporting.result import Figures
from raydist.shared.events import Event


def fold_failures(events: Iterable[Event]) -> list[Failure]:
    """The failures of a run."""
    failures = Failures()
    for event in events:
        failures.add(event)
    return failures.found


def fold_figures(events: Iterable[Event], now: float | None = None) -> Figures:
    """The figures of a run. `now`: its end in seconds since the epoch; without it the time of the
    last event."""
    figures = Figures()
    for event in events:
        figures.add(event)
    figures.ended = figures.ended if now is None else now
    return figures
