"""Receives messages of all ranks until each ends; stops the others once one has failed. (driver)"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from raydist.cluster.drain import DrainNotice
from raydist.launch.vitals import Pace, Vitals
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import GetNews, RankEnd, RankNews, RecordedEnd
from raydist.recovery import classify, deadlines, straggler
from raydist.recovery.arrival import Arrival, RestartCost
from raydist.recovery.classify import AttemptRecord, RankRecord
from raydist.recovery.clocks import Clocks
from raydist.recovery.deadlines import Deadlines, Stop
from raydist.recovery.drain_monitor import DrainMonitor
from raydist.recovery.hang import HangMonitor
from raydist.recovery.hang_verdict import ConfirmedHang
from raydist.recovery.policy import Retry
from raydist.recovery.quiesce import Quiesce
from raydist.recovery.rank_logs import RankLogs
from raydist.recovery.resize import NodesJoined, ResizeMonitor
from raydist.recovery.silences import Silences
from raydist.recovery.straggler import Pauses, Stragglers
from raydist.settings.config import Job
from raydist.shared import kinds, signals
from raydist.shared.errors import Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import EventJson
from raydist.shared.outcome import End, Slow, StopReason


@dataclass(frozen=True)
class NodeAnswer:
    """What the node of a silent agent knows about the end of its rank."""

    rank: int
    found: Future[RecordedEnd | None]


@dataclass(frozen=True)
class ReachableNodes:
    """The ids of those nodes of silent agents that accept connections."""

    nodes: frozenset[str]


Message = (
    tuple[int, "Future[RankNews]"]
    | NodeAnswer
    | ReachableNodes
    | Stopped
    | ConfirmedHang
    | DrainNotice
    | NodesJoined
)
"""What the supervisor receives: the reply of an agent with its rank, or of a node, a signal, or a
monitor's message."""

LOOK_S = 1.0
"""Seconds between two checks of agents that have not answered: each goes over all ranks."""
OTHERS_S = 10.0
"""Seconds after all ranks have met until the actors that host no agent are started. Each is a
process of Ray that takes most of a second of CPU, when the ranks need it most. A short run never
starts them."""


