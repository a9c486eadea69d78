"""The messages among driver, agents, fork servers and ranks. (either side)

| from         | to           | carried by                         | messages                                     |
|--------------|--------------|------------------------------------|----------------------------------------------|
| driver       | agent        | a Ray call, or a call of a thread  | each `Request[Reply]`, answered by its Reply |
| agent        | fork server  | a Unix socket, JSON                | `ServerMessage`                              |
| fork server  | agent        | the same socket                    | `ServerReply`                                |
| writer       | agent        | a socket pair, one JSON per line   | events, and `ShardsReply`                    |
| agent        | rank         | a socket pair, one JSON per line   | `RankMessage`                                |
| rank         | agent        | the same pair                      | events (shared.events), and `RankReply`      |

This file imports only the standard library: the Ray worker of each node loads it at launch.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    from raydist.network.facts import Facts
    from raydist.network.nccl_log import Log
    from raydist.network.traffic import Ports
    from raydist.shared.events import Event

Reply = TypeVar("Reply", covariant=True)
AnyReply = TypeVar("AnyReply")
PACKET = 1 << 17
"""Largest message to a fork server in bytes: below Linux's default socket buffer of 208 KiB."""
DYING_S = 45.0
"""Longest wait of an agent, and of the driver, for the end of a process that was sent SIGKILL. To free much memory
takes seconds; one that waits for a dead disk or a dead GPU never ends."""
TAG = "protocol"
"""The key of a message's type in its JSON. No event has a key of this name."""
StoreKind = Literal["tcp", "horovod"]


class Request(Generic[Reply]):
    """A request of the driver to the agent of one rank; its type parameter is the type of the reply."""


