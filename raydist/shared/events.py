"""The events of a run: one append-only file of JSON lines, and readers that get each event live.
(either side)

Every event has `t` (seconds since the epoch, on the driver's clock) and `kind`; its other fields
depend on the kind. `pace` and `nodes` are said each some 10 s, in a large run less often:

    run        name, dir, target, pages         the run began; `pages`: failure pages that earlier
                                                runs left
    cluster    address, nodes, started          connected to Ray; `started`: raydist started it
    wait       text                             waiting for nodes, and for which
    plan       backend, world_size, slots       for each rank: rank, host, ip, local_rank, gpus
    avoid      node, avoided, text              a node with incidents was left out, or there was no
                                                room to do so
    phase      name, s                          a phase of the launch ended: connect, place, actors,
                                                warm-up, …
    warning    text, [rank]                     a warning
    track      text                             a tracker has the run: its name, and where a person
                                                finds it
    joined     rank, pid, [network]             the rank joined the process group
    begin      rank, [steps, epochs, samples, resumed]
                                                a training loop began; `resumed`: the step it
                                                continues from
    report     rank, [step], values, [kept]     what a job reported; see `Events` for what is in the
                                                file. `kept`: the newest step that a snapshot has
    recalled   rank, step, values               what rank 0 had reported when its state was saved
    spent      rank, what, s                    an evaluation or a save took `s` seconds
    saved      rank, step, path, s              a checkpoint is complete on disk
    raised     rank, type, message, traceback, step
                                                the job raised an exception
    done       rank, [spent, samples]           the job's function returned; spent: {step, evaluate,
                                                save: seconds}; step and samples are without the
                                                first step, a part of the launch
    ended      rank, code, signal, step         the rank's process ended
    hang       text, ranks, certain, s          ranks are silent for `s` seconds, and which ranks
                                                they wait for
    slow       text, ranks                      slow ranks: rank, host, own_s, others_s, step_s,
                                                share
    pace       ranks                            of each rank: [newest step, seconds of its own work
                                                per step, per step]
    nodes      nodes                            of each host: cpu, memory, gpus, ports
                                                (messages.agent.NodeLoad)
    work       ranks                            at the end, of each rank: [seconds of its own work
                                                per step, per step]
    network    text, nodes                      what carried a run of several nodes: port counters,
                                                NCCL's log
    notice     text, ranks, hosts, s            nodes will be taken away in `s` seconds
    stop       reason                           the other ranks are being ended
    failure    cause, text, reason, reached, others, ended, attempt
                                                all ranks ended because this rank ended
    restart    number, most, rank, host, how, step, text
                                                the next attempt begins, because of this failure;
                                                `number`: failures so far, here and in `restarted`
    placed     number, moved, [slots]           every rank has a slot for it; `moved`: the ranks
                                                that changed theirs
    restarted  number, step, s, repeated        its first step is done, `s` after the failure;
                                                `repeated`: steps lost
    result     status, …                        the last line of the file
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
from typing import Any

from raydist.shared.errors import Stopped

RANK_0 = (64 << 20, 300.0)
"""Bytes of rank 0's reports that go to the disk in any case, and bytes per second after these: 26
MB a day. Of one step in 0.1 s all are there for nine hours, of one step in a second for good."""
OTHERS = (1 << 20, 50.0)
"""The same for the reports of all other ranks together, which only live readers need."""

Event = dict[str, Any]
Reader = Callable[[Event], None]
OWED_MOST = 1 << 24
"""Bytes of events that are kept while the disk is full. Later events go to the readers only."""


def event(kind: str, **facts: Any) -> Event:
    """An event with the current time."""
    return {"t": time.time(), "kind": kind, **facts}


@dataclass
class Budget:
    """Bytes that may be written: `left` at once, and `rate` more per second, up to `left` again."""

    left: float
    rate: float
    most: float = field(init=False)
    at: float | None = None

    def __post_init__(self) -> None:
        self.most = self.left

    def take(self, size: int, now: float) -> bool:
        """Take this many bytes; whether there were as many. `now`: seconds on a clock that never
        goes back."""
        if self.at is not None:
            self.left = min(self.most, self.left + (now - self.at) * self.rate)
        self.at = now
        if size > self.left:
            return False
        self.left -= size
        return True


class Events(AbstractContextManager["Events"]):
    """The event stream of one run: each event is appended to a file, then given to the readers.

    Readers get every event. The file of a run of weeks has a limit for reports, by RANK_0 and
    OTHERS: the newest report of rank 0 is always in it before any other event. A reader cannot
    break a run: what it raises is one warning event that names the reader, and it gets the next
    events all the same.
    """

    def __init__(self, path: Path, readers: tuple[Reader, ...] = (), whole: bool = False) -> None:
        """`whole`: all reports of rank 0 go to the file, for a reader of the file that needs
        each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        # A crash or a full disk cut the last line of an earlier run off: without this the first new
        # line would be lost.
        self._owed = bytearray(b"" if ends_with_newline(path) else b"\n")
        self._full = False
        self._budgets = (Budget(*((math.inf, 0.0) if whole else RANK_0)), Budget(*OTHERS))
        self._left_out = b""
        """The newest report of rank 0, if it is not in the file."""
        self._readers = readers
        self._failed = set[str]()
        """The names of the readers that have raised."""
        self._lock = threading.RLock()
        """Monitors add events from threads of their own; a reader that fails adds one while it is
        called."""

    def add(self, new: Event) -> None:
        """Append one event. When this returns the kernel has the line, so it survives a SIGKILL of
        the driver.

        A full disk does not end the run: up to `OWED_MOST` bytes of lines are kept in memory until
        they can be written.
        """
        line = json.dumps(new, default=str)
        with self._lock:
            self._write(self._for_disk(new, line.encode() + b"\n"))
            self._tell(
                json.loads(line)
            )  # readers see the same live as in the file: no tuples, keys are text

    def _for_disk(self, new: Event, line: bytes) -> bytes:
        """What is appended to the file for this event."""
        if new["kind"] == "report":
            first = new.get("rank") == 0
            fits = self._budgets[not first].take(len(line), time.monotonic())
            if first:
                self._left_out = b"" if fits else line
            return line if fits else b""
        left_out, self._left_out = self._left_out, b""
        return left_out + line

    def _write(self, line: bytes) -> None:
        if len(self._owed) < OWED_MOST:
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
                self.say("warning", text=text)

    def all(self, kind: str = "") -> Iterator[Event]:
        """All events in the file, and those that are still to be written; `kind`: only these."""
        return read_events(self.path, bytes(self._owed), kind)

    def show(self, rank: int, output: bytes) -> None:
        """Give a rank's output to the readers only: the rank's log has it already."""
        if output:
            with self._lock:
                self._tell(event("output", rank=rank, output=output))

    def _tell(self, new: Event) -> None:
        for reader in self._readers:
            try:
                reader(new)
            except Stopped:
                raise  # a signal arrived while the reader ran: the driver handles it
            except Exception as error:
                self._report_failure(reader, new["kind"], error)

    def _report_failure(self, reader: Reader, kind: str, error: Exception) -> None:
        name = getattr(reader, "__qualname__", type(reader).__name__)
        if (
            name not in self._failed
        ):  # also ends the recursion: the reader may fail on the warning too
            self._failed.add(name)
            text = (
                f"{name} could not read an event `{kind}`, and left it out: "
                f"{type(error).__name__}: {error}"
            )
            self.say("warning", text=text)

    def say(self, kind: str, **facts: Any) -> None:
        """Append an event with the current time."""
        self.add(event(kind, **facts))

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_events(path: Path, owed: bytes = b"", kind: str = "") -> Iterator[Event]:
    """The events of a file and of the bytes still to be written to it. A line that a crash cut off
    is left out.

    `kind`: only events of this kind; other lines are not parsed.
    """
    wanted = f'"kind": "{kind}"'.encode() if kind else b""
    for line in whole_lines(path, owed):
        found = parse_event(line) if wanted in line else None
        if found is not None and kind in ("", found["kind"]):
            yield found


def whole_lines(path: Path, owed: bytes) -> Iterator[bytes]:
    """The lines of a file with these bytes at its end, without a last line that has no end yet."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line
            else:
                owed = line + owed
    *whole, _ = owed.split(b"\n")
    yield from whole


def parse_event(line: bytes) -> Event | None:
    """The event in a line of events.jsonl; None if a crash or a full disk cut the line off."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"t", "kind"} <= found.keys() else None


def ends_with_newline(path: Path) -> bool:
    """Whether a file ends with a newline; an empty one does."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
