"""Follows a run folder while somebody looks: folds new events, gives what a viewer has not seen
yet. (driver)"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from raydist.reporting.curves import SHOWN, Curve, Piece
from raydist.shared.events import parse_event
from raydist.watch.web.model import Model

SLICE = 1 << 19
"""Bytes of events that are folded before other work gets its turn: some 30 ms."""
TURN_S = 0.3
"""Seconds of folding after which viewers are told how far it is."""
TAIL = 1 << 17
"""Bytes at the end of a log that a viewer gets before its new lines."""
MOST_SHOWN = 4 * SHOWN
"""Most points of a curve in a page: beyond, it gets the curve again, thinned."""
HEAD = 256
"""Bytes at the beginning of a file that tell it from a later file of the same name."""
LOOKED_S = 30.0
"""If nobody has looked for longer than this, it is not known when in that time something new
came."""
FOUND = 300
"""Most lines that a search gives."""
SHARED = re.compile(r"blame-\d+\.txt|logs/rank-\d+\.(log|nccl|stacks)")
"""The files of a run folder that a page may read beside its events."""


class Fetch(Protocol):
    """Brings a file into the run folder before it is read: its beginning, or the whole of it as it
    is now."""

    async def __call__(self, name: str, whole: bool = False) -> None: ...


async def is_here(name: str, whole: bool = False) -> None:
    """For a run folder of this machine."""


@dataclass
class SameFile:
    """Tells whether a name still stands for the file that was read so far: a run folder may be made
    anew."""

    _inode: int = 0
    """0: no file was seen so far."""
    _head: bytes = b""

    def is_another(self, path: Path, read: int) -> bool:
        """Whether it is another file than at the last call, or has fewer bytes than were read.

        The number of an inode is soon used again, so the first bytes are compared too: an event has
        its time there.
        """
        try:
            with path.open("rb") as file:
                status, head = os.fstat(file.fileno()), file.read(HEAD)
        except OSError:  # it may come again
            return False
        differs = self._inode and (status.st_ino != self._inode or not head.startswith(self._head))
        self._inode, self._head = status.st_ino, head
        return bool(differs) or status.st_size < read


@dataclass
class Silence:
    """How long nothing new has come, by this machine's clock if somebody has looked meanwhile.

    The clock of the driver, which dates the events, may be wrong.
    """

    _read: int = 0
    _looked: float | None = None
    _came: float | None = None
    """When the newest event came; None if nobody looked then."""

    def look(self, read: int) -> None:
        """Note that so many bytes of events were read."""
        now = time.monotonic()
        if read != self._read:
            self._came = now if self._looked is not None and now - self._looked < LOOKED_S else None
        self._read, self._looked = read, now

    def seconds(self, last: float) -> float:
        """The seconds. `last`: the time of the newest event."""
        return max(0.0, time.time() - last) if self._came is None else time.monotonic() - self._came


class LogPiece(NamedTuple):
    """What a viewer of a log has not seen yet."""

    text: str
    at: int
    """Where it ends, in bytes."""
    anew: bool
    """It does not continue what was sent before: it is the end of the log."""


@dataclass
class FollowedRun:
    """One run folder, and the fold of its events so far."""

    folder: Path
    fetch: Fetch = is_here
    model: Model = field(default_factory=Model)
    read: int = 0
    """Bytes of events.jsonl that were folded."""
    files: int = 1
    """Files of that name so far: one more each time that the folder was made anew."""
    silence: Silence = field(default_factory=Silence)
    _file: SameFile = field(default_factory=SameFile)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def catch_up(self, turn_s: float = TURN_S) -> float:
        """Fold new events, for at most so many seconds; the share of the file that is folded."""
        await self.fetch("events.jsonl")
        path, until = self.folder / "events.jsonl", time.monotonic() + turn_s
        async with self._lock:
            if self._file.is_another(path, self.read):
                self.model, self.read, self.files = Model(), 0, self.files + 1
            while (size := file_size(path)) > self.read:
                if not self._fold(path):
                    break  # the beginning of a line: still being written, or cut off by a crash
                if time.monotonic() > until:
                    return self.read / size
                await asyncio.sleep(0)
            self.silence.look(self.read)
        return 1.0

    def silent_s(self) -> float:
        """Seconds without a new event."""
        return self.silence.seconds(self.model.figures.ended)

    def _fold(self, path: Path) -> int:
        """Fold the next whole lines; their bytes."""
        with path.open("rb") as file:
            file.seek(self.read)
            lines = file.read(SLICE)
            if not lines.endswith(b"\n") and b"\n" not in lines:
                lines += file.readline()
        *whole, _ = lines.split(b"\n")
        for line in whole:
            self.read += len(line) + 1  # first: a line that cannot be folded is not folded again
            self._fold_line(line)
        return sum(len(line) + 1 for line in whole)

    def _fold_line(self, line: bytes) -> None:
        """Fold one line. An event that the page does not understand is a warning: it must not hide
        all later ones."""
        event = parse_event(line)
        if event is None:
            return
        try:
            self.model.add(event)
        except Exception as error:
            text = (
                f"the page cannot show an event `{event['kind']}`: {type(error).__name__}: {error}"
            )
            self.model.warn(text)

    async def log(self, rank: int, poll_s: float, at: int = -1) -> AsyncIterator[LogPiece]:
        """A rank's log after byte `at`, else its end; then its new lines; an empty text each time
        there are none."""
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
        """Bring the logs of all ranks into the folder; the number of those that did not come in so
        many seconds."""
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
        """(rank, number of the line, line) of the lines in all logs that contain this text, in any
        case."""
        found: list[tuple[int, int, str]] = []
        paths = {int(path.stem[5:]): path for path in self.folder.glob("logs/rank-*.log")}
        for rank, path in sorted(paths.items()):
            found += matching(rank, path, text.casefold(), FOUND - len(found))
        return found


def log_name(rank: int, of: str = "log") -> str:
    """A rank's log in the run folder. `of`: `stacks` for its stacks at the last hang, `nccl` for
    NCCL's log."""
    return f"logs/rank-{rank}.{of}"


def file_size(path: Path) -> int:
    """In bytes; 0 without the file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_from(path: Path, at: int) -> tuple[str, int]:
    """The whole lines of a log after byte `at`, and where they end; below 0: of its last TAIL
    bytes."""
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
    """The lines of one log that contain a text, at most so many."""
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
    """Points that it holds."""


@dataclass
class Viewer:
    """What one open page has been sent."""

    run: FollowedRun
    sent: dict[str, str] = field(default_factory=dict)
    points: dict[str, Shown] = field(default_factory=dict)
    """By the name of a curve."""

    def news(self, share: float) -> Iterator[tuple[str, str]]:
        """(name, JSON) of each section that has changed; of curves only what was added, where
        nothing was replaced."""
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
        """(whether it takes the place of all before, the points); None without new ones."""
        known, count = self.points.get(name), len(curve.steps)
        added = count - known.read if known else 0
        if (
            known is None
            or known.curve is not curve
            or known.cuts != curve.cuts
            or known.points + added > MOST_SHOWN
        ):
            piece = curve.piece()
            self.points[name] = Shown(curve, curve.cuts, count, len(piece.steps))
            return True, piece
        self.points[name] = Shown(curve, curve.cuts, count, known.points + added)
        return (False, curve.since(known.read)) if added else None