class Supervisor:
    """One attempt's monitor loop.

    Each agent has one open call, which returns when it has news; nothing is polled. The supervisor
    keeps the queue, the calls and the files; classify.py and deadlines.py decide.
    """

    def __init__(
        self, group: WorkerGroup, events: Events, logs: Path, job: Job, retry: Retry | None = None
    ) -> None:
        """`retry`: why there is this attempt, if it is not the first."""
        self.ends: dict[int, End] = {}
        self.stopped: Stopped | None = None
        self.resize = ""
        """Why the ranks were stopped to change the number of nodes, for a person; empty if they
        were not."""
        self.slow: list[Slow] = []
        """The stragglers in the latest report."""
        self._group, self._events, self._world = group, events, group.plan.world_size
        self._logs = RankLogs(logs, self._world)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        post = self._messages.put  # a signal handler may call SimpleQueue.put
        self._hangs = HangMonitor(group, job.hang, events, logs, post)
        self._sizes = ResizeMonitor(group, events, post)
        self._drains = DrainMonitor(group, post)
        self._quiesce = Quiesce(group, bool(job.script))
        self._joined: NodesJoined | None = None
        hosts = [slot.node.host for slot in group.plan.slots]
        self._stragglers, self._pauses = (
            Stragglers(hosts, job.watch.slow),
            Pauses(hosts, job.train.gc),
        )
        self._arrival = Arrival(self._world, time.time())
        self._restart = RestartCost(retry) if retry else None
        self._record = AttemptRecord()
        self._deadlines = Deadlines()
        self._raised: dict[int, kinds.Raised] = {}
        self._clocks = Clocks()
        self._all_started = False
        """Whether all actors are started."""
        self._silences = Silences(deadlines.agent_limit(self._world))
        self._look_at = 0.0
        """When agents that have not answered are checked next, on the monotonic clock."""
        self._asked_nodes: dict[int, float] = {}
        """When the node of each silent agent got its request, on the monotonic clock."""
        self._reaching = False
        """Whether a thread is connecting to the nodes of silent agents."""
        self._quiet_servers = set[str]()
        self._answered: dict[int, float] = {}
        """When the agent of each rank last answered, in seconds since the epoch."""

    def run(self) -> list[End]:
        """Return how each rank ended, by rank. A signal ends them all, and is kept in `stopped`."""
        with ExitStack() as stack:
            stack.enter_context(signals.passed_to(self._messages.put))
            stack.enter_context(self._logs)
            for rank in range(self._world):
                self._watch(rank)
            vitals = Vitals(self._events, self._pace, self._group.plan, self._group.call)
            for monitor in (self._hangs, self._drains, self._sizes, self._quiesce, vitals):
                stack.enter_context(monitor)
            while len(self.ends) < self._world:
                self._receive_next()
                if self._deadlines.left(time.monotonic()) == 0.0:
                    self._on_deadline()
                if time.monotonic() >= self._look_at:
                    self._look_at = time.monotonic() + LOOK_S
                    self._look_at_agents()
                    self._start_other_actors()
        if self._stragglers.times:
            times = sorted(self._stragglers.times.items())
            self._events.add(kinds.Work(ranks={str(rank): own[1:] for rank, own in times}))
        return [self.ends[rank] for rank in range(self._world)]

    def _receive_next(self) -> None:
        """Handle the next message, if it comes before the deadline and the next agent check."""
        left = self._deadlines.left(time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._receive(self._messages.get(timeout=LOOK_S if left is None else min(left, LOOK_S)))

    def _watch(self, rank: int) -> None:
        """Request an agent's next news."""
        running_s = time.time() - (self._arrival.met or self._arrival.began)
        self._silences.asked(rank, time.monotonic())
        reply = self._group.call(rank, GetNews(deadlines.answer_interval(running_s, self._world)))
        reply.add_done_callback(lambda done: self._messages.put((rank, done)))

    def _look_at_agents(self) -> None:
        """Report agents that do not answer.

        Once nothing else makes progress, or all other ranks have ended, determine whether their
        ranks have ended or are lost.
        """
        for rank in self._silences.look(time.monotonic()):
            text = (
                f"the agent of rank {rank} on {self._host(rank)} has not answered for "
                f"{self._silences.limit:.0f} s"
            )
            text = f"{text}: it is stopped, or its node; the training goes on"
            self._events.add(kinds.Warning(rank=rank, text=text))
            self._hangs.leave_out(rank)
        silent, running = self._silences.named, set(range(self._world)) - self.ends.keys()
        unheard = running <= silent and (
            bool(self.ends) or self._silences.over(deadlines.UNHEARD * self._silences.limit)
        )
        if silent and not self._deadlines.stopping and (unheard or self._hangs.stalled()):
            self._reach(self._node(rank) for rank in silent & running)

    def _reach(self, nodes: Iterable[str]) -> None:
        """Connect to these nodes in a thread: each node that is cut off takes half a second."""
        if self._reaching:
            return
        self._reaching = True
        asked = frozenset(nodes)

        def connect() -> None:
            found = frozenset[str]()
            with contextlib.suppress(Exception):  # Ray does not answer: the next check tries again
                found = frozenset(self._group.hosts.reachable(asked))
            self._messages.put(ReachableNodes(found))

        threading.Thread(target=connect, name="raydist-reach", daemon=True).start()

    def _on_reached(self, nodes: frozenset[str]) -> None:
        """Ask the nodes that accept connections for ranks' ends; Ray will give up the others."""
        self._reaching = False
        if self._deadlines.stopping:
            return
        for rank in sorted(self._silences.named - self.ends.keys()):
            if self._node(rank) in nodes:
                self._ask_node(rank)

    def _start_other_actors(self) -> None:
        met = self._arrival.met
        if (
            not (self._all_started or self._deadlines.stopping or met is None)
            and time.time() - met > OTHERS_S
        ):
            self._all_started = True
            self._group.hosts.start_other_actors()

    def _ask_node(self, rank: int) -> None:
        """Ask the node of a silent agent whether the agent's rank has ended.

        If the node does not know, the rank is lost.
        """
        now = time.monotonic()
        if rank not in self._asked_nodes:
            self._asked_nodes[rank] = now
            self._group.recorded_end(rank).add_done_callback(
                lambda done: self._messages.put(NodeAnswer(rank, done))
            )
        elif now - self._asked_nodes[rank] > deadlines.NODE_S:
            self._on_lost(rank)

    def _on_node_answer(self, rank: int, answer: Future[RecordedEnd | None]) -> None:
        found = answer.result() if answer.exception() is None else None
        if rank in self.ends or rank not in self._silences.named:
            return
        if found is None:
            self._on_lost(rank)
            return
        text = (
            f"rank {rank} on {self._host(rank)} has ended, as its node knows; its last events "
            "and output are lost"
        )
        self._events.add(kinds.Warning(rank=rank, text=text))
        self._group.keep_value(rank, found.value)
        self._on_end(rank, found.end, silent=True)

    def _receive(self, message: Message) -> None:
        match message:
            case Stopped():
                self.stopped = message
                self._record = replace(self._record, signalled=True)
                self._stop(Stop(StopReason.SIGNAL, str(message), deadlines.GRACE_S))
            case ConfirmedHang():
                if not self._deadlines.stopping:
                    self._record = replace(self._record, hang=message)
                    self._stop(Stop(StopReason.HANG, "ranks hang"))
            case DrainNotice():
                self._prepare(message)
            case NodesJoined():
                self._joined = message
                if self._quiesce.request():
                    self._stop_to_move()
            case ReachableNodes(nodes):
                self._on_reached(nodes)
            case NodeAnswer(rank, found):
                self._on_node_answer(rank, found)
            case (rank, reply):
                self._on_reply(rank, reply)

    def _on_reply(self, rank: int, reply: Future[RankNews]) -> None:
        try:
            news = reply.result()
        except Exception as error:
            self._on_lost(rank, error)
            return
        self._answered[rank] = time.time()
        self._silences.answered(rank)
        self._asked_nodes.pop(rank, None)
        self._note_server(rank, news.server_quiet)
        self._clocks.note(self._host(rank), news.sent, time.time())
        self._logs.append(rank, news.log, news.nccl)
        self._events.show(rank, news.log)
        for event in news.events:
            self._on_event(rank, event)
        if news.end is not None:
            self._on_end(rank, news.end)
        elif rank not in self.ends:
            if not self._deadlines.stopping:  # a rank that is about to end does not hang
                self._on_heartbeat(rank, news)
            self._watch(rank)

    def _note_server(self, rank: int, quiet_s: float) -> None:
        """Report a fork server that does not answer, once.

        Its agent ends it if that would delay the end of a rank.
        """
        host = self._host(rank)
        if quiet_s > deadlines.AGENT_S and host not in self._quiet_servers:
            self._quiet_servers.add(host)
            text = f"the fork server of {host} has not answered for {quiet_s:.0f} s"
            self._events.warn(f"{text}: it is stopped, or waits for a disk; the training goes on")

    def _on_heartbeat(self, rank: int, news: RankNews) -> None:
        self._hangs.note(rank, news.beat, news.quiet)
        if slow := self._stragglers.note(rank, news.work, time.monotonic()):
            self.slow = slow
            self._events.add(straggler.as_event(slow))
        if found := self._pauses.note(rank, news.pauses, time.monotonic()):
            self._events.add(found)

    def _pace(self) -> dict[int, Pace]:
        """Return the pace of each running rank that has made a step."""
        beats, times = self._hangs.beats(), dict(self._stragglers.times)
        steps = {rank: step or times.get(rank, (0,))[0] for rank, (step, _, _) in beats.items()}
        return {
            rank: (step, *times.get(rank, (0, 0.0, 0.0))[1:])
            for rank, step in steps.items()
            if step
        }

    def _on_event(self, rank: int, found: EventJson) -> None:
        # With a node's clock that is minutes ahead, a run of seconds would seem to take minutes.
        here = self._clocks.here(self._host(rank), found["t"])
        event = kinds.from_json({**found, "t": here})
        if isinstance(event, kinds.SaveShards):
            self._group.save_shards(event)
            return
        self._events.add(event)
        if self._quiesce.note(rank, event):
            self._stop_to_move()
        if isinstance(event, kinds.Raised):
            self._raised[rank] = event
            # The process may hang while it exits: the stop does not wait for its end.
            self._stop_within(deadlines.VICTIM_S)
        if self._restart and (cost := self._restart.add(rank, event)):
            self._events.add(cost)
        parts = self._arrival.add(event)
        for name, s in parts.items() if self._restart is None else ():
            self._events.add(kinds.Phase(name=name, s=s))

    def _on_end(self, rank: int, report: RankEnd, silent: bool = False) -> None:
        """Handle the end of a rank's process. `silent`: its agent does not answer."""
        log_tail = self._logs.tail(rank) if report.signal == signal.SIGABRT else ""
        report = replace(report, at=self._clocks.here(self._host(rank), report.at))
        end = classify.classify_end(report, self._known(rank), self._record, log_tail)
        self._ended(replace(end, silent=silent))

    def _on_lost(self, rank: int, error: BaseException | None = None) -> None:
        """Handle the loss of a rank's agent.

        `error`: of the call to the agent; None if the agent did not answer in time.
        """
        host, interval = self._host(rank), deadlines.longest_interval(self._world)
        at = classify.lost_at(
            host,
            self.ends.values(),
            self._answered.get(rank),
            time.time(),
            interval,
            self._deadlines.due is None,
        )
        self._ended(classify.classify_lost(self._known(rank), self._hangs.beat(rank), at, error))

    def _on_stuck(self, rank: int) -> None:
        """Handle a rank whose process was sent SIGKILL and does not end."""
        known, beat = self._known(rank), self._hangs.beat(rank)
        self._ended(classify.classify_stuck(known, beat, time.time(), deadlines.DYING_S))

    def _ended(self, end: End) -> None:
        if end.rank in self.ends:
            return
        self._silences.answered(end.rank)
        self.ends[end.rank] = end
        self._hangs.ended(end.rank)
        self._events.add(
            kinds.Ended(rank=end.rank, how=end.how, code=end.code, signal=end.signal, step=end.step)
        )
        if (seconds := deadlines.culprit_wait(end)) is not None:
            self._stop_within(seconds)

    def _prepare(self, notice: DrainNotice) -> None:
        """Prepare for nodes that are about to be taken away.

        The ranks stop after a common step, within a part of the time left.
        """
        self._events.add(
            kinds.Notice(text=notice.text, ranks=notice.ranks, hosts=notice.hosts, s=notice.left_s)
        )
        if not self._deadlines.stopping and not self.ends:
            self._record = replace(self._record, drain=notice)
            self._stop_within(notice.share_s)
            if self._quiesce.request():
                self._stop_to_move()

    def _on_deadline(self) -> None:
        if not self._deadlines.stopping:
            self._stop(deadlines.stop_when_due(self.ends.values(), self._record.drain))
            return
        # Replies that came in time, in a run of many ranks.
        for _ in range(self._messages.qsize()):
            self._receive(self._messages.get())
        now = time.monotonic()
        if self._deadlines.left(now):  # a signal came, and all ranks get its grace period
            return
        for rank in sorted(set(range(self._world)) - self.ends.keys()):
            if not self._silences.heard(rank, self._deadlines.since):
                self._on_lost(rank)
            elif now >= self._deadlines.final:
                self._on_stuck(rank)
        self._deadlines = self._deadlines.prolonged(now, self._world)

    def _stop_within(self, seconds: float) -> None:
        self._deadlines = self._deadlines.stop_within(seconds, time.monotonic())

    def _stop_to_move(self) -> None:
        """Stop the ranks, now that they can be stopped.

        Ranks on other nodes, or another number of them, will continue.
        """
        if self._deadlines.stopping or any(end.failed for end in self.ends.values()):
            return
        if self._record.drain is not None:
            self._stop(deadlines.drain_stop(self._record.drain))
        elif self._joined is not None:
            self.resize = self._joined.text
            self._stop(Stop(StopReason.RESIZE, f"the size changes: {self.resize}"))

    def _stop(self, stop: Stop) -> None:
        self._events.add(kinds.Stop(cause=stop.reason.value, reason=stop.text))
        # Lost ranks too: an agent that Ray took for dead, or that was paused, may be there again.
        self._group.stop((rank for rank in range(self._world) if self._may_run(rank)), stop.grace_s)
        self._deadlines = self._deadlines.stop_sent(stop.grace_s, time.monotonic(), self._world)

    def _may_run(self, rank: int) -> bool:
        return rank not in self.ends or self.ends[rank].how == "lost"

    def _known(self, rank: int) -> RankRecord:
        return RankRecord(
            rank, self._host(rank), str(self._logs.path(rank)), self._raised.get(rank)
        )

    def _node(self, rank: int) -> str:
        return self._group.plan.slots[rank].node.id

    def _host(self, rank: int) -> str:
        return self._group.plan.slots[rank].node.host
