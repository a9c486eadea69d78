"""A worker group without agents: its calls return futures that the test resolves."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from raydist.cluster import placement
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import GetNews, RankEnd, RankNews, RecordedEnd
from raydist.messages.request import Request
from raydist.network.facts import Facts
from raydist.network.variables import Rendezvous
from raydist.recovery.blame import first_cause
from raydist.recovery.policy import Retry
from raydist.recovery.supervisor import Supervisor
from raydist.settings.config import Backend, Job, Scale, Target
from raydist.shared.events import Events
from raydist.shared.kinds import Event, EventJson
from raydist.shared.outcome import End
from tests.cluster.test_placement import node
from tests.records import Seen

PATIENCE_S = 10.0
"""Maximum wait for something that takes no time."""


def job(ranks: int = 2) -> Job:
    return Job(job=Target("digits"), backend=Backend("gloo"), scale=Scale(nodes=ranks, per_node=1))


class FakeGroup:
    """A worker group that notes each request.

    GetNews stays open until the test answers it. `replies` answers other requests; those without an
    entry stay open.
    """

    def __init__(
        self,
        ranks: int = 2,
        replies: Mapping[type[Any], Callable[[int], Any]] | None = None,
        reserve: Any = None,
    ) -> None:
        there = [node(i) for i in range(1, ranks + 1)]
        self.plan = placement.assign_ranks(placement.resources_for(job(ranks), there), there)
        self.hosts = self
        """The group stands in for its hosts too."""
        self.rendezvous, self.standby, self.first_world_size = Rendezvous(), reserve, ranks
        self.facts: tuple[Facts, ...] = ()
        self.replies = dict(replies or {})
        self.calls: list[tuple[int, Request[Any]]] = []
        self.stops: list[tuple[list[int], float]] = []
        self.settled = 0
        self.cut: set[str] = set()
        """Nodes that accept no connection."""
        self.left_out: set[str] = set()
        """Nodes that get no ranks for the moment."""
        self.connecting, self.reconnect = threading.Event(), threading.Event()
        """The first is set when a connection to such a node is tried; it fails once the second is
        set."""
        self.recorded: dict[int, RecordedEnd] = {}
        """How ranks ended, as recorded on their nodes."""
        self.values: dict[int, Any] = {}
        self.wanted = ""
        """The run that needs the room of this one."""
        self.away: dict[str, float] = {}
        """Nodes that are being drained, each with its deadline."""
        self.open: dict[int, queue.SimpleQueue[Future[Any]]] = {
            rank: queue.SimpleQueue() for rank in range(ranks)
        }
        self.stopped = threading.Event()

    def call(self, rank: int, request: Request[Any]) -> Future[Any]:
        reply: Future[Any] = Future()
        self.calls.append((rank, request))
        if isinstance(request, GetNews):
            self.open[rank].put(reply)
        elif type(request) in self.replies:
            reply.set_result(self.replies[type(request)](rank))
        return reply

    def stop(self, ranks: Iterable[int], grace: float, keep: Collection[int] = ()) -> None:
        self.stops.append(([*ranks], grace))
        self.stopped.set()

    def reachable(self, node_ids: Collection[str]) -> set[str]:
        if self.cut & set(node_ids):
            self.connecting.set()
            assert self.reconnect.wait(PATIENCE_S)  # as a connection to a node that is cut off
        return set(node_ids) - self.cut

    def leave_out(self, node_ids: Collection[str]) -> None:
        self.left_out |= set(node_ids)

    def recorded_end(self, rank: int) -> Future[Any]:
        reply: Future[Any] = Future()
        reply.set_result(self.recorded.get(rank))
        return reply

    def keep_value(self, rank: int, value: Any) -> None:
        self.values[rank] = value

    def wanted_by(self) -> str:
        return self.wanted

    def draining(self) -> dict[str, float]:
        return self.away

    def start_other_actors(self) -> None:
        self.settled += 1

    def recipients(self, kind: type[Any]) -> list[int]:
        """Return the ranks that got a request of this type, in order."""
        return [rank for rank, request in self.calls if isinstance(request, kind)]


class Trial:
    """A supervisor in a separate thread, with ranks that the test plays."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 2,
        retry: Retry | None = None,
        script: str = "",
        **group: Any,
    ) -> None:
        self.group = FakeGroup(ranks, **group)
        self.logs = folder / "logs"
        self.seen = Seen()
        self.events = Events(folder / "events.jsonl", (self.seen,))
        settings = replace(job(ranks), script=script)
        self.supervisor = Supervisor(
            cast("WorkerGroup", self.group), self.events, self.logs, settings, retry
        )
        self.ahead: dict[int, float] = {}
        """Seconds by which the clock of a rank's node is ahead of the driver's, by rank."""
        self._ends: list[End] = []
        self._thread = threading.Thread(
            target=lambda: self._ends.extend(self.supervisor.run()), daemon=True
        )

    def __enter__(self) -> Trial:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.events.__exit__()

    def now(self, rank: int) -> float:
        """Return the time on the clock of this rank's node, in seconds since the epoch."""
        return time.time() + self.ahead.get(rank, 0.0)

    def answer(
        self,
        rank: int,
        *events: Event,
        step: int = 0,
        quiet: float = 0.0,
        within_s: float = PATIENCE_S,
        **more: Any,
    ) -> None:
        """Answer the open call to the agent of this rank. Raises queue.Empty if none arrives within
        `within_s`."""
        now = self.now(rank)
        news = RankNews(
            [each.to_json() for each in events],
            b"",
            b"",
            (step, "forward", now),
            quiet,
            (0, 0.0, 0.0),
            0.0,
            sent=now,
        )
        self.group.open[rank].get(timeout=within_s).set_result(replace(news, **more))

    def end(
        self, rank: int, *events: Event, code: int = 0, signum: int = 0, step: int = 0, **more: Any
    ) -> None:
        """Answer the open call to the agent of this rank: its process has ended."""
        stopped = any(rank in ranks for ranks, _ in self.group.stops)
        end = RankEnd(
            code, signum, self.now(rank), step=step, phase="forward", stop_requested=stopped
        )
        self.answer(rank, *events, step=step, end=replace(end, **more))

    def fail(self, rank: int, error: Exception) -> None:
        """Let the open call to the agent of this rank fail."""
        self.group.open[rank].get(timeout=PATIENCE_S).set_exception(error)

    def stopped(self) -> tuple[list[int], float]:
        """Wait for the next stop; return its ranks and its grace period."""
        assert self.group.stopped.wait(PATIENCE_S), "no stop was sent"
        self.group.stopped.clear()
        return self.group.stops[-1]

    def ends(self) -> Sequence[End]:
        """Wait for the supervisor to return, and return the ends."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the supervisor still waits"
        return self._ends

    def cause(self) -> End:
        """Return the end of the rank that failed first."""
        first = first_cause(self._ends)
        assert first is not None, "no rank failed"
        return first

    def kinds(self, *kinds: str) -> list[EventJson]:
        """Return the events of these kinds, in order."""
        return self.seen.kind(*kinds)
