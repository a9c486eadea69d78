"""The entry of a run in the queue, for the other runs: size, priority, state; as JSON. (pure)"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from raydist.cluster.nodes import ResourceRequest
from raydist.cluster.queue.stop_cost import StopCost

VERSION = 3
"""Version of the JSON. An entry of another version is ignored, as a run outside the queue is."""
WAITING, PLACING, RUNNING, LEAVING = "waiting", "placing", "running", "leaving"
PAUSE, RESUME, CANCEL, MOVE = "pause", "resume", "cancel", "move"


@dataclass(frozen=True)
class Demand:
    """The bundles of a run's placement group. All are placed at once, or none."""

    bundles: int
    bundle: Mapping[str, float]
    """Resources of one bundle."""
    strategy: str
    """Of the placement group: STRICT_SPREAD, STRICT_PACK, PACK or SPREAD."""
    selector: Mapping[str, str]
    """Ray label selector of every bundle."""

    @classmethod
    def of(cls, request: ResourceRequest) -> Demand:
        """Return the demand of a run's request."""
        return cls(
            len(request.bundles), request.bundles[0], request.strategy, dict(request.selector)
        )

    def as_request(self) -> ResourceRequest:
        """Return a request for the same bundles, of one rank each."""
        return ResourceRequest(
            backend="",
            world_size=self.bundles,
            bundles=(self.bundle,) * self.bundles,
            ranks_per_bundle=1,
            strategy=self.strategy,
            rank_resources=self.bundle,
            selector=self.selector,
        )


@dataclass(frozen=True)
class Entry:
    """A run in the queue. Its own driver alone writes it."""

    id: str
    """The id of the driver's Ray job, a slash, and a text that is unique among the job's runs. Of a
    run in an actor, another slash and the actor's id: it may end before the job."""
    name: str
    folder: str
    owner: str
    """user@host of the driver."""
    priority: int
    since: float
    """When the run entered the queue for the first time, in seconds since the epoch."""
    exempt_s: float
    """Seconds after `placed` in which it does not make way."""
    yields: bool
    """Whether it makes way for runs of higher priority."""
    demand: Demand
    limit_s: float = 0.0
    """Seconds after `placed` after which it also makes way for runs of equal priority; 0: never."""
    state: str = WAITING
    """waiting; placing: its placement group exists, maybe without room; running; leaving: it was
    asked to make way, and will wait again."""
    placed: float = 0.0
    """When it was placed, in seconds since the epoch, while it is running or leaving."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Node id -> number of its bundles there, while it is running or leaving."""
    paused_by: str = ""
    """Who has paused it (user@host): it waits until it is resumed. Empty: nobody."""
    spare: tuple[str, ...] = ()
    """Ids of the nodes that it can give up one by one and go on (queue.shrink)."""
    stop: StopCost = field(default_factory=StopCost)
    """What it loses if it makes way."""
    outside: bool = False
    """Whether it lacks room that no run in the queue holds. Meanwhile it holds nobody back."""
    beat: int = 0
    """Grows every second while the driver is alive and not stopped."""

    @property
    def in_line(self) -> bool:
        """Whether it waits for room."""
        return self.state in (WAITING, PLACING) and not self.paused_by

    @property
    def job(self) -> str:
        """The id of its driver's Ray job."""
        return maker_of(self.id)[0]

    @property
    def has_room(self) -> bool:
        """Whether it holds nodes."""
        return self.state in (RUNNING, LEAVING)

    @property
    def ends(self) -> float:
        """When its limit ends, in seconds since the epoch; infinity without a limit."""
        return self.placed + self.limit_s if self.limit_s else inf

    def makes_way_for(self, other: Entry, now: float) -> bool:
        """Return whether this run, which has room, makes way for that one if asked."""
        if now >= self.ends:
            return other.priority >= self.priority
        if not self.yields or now - self.placed < self.exempt_s:
            return False
        return other.priority > self.priority

    @property
    def order(self) -> tuple[int, float, str]:
        """The key by which the queue is sorted: priority, then time; the id settles a tie."""
        return -self.priority, self.since, self.id

    def to_json(self) -> bytes:
        """Return the entry for the store."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode()


@dataclass(frozen=True)
class WayRequest:
    """What the driver of a waiting run asks of one that has room."""

    for_whom: str
    """The run that needs the room, for a person, with the reason for the choice."""
    nodes: tuple[str, ...] = ()
    """Ids of the nodes that it is to give up; empty: all, it is to leave."""

    def to_json(self) -> bytes:
        """Return the request for the store."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Instruction:
    """What a person wants of a run in the queue: `raydist queue pause`. Its driver removes it."""

    act: str
    """pause, resume, cancel or move."""
    by: str
    """user@host of the person."""
    priority: int = 0
    """The new priority, for move."""

    def to_json(self) -> bytes:
        """Return the instruction for the store."""
        return json.dumps(asdict(self)).encode()


def maker_of(id: str) -> tuple[str, str]:
    """Return the Ray job of the entry with this id, and the actor in that job; empty for none."""
    job, _, rest = id.partition("/")
    return job, rest.partition("/")[2]


def read_entry(value: bytes) -> Entry | None:
    """Return the entry in a value of the store; None if another version of raydist wrote it."""
    try:
        plain: dict[str, Any] = json.loads(value)
        if plain.pop("version") != VERSION:
            return None
        parts = {
            "demand": Demand(**plain["demand"]),
            "stop": StopCost(**plain["stop"]),
            "spare": tuple(plain["spare"]),
        }
        return Entry(**{**plain, **parts})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_request(value: bytes) -> WayRequest:
    """Return the request in a value of the store."""
    plain = json.loads(value)
    return WayRequest(plain["for_whom"], tuple(plain["nodes"]))
