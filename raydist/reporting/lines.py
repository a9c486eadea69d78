"""A screen of plain lines for logs: no control characters, at a limited rate. (driver)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

from raydist.reporting.progress import Progress, duration
from raydist.reporting.wording import clean, flat, table

SAVED_S = 1.0
"""Minimum time between two lines about checkpoints: small jobs save many times a second."""


class Lines:
    """A screen of whole lines on a stream. `every_s`: seconds between lines of progress."""

    def __init__(self, stream: TextIO, every_s: float) -> None:
        self._stream = stream
        self._every_s = every_s
        self._began: float | None = None
        self._drawn_at = self._saved_at = -math.inf

    def say(self, text: str, style: str = "") -> None:
        """Write one or more lines. `style` is for screens with colours."""
        self._stream.write(clean(text) + "\n")
        self._stream.flush()

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the first row is its headings."""
        self.say("\n".join(table(rows)))

    def show(self, rows: Sequence[Sequence[str]], t: float) -> None:
        """Do nothing: a table that changes is for terminals."""

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Write (name, value) rows, aligned."""
        width = max(len(name) for name, _ in facts)
        self.say("\n".join(f"  {name:{width}}  {value}" for name, value in facts))

    def phase(self, name: str, seconds: float) -> None:
        """Write the time of a part of the launch."""
        self.say(f"launch: {name} {seconds:.2f} s")

    def draw(self, progress: Progress, t: float, moment: str) -> None:
        """Write a progress line for the first and last step, evaluations, and every `every_s` s.

        `t`: time of the event. `moment`: as returned by Progress.read.
        """
        if moment == "step" and abs(t - self._drawn_at) < self._every_s:
            return
        self._drawn_at = t
        parts = (
            progress.evaluation()
            if moment == "evaluation"
            else [*progress.health(), *progress.time_left()]
        )
        self._progress_line(progress, t, parts)

    def saved(self, progress: Progress, t: float) -> None:
        """Write that a checkpoint is on disk."""
        if abs(t - self._saved_at) >= SAVED_S:
            self._saved_at = t
            self._progress_line(progress, t, ["checkpoint saved"])

    def _progress_line(self, progress: Progress, t: float, parts: Sequence[str]) -> None:
        self._began = t if self._began is None else self._began
        self.say(
            f"[{duration(max(0.0, t - self._began))}] "
            + flat(", ".join([*progress.position(), *parts]))
        )

    def close(self) -> None:
        """Do nothing: plain lines stay."""
