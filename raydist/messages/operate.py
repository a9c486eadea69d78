"""Command and driver: look into a run, and steer it. (either side)

They travel as lines of JSON over a Unix socket of the driver (watch/operate/server.py). The command
sends one request; the driver replies with one or several messages, and closes the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from raydist.messages.wire import Message


class OperateMessage(Message):
    """A message between a command and the driver of a run."""


class RankLine(TypedDict):
    """What is known about a rank now."""

    rank: int
    host: str
    pid: int
    step: int
    """The newest step that it reported, or that was timed."""
    own_s: float
    """Seconds of its own work in a step; 0: not timed."""
    wait_s: float
    """Seconds of a step in which it waits for other ranks."""
    quiet_s: float
    """Seconds since its last heartbeat; 0: it has none."""
    state: str
    """What it is doing, for a person."""


@dataclass(frozen=True)
class ListRanks(OperateMessage):
    """Reply with RankTable."""


@dataclass(frozen=True)
class RankTable(OperateMessage):
    """All ranks of the attempt that runs now."""

    rows: Sequence[RankLine]


@dataclass(frozen=True)
class GetStacks(OperateMessage):
    """Reply with TextReply: what these ranks are doing, line by line."""

    ranks: Sequence[int]
    """Empty: all."""
    native: bool
    """Whether to have py-spy read the frames of C code too."""


@dataclass(frozen=True)
class Execute(OperateMessage):
    """Run a command beside each of these ranks; reply with Printed … and CommandEnded of each.

    With input, for one rank, also with InputTaken …
    """

    ranks: Sequence[int]
    argv: Sequence[str]
    """Empty: a shell."""
    reads: bool = False
    """Whether it gets what TypedInput has; otherwise its input is empty."""
    term: str = ""
    """The TERM of a terminal for it; empty: none."""
    rows: int = 0
    columns: int = 0
    """The size of the terminal."""


@dataclass(frozen=True)
class SendSignal(OperateMessage):
    """Send a signal to the commands; from the command to the driver."""

    number: int


@dataclass(frozen=True)
class TypedInput(OperateMessage):
    """Input for a command; from the command to the driver."""

    text: str
    """As Printed.text."""
    last: bool = False
    """Whether the input ends here."""


@dataclass(frozen=True)
class InputTaken(OperateMessage):
    """The command has room for input again."""

    size: int
    """How many bytes it has taken."""


@dataclass(frozen=True)
class TerminalSize(OperateMessage):
    """The person's terminal has another size; from the command to the driver."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Printed(OperateMessage):
    """What a command beside a rank has printed."""

    rank: int
    stream: int
    """1: its output, 2: its errors."""
    text: str
    """UTF-8; bytes that are none are surrogates, as with errors="surrogateescape"."""


@dataclass(frozen=True)
class CommandEnded(OperateMessage):
    """A command beside a rank has ended, or could not be started."""

    rank: int
    code: int
    """As of a shell: 128 + its signal."""
    error: str = ""
    """Why nothing is known about it."""


@dataclass(frozen=True)
class Debug(OperateMessage):
    """Begin a session of pdb in this rank; reply with DebuggerState … until it is over.

    With `by_editor` the first DebuggerState says that an editor can debug it, and the session
    begins with the first TypedLine.
    """

    rank: int
    by_editor: bool = False


@dataclass(frozen=True)
class TypedLine(OperateMessage):
    """A line for the debugger, or text of the editor; from the command to the driver.

    "": the editor has left.
    """

    line: str


@dataclass(frozen=True)
class DebuggerState(OperateMessage):
    """What the debugger shows."""

    text: str
    place: str
    """As messages.agent.DebuggerNews."""
    over: bool


@dataclass(frozen=True)
class MakeProfile(OperateMessage):
    """Profile these ranks; reply with TextReply when it begins, and when its file is complete."""

    ranks: Sequence[int]
    """Empty: all."""
    steps: int
    """0: for some seconds."""
    seconds: float
    memory: bool
    """Whether to take a snapshot of the GPUs' memory too."""


@dataclass(frozen=True)
class SaveNow(OperateMessage):
    """Have all ranks save a checkpoint; reply with TextReply before and after."""


@dataclass(frozen=True)
class ChangeSettings(OperateMessage):
    """Have all ranks change settings; reply with TextReply before and after."""

    words: Sequence[str]
    """As typed: `optim.lr=0.01`."""


@dataclass(frozen=True)
class StopRun(OperateMessage):
    """Reply with TextReply, and stop the run; the connection closes when the ranks have ended."""

    now: bool
    """As a second Ctrl-C does."""


@dataclass(frozen=True)
class TextReply(OperateMessage):
    """The reply to a request, for a person."""

    lines: Sequence[str]
    file: str = ""
    """The file in the run folder that has the reply and more."""


@dataclass(frozen=True)
class Refused(OperateMessage):
    """The driver did not carry out the request. Nothing follows."""

    text: str
    usage: bool
    """Whether the command was typed wrongly; otherwise it failed."""
