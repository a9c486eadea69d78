"""The open call to each agent; agents that do not answer, and what their nodes know. (driver)"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import GetNews, RankNews, RecordedEnd
from raydist.recovery import deadlines
from raydist.recovery.clocks import Clocks
from raydist.recovery.cut_monitor import CutMonitor, NodesCut
from raydist.recovery.silences import Silences
from raydist.shared import kinds
from raydist.shared.events import Events


@dataclass(frozen=True)
class AgentAnswer:
    """The reply to the call that was open to the agent of a rank."""

    rank: int
    news: Future[RankNews]


@dataclass(frozen=True)
class NodeAnswer:
    """What the node of a silent agent knows about the end of its rank."""

    rank: int
    found: Future[RecordedEnd | None]


@dataclass(frozen=True)
class ReachableNodes:
    """The ids of those nodes of silent agents whose kernels answer."""

    nodes: frozenset[str]


class AgentCalls:
    """The calls to the agents of one attempt. What comes back is posted to the supervisor."""

    def __init__(
        self,
        group: WorkerGroup,
        events: Events,
        post: Callable[[AgentAnswer | NodeAnswer | ReachableNodes | NodesCut], None],
        restarts: bool = False,
    ) -> None:
        """`restarts`: whether the run may continue after the loss of a node."""
        self._group = group
        self._events = events
        self._post = post
        self._silences = Silences(deadlines.agent_limit(group.plan.world_size))
        self.cuts = CutMonitor(group, post, restarts)
        self._clocks = Clocks()
        self._answer_times: dict[int, float] = {}
        """When the agent of each rank last answered, in seconds since the epoch."""
        self._asked_nodes: dict[int, float] = {}
        """When the node of each silent agent got its request, on the monotonic clock."""
        self._reaching = False
        """Whether a thread is connecting to the nodes of silent agents."""
        self._quiet_servers = set[str]()

    @property
    def silent(self) -> Collection[int]:
        """The ranks whose agents are silent."""
        return self._silences.ranks

    def request_news(self, rank: int, running_s: float) -> None:
        """Request an agent's next news. `running_s`: seconds since all ranks have met."""
        self._silences.note_call(rank, time.monotonic())
        interval = deadlines.answer_interval(running_s, self._group.plan.world_size)
        self.cuts.note_call(rank)
        reply = self._group.call(rank, GetNews(interval))

        def receive(done: Future[RankNews]) -> None:
            self.cuts.note_answer(rank)
            self._post(AgentAnswer(rank, done))

        reply.add_done_callback(receive)

    def note(self, rank: int, news: RankNews) -> None:
        """Note that an agent has answered."""
        self._answer_times[rank] = time.time()
        self._silences.note_answer(rank)
        self._asked_nodes.pop(rank, None)
        self._note_server(rank, news.server_quiet)
        self._clocks.note(self._host(rank), news.sent, time.time())

    def note_end(self, rank: int) -> None:
        """Note that a rank has ended: its agent need not answer any more."""
        self._silences.note_answer(rank)
        self.cuts.note_answer(rank)

    def answered_at(self, rank: int) -> float | None:
        """Return when an agent last answered, in seconds since the epoch; None if it never did."""
        return self._answer_times.get(rank)

    def has_answered(self, rank: int, since: float) -> bool:
        """Return whether an agent has answered since then, on the monotonic clock."""
        return self._silences.has_answered(rank, since)

    def here(self, rank: int, at: float) -> float:
        """Return the time `at` of a rank's node on the driver's clock."""
        return self._clocks.here(self._host(rank), at)

    def report_silent(self) -> list[int]:
        """Report the agents that have not answered for too long; return their ranks, once."""
        new = self._silences.look(time.monotonic())
        for rank in new:
            text = (
                f"the agent of rank {rank} on {self._host(rank)} has not answered for "
                f"{self._silences.limit:.0f} s"
            )
            text = f"{text}: it is stopped, or its node; the training continues"
            self._events.add(kinds.Warning(rank=rank, text=text))
        return new

    def none_answers(self, running: Collection[int], some_ended: bool) -> bool:
        """Return whether no running rank's agent answers.

        The run waits longer for that if no rank has ended: all ranks may well continue.
        """
        return self._silences.ranks.issuperset(running) and (
            some_ended or self._silences.over(deadlines.UNHEARD * self._silences.limit)
        )

    def reach(self, ranks: Iterable[int]) -> None:
        """Connect to the nodes of these ranks, and post those that answer.

        In a thread: a node that is cut off takes half a second.
        """
        if self._reaching:
            return
        self._reaching = True
        nodes = frozenset(self._node(rank) for rank in ranks)

        def connect() -> None:
            found = frozenset[str]()
            with contextlib.suppress(Exception):  # Ray does not answer: the next check tries again
                found = frozenset(self._group.hosts.reachable(nodes))
            self._post(ReachableNodes(found))

        threading.Thread(target=connect, name="raydist-reach", daemon=True).start()

    def note_reachable(self) -> None:
        """Note that the thread has posted its nodes."""
        self._reaching = False

    def ask_nodes(self, nodes: Collection[str], running: Collection[int]) -> list[int]:
        """Ask these nodes whether the ranks of their silent agents have ended.

        Ray will give up the other nodes. Returns the ranks that are lost: their nodes got such a
        request, and have not answered either.
        """
        now, lost = time.monotonic(), []
        for rank in sorted(self._silences.ranks & set(running)):
            if self._node(rank) not in nodes:
                continue
            if rank not in self._asked_nodes:
                self._asked_nodes[rank] = now
                self._ask_node(rank)
            elif now - self._asked_nodes[rank] > deadlines.NODE_S:
                lost.append(rank)
        return lost

    def _ask_node(self, rank: int) -> None:
        found = self._group.recorded_end(rank)
        found.add_done_callback(lambda done: self._post(NodeAnswer(rank, done)))

    def _note_server(self, rank: int, quiet_s: float) -> None:
        """Report a fork server that does not answer, once.

        Its agent ends it if that would delay the end of a rank.
        """
        host = self._host(rank)
        if quiet_s > deadlines.AGENT_S and host not in self._quiet_servers:
            self._quiet_servers.add(host)
            text = f"the fork server of {host} has not answered for {quiet_s:.0f} s"
            self._events.warn(f"{text}: it is stopped, or waits for a disk; the training continues")

    def _node(self, rank: int) -> str:
        return self._group.plan.slots[rank].node.id

    def _host(self, rank: int) -> str:
        return self._group.plan.slots[rank].node.host
