"""Driver and agent: open a node, run ranks, read what they report. (either side)"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from raydist.messages.rank import Collective
from raydist.messages.request import Request
from raydist.messages.server import StoreAddress, StoreKind, Warm

if TYPE_CHECKING:
    from raydist.network.facts import Facts
    from raydist.network.nccl_log import Log
    from raydist.network.traffic import Ports
    from raydist.shared.events import Event

DYING_S = 45.0
"""Longest wait of an agent, and of the driver, for the end of a process that was sent SIGKILL. To
free much memory takes seconds; one that waits for a dead disk or a dead GPU never ends."""


@dataclass(frozen=True)
class WarmServer:
    """A fork server that already runs on the driver's machine."""

    folder: str
    heritage: tuple[str, ...]
    """The properties that its processes inherit (node.fork_launcher.heritage). An agent with equal
    ones may use it."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended."""

    code: int
    signal: int
    """The signal that ended it, else 0."""
    at: float
    """Seconds since the epoch, on the clock of its node."""
    lost: str = ""
    """The end of the fork server's log if the process was lost with that server; or MPI's last
    message."""
    output: str = ""
    """The end of the output of an MPI program."""


@dataclass(frozen=True)
class RecordedError:
    """An exception as text."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class RankEnd(ProcessEnd):
    """How a rank ended, and the causes that its agent found."""

    step: int = 0
    phase: str = ""
    why: str = ""
    """The process or the kernel that may have ended it, for a person."""
    oom: Literal["", "kernel"] = ""
    """Whether the kernel's out-of-memory killer ended it."""
    by_mpirun: bool = False
    """mpirun ended its child of the rank before."""
    told: bool = False
    """Its agent had been told to stop it while it ran, and had raised nothing. No clock is needed
    to know that."""
    error: RecordedError | None = None
    """The error that torch.distributed.elastic's `@record` wrote."""


@dataclass(frozen=True)
class Opened:
    """The reply of an agent that has opened."""

    facts: Facts | None
    """Of its node; from the first agent of each node only."""
    born: float
    """When the agent was made, in seconds since the epoch."""
    warm: Warm
    store: StoreAddress | None
    ports: Ports | None
    """The counters of the network ports of its node; from the first agent of each node only."""


@dataclass(frozen=True)
class Open(Request[Opened]):
    """Read the facts of the node, start or join its fork server, open the rendezvous store."""

    run: str
    """Names the fork server of a node, which all agents there share."""
    start: str
    modules: tuple[str, ...]
    """The modules that the fork server imports before it forks."""
    env: Mapping[str, str]
    interface: str | None
    threads: int
    mpirun: str
    secret: str
    """Proves that a process is a child of this run's mpirun."""
    keep_s: float = 0
    """Seconds that the fork server of a node stays after the run, for the next one; 0: it ends with
    the run."""
    installed: tuple[str, ...] = ()
    """Those of the modules that a server imports that stays: not the user's own files, which change
    from run to run."""
    warm_server: WarmServer | None = None
    ray_stays: bool = False
    """The Ray of this run is not the driver's own: it outlives the run, and the fork server ends
    with it."""
    rank: int = -1
    node_id: str = ""
    node_ip: str = ""
    lead: bool = True
    """The first agent of its node."""
    store: StoreKind | None = None
    """The kind of store to open; None: no store."""


