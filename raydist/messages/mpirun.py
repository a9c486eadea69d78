"""Driver and agent: mpirun and its daemons. (either side)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raydist.messages.agent import ProcessEnd
from raydist.messages.request import Request


@dataclass(frozen=True)
class DaemonRequest:
    """A daemon that mpirun requests on a host."""

    agent: int
    """Names mpirun's launch agent that sent the request; it ends as the daemon does."""
    host: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class RunMpirun(Request[ProcessEnd]):
    """Run mpirun to its end. `{agent}` and `{rank}` in `argv` become paths on the node."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class RunDaemon(Request[ProcessEnd]):
    """Run mpirun's daemon for this node to its end."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class NextDaemons(Request["list[DaemonRequest]"]):
    """Reply with the next daemons that mpirun's launch agents request.

    The reply is empty once mpirun has ended.
    """


@dataclass(frozen=True)
class EndLaunchAgent(Request[None]):
    """End a launch agent of mpirun as its daemon ended."""

    agent: int
    end: ProcessEnd


@dataclass(frozen=True)
class MpirunEnded(Request[None]):
    """Report that mpirun has ended, and starts no more processes for this rank."""

    why: str
