"""Follow a run folder while a page is open: fold new events, return what is new. (driver)"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from raydist.reporting.curves import SHOWN, Curve, Piece
from raydist.shared import kinds
from raydist.shared.events import parse_event
from raydist.shared.record_names import EVENTS
from raydist.watch.web.model import Model

SLICE = 1 << 19
"""Bytes of events that are folded before other work gets its turn: about 30 ms."""
TURN_S = 0.3
"""Seconds of folding after which viewers get the progress."""
TAIL = 1 << 17
"""Bytes at the end of a log that a viewer gets before its new lines."""
MAX_SHOWN = 4 * SHOWN
"""Maximum number of points of a curve in a page: beyond it, the page gets a thinned curve."""
HEAD = 256
"""Bytes at the beginning of a file that distinguish it from a later file of the same name."""
LOOKED_S = 30.0
"""Seconds without a look after which it is unknown when something new arrived."""
FOUND = 300
"""Maximum number of lines that a search returns."""
SHARED = re.compile(
    r"blame-\d+\.txt|logs/rank-\d+\.(log|nccl|stacks)|operate/[\w.-]+\.(txt|json\.gz)"
)
"""The files of a run folder, besides its events, that a page may read."""


class Fetch(Protocol):
    """A function that fetches a file into the run folder before it is read.

    It fetches the beginning, or the whole file in its current state.
    """

    async def __call__(self, name: str, whole: bool = False) -> None: ...


async def is_here(name: str, whole: bool = False) -> None:
    """Do nothing: for a run folder on this machine."""


@dataclass
class SameFile:
    """A check whether a name still refers to the file that was read so far.

    A run folder may be recreated.
    """

    _inode: int = 0
    """0: no file was seen so far."""
    _head: bytes = b""

    def is_another(self, path: Path, read: int) -> bool:
        """Report whether this is another file than at the last call, or shorter than what was read.

        An inode number is soon reused, so the first bytes are compared too: an event has its time
        there.
        """
        try:
            with path.open("rb") as file:
                status, head = os.fstat(file.fileno()), file.read(HEAD)
        except OSError:  # it may come again
            return False
        differs = self._inode and (status.st_ino != self._inode or not head.startswith(self._head))
        self._inode = status.st_ino
        self._head = head
        return bool(differs) or status.st_size < read


@dataclass
class Silence:
    """How long nothing new has arrived, by this machine's clock if somebody has looked.

    The clock of the driver, which dates the events, may be wrong.
    """

    _read: int = 0
    _looked_at: float | None = None
    _came: float | None = None
    """When the newest event arrived; None if nobody looked then."""

    def look(self, read: int) -> None:
        """Record how many bytes of events were read."""
        now = time.monotonic()
        if read != self._read:
            self._came = (
                now if self._looked_at is not None and now - self._looked_at < LOOKED_S else None
            )
        self._read = read
        self._looked_at = now

    def seconds(self, last: float) -> float:
        """Return the seconds without anything new. `last`: the time of the newest event."""
        return max(0.0, time.time() - last) if self._came is None else time.monotonic() - self._came


class LogPiece(NamedTuple):
    """What a viewer of a log has not yet seen."""

    text: str
    at: int
    """Where the piece ends, in bytes."""
    anew: bool
    """Whether the piece does not continue what was sent before: it is the end of the log."""


@dataclass
class FollowedRun:
    """One run folder, and the fold of its events so far."""

    folder: Path
    fetch: Fetch = is_here
    model: Model = field(default_factory=Model)
    read: int = 0
    """Bytes of events.jsonl that were folded."""
    files: int = 1
    """Number of files of that name so far: one more each time that the folder was recreated."""
    silence: Silence = field(default_factory=Silence)
    _file: SameFile = field(default_factory=SameFile)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def catch_up(self, turn_s: float = TURN_S) -> float:
        """Fold new events, for at most `turn_s` seconds; return the folded share of the file."""
        await self.fetch(EVENTS)
        path, until = self.folder / EVENTS, time.monotonic() + turn_s
        async with self._lock:
            if self._file.is_another(path, self.read):
                self.model = Model()
                self.read = 0
                self.files += 1
            while (size := file_size(path)) > self.read:
                if not self._fold(path):
                    break  # the beginning of a line: still being written, or truncated by a crash
                if time.monotonic() > until:
                    return self.read / size
                await asyncio.sleep(0)
            self.silence.look(self.read)
        return 1.0

    async def read_all(self) -> None:
        """Fold all events that there are now."""
        while await self.catch_up() < 1:
            pass

    def silent_s(self) -> float:
        """Return the seconds without a new event."""
        return self.silence.seconds(self.model.figures.ended_at)

    def _fold(self, path: Path) -> int:
        """Fold the next whole lines; return their number of bytes."""
        with path.open("rb") as file:
            file.seek(self.read)
            lines = file.read(SLICE)
            if not lines.endswith(b"\n") and b"\n" not in lines:
                lines += file.readline()
        *whole, _ = lines.split(b"\n")
        for line in whole:
            self.read += len(line) + 1  # first: a line that cannot be folded is not tried again
            self._fold_line(line)
        return sum(len(line) + 1 for line in whole)

    def _fold_line(self, line: bytes) -> None:
        """Fold one line.

        An event that the page does not understand becomes a warning: it must not hide all later
        events.
        """
        event = parse_event(line)
        if event is None:
            return
        if isinstance(event, kinds.Other) and event.kind in kinds.KINDS:
            self.model.warn(f"the page cannot show an event `{event.kind}`: it lacks a field")
        try:
            self.model.add(event)
        except Exception as error:
            text = f"the page cannot show an event `{event.kind}`: {type(error).__name__}: {error}"
            self.model.warn(text)

    async def log(self, rank: int, poll_s: float, at: int = -1) -> AsyncIterator[LogPiece]:
        """Yield a rank's log after byte `at`, or its end; then its new lines.

        The text is empty whenever there are no new lines.
        """
        path, file = self.folder / log_name(rank), SameFile()
        while True:
            await self.fetch(log_name(rank))
            if file.is_another(path, at):
                at = -1
            anew = at < 0
            text, at = read_from(path, at)
            yield LogPiece(text, at, anew)
            if not text:
                await asyncio.sleep(poll_s)

    async def fetch_logs(self, limit_s: float) -> int:
        """Fetch the logs of all ranks into the folder; return how many did not arrive in time."""
        tasks = [
            asyncio.ensure_future(self.fetch(log_name(rank), whole=True))
            for rank in self.model.ranks
        ]
        if not tasks:
            return 0
        done, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        return len(late) + sum(task.exception() is not None for task in done)

    def search(self, text: str) -> list[tuple[int, int, str]]:
        """Return (rank, line number, line) of the lines in all logs that contain this text.

        Case is ignored.
        """
        found: list[tuple[int, int, str]] = []
        paths = {int(path.stem[5:]): path for path in self.folder.glob("logs/rank-*.log")}
        for rank, path in sorted(paths.items()):
            found += matching(rank, path, text.casefold(), FOUND - len(found))
        return found


def log_name(rank: int, of: str = "log") -> str:
    """Return the name of a rank's log in the run folder.

    `of`: `stacks` for its stacks at the last hang, `nccl` for NCCL's log.
    """
    return f"logs/rank-{rank}.{of}"


def file_size(path: Path) -> int:
    """Return the size in bytes; 0 without the file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_from(path: Path, at: int) -> tuple[str, int]:
    """Return the whole lines of a log after byte `at`, and where they end.

    If `at` is below 0: those of its last TAIL bytes.
    """
    size = file_size(path)
    begin = max(0, size - TAIL) if at < 0 else at
    if size <= begin:
        return "", begin if at >= 0 or size else -1
    with path.open("rb") as file:
        file.seek(begin)
        block = file.read(max(TAIL, 1 << 16))
    end = block.rfind(b"\n") + 1 or len(block)
    begin_of_line = block.find(b"\n") + 1 if at < 0 and begin else 0
    return block[begin_of_line:end].decode(errors="replace"), begin + end


