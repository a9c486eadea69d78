"""pdb in a rank, over its channel: breakpoint() waits for a person, who may enter. (rank side)

No other process traces the rank. To enter, the rank's own thread sends its main thread a signal,
whose handler begins the session; the agent and the driver pass lines on.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol

from raydist.messages.rank import DebuggerSays, HeldAt, RankReply, WentOn
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.worker import editor
from raydist.worker.editor import EditorSession
from raydist.worker.heartbeat import STACKS_SIGNAL
from raydist.worker.timeouts import collectives_begun

DEBUG_SIGNAL = STACKS_SIGNAL - 1
"""Has the main thread enter the debugger; the rank sends it to itself."""


RAYS = "ray.util."
"""The beginning of what Ray puts into PYTHONBREAKPOINT."""
LATER_S = 0.02
"""Seconds until the next attempt to enter."""
BEHIND_S = 5.0
"""Longest wait for the collectives that others have begun: a rank that hangs never makes them."""
OWN = tuple(f"{os.sep}worker{os.sep}{name}.py" for name in ("channel", "context", "agreed"))
"""Files of raydist whose functions hold locks that the channel's thread needs."""


LAUNCH = tuple(f"{os.sep}worker{os.sep}{name}.py" for name in ("main", "program", "target"))
"""Files of raydist whose functions call the program."""


class Wire(Protocol):
    """What the debugger needs of the rank's Channel."""

    def reply(self, message: RankReply) -> None: ...
    def emit(self, event: Event) -> None: ...
    def hold_beat(self) -> contextlib.AbstractContextManager[None]: ...


