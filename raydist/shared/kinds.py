"""The kinds of events of a run: a class for each, and their JSON. (either side)

`raydist.events` is this module. What `on_event` and `Run.events` give is an object of one of these
classes, which `match` tells apart; [events](events.md) lists them with their fields.

    from raydist import events

    match event:
        case events.Report(rank=0):
            print(event.step, event.values)
        case events.StartsAttempt():  # Restart, Regroup or Pause
            print(event.text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

C = TypeVar("C")
if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Callable[[C], C]:
        """Return its argument: only a type checker needs what it says."""
        return lambda made: made


EventJson = dict[str, Any]
"""An event as JSON: its `t`, its `kind`, and its fields."""


# dataclass(frozen=True) compiles six methods for each class: with it the import of this file took
# 55 ms of a CPU's time, without it 3 ms. A type checker sees frozen dataclasses with keyword
# arguments.
@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Frozen:
    """What a frozen dataclass has, with one `__init__` for all classes."""

    kind: ClassVar[str]
    """The `kind` in the JSON: the name of the class in lower case."""
    _fields: ClassVar[frozenset[str]] = frozenset()
    _required: ClassVar[frozenset[str]] = frozenset()
    """The fields without a default."""

    def __init_subclass__(cls) -> None:
        own = set(cls.__annotations__)
        cls.kind = cls.__dict__.get("kind", cls.__name__.lower())
        cls._fields = cls._fields | own
        cls._required = cls._required | {name for name in own if name not in cls.__dict__}

    def __init__(self, **fields: Any) -> None:
        if not self._required <= fields.keys() <= self._fields:
            missing = sorted(self._required - fields.keys())
            unknown = sorted(fields.keys() - self._fields)
            raise TypeError(f"{type(self).__name__}: missing {missing}, unknown {unknown}")
        # A default is an attribute of the class, so __dict__ is what goes into the JSON.
        self.__dict__.update({"t": time.time(), **fields})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # fields may be lists

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"


class Event(_Frozen):
    """Something that happened in a run.

    `t`: seconds since the epoch, on the driver's clock. `kind`: the class's name in the JSON.
    `to_json()` returns what events.jsonl has of it.

    A field with a default is optional: it is in the JSON if the event was made with it. A new field
    needs a default, so that the events of earlier runs are still read.
    """

    t: float = 0.0
    """Seconds since the epoch, on the driver's clock; now, if it is not given."""

    def to_json(self) -> EventJson:
        """Return the event as in events.jsonl: `t`, `kind`, and the fields given to it."""
        return {"t": self.t, "kind": self.kind, **vars(self)}


class OfRank(Event):
    """An event of one rank."""

    rank: int


class SlotJson(TypedDict):
    """Where a rank runs."""

    rank: int
    host: str
    ip: str
    node: str
    """Ray's id of the node; empty without Ray."""
    local_rank: int
    gpus: float
    """Number of GPUs."""


class SpareJson(TypedDict):
    """A node that is reserved without ranks."""

    host: str
    ip: str
    node: str


class HasSlots(Event):
    """An event that may place the ranks: `slots` are those of all ranks from now on."""

    slots: Sequence[SlotJson] = ()
    """For each rank: rank, host, ip, node, local_rank, gpus."""


class HasPlan(HasSlots):
    """An event that places all ranks."""

    slots: Sequence[SlotJson]
    backend: str
    """gloo, nccl, horovod, mpi, …"""
    world_size: int
    spares: Sequence[SpareJson] = ()
    """Nodes that are reserved without ranks: host, ip, node."""


class StartsAttempt(Event):
    """An event with which the next attempt begins: all ranks are started again, or with
    restart.in_place only those that failed."""

    number: int
    """Failures so far (`restart`), or attempts so far (`regroup`, `pause`)."""
    text: str
    """Why, on one line."""


class RankRequest(OfRank):
    """A request of a rank in the form of an event. No file and no reader gets it."""


class Run(Event):
    """The run began."""

    name: str
    dir: str
    """The run folder."""
    target: str = ""
    """The job's file or function."""
    pages: int = 0
    """Failure pages in the folder from earlier runs."""


class Cluster(Event):
    """The run is connected to Ray, or does not need it."""

    address: str
    """Of Ray; empty without Ray."""
    nodes: int = 1
    """Nodes that are alive."""
    started: bool = False
    """Whether raydist started this Ray."""
    requested: str = ""
    """Without Ray: the setting `group`."""
    job: str = ""
    """The id of the job as which the program was submitted to Ray; empty if it was not."""
    dashboard: str = ""
    """HOST:PORT of Ray's dashboard; empty if it has none, or the program itself has connected."""