class Transport(Protocol):
    """Sends requests to agents: through Ray's actors, or to a thread of this process."""

    def __call__(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to the agent of a rank. The future raises what the agent raised, or that it is gone."""
        ...


class NodeRequest(NamedTuple):
    """A request to one agent of a node, among those that travel together."""

    number: int
    """Of the request, among all to this node."""
    local_rank: int
    request: Request[Any]


class Answer(NamedTuple):
    """The answer to a NodeRequest."""

    number: int
    reply: Any = None
    error: Exception | None = None
    """What the agent raised."""


# --- parts of replies


@dataclass(frozen=True)
class WarmServer:
    """A fork server that already runs on the driver's machine."""

    folder: str
    heritage: tuple[str, ...]
    """The properties that its processes inherit (node.fork_launcher.heritage). An agent with equal ones may use it."""


@dataclass(frozen=True)
class StoreAddress:
    """The address of the rendezvous store of an attempt, on rank 0's node."""

    port: int
    secret: str
    """Horovod's store requires it; empty for a TCPStore."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended."""

    code: int
    signal: int
    """The signal that ended it, else 0."""
    at: float
    """Seconds since the epoch, on the clock of its node."""
    lost: str = ""
    """The end of the fork server's log if the process was lost with that server; or MPI's last message."""
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
    """Its agent had been told to stop it while it ran, and had raised nothing. No clock is needed to know that."""
    error: RecordedError | None = None
    """The error that torch.distributed.elastic's `@record` wrote."""


class Collective(TypedDict):
    """An entry of torch's flight recorder, with the fields that a hang report uses; a torch without a field gives None.

    torch documents them in docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
    """

    process_group: Sequence[str]
    """Its name and its description."""
    collective_seq_id: int
    p2p_seq_id: int
    is_p2p: bool
    profiling_name: str
    """As `gloo:all_reduce`, `nccl:all_reduce` or, with torch 2.15's NCCL, `nccl2:all_reduce`."""
    input_sizes: Sequence[Sequence[int]]
    state: str
    """scheduled, started or completed."""
    retired: bool


# --- driver -> agent


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
    """Seconds that the fork server of a node stays after the run, for the next one; 0: it ends with the run."""
    installed: tuple[str, ...] = ()
    """Those of the modules that a server imports that stays: not the user's own files, which change from run to run."""
    warm_server: WarmServer | None = None
    ray_stays: bool = False
    """The Ray of this run is not the driver's own: it outlives the run, and the fork server ends with it."""
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
class OpenStore(Request[StoreAddress]):
    """Replace the rendezvous store by a new one. The agent passes it to the fork server."""

    kind: StoreKind
    address: str


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
    """The driver's machine, as shared.own_path.machine_id(): the person has chosen the files that lie there."""


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
    """The stacks of its threads, in faulthandler's format; of a rank that could not answer, the main thread's only."""
    collectives: Sequence[Collective]
    """The last entries of torch's flight recorder, the oldest first."""
    beat: tuple[int, str, float] = (0, "", 0.0)
    """Its heartbeat after that."""


@dataclass(frozen=True)
class Examine(Request["RankActivity | None"]):
    """Examine a rank that may hang; the reply is None if it has ended."""


@dataclass(frozen=True)
class HoldRank(Request[int]):
    """Have the rank stand still after the step that it is making; reply with that step. To the rank as well."""


@dataclass(frozen=True)
class StopAfter(Request[None]):
    """Have the rank go on to this step, keep its state, and emit `left`. To the rank as well."""

    step: int


@dataclass(frozen=True)
class ReleaseRank(Request[None]):
    """Have a rank that holds continue: not all ranks can hold now. To the rank as well."""


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
    """Whether the agent can start a rank. It can't if it is new and not open yet, if its fork server has ended, or if a
    process of an earlier attempt does not end."""


@dataclass(frozen=True)
class WaitForWriter(Request[None]):
    """Reply when the checkpoint that is being written is on the disk."""


@dataclass(frozen=True)
class Flush(Request["list[Event]"]):
    """Write the newest snapshot of this node to the disk; reply with the events of the writer."""


@dataclass(frozen=True)
class HeldShards:
    """The shards of a sharded state that are in the memory of a node."""

    own: Sequence[tuple[int, int, int]]
    """Of its own ranks: rank, world size, step."""
    copies: Sequence[tuple[int, int, int]]
    """Of ranks of another node."""
    saved: int
    """The newest of these steps of which the node sees a checkpoint, or a later one; -1 if there is none."""


@dataclass(frozen=True)
class ListShards(Request["HeldShards | None"]):
    """Reply with the shards in the memory of this node; None if there are none. To the writer as well."""


@dataclass(frozen=True)
class WrittenShards:
    """The files that a node has written."""

    files: Mapping[str, Mapping[str, Any]]
    """By name the fields of state.write.FileFacts."""


@dataclass(frozen=True)
class WriteShards(Request[WrittenShards]):
    """Write the shards of these ranks to the disk, beside the checkpoints. To the writer as well."""

    step: int
    mark: str
    """Names the folder: of all requests that make one checkpoint the same."""
    world_size: int
    ranks: tuple[int, ...]
    folder: str = ""
    """The checkpoints' folder of raydist.sharded.save: the ranks wait with what they save next until this is committed
    or dropped. Empty: the newest kept states of a run that can't continue, in its own folder."""


@dataclass(frozen=True)
class SavedShards:
    """The files of all nodes are a checkpoint."""

    path: str


@dataclass(frozen=True)
class UnseenShards:
    """The node does not see files of others."""

    files: Sequence[str]
    folder: str


@dataclass(frozen=True)
class CommitShards(Request["SavedShards | UnseenShards"]):
    """Make a checkpoint of the files that all nodes have written. To the writer as well."""

    step: int
    mark: str
    world_size: int
    files: Mapping[str, Mapping[str, Any]]
    """As in `WrittenShards`."""
    keep: int
    best: str | None
    """As in config.Checkpoint."""
    folder: str = ""
    """As in WriteShards."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)
    """As in state.write.Meta."""


@dataclass(frozen=True)
class DropShards(Request[None]):
    """Delete the files that this node has written: they become no checkpoint. To the writer as well."""

    step: int
    mark: str
    folder: str = ""
    """As in WriteShards."""


@dataclass(frozen=True)
class StopRank(Request[None]):
    """Send SIGTERM, and SIGKILL after `grace` seconds; without grace SIGKILL at once. Reply after the end."""

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


# --- driver -> agent: the doctor's check-up


class LibraryTrial(TypedDict, total=False):
    """The addresses that gloo or NCCL chose (node.dryrun), or its error."""

    addresses: list[str]
    interface: str
    """Of NCCL."""
    error: str
    """The library's own message."""
    status: int
    """The ncclResult_t of a trial, dropped before it is replied."""


class CheckupRequest(Request[Reply]):
    """A request of the doctor."""


class Peer(NamedTuple):
    """The address on which a node listens for the others."""

    address: str
    port: int


class Trip(NamedTuple):
    """The outcome of a call to a peer."""

    kind: str
    """fine, silent, refused, unreachable, broken, or stalled (short packets passed, long ones did not)."""
    words: str = ""
    rtt_s: float = 0.0
    ahead_s: float = 0.0
    """The lead of the peer's clock over the caller's; exact to half a round trip."""


@dataclass(frozen=True)
class ListenForPeers(CheckupRequest[Peer]):
    """Start to answer the other nodes, on the training address only."""

    address: str
    secret: bytes


@dataclass(frozen=True)
class CallPeers(CheckupRequest["list[Trip]"]):
    """Call all other nodes."""

    peers: Sequence[Peer]
    own: int
    """The index of this node among them."""
    secret: bytes
    timeout: float


@dataclass(frozen=True)
class ReachStore(CheckupRequest[str]):
    """Connect to the store as the ranks will; reply with the error, or with an empty text."""

    address: str
    port: int
    timeout: float


@dataclass(frozen=True)
class TryLibraries(CheckupRequest["dict[str, LibraryTrial]"]):
    """Try which addresses gloo and NCCL choose with the variables of a rank; by library the result of node.dryrun."""

    names: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class HostCheck:
    """The reply to CheckHost."""

    shm_error: str
    """The error of writing to /dev/shm, or an empty text."""
    sees_folder: bool
    addresses: Sequence[str]
    """The addresses of the host's own name."""
    lookup_s: float = 0.0
    """Seconds that the look-up of the name of `CheckHost.address` took; at most checkup.LOOKUP_LIMIT_S."""


@dataclass(frozen=True)
class CheckHost(CheckupRequest[HostCheck]):
    """Check /dev/shm, the visibility of the driver's folder, the host's name, and name servers."""

    folder: str
    address: str = ""
    """The address of another node, whose name is looked up; none if it is empty."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables that the job sets: RES_OPTIONS shortens a look-up."""


# --- driver -> agent: mpirun


@dataclass(frozen=True)
class DaemonRequest:
    """A daemon that mpirun requests on a host."""

    agent: int
    """Names mpirun's launch agent of the request, which ends as the daemon does."""
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
    """Reply with the next daemons that mpirun's launch agents request; with none once mpirun has ended."""


@dataclass(frozen=True)
class EndLaunchAgent(Request[None]):
    """End a launch agent of mpirun as its daemon ended."""

    agent: int
    end: ProcessEnd


@dataclass(frozen=True)
class MpirunEnded(Request[None]):
    """mpirun has ended, and starts no process for this rank any more."""

    why: str


# --- agent <-> fork server


@dataclass(frozen=True)
class RankSpec:
    """Everything that a process needs to become a rank."""

    rank: int
    env: dict[str, str]
    job: str
    argv: tuple[str, ...]
    script: str
    cwd: str
    sys_path: tuple[str, ...]
    value: str
    """The file for the return value. Beside it: `.error`, `.stacks`, `.spec`."""
    call: str | None = None
    """The file of the pickled function, if the job is one."""
    cpus: tuple[int, ...] | None = None
    """The CPUs to which the rank is bound, by raydist or by mpirun; None: it is not."""


@dataclass(frozen=True)
class ProgramSpec:
    """A program of mpirun, run as a child of the fork server."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


@dataclass(frozen=True)
class LookAtModel:
    """Build the model that `model=` names without values, and write to the descriptor why it cannot be divided.

    That is JSON of the arguments of a ConfigError, or nothing.
    """

    model: Mapping[str, Any]
    blocks: str
    stages: int
    tp: int
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class WriteCheckpoint:
    """Fork a writer process for a checkpoint; its events go to the descriptor."""

    last: bool = True
    """Write the newest snapshot, if no checkpoint on the disk is as new; else what the first rank asks for."""


@dataclass(frozen=True)
class WriterFailed:
    """The reply of a writer process that could not do what was asked."""

    error: str


@dataclass(frozen=True)
class GetNewestState:
    """Reply with NewestState, of the run whose agents have this folder."""

    run: str


@dataclass(frozen=True)
class NewestState:
    """The step of the newest state that the memories of a run hold on this node; -1: they hold none."""

    step: int


@dataclass(frozen=True)
class SignalProcess:
    """Send a signal to a process that was forked for this agent; SIGKILL goes to its whole process group."""

    pid: int
    signal: int


@dataclass(frozen=True)
class Claim:
    """Serve the process that has the other end of the socket sent along, until that closes; reply with Claimed.

    Without a socket it only asks whether the server would.
    """


@dataclass(frozen=True)
class Claimed:
    """Whether the server serves this process: not if it serves another one, or a file that it imported has changed."""

    ok: bool


@dataclass(frozen=True)
class BeginRun:
    """Make the folder of a run, with a link to the server, and remove it when the claim ends.

    A server that stays does so for `keep_s` seconds afterwards, and no longer than the process `guard`; 0: none.
    """

    folder: str
    keep_s: float
    guard: int = 0


@dataclass(frozen=True)
class ImportModules:
    """Import these modules before the next fork, and reply with Warm."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class Warm:
    """The fork server has imported the modules that ranks need."""

    failed: Mapping[str, str] = field(default_factory=dict)
    """Modules that could not be imported, each with the error."""
    cuda: bool = False
    """A module has initialised CUDA, which no fork survives."""
    pid: int = 0
    """Of the fork server."""


@dataclass(frozen=True)
class Ping:
    """Reply with Pong."""


@dataclass(frozen=True)
class Pong:
    """The fork server handles messages."""


@dataclass(frozen=True)
class Forked:
    """A process was forked."""

    pid: int
    serial: int = 0
    """Its number among the forks of this server: the kernel uses pids again."""


@dataclass(frozen=True)
class Busy:
    """The fork server imports modules, or looks whether their files have changed, before it handles messages again."""


@dataclass(frozen=True)
class StoreOpened:
    """What the process of a store writes to the descriptor that came with OpenStore: its port, or why it has none."""

    port: int = 0
    secret: str = ""
    error: str = ""


@dataclass(frozen=True)
class Ended:
    """A process that was forked for this agent has ended."""

    pid: int
    code: int
    signal: int
    at: float
    serial: int = 0
    """As in Forked."""


@dataclass(frozen=True)
class InFile:
    """The message is in the file whose descriptor comes last: it is larger than PACKET."""


@dataclass(frozen=True)
class Failed:
    """A request could not be carried out."""

    error: str


ShardsRequest = ListShards | WriteShards | CommitShards | DropShards
"""What an agent passes on to a writer process, and the replies of that process."""
ShardsReply = HeldShards | WrittenShards | SavedShards | UnseenShards | WriterFailed
ServerMessage = (
    Claim | BeginRun | ImportModules | RankSpec | ProgramSpec | OpenStore | WriteCheckpoint | ShardsRequest
    | SignalProcess | InFile | Ping | LookAtModel | GetNewestState
)  # fmt: skip
ServerReply = Claimed | Warm | Forked | StoreOpened | Failed | Pong | NewestState | Busy


# --- agent <-> rank


@dataclass(frozen=True)
class TellActivity:
    """Reply with the stacks and the last collectives."""


@dataclass(frozen=True)
class Activity:
    """What the rank does at this moment."""

    stack: str
    """The stacks of all its threads, in faulthandler's format."""
    collectives: Sequence[Collective]
    """The last entries of torch's flight recorder, the oldest first."""


@dataclass(frozen=True)
class Holding:
    """The rank stands still after this step, until it gets StopAfter or ReleaseRank."""

    step: int


RankMessage = TellActivity | HoldRank | StopAfter | ReleaseRank
RankReply = Activity | Holding

_BY_NAME: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Claim, Claimed, BeginRun, ImportModules, Warm, RankSpec, ProgramSpec, OpenStore, WriteCheckpoint, SignalProcess,
        LookAtModel, GetNewestState, NewestState,
        Forked, StoreOpened, Ended, Busy, InFile, Failed, Ping, Pong,
        TellActivity, HoldRank, StopAfter, Activity, Holding,
        ListShards, WriteShards, CommitShards, DropShards, ReleaseRank,
        HeldShards, WrittenShards, SavedShards, UnseenShards, WriterFailed,
    )
}  # fmt: skip
Message = ServerMessage | ServerReply | Ended | RankMessage | RankReply | ShardsReply


def encode(message: Message) -> bytes:
    """A message as one line of JSON, without the newline."""
    return json.dumps({TAG: type(message).__name__, **vars(message)}, default=str).encode()


def decode(data: bytes) -> Message:
    """The message of a line of `encode`. ValueError: it is no message."""
    return from_json(json.loads(data))


def numbered(number: int, packet: bytes) -> bytes:
    """A packet with the number of a request before it. The reply has the same number."""
    return b"%d %s" % (number, packet)


def split_number(packet: bytes) -> tuple[int, bytes]:
    """The number of the request that a packet is, or replies to (0: of none), and the message."""
    number, _, message = packet.partition(b" ")
    return (int(number), message) if number.isdigit() else (0, packet)


def from_json(fields: Mapping[str, Any]) -> Message:
    """The message of parsed JSON. ValueError: it is no message."""
    try:
        kind = _BY_NAME[fields[TAG]]
        own = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items() if name != TAG}
        made: Message = kind(**own)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a message of raydist: {error}") from error
    return made
