"""A run as plain lines, for a job's log: no control characters, a sane rate. (driver)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

from raydist.watch.progress import Progress, duration
from raydist.watch.wording import clean, flat, table

SAVED_S = 1.0
"""Seconds between two lines about checkpoints: a small job saves faster than anybody reads."""


class Lines:
    """Writes whole lines to a stream that is no terminal. `every_s`: seconds between lines of progress."""

    def __init__(self, stream: TextIO, every_s: float) -> None:
        self._stream = stream
        self._every_s = every_s
        self._began: float | None = None
        self._drawn = self._saved = -math.inf

    def say(self, text: str, style: str = "") -> None:
        """A line, or several. `style` is for screens with colours."""
        self._stream.write(clean(text) + "\n")
        self._stream.flush()

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows under their headings."""
        self.say("\n".join(table(rows)))

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """What and its value, aligned."""
        wide = max(len(what) for what, _ in facts)
        self.say("\n".join(f"  {what:{wide}}  {value}" for what, value in facts))

    def phase(self, name: str, seconds: float) -> None:
        """A part of the launch is over."""
        self.say(f"launch: {name} {seconds:.2f} s")

    def draw(self, progress: Progress, t: float, moment: str) -> None:
        """A line of progress, if it is time for one, or if it is the first, the last or an evaluation."""
        if moment == "step" and abs(t - self._drawn) < self._every_s:
            return
        self._drawn = t
        words = progress.evaluation() if moment == "evaluation" else [*progress.health(), *progress.left()]
        self._tell(progress, t, words)

    def saved(self, progress: Progress, t: float) -> None:
        """A checkpoint is on disk."""
        if abs(t - self._saved) >= SAVED_S:
            self._saved = t
            self._tell(progress, t, ["checkpoint saved"])

    def _tell(self, progress: Progress, t: float, words: Sequence[str]) -> None:
        self._began = t if self._began is None else self._began
        self.say(f"[{duration(max(0.0, t - self._began))}] " + flat(", ".join([*progress.position(), *words])))

    def close(self) -> None:
        """Nothing to put away."""
