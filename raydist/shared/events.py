"""The events of a run: an append-only file of JSON lines, and live readers. (either side)

shared/kinds.py has the class of each kind of event.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from raydist.shared import kinds
from raydist.shared.errors import Stopped
from raydist.shared.kinds import Event

RANK_0 = (64 << 20, 300.0)
"""Bytes of rank 0's reports that are always written, and bytes per second after these.

The rate is 26 MB a day. With a step every 0.1 s, all reports of the first nine hours are written;
with a step every second, all of them.
"""
OTHERS = (1 << 20, 50.0)
"""The same limits for the reports of all other ranks together, which only live readers need."""

E = TypeVar("E", bound=Event)
Reader = Callable[[Event], None]
MAX_OWED = 1 << 24
"""Bytes of events that are kept in memory while the disk is full. Later ones reach only readers."""


@dataclass
class Budget:
    """Bytes that may be written: `left` now, plus `rate` per second up to the initial amount."""

    left: float
    rate: float
    most: float = field(init=False)
    at: float | None = None

    def __post_init__(self) -> None:
        self.most = self.left

    def take(self, size: int, now: float) -> bool:
        """Take this many bytes; report whether enough were left.

        `now`: seconds on a monotonic clock.
        """
        if self.at is not None:
            self.left = min(self.most, self.left + (now - self.at) * self.rate)
        self.at = now
        if size > self.left:
            return False
        self.left -= size
        return True


def line_of(event: Event) -> bytes:
    """Return an event as JSON; if it has none, such as a dict with tuples as keys, a warning.

    In a rank, an exception would end the thread that sends, and the rank would be taken for stuck;
    in the driver it would end the run.
    """
    try:
        return json.dumps(event.to_json(), default=str).encode()
    except Exception as error:
        rank = event.rank if isinstance(event, kinds.OfRank) else None
        text = f"an event of the kind {event.kind} was not sent: {error}"
        return json.dumps(kinds.Warning(rank=rank, text=text).to_json()).encode()


class Events(AbstractContextManager["Events"]):
    """The event stream of one run: each event is appended to a file, then given to the readers.

    Readers get every event. RANK_0 and OTHERS limit the reports in the file, because a run may last
    weeks; the newest report of rank 0 is always written before any other event. A reader cannot
    break a run: its exception becomes one warning event that names the reader, and it still gets
    the next events.
    """

    def __init__(self, path: Path, readers: tuple[Reader, ...] = (), whole: bool = False) -> None:
        """Open the file.

        `whole`: write all reports of rank 0 to the file, for a reader of the file that needs each
        of them.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        # A crash or a full disk may have cut off the last line of an earlier run: without this
        # newline the first new line would be lost.
        self._owed = bytearray(b"" if ends_with_newline(path) else b"\n")
        self._full = False
        self._budgets = (Budget(*((math.inf, 0.0) if whole else RANK_0)), Budget(*OTHERS))
        self._left_out = b""
        """The newest report of rank 0, if it is not in the file."""
        self._readers = readers
        self._failed = set[str]()
        """The names of the readers that have raised."""
        self._lock = threading.RLock()
        """Monitors add events from their own threads; a failing reader adds one in its call."""

    def add_reader(self, reader: Reader) -> None:
        """Give all further events to this reader, too."""
        with self._lock:
            self._readers = (*self._readers, reader)

    def add(self, new: Event) -> None:
        """Append one event. When this returns, the kernel has the line.

        The line thus survives a SIGKILL of the driver. A full disk does not end the run: up to
        `MAX_OWED` bytes of lines are kept in memory until they can be written.
        """
        line = line_of(new)
        # Readers see the same live as in the file: no tuples, and keys are text.
        seen = kinds.from_json(json.loads(line))
        with self._lock:
            self._write(self._for_disk(seen, line + b"\n"))
            self._tell(seen)

    def _for_disk(self, new: Event, line: bytes) -> bytes:
        """Return what is appended to the file for this event."""
        if isinstance(new, kinds.Report):
            first = new.rank == 0
            fits = self._budgets[not first].take(len(line), time.monotonic())
            if first:
                self._left_out = b"" if fits else line
            return line if fits else b""
        left_out, self._left_out = self._left_out, b""
        return left_out + line

    def _write(self, line: bytes) -> None:
        if len(self._owed) < MAX_OWED:
            self._owed += line
        try:
            while self._owed:
                del self._owed[: self._file.write(self._owed) or 0]
        except OSError as error:
            if not self._full:
                self._full = True
                text = (
                    f"{self.path.parent} cannot be written ({error.strerror}): the run "
                    "continues without it"
                )
                self.warn(text)

    def all(self, kind: type[E]) -> Iterator[E]:
        """Return the events of a kind in the file and of those still to be written."""
        return read_kind(kind, self.path, bytes(self._owed))

    def show(self, rank: int, output: bytes) -> None:
        """Give a rank's output to the readers only: the rank's log has it already."""
        if output:
            with self._lock:
                self._tell(kinds.Output(rank=rank, output=output))

    def _tell(self, new: Event) -> None:
        for reader in self._readers:
            try:
                reader(new)
            except Stopped:
                raise  # a signal arrived while the reader ran: the driver handles it
            except Exception as error:
                self._report_failure(reader, new.kind, error)

    def _report_failure(self, reader: Reader, kind: str, error: Exception) -> None:
        name = getattr(reader, "__qualname__", type(reader).__name__)
        # This check also ends the recursion: the reader may fail on the warning too.
        if name not in self._failed:
            self._failed.add(name)
            text = (
                f"{name} could not read an event `{kind}`, and left it out: "
                f"{type(error).__name__}: {error}"
            )
            self.warn(text)

    def warn(self, text: str) -> None:
        """Append a warning of the driver."""
        self.add(kinds.Warning(text=text))

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file. A line that a crash cut off is skipped."""
    return filter(None, map(parse_event, whole_lines(path)))


def read_kind(kind: type[E], path: Path, owed: bytes = b"") -> Iterator[E]:
    """Yield the events of a kind in a file and in the bytes still to be written to it.

    Lines of other kinds are not parsed.
    """
    wanted = f'"kind": "{kind.kind}"'.encode()
    for line in whole_lines(path, owed):
        found = parse_event(line) if wanted in line else None
        if isinstance(found, kind):
            yield found


def whole_lines(path: Path, owed: bytes = b"") -> Iterator[bytes]:
    """Yield the lines of a file followed by these bytes, without an unfinished last line."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line
            else:
                owed = line + owed
    *whole, _ = owed.split(b"\n")
    yield from whole


def parse_event(line: bytes) -> Event | None:
    """Return the event in a line of events.jsonl; None if a crash or a full disk truncated it."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(found, dict) and {"t", "kind"} <= found.keys()
    return kinds.from_json(found) if whole else None


def ends_with_newline(path: Path) -> bool:
    """Report whether a file ends with a newline; an empty file does."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
