"""Driver and agent: open a node, run ranks, read what they report. (either side)"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from raydist.messages.rank import Collective
from raydist.messages.request import Request
from raydist.messages.server import StoreAddress, StoreKind, Warm

if TYPE_CHECKING:
    from raydist.network.facts import Facts
    from raydist.network.nccl_log import Log
    from raydist.network.traffic import Ports
    from raydist.shared.kinds import EventJson

DYING_S = 45.0
"""Maximum wait of an agent, and of the driver, for the end of a process that was sent SIGKILL.
Freeing much memory takes seconds; a process that waits for a dead disk or a dead GPU never ends."""


@dataclass(frozen=True)
class WarmServer:
    """A fork server that already runs on the driver's machine."""

    folder: str
    heritage: tuple[str, ...]
    """The properties that its processes inherit (node.fork_launcher.heritage). An agent with equal
    properties may use it."""


@dataclass(frozen=True)
class HeldServer:
    """A fork server that holds the states of a run that has made way (HoldStates)."""

    key: str
    folder: str


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended."""

    code: int
    signal: int
    """The signal that ended it, or 0."""
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
    """The process or the kernel that may have ended it, as readable text."""
    oom: Literal["", "kernel"] = ""
    """`kernel`: the kernel's out-of-memory killer ended it."""
    by_mpirun: bool = False
    """Whether mpirun had ended its child of the rank before."""
    stop_requested: bool = False
    """Whether its agent had been asked to stop it while it ran, and had raised nothing. This is
    known without comparing clocks."""
    error: RecordedError | None = None
    """The error that torch.distributed.elastic's `@record` wrote."""
    gpu_report: str = ""
    """What NVML reported about its GPU, as readable text: its Xids, and whether it is lost."""
    kept: bool = False
    """Whether the process still runs, and waits for the next attempt (ParkRank)."""
    why_not_kept: str = ""
    """Why its process was not kept, if it was to be."""


@dataclass(frozen=True)
class Opened:
    """The reply of an agent that has opened."""

    facts: Facts | None
    """The facts of its node; only from the first agent of each node."""
    born: float
    """When the agent was created, in seconds since the epoch."""
    warm: Warm
    store: StoreAddress | None
    ports: Ports | None
    """The counters of the network ports of its node; only from the first agent of each node."""
    holds: bool = False
    """Whether its fork server holds the states of Open.held."""
    server: str = ""
    """The folder of its fork server; only from the first agent of each node."""


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
    """The subset of the modules that a persistent server imports: not the user's own files, which
    change from run to run."""
    warm_server: WarmServer | None = None
    held: HeldServer | None = None
    """The server to use on this node, with the run's states from before it made way."""
    ray_stays: bool = False
    """Whether the Ray of this run is not the driver's own: it outlives the run, and the fork server
    ends with it."""
    rank: int = -1
    node_id: str = ""
    node_ip: str = ""
    lead: bool = True
    """Whether this is the first agent of its node."""
    store: StoreKind | None = None
    """The kind of store to open; None: no store."""


@dataclass(frozen=True)
class FindUnreachablePaths(Request["dict[str, str]"]):
    """Reply with the files and folders that this node can't see: by key, the reason."""

    paths: Mapping[str, str]
    env: Mapping[str, str]


class ProcessId(NamedTuple):
    """A process of a node, which no later process with the same pid is taken for."""

    pid: int
    since: int
    """When it started: clock ticks after boot, as in proc_pid_stat(5); 0: it had ended."""