@dataclass(frozen=True)
class FindUnreachablePaths(Request["dict[str, str]"]):
    """Reply with the files and folders that this node can't see: by key, the reason."""

    paths: Mapping[str, str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class StartRank(Request[int]):
    """Start the process of the rank; reply with its pid."""

    rank: int
    env: Mapping[str, str]
    job: str
    """The settings, as JSON (settings.config.as_dict)."""
    argv: tuple[str, ...]
    script: str
    """The program of script=, else empty."""
    cwd: str
    """The working directory; empty: that of the agent."""
    sys_path: tuple[str, ...]
    nccl_aloud: bool
    """Send NCCL's log to the driver too."""
    nccl_strict: bool
    """End the rank if NCCL does not use InfiniBand although the plan says so."""
    call: bool = False
    """The job is a function, which the node has (KeepCall)."""
    cpus: tuple[int, ...] | None = None
    """The CPUs to which the rank is bound; None: it is not."""
    driver: str = ""
    """The driver's machine, as shared.own_path.machine_id(): the person has chosen the files that
    lie there."""


@dataclass(frozen=True)
class KeepCall(Request[None]):
    """Keep the pickled function of the job for all ranks of the node."""

    call: bytes | Awaitable[bytes]
    """Ray's reference can be awaited."""


@dataclass(frozen=True)
class RankNews:
    """The news of a rank since the last reply."""

    events: Sequence[Event]
    log: bytes
    """New bytes of its output."""
    nccl: bytes
    """New lines of NCCL's log."""
    beat: tuple[int, str, float]
    """Its last heartbeat: step, phase, seconds since the epoch."""
    quiet: float
    """The age of the heartbeat in seconds."""
    work: tuple[int, float, float]
    """Steps that were timed, compute seconds of one step, seconds of one step."""
    pauses: float
    """The share of the rank's time in which Python's garbage collector stops it."""
    end: RankEnd | None = None
    """How it ended; no news follows."""
    server_quiet: float = 0.0
    """Seconds for which the fork server of its node has not answered."""
    sent: float = 0.0
    """When this was sent, in seconds since the epoch on the clock of its node."""


@dataclass(frozen=True)
class GetNews(Request[RankNews]):
    """Reply at once to news that can't wait, else after `patience` seconds."""

    patience: float


@dataclass(frozen=True)
class RankActivity:
    """The activity of a rank while it was examined."""

    pid: int
    state: str
    """The letter of its process's state in /proc/PID/stat."""
    busy: float
    """CPU seconds that it used per second."""
    stack: str
    """The stacks of its threads, in faulthandler's format; of a rank that could not answer, the
    main thread's only."""
    collectives: Sequence[Collective]
    """The last entries of torch's flight recorder, the oldest first."""
    beat: tuple[int, str, float] = (0, "", 0.0)
    """Its heartbeat after that."""


@dataclass(frozen=True)
class Examine(Request["RankActivity | None"]):
    """Examine a rank that may hang; the reply is None if it has ended."""


@dataclass(frozen=True)
class RankValue:
    """What the job returned or raised, pickled; neither if it returned None or ended by itself."""

    value: bytes | None = None
    error: bytes | None = None


@dataclass(frozen=True)
class RecordedEnd:
    """How a rank ended whose agent does not answer, as its node has noted it."""

    end: RankEnd
    value: RankValue


@dataclass(frozen=True)
class GetValue(Request[RankValue]):
    """Reply with what the job returned or raised."""


@dataclass(frozen=True)
class IsOpen(Request[bool]):
    """Whether the agent can start a rank. It can't if it is new and not open yet, if its fork
    server has ended, or if a process of an earlier attempt does not end."""


@dataclass(frozen=True)
class WaitForWriter(Request[None]):
    """Reply when the checkpoint that is being written is on the disk."""


@dataclass(frozen=True)
class Flush(Request["list[Event]"]):
    """Write the newest snapshot of this node to the disk; reply with the events of the writer."""


@dataclass(frozen=True)
class StopRank(Request[None]):
    """Send SIGTERM, and SIGKILL after `grace` seconds; without grace SIGKILL at once. Reply after
    the end."""

    grace: float


@dataclass(frozen=True)
class NetworkUse:
    """The network counters of a node, and the network that NCCL uses."""

    ports: Ports | None
    """The counters of its ports; from the first agent of each node only."""
    nccl: Log
    """The channels of the rank in NCCL's log."""


@dataclass(frozen=True)
class GetNetworkUse(Request[NetworkUse]):
    """Reply with the network counters so far."""


class GpuLoad(TypedDict):
    """How busy one GPU is; None for what it does not tell."""

    util: float | None
    """Share of the time in which a kernel ran, from 0 to 1."""
    memory: tuple[int, int] | None
    """Bytes (used, in all)."""
    power_w: int | None
    temp_c: int | None


class NodeLoad(TypedDict):
    """How busy a node is."""

    cpu: float
    """Share of all cores since the answer before, from 0 to 1."""
    memory: tuple[int, int]
    """Bytes (used, in all)."""
    gpus: list[GpuLoad]
    ports: dict[str, tuple[int, int]]
    """Bytes (received, sent) since the port is up, by its name."""


@dataclass(frozen=True)
class GetLoad(Request[NodeLoad]):
    """Reply how busy the node is."""


@dataclass(frozen=True)
class Close(Request[None]):
    """End the rank and the store, and the fork server if the agent has started it."""