def matching(rank: int, path: Path, text: str, most: int) -> Iterator[tuple[int, int, str]]:
    """Yield the lines of one log that contain a text, at most `most`."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if most <= 0:
                return
            if text in line.casefold():
                most -= 1
                yield rank, number, line.rstrip()[:500]


class Shown(NamedTuple):
    """What a page has of a curve."""

    curve: Curve
    cuts: int
    read: int
    """Points that were sent or thinned away."""
    points: int
    """Points that the page holds."""


@dataclass
class Viewer:
    """What was sent to one open page."""

    run: FollowedRun
    sent: dict[str, str] = field(default_factory=dict)
    points: dict[str, Shown] = field(default_factory=dict)
    """By the name of a curve."""
    note_fetched: float = -math.inf
    """When the note was last fetched, in the seconds of time.monotonic."""

    def news(self, share: float) -> Iterator[tuple[str, str]]:
        """Yield (name, JSON) of each section that has changed.

        Of curves it yields only what was added, if nothing was replaced.
        """
        for name, section in {
            **self.run.model.sections(),
            "read": {"share": round(share, 3)},
        }.items():
            text = json.dumps(section, separators=(",", ":"))
            if self.sent.get(name) != text:
                self.sent[name] = text
                yield name, text
        if curves := {
            name: piece
            for name, curve in self.run.model.curves.items()
            if (piece := self._new(name, curve))
        }:
            yield "curves", json.dumps(curves, separators=(",", ":"))

    def _new(self, name: str, curve: Curve) -> tuple[bool, Piece] | None:
        """Return (whether it replaces everything before, the points); None without new points."""
        known, count = self.points.get(name), len(curve.steps)
        added = count - known.read if known else 0
        if (
            known is None
            or known.curve is not curve
            or known.cuts != curve.cuts
            or known.points + added > MAX_SHOWN
        ):
            piece = curve.piece()
            self.points[name] = Shown(curve, curve.cuts, count, len(piece.steps))
            return True, piece
        self.points[name] = Shown(curve, curve.cuts, count, known.points + added)
        return (False, curve.since(known.read)) if added else None
