"""Driver and agent: commands that a person runs beside a rank. (either side)"""

from __future__ import annotations

from dataclasses import dataclass

from raydist.messages.agent import ProcessEnd
from raydist.messages.request import Reply, Request


class CommandRequest(Request[Reply]):
    """A request about commands beside a rank."""


@dataclass(frozen=True)
class RunCommand(CommandRequest[int]):
    """Run a command in the rank's environment, folder and cgroup; reply with its pid."""

    argv: tuple[str, ...]
    """Empty: a shell."""
    reads: bool = False
    """Whether WriteCommand gives it input; otherwise it has none."""
    term: str = ""
    """The TERM of a terminal for it; empty: it has pipes."""
    rows: int = 0
    columns: int = 0
    """The size of the terminal."""


@dataclass(frozen=True)
class CommandOutput:
    """What a command has printed since the last reply."""

    out: bytes
    err: bytes
    end: ProcessEnd | None
    """How it ended; no further output follows."""


@dataclass(frozen=True)
class ReadCommand(CommandRequest[CommandOutput]):
    """Reply with the new output of a command at once, or with none after `patience` seconds."""

    pid: int
    patience: float


@dataclass(frozen=True)
class WriteCommand(CommandRequest[None]):
    """Give a command input; reply once it has room for it, or reads no more."""

    pid: int
    data: bytes
    last: bool
    """Whether its input ends here. That of a terminal does not."""


@dataclass(frozen=True)
class ResizeCommand(CommandRequest[None]):
    """Change the size of a command's terminal."""

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
    """End a command: the person has gone. One with a terminal gets SIGHUP first."""

    pid: int