class Debugger:
    """The debugger of a rank: at most one session at a time, in any thread of the rank."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank, self._wire = rank, wire
        self._pid = os.getpid()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Lines of a person; None: the person has gone."""
        self._attached = threading.Event()
        self._turn = threading.Lock()
        """Held by the thread that is in a session."""
        self._after, self._until = 0, 0.0
        """How many collectives to begin before a session, and until when to wait for them."""
        self._driver_knows = False
        """Whether the driver knows that the rank waits."""
        self.post_mortem = False
        """Whether to wait at an exception that ends the program (`watch.post_mortem`)."""
        self._raised = False
        """Whether it waits at such an exception."""
        self._editor: EditorSession | None = None
        """The last session of an editor, which takes the place of pdb."""

    def install(self) -> None:
        """Have breakpoint() wait for a person, and make it possible to enter. In the main thread.

        A system call that the signal interrupts continues afterwards, where the kernel can do so.
        """
        signal.signal(DEBUG_SIGNAL, self._on_signal)
        signal.siginterrupt(DEBUG_SIGNAL, False)
        sys.breakpointhook = self._on_breakpoint
        # A forked DataLoader worker has none of debugpy's threads, and would wait for them.
        os.register_at_fork(after_in_child=self._end_tracing)

    @property
    def editor(self) -> EditorSession | None:
        """The session of an editor, until it is over."""
        session = self._editor
        return None if session is None or session.over else session

    def prepare_editor(self, reply: Callable[[str], None]) -> None:
        """Load what an editor needs, in a thread: the training continues meanwhile.

        `reply`: is called with the reason why no editor can debug this rank, or "".
        """
        why = f"it waits at an exception; type raydist debug rank={self._rank}, without --vscode"
        editor.start_thread(lambda: reply(why if self._raised else editor.load_debugpy()))

    def attach(self, after: int = 0, by_editor: bool = False) -> None:
        """Begin a session for a person: where the rank waits, or at its next line of Python.

        `after`, `by_editor`: as in AttachDebugger.
        """
        made = EditorSession(self.write, self._wire.hold_beat, self._leave_editor)
        self._editor = made if by_editor else None
        self._after, self._until = after, time.monotonic() + BEHIND_S
        while not self._lines.empty():  # of an earlier session
            self._lines.get()
        self._attached.set()
        self._enter()

    def _enter(self) -> None:
        """Send the main thread the signal, unless a thread is in a session already."""
        if not self._turn.locked():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, DEBUG_SIGNAL)

    def take(self, line: str) -> None:
        """Take a line of the person, or text of the editor."""
        if (session := self.editor) is not None:
            session.take(line)
        else:
            self._lines.put(line)

    def detach(self) -> None:
        """The person has left: the rank continues."""
        self._attached.clear()
        self._lines.put(None)
        if (session := self.editor) is not None:
            session.leave()

    def _leave_editor(self) -> None:
        """Continue without the editor."""
        self._attached.clear()  # the signal must begin no session
        self._lines.put(None)
        self._enter_later()
        self.end()

    def _enter_later(self) -> None:
        """Send the main thread the signal once no thread is in a session."""
        if self._turn.locked():
            editor.start_timer(LATER_S, self._enter_later)
        else:
            self._enter()

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if self.editor is None:
            self._end_tracing()
        if frame is None or not self._attached.is_set():  # the person has gone meanwhile
            return
        if in_own_code(frame) or self._is_behind():
            editor.start_timer(LATER_S, self._enter)
        else:
            self._hold(frame)

    def _end_tracing(self) -> None:
        """Have debugpy leave this thread: the session is over, or this is a fork of the rank."""
        with contextlib.suppress(Exception):  # must not become an error of the program
            editor.stop_tracing()

    def _is_behind(self) -> bool:
        return time.monotonic() < self._until and collectives_begun() < self._after

    def _on_breakpoint(self, *args: Any, **options: Any) -> Any:
        # A forked DataLoader worker has no channel. PYTHONBREAKPOINT chooses another debugger, or
        # none; Ray's, which each Ray worker sets for its children, works in Ray's tasks only.
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if os.getpid() != self._pid or (chosen and not chosen.startswith(RAYS)):
            return sys.__breakpointhook__(*args, **options)
        if (session := self.editor) is not None and session.begun:
            session.stop_at(sys._getframe(1))
            return None
        self._hold(sys._getframe(1), at_breakpoint=True)
        return None

    def examine(self, error: Exception) -> None:
        """Have a person look into what an exception has left, if that is wanted."""
        frames = error.__traceback__
        if self.post_mortem and frames is not None:
            with self._in_turn() as free:
                if free:
                    self._raised = True
                    Session(self).examine(error, frames)

    def _hold(self, frame: FrameType, at_breakpoint: bool = False) -> None:
        with self._in_turn() as free:
            if free and self.editor is not None and self._attached.is_set():
                self.begin_editor(frame if at_breakpoint else None)
            elif free:
                Session(self).begin(frame)

    def begin_editor(self, stop_at: FrameType | None = None) -> None:
        """Hand this thread over to the editor. `stop_at`: a frame in which to stop at once.

        An error of debugpy must not become one of the program.
        """
        session = self.editor
        try:
            if session is not None:
                self._wire.reply(HeldAt("", 0))
                session.begin()
                if stop_at is not None:
                    session.stop_at(stop_at)
        except Exception as error:
            text = f"no editor can debug this rank: {type(error).__name__}: {error}"
            self._wire.emit(kinds.Warning(rank=self._rank, text=text))
            if session is not None:
                session.leave()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[bool]:
        """Report whether no other thread is in a session; none is until the end of the block."""
        free = self._turn.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._turn.release()

    @contextlib.contextmanager
    def held(self, frame: FrameType, line: int) -> Iterator[None]:
        """Tell that the rank waits at this line, and wait for a person; then run the block."""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        with self._wire.hold_beat():
            self._wire.reply(HeldAt(file, line))
            if not self._attached.is_set():
                self._driver_knows = True
                self._wire.emit(kinds.Held(rank=self._rank, file=file, line=line, function=name))
                self._attached.wait()
            yield

    def read_line(self) -> str:
        """Return the next line of the person; "" once there is none any more."""
        line = self._lines.get()
        return "" if line is None else line

    def write(self, text: str) -> None:
        """Show the person a text."""
        self._wire.reply(DebuggerSays(text))

    def end(self) -> None:
        """End the session: the person leaves, and the rank continues."""
        self._attached.clear()
        self._wire.reply(WentOn())
        self.release()

    def release(self) -> None:
        """Tell the driver that the rank no longer waits, if it knows that it did."""
        if self._driver_knows:
            self._driver_knows = False
            self._wire.emit(kinds.Released(rank=self._rank))

    @property
    def attached(self) -> bool:
        """Whether a person is there."""
        return self._attached.is_set()

    @property
    def prompt(self) -> str:
        return f"(rank {self._rank}) "