class Wait(Event):
    """The run waits for nodes, or for the installation of packages."""

    text: str


class Plan(HasPlan):
    """Every rank has a slot."""


class Avoid(Event):
    """A node with incidents was left out, or there was no room to do so."""

    node: str
    """Ray's id of the node."""
    avoided: bool
    text: str


class Phase(Event):
    """A phase of the launch ended."""

    name: str
    """queue, connect, place, actors, warm-up, rendezvous, first step."""
    s: float
    """Seconds that it took."""


class Warning(Event):
    """A warning."""

    text: str
    rank: int | None = None
    """The rank that warns; None: the driver."""


class Track(Event):
    """A tracker records the run."""

    text: str
    """Its name, and where to find the run there."""


class Began(OfRank):
    """The process of a rank was started."""

    host: str
    pid: int


class Joined(OfRank):
    """A rank joined the process group."""

    pid: int


class Begin(OfRank):
    """A training loop began."""

    steps: int | None = None
    """Steps of the whole training."""
    epochs: int | None = None
    samples: int | None = None
    """Samples of an epoch, if they can be counted."""
    resumed: int | None = None
    """The step that it continues from; None: a new start."""
    checkpoint: str = ""
    """The newest checkpoint when the attempt began; empty: none. The state in memory may be newer.
    """
    fit: int | None = None
    """2 in the second `raydist.fit` of a job, and so on; None in the first, and outside of one."""


class Report(OfRank):
    """A job called `raydist.report`. In a long run the file does not have every report."""

    values: Mapping[str, Any]
    """What it reported, by name."""
    step: int | None = None
    kept: int | None = None
    """The newest step that a snapshot in memory has."""
    fit: int | None = None
    """2 during and after the second `raydist.fit` of a job, and so on; None before it."""
    samples_hash: str | None = None
    """With `train.check_resume`, a checksum of the samples of this step: of their indices, on all
    ranks; of a stream or a loader, of what rank 0 has read."""


class Recalled(OfRank):
    """A resumed run has what rank 0 had reported when its state was saved."""

    step: int
    values: Mapping[str, Any]


class Spent(OfRank):
    """An evaluation or a save ended."""

    what: str
    """evaluate, save."""
    s: float
    """Seconds that it took."""


class Saved(OfRank):
    """A checkpoint is complete on the disk or in the store."""

    step: int
    path: str = ""
    s: float = 0.0
    """Seconds that it took."""


class Raised(OfRank):
    """The job raised an exception."""

    type: str
    message: str
    traceback: str = ""
    step: int = 0
    """The last step that the rank reported."""
    code: int = 0
    """The exit code, if the job called `sys.exit` with one."""


class Done(OfRank):
    """The training loop of a rank ended."""

    spent: Mapping[str, float] | None = None
    """Seconds by activity: step, evaluate, save. `step` is without the first step, which is a part
    of the launch."""
    samples: int = 0
    """Samples of all ranks after the first step."""


class Left(OfRank):
    """A rank stopped after the step that all ranks had agreed on."""

    step: int


class Held(OfRank):
    """A rank waits at a `breakpoint()` for a person: `raydist debug rank=N`."""

    file: str
    line: int
    function: str = ""


class Released(OfRank):
    """A rank that waited in the debugger continues."""


class Changed(OfRank):
    """Settings were changed in the run (`raydist set`): all ranks continue with other values."""

    step: int
    """The step after which."""
    before: Mapping[str, float | int | None]
    """By name: the values until then."""
    after: Mapping[str, float | int | None]
    """By name: the new values."""


class Profiled(OfRank):
    """A rank has written its part of a profile (`raydist profile`), or could not."""

    name: str
    """The profile, unique in the run."""
    path: str = ""
    """Its trace, on its node until the driver has it; empty: there is none."""
    memory: str = ""
    """The snapshot of its GPU memory there; empty: there is none."""
    error: str = ""
    """Why there is no trace."""


class Save(RankRequest):
    """Rank 0 has put a state into memory that is to be written to the disk."""

    kept: bool = False
    """Whether the ranks keep this state in memory besides: a restart needs no checkpoint of it."""


