"""Agent and fork server: fork, signal and watch processes. (either side)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raydist.messages.request import Request
from raydist.messages.wire import Message

StoreKind = Literal["tcp", "horovod"]


class ServerMessage(Message):
    """A message to a fork server."""


class ServerReply(Message):
    """A reply of a fork server."""


@dataclass(frozen=True)
class RankSpec(ServerMessage):
    """Everything that a process needs to become a rank."""

    rank: int
    env: dict[str, str]
    job: str
    argv: tuple[str, ...]
    script: str
    cwd: str
    sys_path: tuple[str, ...]
    value: str
    """The file for the return value. Next to it are `.error`, `.stacks` and `.spec`."""
    call: str | None = None
    """The file of the pickled function, if the job is a function."""
    cpus: tuple[int, ...] | None = None
    """The CPUs to which the rank is bound, by raydist or by mpirun; None: it is not bound."""
    saving: bool = False
    """As in StartRank."""


@dataclass(frozen=True)
class ProgramSpec(ServerMessage):
    """A program of mpirun that runs as a child of the fork server."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


@dataclass(frozen=True)
class CommandSpec(ServerMessage):
    """A command that a person runs alongside a rank.

    Its descriptors: standard output, standard error, and standard input if it has one; or one
    terminal.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    terminal: bool = False


@dataclass(frozen=True)
class LookAtModel(ServerMessage):
    """Build the model that `model=` names, without values, to check that it can be divided.

    The descriptor gets the arguments of a ConfigError as JSON; nothing if the model can be divided.
    """

    model: Mapping[str, Any]
    blocks: str
    stages: int
    tp: int
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class WriteCheckpoint(ServerMessage):
    """Fork a writer process for a checkpoint; the descriptor gets its events."""

    last: bool = True
    """Whether to write the newest snapshot, unless a checkpoint on the disk is as new. If not, the
    writer writes what the first rank requests."""
    step: int = -1
    """As in Flush."""
    random: Sequence[str] = ()
    """As in Flush."""


@dataclass(frozen=True)
class KeptSteps(ServerReply):
    """The steps whose state a node can save with the random generators of all its ranks."""

    steps: Sequence[int]


@dataclass(frozen=True)
class ListSteps(Request[KeptSteps], ServerMessage):
    """Reply with the KeptSteps of this node. The agent forwards the request to the fork server."""

    ranks: int
    """The number of ranks on the node. There may be more memories, left by an earlier attempt."""


@dataclass(frozen=True)
class GetNewestState(ServerMessage):
    """Reply with the NewestState of the run whose agents have this folder."""

    run: str


@dataclass(frozen=True)
class NewestState(ServerReply):
    """The step of the newest state of a run in memory on this node; -1: there is none."""

    step: int


@dataclass(frozen=True)
class HoldStates(Request[None], ServerMessage):
    """Hold the states of this run in memory when its agents have gone, for its next placement.

    Without a KeepStates they are held for a minute. The agent forwards the message.
    """

    key: str
    """The name of these states."""


@dataclass(frozen=True)
class KeepStates(ServerMessage):
    """Hold these states until this connection closes.

    The server closes it itself once it does not hold them any more.
    """

    key: str


@dataclass(frozen=True)
class FindStates(ServerMessage):
    """Reply with StatesFound."""

    key: str


@dataclass(frozen=True)
class StatesFound(ServerReply):
    """Whether the server holds these states."""

    ok: bool


@dataclass(frozen=True)
class SignalProcess(ServerMessage):
    """Send a signal to a process that was forked for this agent.

    SIGKILL goes to its whole process group; with `group` any signal.
    """

    pid: int
    signal: int
    group: bool = False


@dataclass(frozen=True)
class Claim(ServerMessage):
    """Serve the process at the other end of the passed socket until it closes; reply with Claimed.

    Without a socket the server only replies whether it would do so.
    """


@dataclass(frozen=True)
class Claimed(ServerReply):
    """Whether the server serves this process.

    It does not if it already serves another one, or if a file that it has imported has changed.
    """

    ok: bool


@dataclass(frozen=True)
class BeginRun(ServerMessage):
    """Create the folder of a run, with a link to the server, and remove it when the claim ends.

    A persistent server then waits `keep_s` seconds for the next claim, but ends when the process
    `guard` does (0: no such process).
    """

    folder: str
    keep_s: float
    guard: int = 0


@dataclass(frozen=True)
class ImportModules(ServerMessage):
    """Import these modules before the next fork, and reply with Warm."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class Warm(ServerReply):
    """The fork server has imported the modules that ranks need."""

    failed: Mapping[str, str] = field(default_factory=dict)
    """Modules that could not be imported, each with the error."""
    cuda: bool = False
    """Whether a module has initialised CUDA, which does not work in a forked process."""
    pid: int = 0
    """The pid of the fork server."""
    rank_readers: Sequence[str] = ()
    """Modules that have read, while they were imported, which rank they are in."""


@dataclass(frozen=True)
class Ping(ServerMessage):
    """Reply with Pong."""


@dataclass(frozen=True)
class Pong(ServerReply):
    """The fork server is handling messages."""


@dataclass(frozen=True)
class Forked(ServerReply):
    """A process was forked."""

    pid: int
    serial: int = 0
    """Its number among the forks of this server, because the kernel reuses pids."""


@dataclass(frozen=True)
class Busy(ServerReply):
    """The fork server is importing modules or checking whether their files have changed.

    It handles messages again after that.
    """


@dataclass(frozen=True)
class StoreOpened(ServerReply):
    """What the process of a store writes to OpenStore's descriptor: its port, or an error."""

    port: int = 0
    secret: str = ""
    error: str = ""


@dataclass(frozen=True)
class Ended(Message):
    """A process that was forked for this agent has ended."""

    pid: int
    code: int
    signal: int
    at: float
    serial: int = 0
    """As in Forked."""


@dataclass(frozen=True)
class InFile(ServerMessage):
    """The message is larger than PACKET, and therefore in the file of the last descriptor."""


@dataclass(frozen=True)
class Failed(ServerReply):
    """A request could not be carried out."""

    error: str


@dataclass(frozen=True)
class StoreAddress:
    """The address of the rendezvous store of an attempt, on rank 0's node."""

    port: int
    secret: str
    """The secret of Horovod's store; empty for a TCPStore."""


@dataclass(frozen=True)
class OpenStore(Request[StoreAddress], ServerMessage):
    """Replace the rendezvous store by a new one. The agent forwards this to the fork server."""

    kind: StoreKind
    address: str
