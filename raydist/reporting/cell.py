"""A screen for notebooks: lines that stay, and one output line that IPython replaces. (driver)"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape
from typing import Any, TextIO

from raydist.reporting.lines import Lines
from raydist.reporting.progress import Progress
from raydist.reporting.wording import flat, table

REPLACED_S = 0.2
"""Minimum time between two versions of the live line."""


class Cell(Lines):
    """A screen in the output of a notebook cell.

    It needs no widgets: a display with an id is a part of Jupyter's protocol, which every front end
    has.
    """

    def __init__(self, stream: TextIO, every_s: float) -> None:
        super().__init__(stream, every_s)
        self._handle: Any = None
        self._launch = "launch"
        self._replaced_at = -math.inf

    def phase(self, name: str, seconds: float) -> None:
        """Append the time of a part of the launch to the live line."""
        self._launch += f"  {name} {seconds:.2f} s"
        self._replace(self._launch)

    def draw(self, progress: Progress, t: float, moment: str) -> None:
        """Replace the live line, at most once per REPLACED_S.

        An evaluation becomes a line that stays.
        """
        if moment == "evaluation":
            self.say("  ".join([*progress.position(), *progress.evaluation()]))
        elif moment == "step" and abs(t - self._replaced_at) < REPLACED_S:
            return
        self._replaced_at = t
        text = flat("  ".join([*progress.position(), *progress.health(), *progress.time_left()]))
        steps, step = progress.totals.get("steps"), progress.step
        bar = (
            f"<progress max='{steps}' value='{step or 0}'></progress> "
            if steps and steps > 0
            else ""
        )
        self._replace(text, f"{bar}<code>{escape(text)}</code>")

    def show(self, rows: Sequence[Sequence[str]], t: float) -> None:
        """Replace the live line by a table, at most once per REPLACED_S. `t`: now, on any clock."""
        if abs(t - self._replaced_at) >= REPLACED_S:
            self._replaced_at = t
            self._replace("\n".join(table(rows)))

    def saved(self, progress: Progress, t: float) -> None:
        """Show nothing: the summary names the newest checkpoint."""

    def close(self) -> None:
        """Empty the live line."""
        if self._handle is not None:
            self._replace("")

    def _replace(self, text: str, html: str | None = None) -> None:
        from IPython.display import display

        shown = {
            "text/plain": text,
            "text/html": f"<pre>{escape(text)}</pre>" if html is None else html,
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def in_notebook() -> bool:
    """Report whether this process is a Jupyter kernel, whose output a notebook displays."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None