class SaveShards(RankRequest):
    """All ranks have put a sharded state into memory that is to be written to the disk."""

    kind = "save_shards"
    step: int
    folder: str
    keep: int
    best: str | None
    metrics: Mapping[str, float]
    reported: Mapping[str, Any]
    kept: bool = False
    """As for `Save`."""


class MeetRequest(RankRequest):
    """A rank is ready to be connected to all others: the driver sends each the contacts of all."""

    kind = "meet_request"
    number: int
    """The attempt."""
    contact: str
    """How others reach this rank: its handle and the addresses where it listens, as JSON."""


class Ended(OfRank):
    """The process of a rank ended."""

    how: str = ""
    """finished, stopped, raised, exited, killed, hung, lost, drained, ended (by mpirun):
    `End.how`."""
    code: int = 0
    """The exit code; 0 if it was killed."""
    signal: int = 0
    """The signal that killed it, or 0."""
    step: int = 0
    """The last step that it reported."""


class Output(OfRank):
    """A rank printed something. Only live readers get it: the file is logs/rank-N.log."""

    output: bytes


class Hang(Event):
    """Ranks are silent."""

    text: str
    """Which ranks they wait for."""
    ranks: Sequence[int]
    """The ranks that the others wait for."""
    certain: bool
    """Whether these are the cause."""
    s: float
    """Seconds without a sign of the ranks."""
    notes: Sequence[str] = ()
    """What further witnesses say, a line each."""


class SlowRank(TypedDict, total=False):
    """A rank that slows the others: by its own work, or by its garbage collector."""

    rank: int
    host: str
    own_s: float
    """Seconds of its own work in a step."""
    others_s: float
    """The median of the others."""
    step_s: float
    """Seconds of a step."""
    share: float
    """The fraction of a step in which the others wait for it."""
    pauses: float
    """The fraction of its time in which Python's garbage collector pauses it."""


class Slow(Event):
    """Ranks are slow."""

    text: str
    ranks: Sequence[SlowRank]
    """For each slow rank: rank, host, and own_s, others_s, step_s, share, or pauses."""


class Pace(Event):
    """The pace of the ranks, about every 10 s, less often in a large run."""

    ranks: Mapping[str, Sequence[float]]
    """By rank: [newest step, seconds of its own work in a step, seconds of a step]."""


class Nodes(Event):
    """The load of the nodes, about every 10 s, less often in a large run."""

    nodes: Mapping[str, Mapping[str, Any]]
    """By host: cpu, memory, gpus, ports (`messages.agent.NodeLoad`)."""


class Work(Event):
    """The work of the ranks, at the end of an attempt."""

    ranks: Mapping[str, Sequence[float]]
    """By rank: [seconds of its own work in a step, seconds of a step]."""


class Network(Event):
    """What carried the traffic between the nodes."""

    text: str
    """From the ports' counters and NCCL's log."""
    nodes: Sequence[Mapping[str, Any]]
    """For each node: host, sent (bytes by port), rate (GB/s of the ports that carried the run),
    ports (their number), gpus (of the machine; 0: unknown)."""


class Notice(Event):
    """Nodes will be taken away."""

    text: str
    ranks: Sequence[int]
    hosts: Sequence[str]
    s: float | None
    """Seconds until then; None: unknown."""


class Stop(Event):
    """The other ranks are being ended."""

    reason: str
    """For a person."""
    cause: str = ""
    """failure, signal, hang, …: `recovery.deadlines.StopReason`."""


class Failure(Event):
    """All ranks have ended, because this rank did."""

    cause: Mapping[str, Any]
    """How the rank that failed first ended: the fields of `End`."""
    text: str
    """What failed, on several lines."""
    reason: str
    """Why this rank is the first cause."""
    reached: int
    """The last step that any rank reported."""
    others: Sequence[Mapping[str, Any]]
    """The other ranks that failed: rank, host, how, step, words."""
    ended: float = 0.0
    """When the last rank ended, in seconds since the epoch."""
    attempt: int = 0
    """Attempts before it."""


class Restart(StartsAttempt):
    """The next attempt begins, because of a failure."""

    most: int | None = None
    """`restart.max`."""
    rank: int = 0
    """The rank that failed; the next fields are of this rank."""
    host: str = ""
    how: str = ""
    step: int = 0
    free: bool = False
    """Whether the cluster took its node away: this does not count towards `restart.max`."""


class Regroup(StartsAttempt):
    """The next attempt begins, because the number of nodes changes."""