@dataclass(frozen=True)
class StartRank(Request[ProcessId]):
    """Start the process of the rank; reply with its id."""

    rank: int
    env: Mapping[str, str]
    job: str
    """The settings, as JSON (settings.config.as_dict)."""
    argv: tuple[str, ...]
    script: str
    """The program of script=, or empty."""
    cwd: str
    """The working directory; empty: that of the agent."""
    sys_path: tuple[str, ...]
    nccl_aloud: bool
    """Send NCCL's log to the driver too."""
    nccl_strict: bool
    """End the rank if NCCL does not use InfiniBand although the plan requires it."""
    call: bool = False
    """Whether the job is a function, which the node has (KeepCall)."""
    imports_cwd: bool = False
    """Whether the driver's PYTHONPATH names the working directory: a program then imports modules
    from it."""
    cpus: tuple[int, ...] | None = None
    """The CPUs to which the rank is bound; None: it is not bound."""
    gpus: int = 1
    """GPUs of the rank, if it has any: 1 for a part of one, too."""
    driver: str = ""
    """The driver's machine, as shared.own_path.machine_id(): the user has chosen the files
    there."""
    keep: bool = False
    """Whether a process that waits for this attempt continues; otherwise it is killed."""
    after: tuple[ProcessId, ...] = ()
    """The processes of agents that this one replaces on its node: they may hold the GPU."""
    saving: bool = False
    """Whether a state that the previous attempt has locked is still being written to the disk."""


@dataclass(frozen=True)
class KeepCall(Request[None]):
    """Keep the pickled function of the job for all ranks of the node."""

    call: bytes | Awaitable[bytes]
    """Ray's reference can be awaited."""


@dataclass(frozen=True)
class RankNews:
    """What a rank has reported since the last reply."""

    events: Sequence[EventJson]
    log: bytes
    """New bytes of its output."""
    nccl: bytes
    """New lines of NCCL's log."""
    beat: tuple[int, str, float]
    """Its last heartbeat: step, phase, seconds since the epoch."""
    quiet: float
    """The age of the heartbeat in seconds, not counting time before the attempt."""
    work: tuple[int, float, float]
    """Steps that were timed, compute seconds of one step, seconds of one step."""
    pauses: float
    """The fraction of the rank's time in which Python's garbage collector pauses it."""
    end: RankEnd | None = None
    """How it ended; no further report follows."""
    server_quiet: float = 0.0
    """Seconds for which the fork server of its node has not answered."""
    sent: float = 0.0
    """When this was sent, in seconds since the epoch on the clock of its node."""


@dataclass(frozen=True)
class GetNews(Request[RankNews]):
    """Reply at once with news that can't wait, otherwise after `patience` seconds."""

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
    """The stacks of its threads, in faulthandler's format; if the rank could not answer, only that
    of the main thread."""
    collectives: Sequence[Collective]
    """The last entries of torch's flight recorder, oldest first."""
    beat: tuple[int, str, float] = (0, "", 0.0)
    """Its heartbeat after that."""
    way: StackWay = ""
    gpu_fault: str = ""
    """What NVML reports of its GPU if that is broken."""


StackWay = Literal["", "thread", "signal"]
"""Who wrote a rank's stack: a thread of the rank, or faulthandler's handler of a signal.

Empty: there is none."""


@dataclass(frozen=True)
class Examine(Request["RankActivity | None"]):
    """Examine a rank that may hang; the reply is None if it has ended."""

    quick: bool = False
    """Reply as soon as there is a stack; `busy` is then inexact."""


@dataclass(frozen=True)
class NativeStack:
    """What py-spy says about a rank."""

    text: str
    """Its threads, with the frames of C code; empty if it failed."""
    error: str = ""
    """Why there is none, and what helps."""


@dataclass(frozen=True)
class GetNativeStack(Request["NativeStack | None"]):
    """Have py-spy read the stacks of a rank, C code included; the reply is None if it has ended."""


@dataclass(frozen=True)
class AskNccl(Request[str]):
    """Ask the RAS of a rank's NCCL about all communicators; the reply is its answer.

    It is empty if none answers within seconds.
    """


@dataclass(frozen=True)
class RankStatus:
    """What an agent knows about its running rank without asking it."""

    pid: int
    state: str
    """The letter of its process's state in /proc/PID/stat."""
    beat: tuple[int, str, float]
    """Its last heartbeat: step, phase, seconds since the epoch."""
    quiet: float
    """As in RankNews; 0: there is none."""
    work: tuple[int, float, float]
    """As in RankNews."""
    held: str = ""
    """As DebuggerNews.place."""
    at: float = 0.0
    """When it was read, in seconds since the epoch on the clock of its node."""


