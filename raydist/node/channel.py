"""From a rank to its seat: events over a socket, and a heartbeat page that outlives the process. (rank side)"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import threading
import time
from collections import deque

from raydist import context
from raydist.events import Event, event
from raydist.node import insight
from raydist.node.wire import ASK, BEAT, BEAT_PAGE, GOING, OWN

FLUSH_S = 0.1
"""Seconds a report may wait in the rank before it travels."""


class Channel:
    """The rank's end of the socket. Reports are gathered and sent by a thread; everything else is sent at once."""

    def __init__(self, sock: socket.socket, beat_fd: int) -> None:
        self._sock = sock
        self._page = mmap.mmap(beat_fd, BEAT_PAGE)
        self._waiting: deque[Event] = deque()
        self._sending = threading.Lock()
        self._open = True
        threading.Thread(target=self._serve, name="raydist-channel", daemon=True).start()
        # A forked DataLoader worker has no flush thread, and may inherit a taken lock: it keeps silent.
        os.register_at_fork(after_in_child=self.shut)

    def emit(self, happened: Event) -> None:
        """Send an event; a report only joins the queue, which costs a microsecond and never blocks."""
        self._waiting.append(happened)
        if happened["kind"] != "report" and self._open:
            self.flush()

    def beat(self, step: int, phase: int) -> None:
        """Write the heartbeat: two numbers and the time, into memory that the seat can read."""
        BEAT.pack_into(self._page, 0, step, phase, time.time())

    def own(self, steps: int, work: float, whole: float) -> None:
        """Write, beside the heartbeat, how much of a step is this rank's own work; both in seconds."""
        OWN.pack_into(self._page, BEAT.size, steps, work, whole)

    def flush(self) -> None:
        """Send all that waits."""
        with self._sending:
            lines = []
            while self._waiting:
                lines.append(json.dumps(self._waiting.popleft(), default=str))
            if lines:
                # The seat is gone: the fork server is about to end this rank, there is nobody to tell.
                with contextlib.suppress(OSError):
                    self._sock.sendall(("\n".join(lines) + "\n").encode())

    def shut(self) -> None:
        """Send nothing more."""
        self._open = False
        self._waiting = deque(maxlen=0)

    def _serve(self) -> None:
        """Send what waits, often, and hear what the seat says, a line for each word."""
        asked, heard = [self._sock], b""
        while self._open:
            if select.select(asked, [], [], FLUSH_S)[0]:
                said = self._sock.recv(64)
                *words, heard = (heard + said).split(b"\n")
                for word in words:
                    self._hear(word)
                if not said:
                    asked = []  # the seat is gone
            if self._waiting:
                self.flush()

    def _hear(self, word: bytes) -> None:
        """It asks what this rank last did, or says that its node goes, or when to leave for others to come."""
        here = context.here()
        if word == ASK:
            self.emit(event("collectives", entries=insight.collectives()))
        elif word == GOING:
            here.going = True
        else:
            here.leave.hear(word.decode())
