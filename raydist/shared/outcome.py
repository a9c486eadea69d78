"""How ranks ended, and the outcome of an attempt. (pure)"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from raydist.shared.errors import RaydistError

EndKind = Literal[
    "finished", "raised", "exited", "killed", "lost", "hung", "drained", "ended", "stopped"
]
"""How a rank ended.

It raised an exception, exited with a code, was killed by a signal, was lost with its node or actor,
hung and was stopped for it, was drained (stopped because its node will be taken away), was ended by
mpirun, or was stopped by raydist.
"""
GPU_AT_FAULT = "a fault of the GPU, not of the program"
"""In raydist's line on an Xid of NVIDIA's driver."""
BROKEN_GPU = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|hardware stack error|GPU is lost|ECC "
    rf"error encountered|{GPU_AT_FAULT}"
)
"""Texts of CUDA and NVML for a broken GPU (cudaGetErrorString, nvidia-smi), and GPU_AT_FAULT.

Most other CUDA errors are the program's fault.
"""
KilledBy = Literal["", "kernel", "ray"]
"""Which out-of-memory killer ended a rank: the kernel's, or Ray's memory monitor."""


class StopReason(Enum):
    """Why all ranks of an attempt are stopped."""

    SIGNAL = "signal"
    FAILURE = "failure"
    HANG = "hang"
    DRAIN = "drain"
    RESIZE = "resize"
    MAKE_WAY = "make way"


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
    """The rank's phase in the step: data, forward, …"""
    code: int = 0
    """Exit code (0 if killed)."""
    signal: int = 0
    """The signal that killed it."""
    type: str = ""
    """Type of the exception, such as `ValueError`."""
    message: str = ""
    traceback: str = ""
    log: str = ""
    """Path of the rank's log on the driver's machine."""
    why: str = ""
    """The reason that the rank's node found.

    It is out of memory, or a SIGKILL from a process other than the kernel.
    """
    oom: KilledBy = ""
    """What ended the rank because memory ran out; empty if nothing did."""
    silent: bool = False
    """The rank's agent stopped responding: the rank is lost, or its node knows how it ended."""
    stuck: bool = False
    """The rank is lost because its killed process does not end; its agent answers."""
    answers: bool = False
    """The rank's agent answers, although the call that was to start the rank was lost."""
    preempted: bool = False
    """The cluster took the rank's node away, or is about to."""
    kept: bool = False
    """The rank's process still runs, and waits for the next attempt."""
    why_not_kept: str = ""
    """Why the process was not kept, if it was to be."""
    notes: tuple[str, ...] = ()
    """What further witnesses say of a hang, a line each."""

    @property
    def gone(self) -> bool:
        """Whether the rank's agent is gone or no longer answers."""
        return self.silent or (self.how == "lost" and not (self.stuck or self.answers))

    @property
    def failed(self) -> bool:
        """Whether the rank failed: it neither finished nor was stopped."""
        return self.how not in ("finished", "stopped")


@dataclass(frozen=True)
class Slow:
    """A straggler: a rank whose own work takes longer than that of the others.

    Times are in seconds per step.
    """

    rank: int
    host: str
    own: float
    others: float
    """The median of the other ranks."""
    step: float

    @property
    def share(self) -> float:
        """The fraction of each step in which the other ranks wait for this one."""
        return (self.own - self.others) / self.step if self.step > 0 else 0.0


@dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt at the job."""

    ends: Sequence[End] = ()
    """How each rank ended, by rank."""
    values: Sequence[Any] = ()
    exceptions: Mapping[int, BaseException] = field(default_factory=dict)
    """The exceptions that could be pickled, by rank."""
    failure: str = ""
    """Why the attempt failed, as text for a person; empty if no rank failed."""
    error: RaydistError | None = None
    """The error from outside the ranks that ended the attempt: no cluster, no resources, …"""
    earlier: Sequence[Attempt] = ()
    """The attempts before this one."""
    why_last: str = ""
    """Why no other attempt followed, if this one failed."""
    resize: str = ""
    """Why the attempt was ended to change the number of nodes, as text; empty if it was not."""
    made_way: str = ""
    """For which other run the attempt was ended, as text; empty for none."""
    stepped: bool = True
    """Whether a rank made a step. Otherwise the steps in `ends` are those from which it resumed."""
    fit: int = 0
    """The number of the last raydist.fit that began, from 1, whose steps `ends` has; 0: none."""

    @property
    def reached(self) -> int:
        """The last step that any rank reported."""
        return max((end.step for end in self.ends), default=0)
