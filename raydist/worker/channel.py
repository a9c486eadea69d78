"""A rank's channel to its agent: a socket for events, and a heartbeat page. (rank side)

The heartbeat page outlives the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raydist.messages.rank import (
    Activity,
    AttachDebugger,
    DetachDebugger,
    DoAfter,
    EditorPrepared,
    GoOn,
    HoldForAction,
    Holding,
    HoldRank,
    HoldTimeouts,
    LetGoTimeouts,
    Meet,
    ParkRank,
    ParkReply,
    PrepareEditor,
    PrepareProfile,
    ProfileNow,
    ProfilePrepared,
    RankReply,
    ReleaseFromAction,
    ReleaseRank,
    StopAfter,
    TellActivity,
    TellDebugger,
    TimeoutsHeld,
)
from raydist.messages.wire import Message, decode, encode
from raydist.shared import kinds
from raydist.shared.events import line_of
from raydist.shared.kinds import Event
from raydist.worker import context, stacks
from raydist.worker.agreed import Action
from raydist.worker.heartbeat import (
    BEAT_PAGE,
    PHASES,
    read_beat,
    write_beat,
    write_compute_time,
    write_pauses,
)
from raydist.worker.timeouts import GroupTimeouts

if TYPE_CHECKING:
    from raydist.worker.debugger import Debugger
    from raydist.worker.profiling import RankProfiler

FLUSH_S = 0.1
"""Maximum time that a report waits in the rank before it is sent."""
STALL_S = 2.0
"""Maximum wait for an agent that reads nothing, such as a stopped one; after that the rank does not
wait until the agent reads again."""
QUEUED = 50_000
"""Maximum number of events that wait for such an agent; the oldest are dropped first."""
DEBUGGED = PHASES.index("debugger")
AT_ONCE = 1000
"""Maximum number of events in one piece."""


class Channel:
    """The rank's end of the socket.

    A thread sends the queued reports; other events are sent at once.
    """

    def __init__(self, sock: socket.socket, beat_fd: int) -> None:
        self._sock = sock
        self._page = mmap.mmap(beat_fd, BEAT_PAGE)
        self._queue: deque[Event | bytes] = deque(maxlen=QUEUED)
        self._unsent = b""
        """The unsent rest of the last piece."""
        self._stalled = False
        self._send_lock = threading.Lock()
        self._sender = 0
        """The thread that holds the lock: a signal handler may interrupt it, and then finds the
        lock taken."""
        self._open = True
        self._reported_gap = ""
        self.debugger: Debugger | None = None
        """The debugger of this rank, if it has one."""
        self.profiler: RankProfiler | None = None
        """Makes profiles of this rank, if it uses torch."""
        self.timeouts = GroupTimeouts()
        threading.Thread(target=self._serve, name="raydist-channel", daemon=True).start()
        # A forked DataLoader worker does not have this thread, and may inherit a held lock, so it
        # sends nothing.
        os.register_at_fork(after_in_child=self.shut)

    def emit(self, event: Event) -> None:
        """Send an event; a report is only queued, which takes a microsecond and never blocks."""
        self._queue.append(event)
        if not isinstance(event, kinds.Report) and self._open:
            self.flush()

    def beat(self, step: int, phase: int) -> None:
        """Write the heartbeat, with the time, to memory that the agent reads.

        `phase`: an index in PHASES.
        """
        # An editor's session is on while the rank goes on, and may stop it at any line.
        if read_beat(self._page)[1] == PHASES[DEBUGGED]:
            phase = DEBUGGED
        write_beat(self._page, step, phase, time.time())

    def note_compute_time(self, steps: int, compute_s: float, step_s: float) -> None:
        """Write the compute time and the whole time of one step next to the heartbeat.

        `steps`: steps timed so far.
        """
        write_compute_time(self._page, steps, compute_s, step_s)

    def note_pauses(self, share: float) -> None:
        """Write the fraction of time in garbage collector pauses next to the heartbeat."""
        write_pauses(self._page, share)

    def flush(self) -> None:
        """Send the queued events.

        It does not wait for long: the training must not depend on the agent.
        """
        # In a signal handler of a thread that is sending: that thread sends these events too.
        if self._sender == threading.get_ident():
            return
        with self._send_lock:
            self._sender = threading.get_ident()
            try:
                while (self._unsent or self._queue) and self._send_some():
                    pass
            finally:
                self._sender = 0

    def _send_some(self) -> bool:
        """Send a piece of the queued events; return False if the agent reads nothing."""
        if not self._unsent:
            some = [self._queue.popleft() for _ in range(min(len(self._queue), AT_ONCE))]
            lines = (each if isinstance(each, bytes) else line_of(each) for each in some)
            self._unsent = b"".join(line + b"\n" for line in lines)
        until = time.monotonic() + (0.0 if self._stalled else STALL_S)
        while self._unsent:
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent, socket.MSG_DONTWAIT) :]
                self._stalled = False
            except BlockingIOError:
                if (left := until - time.monotonic()) <= 0:
                    self._stalled = True
                    return False
                select.select([], [self._sock], [], left)
            except OSError:  # the agent is gone, and the fork server is about to end this rank
                self._unsent = b""
        return True

    def reply(self, message: RankReply) -> None:
        """Send a message, after all queued events."""
        self._queue.append(encode(message))
        self.flush()

    def shut(self) -> None:
        """Stop sending."""
        self._open = False
        self._queue = deque(maxlen=0)

    def _serve(self) -> None:
        """Send queued events every FLUSH_S, and handle the messages of the agent, one per line."""
        readable, rest = [self._sock], b""
        while self._open:
            if select.select(readable, [], [], FLUSH_S)[0]:
                data = self._sock.recv(4096)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._handle_line(line)
                if not data:
                    readable = []  # the agent is gone
            if self._queue or self._unsent:
                self.flush()

    def _handle_line(self, line: bytes) -> None:
        # Without this thread the rank would wait in vain for messages such as Meet and GoOn.
        try:
            self._handle(decode(line))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            text = f"rank {context.rank().rank} could not handle a message of its agent: {why}"
            self.emit(kinds.Warning(text=text))

    def _handle(self, message: Message) -> None:
        current = context.current()
        match message:
            case TellActivity():
                self._tell_activity()
            case HoldRank():
                self.reply(Holding(*current.stop_request.hold_in_fit()))
            case StopAfter(step, fit):
                current.stop_request.stop_after(step, fit)
            case ReleaseRank():
                current.stop_request.release()
            case HoldForAction():
                self.reply(Holding(*current.actions.hold_in_fit()))
            case DoAfter(step, what, values, fit):
                current.actions.agree(Action(step, what, values, fit))
            case ReleaseFromAction():
                current.actions.release()
            case PrepareProfile(name, memory) if self.profiler is not None:
                self.profiler.prepare(name, memory, lambda why: self.reply(ProfilePrepared(why)))
            case PrepareProfile():
                self.reply(ProfilePrepared("the rank has not imported torch"))
            case ProfileNow(seconds) if self.profiler is not None:
                self.profiler.begin_now(seconds)
            case HoldTimeouts(reason):
                self.reply(TimeoutsHeld(self.timeouts.hold(reason)))
            case LetGoTimeouts(reason):
                self.timeouts.let_go(reason)
            case PrepareEditor() if self.debugger is not None:
                self.debugger.prepare_editor(lambda why: self.reply(EditorPrepared(why)))
            case AttachDebugger() | TellDebugger() | DetachDebugger() if self.debugger is not None:
                self._debug(self.debugger, message)
            case Meet() | ParkRank() | GoOn() if current.in_place is not None:
                if isinstance(message, GoOn):  # the rank that was held has ended
                    self.timeouts.put_back()
                current.in_place.take(message)
            case ParkRank():
                self.reply(ParkReply("it cannot be connected anew"))

    def _debug(
        self, debugger: Debugger, message: AttachDebugger | TellDebugger | DetachDebugger
    ) -> None:
        match message:
            case AttachDebugger(after, by_editor):
                debugger.attach(after, by_editor)
            case TellDebugger(line):
                debugger.take(line)
            case DetachDebugger():
                debugger.detach()

    @contextlib.contextmanager
    def hold_beat(self) -> Iterator[None]:
        """Write the heartbeat of a rank in the debugger, and the one before it afterwards.

        A rank without a heartbeat, such as that of a script, has none afterwards either.
        """
        step, phase, at = read_beat(self._page)
        write_beat(self._page, step, DEBUGGED, time.time())
        try:
            yield
        finally:
            step, _, _ = read_beat(self._page)
            index = PHASES.index(phase) if at else 0
            write_beat(self._page, step, index, time.time() if at else 0.0)

    def _tell_activity(self) -> None:
        """Reply with the stacks and the last collectives.

        If torch records none, rank 0 warns once for all ranks.
        """
        stack = stacks.of_all_threads()
        try:
            in_place = context.current().in_place
            # Those of an earlier attempt have other numbers.
            entries, gap = stacks.collectives(in_place.met_ns if in_place is not None else 0)
        # Another torch has other private functions; this thread must continue.
        except Exception as error:
            entries = []
            gap = f"torch's flight recorder could not be read ({type(error).__name__}: {error})"
        self.reply(Activity(stack, entries))
        if gap and not self._reported_gap and context.rank().rank == 0:
            self.emit(kinds.Warning(text=gap))
        self._reported_gap = gap
