"""What ranks print, on the screen: whole lines, each with the rank that wrote it. (driver)"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

LONG = 2000
"""Characters of a line that are shown; the whole of it is in the rank's log."""


class Output:
    """Bytes of each rank, as they come, made into lines. `shown`: all, none, or ranks as in 0,3."""

    def __init__(self, shown: str) -> None:
        self._shown = ranks_of(shown)
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._begun: dict[int, str] = {}

    def lines(self, rank: int, chunk: bytes) -> Iterator[str]:
        """The lines that these bytes complete; none of a rank that is not shown."""
        if self._shown is not None and rank not in self._shown:
            return
        decoder = self._decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("backslashreplace"))
        *whole, self._begun[rank] = (self._begun.get(rank, "") + decoder.decode(chunk)).split("\n")
        for line in whole:
            yield _shown(rank, line)

    def rest(self) -> Iterator[str]:
        """Lines that were never ended."""
        for rank, line in sorted(self._begun.items()):
            if line:
                yield _shown(rank, line)
        self._begun.clear()


def ranks_of(shown: str) -> set[int] | None:
    """The ranks of `0,3`; None for all."""
    if shown == "all":
        return None
    return set() if shown in ("none", "auto") else {int(rank) for rank in shown.split(",")}


def _shown(rank: int, line: str) -> str:
    """`[0] the line`; of a progress bar only what it said last."""
    last = line.rstrip("\r").rpartition("\r")[2]
    return f"[{rank}] {last[:LONG]}" + (" …" if len(last) > LONG else "")
