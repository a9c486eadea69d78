"""What happened, as data: one append-only file of JSON lines per run, and its live readers. (either side)

Every event has `t` (seconds since the epoch, at its origin) and `kind`; the rest depends on the kind:

    run        name, dir, target, pages          the run began; `pages`: of failures, there already from runs before
    cluster    address, nodes, started           Ray is there; `started`: raydist brought it up itself
    wait       text                              nodes are awaited, and for what
    plan       backend, world_size, seats        who sits where: rank, host, ip, local_rank, gpus
    avoid      node, avoided, text               a node with a bad record: left out, or there was no room
    phase      name, s                           a part of the launch budget is over: connect, place, actors, warm-up, …
    warning    text, [rank]                      something that a person should know
    joined     rank, pid, [network]              the rank is in the process group
    begin      rank, [steps, epochs, samples, resumed]   a loop begins; `resumed`: the step that it goes on from
    report     rank, [step], values              what a job reported; of ranks other than 0 only the newest per batch
    spent      rank, what, s                     seconds of an evaluation or a save are over
    saved      rank, step, path, s               a checkpoint is complete on disk
    raised     rank, type, message, traceback, step      an exception reached the top of the job
    done       rank, [spent]                     the job's function returned; spent: {step, evaluate, save: seconds}
    ended      rank, code, signal, step          the process of the rank is gone
    hang       text, ranks, certain, s           ranks are silent for `s` seconds, and who holds them up
    slow       text, ranks                       who holds up the others: rank, host, own_s, others_s, step_s, share
    work       ranks                             of each rank: [seconds of own work in a step, of the step]; at the end
    network    text, nodes                       what carried a run of several nodes: the ports, NCCL's own word
    notice     text, ranks, hosts, s             nodes are about to be taken away, in so many seconds
    stop       reason                            the others are being ended
    failure    cause, text, reason, reached, others, ended, attempt     all ranks have ended, because of this one's end
    restart    number, most, rank, host, how, step, text    another attempt begins, because of this failure
    placed     number, moved, [seats]            every rank has a place for it; `moved`: the ranks that got another one
    restarted  number, step, s, repeated         its first step is done, `s` after the failure; so many were done before
    result     status, …                         the last line of the file
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from raydist.errors import Stopped

Event = dict[str, Any]
Reader = Callable[[Event], None]
OWED_MOST = 1 << 24
"""Bytes of events that are kept while the disk is full; later ones are told, and written nowhere."""


def event(kind: str, **facts: Any) -> Event:
    """An event of now."""
    return {"t": time.time(), "kind": kind, **facts}


class Events(AbstractContextManager["Events"]):
    """The event stream of one run: appends to a file, then tells the readers.

    A reader that raises is dropped, and the stream says so: watching can't break a run.
    """

    def __init__(self, path: Path, readers: tuple[Reader, ...] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._owed = bytearray()
        self._full = False
        self._readers = list(readers)

    def add(self, happened: Event) -> None:
        """Append one event. The line is in the kernel when this returns, so it outlives a killed driver.

        A full disk does not end the run: the lines are kept here until there is room, `OWED_MOST` of them.
        """
        if len(self._owed) < OWED_MOST:
            self._owed += json.dumps(happened, default=str).encode() + b"\n"
        try:
            while self._owed:
                del self._owed[: self._file.write(self._owed) or 0]
        except OSError as error:
            if not self._full:
                self._full = True
                self.say(
                    "warning", text=f"{self.path.parent} takes no more ({error.strerror}): the run goes on without"
                )
        self._tell(happened)

    def all(self) -> Iterator[Event]:
        """Every event so far."""
        return read(self.path, bytes(self._owed))

    def show(self, rank: int, output: bytes) -> None:
        """What a rank has printed: for the readers only. It is in the rank's own log already."""
        if output:
            self._tell(event("output", rank=rank, output=output))

    def _tell(self, happened: Event) -> None:
        for reader in list(self._readers):
            try:
                reader(happened)
            except Stopped:
                raise  # a signal came while the reader was drawing: that is for the driver, not the reader's fault
            except Exception as error:
                self._readers.remove(reader)
                self.say("warning", text=f"a reader of events was dropped: {type(error).__name__}: {error}")

    def say(self, kind: str, **facts: Any) -> None:
        """Append an event of now."""
        self.add(event(kind, **facts))

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read(path: Path, owed: bytes = b"") -> Iterator[Event]:
    """The events of a file, and of what is still to be written to it. A last line that a crash cut off is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)
            else:
                owed = line + owed
    for line in owed.splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
