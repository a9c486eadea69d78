"""Events `nodes` -> the newest load of each node, and its figures over time. (pure)"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from raydist.reporting.curves import as_sent
from raydist.shared import kinds

COLUMNS = 240
"""Half the maximum number of points of a line: beyond it, two become their mean."""
LINES = 32
"""Maximum number of lines in a chart: beyond it, half of them are the lowest, half the highest."""
RECENT = 16
"""Number of the newest points that decide which lines are the lowest and the highest."""

Place = tuple[str, str]
"""(host, what of it: `GPU 0`, a port, or empty for the host itself)."""


class FigureShown(TypedDict):
    """The lines of one chart."""

    lines: list[tuple[str, list[float | None]]]
    """Of each line its label, and a value for each time; None: unknown."""
    of: int
    """Number of all lines, also of those that are left out."""


class FiguresShown(TypedDict):
    """What a page receives: charts over the same times."""

    times: list[float]
    """In seconds since the epoch."""
    figures: dict[str, FigureShown]
    """By the name of the figure: CPU, GPU memory, …"""


@dataclass
class NodeFigures:
    """The load of the nodes.

    Each line has at most 2 * COLUMNS values of four bytes, however long the run is.
    """

    newest: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By host, its newest load, with the bytes per second of each port."""
    times: list[float] = field(default_factory=list)
    """The time at which each column begins, in seconds since the epoch."""
    lines: dict[str, dict[Place, array[float]]] = field(default_factory=dict)
    """By figure and place, a value in each column; NaN, or missing at the end: unknown."""
    every: int = 1
    """Number of events of which a column has the mean."""
    _in_last: int = 0
    """Number of events in the newest column so far."""
    _loads: dict[str, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    """By host, the time of its newest load, and the load with the counters of its ports."""

    def present(self, hosts: Collection[str]) -> dict[str, Any]:
        """Return the newest loads of these hosts, and of all that the newest event has.

        The others are lost, or have left the run.
        """
        now = max((t for t, _ in self._loads.values()), default=0.0)
        return {
            host: load
            for host, load in self.newest.items()
            if host in hosts or self._loads[host][0] == now
        }

    def for_next_run(self) -> NodeFigures:
        """Return this for another run in the same folder: it continues the lines."""
        return replace(self, newest={}, _loads={})

    def add(self, event: kinds.Nodes) -> None:
        """Add one event."""
        if self._in_last == self.every or not self.times:
            self._begin_column(event.t)
        self._in_last += 1
        for host, load in event.nodes.items():
            t, before = self._loads.get(host, (0.0, {}))
            self._loads[host] = (event.t, load)
            rates = port_rates(load["ports"], before.get("ports", {}), event.t - t)
            self.newest[host] = {**load, "ports": rates}
            for figure, part, value in measured(self.newest[host]):
                if value is not None:
                    line = self.lines.setdefault(figure, {}).setdefault((host, part), array("f"))
                    self._put(line, value)

    def _begin_column(self, t: float) -> None:
        if len(self.times) == 2 * COLUMNS:
            self.every *= 2
            self.times = self.times[::2]
            for lines in self.lines.values():
                for place, line in lines.items():
                    lines[place] = halved([*line, *[math.nan] * (2 * COLUMNS - len(line))])
        self.times.append(t)
        self._in_last = 0

    def _put(self, line: array[float], value: float) -> None:
        """Add a value to the newest column."""
        line.extend([math.nan] * (len(self.times) - len(line)))
        before = 0 if math.isnan(line[-1]) else self._in_last - 1
        line[-1] = (line[-1] * before + value) / (before + 1) if before else value

    def shown(self, host: str = "") -> FiguresShown:
        """Return the figures of one node; without a name, those of all nodes, LINES of each."""
        figures: dict[str, FigureShown] = {}
        for figure, lines in self.lines.items():
            places = [place for place in lines if host in ("", place[0])]
            chosen = outermost({place: self._recent(lines[place]) for place in places})
            if chosen:
                figures[figure] = {
                    "lines": [(label(place, host), self._values(lines[place])) for place in chosen],
                    "of": len(places),
                }
        return {"times": [round(t, 1) for t in self.times], "figures": figures}

    def _values(self, line: Sequence[float]) -> list[float | None]:
        missing = [None] * (len(self.times) - len(line))
        return [*map(as_sent, line), *missing]

    def _recent(self, line: Sequence[float]) -> float:
        """Return the mean of the newest points; minus infinity if none of them is known."""
        known = [v for v in line[max(0, len(self.times) - RECENT) :] if math.isfinite(v)]
        return sum(known) / len(known) if known else -math.inf


def measured(load: Mapping[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """Yield (figure, GPU or port, value) of everything in a load that a line shows."""
    yield "CPU", "", load["cpu"]
    yield "memory", "", load["memory"][0]
    for number, gpu in enumerate(load["gpus"]):
        part = f"GPU {number}"
        yield "GPU utilisation", part, gpu["util"]
        yield "GPU memory", part, gpu["memory"][0] if gpu["memory"] else None
        yield "GPU power", part, gpu["power_w"]
        yield "GPU temperature", part, gpu["temp_c"]
    for port, rates in load["ports"].items():
        received, sent = rates or (None, None)
        yield "received", port, received
        yield "sent", port, sent


def outermost(values: Mapping[Place, float]) -> list[Place]:
    """Return at most LINES places, in their order: those with the lowest and highest values."""
    if len(values) <= LINES:
        return list(values)
    order = sorted(values, key=lambda place: values[place])
    outer = {*order[: LINES // 2], *order[-LINES // 2 :]}
    return [place for place in values if place in outer]


def label(place: Place, host: str) -> str:
    """Return the name of a line. `host`: the node that the chart is of; empty: of all."""
    name, part = place
    return part or name if host else f"{name} {part}".rstrip()


def halved(line: Sequence[float]) -> array[float]:
    """Return half as many values, each the mean of what is known of two."""
    found = array("f")
    for first, second in zip(line[::2], line[1::2], strict=True):
        known = [value for value in (first, second) if math.isfinite(value)]
        found.append(sum(known) / len(known) if known else math.nan)
    return found


def port_rates(
    now: Mapping[str, Any], before: Mapping[str, Any], s: float
) -> dict[str, list[float] | None]:
    """Return the bytes per second [received, sent] of each port over the last `s` seconds.

    None if they are unknown.
    """
    return {
        name: [
            max(0.0, round((new - old) / s)) for new, old in zip(counts, before[name], strict=True)
        ]
        if name in before and s > 0
        else None
        for name, counts in now.items()
    }
