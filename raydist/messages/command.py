"""Driver and agent: commands that a person runs alongside a rank. (either side)"""

from __future__ import annotations

from dataclasses import dataclass

from raydist.messages.agent import ProcessEnd
from raydist.messages.request import Reply, Request


class CommandRequest(Request[Reply]):
    """A request about commands alongside a rank."""


@dataclass(frozen=True)
class RunCommand(CommandRequest[int]):
    """Run a command in the rank's environment, folder and cgroup; reply with its pid."""

    argv: tuple[str, ...]
    """Empty: a shell."""
    reads: bool = False
    """Whether WriteCommand sends it input; otherwise its input is empty."""
    term: str = ""
    """TERM of the terminal that the command gets; empty: it gets pipes."""
    rows: int = 0
    columns: int = 0
    """The size of the terminal."""


@dataclass(frozen=True)
class CommandOutput:
    """The output of a command since the last reply."""

    out: bytes
    err: bytes
    end: ProcessEnd | None
    """How the command ended; None while more output may follow."""


@dataclass(frozen=True)
class ReadCommand(CommandRequest[CommandOutput]):
    """Reply with a command's new output, or without any after `patience` seconds."""

    pid: int
    patience: float


@dataclass(frozen=True)
class WriteCommand(CommandRequest[None]):
    """Send a command input; reply once it took all of it, or has closed its input."""

    pid: int
    data: bytes
    last: bool
    """Whether the input ends here. The input of a terminal does not end."""


@dataclass(frozen=True)
class ResizeCommand(CommandRequest[None]):
    """Set the size of a command's terminal."""

    pid: int
    rows: int
    columns: int


@dataclass(frozen=True)
class SignalCommand(CommandRequest[None]):
    """Send a signal to a command."""

    pid: int
    number: int


@dataclass(frozen=True)
class LeaveCommand(CommandRequest[None]):
    """End a command because the person has left. One with a terminal gets SIGHUP first."""

    pid: int