class PdbStreams:
    """What pdb takes for its input and output."""

    encoding = "utf-8"

    def __init__(self, debugger: Debugger) -> None:
        self.readline: Callable[[], str] = debugger.read_line
        self.write: Callable[[str], None] = debugger.write

    def flush(self) -> None:
        """Do nothing: each text is sent at once."""


class Session(pdb.Pdb):
    """A session of pdb whose end never ends the program."""

    def __init__(self, debugger: Debugger) -> None:
        terminal: Any = PdbStreams(debugger)
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False)
        self.prompt = debugger.prompt
        self._debugger = debugger
        self._over = self._stopped = False

    def begin(self, frame: FrameType) -> None:
        """Hold the program at this frame; return when it is to continue, and trace it if wanted."""
        self.reset()
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.interaction(frame, None)
        if not self._over:
            sys.settrace(self.trace_dispatch)

    def examine(self, error: Exception, frames: TracebackType) -> None:
        """Hold the program at the line that has raised; it ends afterwards."""
        self.reset()
        last = frames
        while last.tb_next is not None:
            last = last.tb_next
        with self._debugger.held(last.tb_frame, last.tb_lineno):
            self.message(f"{type(error).__name__}: {error}")
            self.message("leaving the debugger lets the rank fail as it would have")
            super().interaction(None, frames)
        self._debugger.end()

    def interaction(self, frame: FrameType | None, *error: Any) -> None:
        """Hold the program, here or after a step or at a breakpoint of the session."""
        assert frame is not None
        if self._stopped and not self._debugger.attached:  # the person left while the program ran
            self.do_quit("")
            self._debugger.release()
            return
        self._stopped = True
        with self._debugger.held(frame, frame.f_lineno):
            by_editor = self._debugger.editor is not None
            if by_editor:
                self.do_quit("")
            else:
                super().interaction(frame, *error)
        if by_editor:
            self._debugger.release()
            self._debugger.begin_editor(frame)
        elif self._over:
            self._debugger.end()

    def get_stack(self, f: Any, t: Any) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames without those of raydist before the program's first one."""
        stack, here = super().get_stack(f, t)
        launch = [n for n, (frame, _) in enumerate(stack) if starts_program(frame)]
        first = launch[-1] + 1 if launch and launch[-1] < here else 0
        return stack[first:], here - first

    def set_continue(self) -> None:
        """Go on; without breakpoints this ends the session."""
        super().set_continue()
        self._over = not self.breaks

    def do_quit(self, arg: str) -> bool:
        """q(uit), Ctrl-D: leave the debugger; the program continues."""
        self.clear_all_breaks()
        self.set_continue()
        return True

    def do_q(self, arg: str) -> bool:
        """As do_quit."""
        return self.do_quit(arg)

    def do_exit(self, arg: str) -> bool:
        """As do_quit."""
        return self.do_quit(arg)

    def do_EOF(self, arg: str) -> bool:
        """As do_quit: the person has gone."""
        return self.do_quit(arg)

    def do_run(self, arg: str) -> None:
        """run, restart: not possible here. pdb's own would raise Restart into the program."""
        self.message(
            "a rank cannot be started again from here: c or q lets it continue, and raydist stop "
            "ends the run"
        )

    def do_restart(self, arg: str) -> None:
        """As do_run."""
        self.do_run(arg)


def starts_program(frame: FrameType) -> bool:
    """Report whether a frame is one of those between the start of the rank and its program."""
    return frame.f_code.co_filename.endswith(LAUNCH)


def in_own_code(frame: FrameType | None) -> bool:
    """Report whether a thread may hold a lock without which the channel can't work."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(OWN):
            return True
        frame = frame.f_back
    return False