@dataclass(frozen=True)
class GetStatus(Request["RankStatus | None"]):
    """Reply at once with the status of the rank; None if it has ended."""


@dataclass(frozen=True)
class DebuggerNews:
    """What the debugger of a rank has shown since the last reply."""

    text: str
    place: str
    """Where the rank waits, such as `/home/me/train.py:31`; empty: it does not wait."""
    over: bool
    """Whether the session has ended, and the rank continues."""


@dataclass(frozen=True)
class ReadDebugger(Request[DebuggerNews]):
    """Reply with news of the debugger at once, or with none after `patience` seconds."""

    patience: float


@dataclass(frozen=True)
class RankValue:
    """What the job returned or raised, pickled; neither if it returned None or ended by itself."""

    value: bytes | None = None
    error: bytes | None = None


@dataclass(frozen=True)
class RecordedEnd:
    """How a rank ended whose agent does not answer, as recorded by its node."""

    end: RankEnd
    value: RankValue


@dataclass(frozen=True)
class GetValue(Request[RankValue]):
    """Reply with what the job returned or raised."""


@dataclass(frozen=True)
class IsOpen(Request[bool]):
    """Report whether the agent can start a rank.

    It can't if it is new and not open yet, if its fork server has ended, or if a process of an
    earlier attempt does not end.
    """


@dataclass(frozen=True)
class WaitForWriter(Request[None]):
    """Reply when the whole state being written is on the disk, or a restart does not need it."""


@dataclass(frozen=True)
class Flushed:
    """The reply of an agent to Flush."""

    events: Sequence[EventJson]
    """Those of the writer."""
    had_state: bool
    """Whether a whole state is in this node's memory: a node that has just joined has none yet."""


@dataclass(frozen=True)
class Flush(Request[Flushed]):
    """Write the newest snapshot of this node to the disk, if it has one."""

    step: int = -1
    """Write this step instead, and drop later ones: ranks of other nodes lack them. -1: the step
    that most ranks of this node have."""
    random: Sequence[str] = ()
    """The random generators of all ranks at that step, in their order, as in RandomStates. Empty:
    they are taken from the memories of this node, and left out if some ranks are elsewhere."""


@dataclass(frozen=True)
class StopRank(Request[None]):
    """Send SIGTERM, then SIGKILL after `grace` seconds; reply after the end.

    Without grace it sends SIGKILL at once.
    """

    grace: float
    keep: bool = False
    """Leave the process of a rank that can wait for the next attempt."""


@dataclass(frozen=True)
class NetworkUse:
    """The network counters of a node, and the network that NCCL uses."""

    ports: Ports | None
    """The counters of its ports; only from the first agent of each node."""
    nccl: Log
    """The channels of the rank in NCCL's log."""


@dataclass(frozen=True)
class GetNetworkUse(Request[NetworkUse]):
    """Reply with the network counters so far."""


class GpuLoad(TypedDict):
    """The load of one GPU; None for values that the GPU does not report."""

    util: float | None
    """Fraction of the time in which a kernel ran, from 0 to 1."""
    memory: tuple[int, int] | None
    """Bytes (used, total)."""
    power_w: int | None
    temp_c: int | None


class NodeLoad(TypedDict):
    """The load of a node."""

    cpu: float
    """Fraction of all cores since the previous reply, from 0 to 1."""
    memory: tuple[int, int]
    """Bytes (used, total)."""
    gpus: list[GpuLoad]
    ports: dict[str, tuple[int, int]]
    """Bytes (received, sent) since the port came up, by its name."""


@dataclass(frozen=True)
class GetLoad(Request[NodeLoad]):
    """Reply with the load of the node."""


@dataclass(frozen=True)
class FindReached(Request["set[tuple[str, int]]"]):
    """Reply with those of these addresses that accept or refuse a connection from this node.

    cluster.reach.reached_addresses() answers it, within about `within_s` seconds.
    """

    addresses: tuple[tuple[str, int], ...]
    within_s: float


@dataclass(frozen=True)
class Close(Request[None]):
    """End the rank and the store, and the fork server if the agent has started it."""
