"""Command and driver: inspect and steer a run. (either side)

The messages are lines of JSON on a Unix socket of the driver (watch/operate/server.py). The command
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
    """The state of a rank."""

    rank: int
    host: str
    pid: int
    step: int
    """The newest step that was reported or timed."""
    own_s: float
    """Seconds of its own work in a step; 0: not timed."""
    wait_s: float
    """Seconds of a step that it waits for other ranks."""
    quiet_s: float
    """Seconds since its last heartbeat; 0 if it sends none."""
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
    """Whether py-spy also reads the frames of C code."""


@dataclass(frozen=True)
class Execute(OperateMessage):
    """Run a command alongside each of these ranks; reply with Printed and CommandEnded for each.

    A command that reads input runs for one rank only; InputTaken is a reply to its input.
    """

    ranks: Sequence[int]
    argv: Sequence[str]
    """Empty: a shell."""
    reads: bool = False
    """Whether TypedInput is its input; otherwise its input is empty."""
    term: str = ""
    """TERM of the terminal that it gets; empty: it gets none."""
    rows: int = 0
    columns: int = 0
    """The size of the terminal."""


@dataclass(frozen=True)
class SendSignal(OperateMessage):
    """Sent to the driver: send this signal to the commands alongside the ranks."""

    number: int


@dataclass(frozen=True)
class TypedInput(OperateMessage):
    """Sent to the driver: input for the command alongside a rank."""

    text: str
    """As Printed.text."""
    last: bool = False
    """Whether the input ends here."""


@dataclass(frozen=True)
class InputTaken(OperateMessage):
    """The command has read input, so that more can be sent."""

    size: int
    """The number of bytes that it has read."""


@dataclass(frozen=True)
class TerminalSize(OperateMessage):
    """Sent to the driver: the person's terminal now has this size."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Printed(OperateMessage):
    """Output of a command alongside a rank."""

    rank: int
    stream: int
    """1: standard output, 2: standard error."""
    text: str
    """Decoded as UTF-8 with errors="surrogateescape"."""


@dataclass(frozen=True)
class CommandEnded(OperateMessage):
    """A command alongside a rank has ended, or could not be started."""

    rank: int
    code: int
    """The exit code, as a shell reports it: 128 + the signal that ended the command."""
    error: str = ""
    """Why the command could not be started, or why its end is unknown; empty otherwise."""


@dataclass(frozen=True)
class Debug(OperateMessage):
    """Begin a session of pdb in this rank; reply with DebuggerState until the session is over.

    With `by_editor` the first DebuggerState tells that an editor can debug the rank; the session
    begins with the first TypedLine.
    """

    rank: int
    by_editor: bool = False


@dataclass(frozen=True)
class TypedLine(OperateMessage):
    """Sent to the driver: a line for the debugger, or text of the editor.

    An empty line: the editor has disconnected.
    """

    line: str


@dataclass(frozen=True)
class DebuggerState(OperateMessage):
    """Output of the debugger, and where it is."""

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
    """0: profile for `seconds` instead."""
    seconds: float
    memory: bool
    """Whether to take a snapshot of the GPUs' memory as well."""


@dataclass(frozen=True)
class SaveNow(OperateMessage):
    """Have all ranks save a checkpoint; reply with TextReply at its begin and at its end."""


@dataclass(frozen=True)
class ChangeSettings(OperateMessage):
    """Have all ranks change settings; reply with TextReply before and after the change."""

    words: Sequence[str]
    """Overrides, such as `optim.lr=0.01`."""


@dataclass(frozen=True)
class StopRun(OperateMessage):
    """Stop the run; reply with TextReply, and close the connection when the ranks have ended."""

    now: bool
    """Whether to stop it as a second Ctrl-C does."""


@dataclass(frozen=True)
class TextReply(OperateMessage):
    """A reply for a person."""

    lines: Sequence[str]
    file: str = ""
    """The file in the run folder with the whole reply."""


@dataclass(frozen=True)
class Refused(OperateMessage):
    """The driver did not carry out the request. No other message follows."""

    text: str
    usage: bool
    """Whether the arguments of the command were wrong; otherwise the request failed."""
