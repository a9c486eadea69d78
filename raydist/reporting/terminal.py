"""A screen for terminals: lines that stay, and a live line below them. (driver)"""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raydist.reporting.progress import Progress
from raydist.reporting.wording import clean, flat, table

REDRAW_S = 0.2
"""Minimum time between two drawings of the live line."""
WIDE = 100
"""Minimum number of columns for position, bar, loss and time left on one line."""


class Terminal:
    """A screen that draws only when an event arrives. It has no thread that could slow the run."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(
            file=stream, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._launch = "launch"
        self._drawn_at = -math.inf

    def say(self, text: str, style: str = "") -> None:
        """Write one or more lines that stay.

        They are not wrapped, so that a path can be copied whole.
        """
        # Text, not str: brackets in a job's text are not markup.
        self._console.print(Text(clean(text), style=style), soft_wrap=True)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the first row is its headings."""
        head, *rest = table(rows, self._console.width)
        self.say(head, "dim")
        self.say("\n".join(rest))

    def show(self, rows: Sequence[Sequence[str]], t: float) -> None:
        """Redraw a table instead of the live line, at most once per REDRAW_S.

        `t`: now, on any clock.
        """
        if abs(t - self._drawn_at) < REDRAW_S:
            return
        self._drawn_at = t
        room = max(4, self._console.height - 2)
        self._refresh(
            Text("\n".join(table(rows[:room], self._console.width)), no_wrap=True, overflow="crop")
        )

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Write (name, value) rows, aligned; long values are wrapped between words."""
        width = max(len(name) for name, _ in facts)
        room = max(20, self._console.width - width - 4)
        for name, value in facts:
            lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False) or [
                ""
            ]
            text = ("\n" + " " * (width + 4)).join(lines)
            self._console.print(
                Text.assemble(f"  {name:{width}}  ", (text, "bold")), soft_wrap=True
            )

    def phase(self, name: str, seconds: float) -> None:
        """Append the time of a part of the launch to the live line, which the bar will replace."""
        self._launch += f"  {clean(name)} {seconds:.2f} s"
        self._refresh(Text(self._launch, style="dim"))

    def draw(self, progress: Progress, t: float, moment: str) -> None:
        """Redraw the bar, at most once per REDRAW_S. An evaluation becomes a line above it.

        `t`: time of the event. `moment`: as returned by Progress.read.
        """
        if moment == "evaluation":
            self.say("  ".join([*progress.position(), *progress.evaluation()]))
        elif moment == "step" and abs(t - self._drawn_at) < REDRAW_S:
            return
        self._drawn_at = t
        self._refresh(self._bar(progress))

    def saved(self, progress: Progress, t: float) -> None:
        """Show nothing: the summary names the newest checkpoint."""

    def close(self) -> None:
        """Remove the live line. A terminal that is gone does not end the run."""
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()

    def _refresh(self, shown: RenderableType) -> None:
        self._live.update(shown)
        if not self._live.is_started:
            self._live.start()
            # A second Ctrl-C ends the process at once: it must not leave the cursor hidden.
            self._console.show_cursor(True)
        self._live.refresh()

    def _bar(self, progress: Progress) -> RenderableType:
        """Return one row in a wide terminal, two in a narrow one.

        There is no bar without a known number of steps.
        """
        position, health, left = map(
            _one_line, (progress.position(), progress.health(), progress.time_left())
        )
        steps, step = progress.totals.get("steps"), progress.step
        if step is None or not steps or steps < 0:
            return Text("  ").join((position, health))
        done = max(0, min(step, steps)) / steps
        # Not of `steps`: rich multiplies, and a huge number overflows.
        bar = ProgressBar(total=1, completed=done)
        if self._console.width >= WIDE:
            return _row(position, bar, Text("  ").join((health, left)))
        return Group(_row(position, bar, left), health)


def _row(before: Text, bar: ProgressBar, after: Text) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(before, bar, after)
    return row


def _one_line(parts: Sequence[str]) -> Text:
    return Text(flat("  ".join(parts)), no_wrap=True, overflow="crop")
