"""A run on a terminal: lines that stay, and below them a live one. (driver)"""

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

from raydist.watch.progress import Progress
from raydist.watch.wording import clean, flat, table

REDRAW_S = 0.2
"""Shortest time between two drawings of the live line."""
WIDE = 100
"""Columns from which everything fits beside the bar."""


class Terminal:
    """Draws only when an event comes: no thread, so the run is never slower for being watched."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._launch = "launch"
        self._drawn = -math.inf

    def say(self, text: str, style: str = "") -> None:
        """A line that stays, or several; never broken by us, so that a path can be copied whole."""
        # Text, not str: brackets in a person's words are no markup.
        self._console.print(Text(clean(text), style=style), soft_wrap=True)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows under their headings."""
        head, *rest = table(rows, self._console.width)
        self.say(head, "dim")
        self.say("\n".join(rest))

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """What and its value, aligned; long values are broken between words."""
        wide = max(len(what) for what, _ in facts)
        room = max(20, self._console.width - wide - 4)
        for what, value in facts:
            lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False) or [""]
            text = ("\n" + " " * (wide + 4)).join(lines)
            self._console.print(Text.assemble(f"  {what:{wide}}  ", (text, "bold")), soft_wrap=True)

    def phase(self, name: str, seconds: float) -> None:
        """A part of the launch is over: the live line grows, until the bar takes its place."""
        self._launch += f"  {clean(name)} {seconds:.2f} s"
        self._refresh(Text(self._launch, style="dim"))

    def draw(self, progress: Progress, t: float, moment: str) -> None:
        """Draw the bar anew, unless that was just done. An evaluation stays as a line above it."""
        if moment == "evaluation":
            self.say("  ".join([*progress.position(), *progress.evaluation()]))
        elif moment == "step" and abs(t - self._drawn) < REDRAW_S:
            return
        self._drawn = t
        self._refresh(self._bar(progress))

    def saved(self, progress: Progress, t: float) -> None:
        """A checkpoint is on disk: the summary tells where the newest is."""

    def close(self) -> None:
        """Take the live line away. A terminal that is gone is no failure of the run."""
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()

    def _refresh(self, shown: RenderableType) -> None:
        self._live.update(shown)
        if not self._live.is_started:
            self._live.start()
            # A second Ctrl-C ends the process where it stands: the cursor must not stay hidden then.
            self._console.show_cursor(True)
        self._live.refresh()

    def _bar(self, progress: Progress) -> RenderableType:
        """One row where there is room, two where there is not, no bar where no end is known."""
        position, health, left = map(_one_line, (progress.position(), progress.health(), progress.left()))
        steps, step = progress.totals.get("steps"), progress.step
        if not steps or step is None:
            return Text("  ").join((position, health))
        bar = ProgressBar(total=steps, completed=min(step, steps))
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


def _one_line(words: Sequence[str]) -> Text:
    return Text(flat("  ".join(words)), no_wrap=True, overflow="crop")
