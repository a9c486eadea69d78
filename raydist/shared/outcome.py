"""How ranks ended, and the outcome of an attempt. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from raydist.shared.errors import RaydistError

EndKind = Literal[
    "finished", "raised", "exited", "killed", "lost", "hung", "drained", "ended", "stopped"
]
"""How a rank ended: raised an exception, exited with a code, killed by a signal, lost with its node
or actor, hung and was stopped for it, drained (stopped because its node will be taken away), ended
by mpirun, stopped by raydist."""
KilledBy = Literal["", "kernel", "ray"]
"""The kernel's out-of-memory killer, or Ray's memory monitor."""


class StopReason(Enum):
    """Why all ranks of an attempt are stopped."""

    SIGNAL = "signal"
    FAILURE = "failure"
    HANG = "hang"
    DRAIN = "drain"
    RESIZE = "resize"


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    host: str
    how: EndKind
    at: float
    """Seconds since the epoch."""
    step: int = 0
    """The last step that the rank reported."""
    phase: str = ""
    """Its phase in the step: data, forward, …"""
    code: int = 0
    """Exit code (0 for killed)."""
    signal: int = 0
    """The signal that killed it."""
    type: str = ""
    """Type of the exception: `ValueError`."""
    message: str = ""
    traceback: str = ""
    log: str = ""
    """Path of the rank's log on the driver's machine."""
    why: str = ""
    """The reason that its node found: out of memory, or a SIGKILL from another process than the
    kernel."""
    oom: KilledBy = ""
    """What ended it because memory ran out; empty if nothing did."""
    silent: bool = False
    """Its agent stopped responding: it is lost, or its node knows how it ended."""
    stuck: bool = False
    """It is lost because its process does not end, although it was killed; its agent answers."""
    preempted: bool = False
    """Its node was taken away by the cluster, or is about to be."""

    @property
    def gone(self) -> bool:
        """Whether its agent is gone, or does not answer any more."""
        return self.silent or (self.how == "lost" and not self.stuck)

    @property
    def failed(self) -> bool:
        """Whether the rank failed: it neither finished nor was stopped."""
        return self.how not in ("finished", "stopped")


@dataclass(frozen=True)
class Slow:
    """A straggler: a rank whose own work takes longer than the others'. Times are in seconds per
    step."""

    rank: int
    host: str
    own: float
    others: float
    """The median of the other ranks."""
    step: float

    @property
    def share(self) -> float:
        """The fraction of each step in which the others wait for it."""
        return (self.own - self.others) / self.step if self.step > 0 else 0.0


@dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt at the job."""

    ends: Sequence[End] = ()
    """How each rank ended, by rank."""
    values: Sequence[Any] = ()
    exceptions: Mapping[int, BaseException] = field(default_factory=dict)
    """By rank, the exceptions that could be pickled."""
    failure: str = ""
    """Why it failed, as text for a person; empty if no rank failed."""
    error: RaydistError | None = None
    """The error that ended it from outside the ranks: no cluster, no resources, a signal."""
    earlier: Sequence[Attempt] = ()
    """The attempts before it."""
    why_last: str = ""
    """Why no other attempt followed, if it failed."""
    resize: str = ""
    """Why it was ended to change the number of nodes, for a person; empty if it was not."""

    @property
    def reached(self) -> int:
        """The last step that any rank reported."""
        return max((end.step for end in self.ends), default=0)