class Pause(StartsAttempt):
    """The run has made way for another one, and waits in the queue for its next attempt."""


class Placed(HasSlots):
    """Every rank has a slot for the attempt."""

    number: int
    """Attempts before it."""
    moved: Sequence[int] = ()
    """The ranks that changed slots."""


class Restarted(Event):
    """The first step of the next attempt is done, or a program that never reported one runs."""

    number: int
    """Failures so far."""
    step: int
    """That step; 0: the program has reported none."""
    s: float
    """Seconds since the failure."""
    repeated: int
    """Steps that were lost."""
    resized: bool = False
    """Whether only the number of nodes changed: nothing had failed."""
    paused: bool = False
    """Whether the run had made way for another one: nothing had failed."""
    kept: Sequence[int] = ()
    """The ranks that kept their processes (`restart.in_place`)."""
    why_not_kept: str = ""
    """Why ranks were started anew that had not failed, although `restart.in_place` is set."""


class Checked(Event):
    """The first steps after a restart or a resume were compared (`train.check_resume`)."""

    text: str
    """What came of it, on one line."""
    resumed: int
    """The step that the training continued from."""
    steps: int
    """The number of steps that were compared; 0: none was recorded before."""
    differs: int | None = None
    """The first step that was not as before; None: all were."""
    what: str | None = None
    """What differed in that step: samples, or else loss."""


class Resize(HasPlan):
    """The run continues with another number of nodes."""

    nodes: int
    before: int
    """The number of nodes until now."""


class Takeover(HasPlan):
    """A spare node takes over the ranks of another one."""

    node: str
    host: str
    ip: str
    instead: str
    """The id of the other node."""
    of: str
    """The host name of the other node."""


class Operated(Event):
    """A person has looked into the run or steered it: `raydist stacks`, `save`, …"""

    command: str
    """stacks, save, …: the name of the command."""
    text: str
    """What came of it, on one line."""
    ranks: Sequence[int] = ()
    """The ranks that were named; empty: all."""
    file: str = ""
    """The file in the run folder with the whole answer; empty: none."""


class Result(Event):
    """The run ended, with the content of result.json. Lines about trackers and about the upload of
    the records may follow."""

    status: str
    """finished, failed, stopped."""
    dir: str = ""
    world_size: int = 0
    metrics: Mapping[str, Any] = {}
    launch: Mapping[str, float] = {}
    """Seconds of each phase."""
    wall_s: float = 0.0
    goodput: float = 0.0
    spent: Mapping[str, float] = {}
    """Seconds of each part of the run."""
    recovery: Mapping[str, float] = {}
    """Seconds of each part of the recoveries."""
    throughput: float | None = None
    """Samples per second."""
    checkpoint: str | None = None
    warnings: Sequence[str] = ()
    network: str = ""
    work: Mapping[str, Sequence[float]] = {}
    """As in the event `work`."""
    slow: Mapping[str, Any] = {}
    """As the last event `slow`."""
    signal: int = 0
    """The signal that stopped the run, or 0."""
    error: str = ""
    """The type of an error that came from outside of the ranks."""
    failure: str = ""
    """The text of the last failure."""
    cause: Mapping[str, Any] | None = None
    """As in the event `failure`."""
    restarts: Sequence[Mapping[str, Any]] = ()
    """The causes of earlier attempts."""
    why_last: str = ""
    """Why the run was not restarted."""


class Other(Event):
    """An event of a newer or older raydist, which this one does not know or which lacks fields."""


def leaves(of: type[Event]) -> list[type[Event]]:
    """Return the classes without subclasses below a class, in the order of the file."""
    below = of.__subclasses__()
    return [leaf for each in below for leaf in leaves(each)] if below else [of]


KINDS = {each.kind: each for each in leaves(Event) if each is not Other}
"""The class of each kind."""


def from_json(fields: Mapping[str, Any]) -> Event:
    """Return the event of a line of events.jsonl, parsed: a dict with `t` and `kind`.

    An unknown kind, or one that lacks a field, gives an `Other`: a newer or older raydist wrote it.
    Unknown fields are kept for `to_json`.

        [events.from_json(json.loads(line)) for line in open("events.jsonl")]
    """
    kind = KINDS.get(fields["kind"], Other)
    if not kind._required <= fields.keys():
        kind = Other
    made = kind.__new__(kind)
    vars(made).update(fields)
    if kind is not Other:
        del vars(made)["kind"]
    return made
