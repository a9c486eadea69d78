"""The output of ranks as whole lines, each with its rank. (driver)"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

LONG = 2000
"""Maximum number of characters of a line that are shown; the rank's log has the whole line."""


class Output:
    """The bytes of each rank, split into lines. `shown`: all, none, or ranks such as 0,3."""

    def __init__(self, shown: str) -> None:
        self._shown_ranks = ranks_of(shown)
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._unfinished_lines: dict[int, str] = {}

    def lines(self, rank: int, chunk: bytes) -> Iterator[str]:
        """Yield the lines that these bytes complete; none if the rank is not shown."""
        if self._shown_ranks is not None and rank not in self._shown_ranks:
            return
        decoder = self._decoders.setdefault(
            rank, codecs.getincrementaldecoder("utf-8")("backslashreplace")
        )
        first, *others = decoder.decode(chunk).split("\n")
        *whole, rest = self._unfinished_lines.get(rank, "") + first, *others
        self._unfinished_lines[rank] = _visible(rest)
        for line in whole:
            yield _shown(rank, line)

    def rest(self) -> Iterator[str]:
        """Yield the last line of each rank that ended without a newline."""
        for rank, line in sorted(self._unfinished_lines.items()):
            if line:
                yield _shown(rank, line)
        self._unfinished_lines.clear()


def ranks_of(shown: str) -> set[int] | None:
    """Return the ranks of `0,3`; None for all."""
    if shown == "all":
        return None
    return set() if shown in ("none", "auto") else {int(rank) for rank in shown.split(",")}


def _visible(line: str) -> str:
    """Return what remains of a line on a screen.

    A progress bar returns to the beginning of its line, and may rewrite it for hours.
    """
    last = line.rstrip("\r").rpartition("\r")[2][: LONG + 1]
    return last + "\r" if line.endswith("\r") else last


def _shown(rank: int, line: str) -> str:
    """Format a line as `[0] the line`; for a progress bar, which rewrites it, the last text."""
    last = _visible(line).rstrip("\r")
    return f"[{rank}] {last[:LONG]}" + (" …" if len(last) > LONG else "")
