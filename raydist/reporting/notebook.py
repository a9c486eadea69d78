"""A Result in a notebook: the summary, and a small curve of each reported value. (driver)"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from raydist.reporting import wording
from raydist.reporting.curves import Curve, add_report
from raydist.reporting.progress import number_text
from raydist.shared import kinds
from raydist.shared.events import read_events
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS

WIDTH, HEIGHT, PAD = 240, 60, 4
"""The size of a curve, in pixels."""
CURVES = 8
"""Maximum number of curves that are shown."""
POINTS = 480
"""Maximum number of points of a curve that are drawn."""
Line = list[tuple[int, float]]
"""(step, value) of each point."""


def result_html(facts: Mapping[str, Any]) -> str:
    """Return a table of the summary, and the curves as SVG.

    It has no script and sets no colors: it fits light and dark themes. `facts`: the content of
    result.json.
    """
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td "
        f"style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in wording.summary(facts)
    )
    curves: dict[str, Line] = {}
    restarts: list[int] = []
    with suppress(OSError, json.JSONDecodeError):  # the folder may be gone
        curves, restarts = curves_of(read_events(Path(facts["dir"]) / EVENTS))
    shown = [svg(name, curve, restarts) for name, curve in list(curves.items())[:CURVES]]
    failure = f"<pre>{escape(facts['failure'])}</pre>" if facts["failure"] else ""
    head = f"<b>{escape(wording.headline(facts, None))}</b>"
    return f"<div>{head}{failure}<table>{rows}</table>{''.join(shown)}</div>"


def curves_of(events: Iterable[Event]) -> tuple[dict[str, Line], list[int]]:
    """Return the curve of each reported value, and the restarts of a run.

    The curves are those of the run's page, without values that are not numbers.
    """
    curves, restarts, newest = dict[str, Curve](), list[int](), 0
    for event in events:
        match event:
            case kinds.StartsAttempt():
                restarts.append(event.step if isinstance(event, kinds.Restart) else newest)
            case kinds.Report(rank=0) if event.step is not None:
                newest = event.step
                add_report(curves, event, event.step)
    found: dict[str, Line] = {}
    for name, curve in curves.items():
        piece = curve.piece(most=POINTS)
        if line := [
            (step, value)
            for step, value in zip(piece.steps, piece.values, strict=True)
            if value is not None
        ]:
            found[name] = line
    return found, restarts


def svg(name: str, curve: Line, restarts: Sequence[int] = ()) -> str:
    """Draw a curve over its steps, its newest value as text; restarts are dashed lines."""
    low, high = min(value for _, value in curve), max(value for _, value in curve)
    first, last = curve[0][0], curve[-1][0]

    def x(step: int) -> str:
        return f"{PAD + (WIDTH - 2 * PAD) * (step - first) / max(1, last - first):.1f}"

    def y(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.5
        return f"{HEIGHT - PAD - (HEIGHT - 2 * PAD) * share:.1f}"

    line = " ".join(f"{x(step)},{y(value)}" for step, value in curve)
    marks = "".join(
        f"<line x1='{x(step)}' x2='{x(step)}' y1='0' y2='{HEIGHT}' stroke='currentColor' "
        "stroke-dasharray='2' "
        "opacity='0.5'/>"
        for step in restarts
        if first <= step <= last
    )
    dot = f"<circle cx='{x(last)}' cy='{y(curve[-1][1])}' r='2' fill='currentColor'/>"
    label = f"{escape(name)} {number_text(curve[-1][1])}"
    span = f"{label}: steps {first} to {last}, from {number_text(low)} to {number_text(high)}"
    return (
        f"<figure style='display:inline-block;margin:4px'><figcaption>{label}</figcaption>"
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' "
        f"aria-label='{span}'><title>{span}</title>"
        f"<polyline points='{line}' fill='none' stroke='currentColor'/>{dot}{marks}</svg></figure>"
    )
