"""Receives messages of all ranks until each ends; stops the others once one has failed. (driver)"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from raydist.cluster.drain import DrainNotice
from raydist.launch.vitals import Pace, Vitals
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import RankEnd, RankNews, RecordedEnd
from raydist.messages.rank import HoldTimeouts, LetGoTimeouts
from raydist.recovery import classify, deadlines, phases
from raydist.recovery.agent_calls import AgentAnswer, AgentCalls, NodeAnswer, ReachableNodes
from raydist.recovery.classify import AttemptRecord, RankRecord
from raydist.recovery.cut_monitor import NodesCut
from raydist.recovery.hang import HangMonitor
from raydist.recovery.hang_verdict import ConfirmedHang
from raydist.recovery.in_place import Meeting
from raydist.recovery.leave_monitor import LeaveMonitor
from raydist.recovery.phases import DeclareLost, MakeWay, Phase, RequestQuiesce, Stop, Stopping
from raydist.recovery.policy import Retry
from raydist.recovery.quiesce import Quiesce
from raydist.recovery.rank_logs import RankLogs
from raydist.recovery.resize import NodesJoined, ResizeMonitor
from raydist.recovery.straggler import SlowRanks
from raydist.settings.config import Job
from raydist.shared import kinds, signals
from raydist.shared.errors import Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import EventJson
from raydist.shared.outcome import End, Slow, StopReason

Received = (
    AgentAnswer
    | NodeAnswer
    | ReachableNodes
    | NodesCut
    | Stopped
    | ConfirmedHang
    | DrainNotice
    | MakeWay
    | NodesJoined
)
"""What the supervisor receives: the reply of an agent, or of a node, a signal, or a monitor's
message."""

LOOK_S = 1.0
"""Seconds between two checks of agents that have not answered: each goes over all ranks."""


class Supervisor:
    """One attempt's monitor loop.

    Each agent has one open call, which returns when it has news; nothing is polled. The supervisor
    keeps the queue and the files. phases.advance() decides what is done, classify.py how a rank
    ended.
    """

    def __init__(
        self, group: WorkerGroup, events: Events, logs: Path, job: Job, retry: Retry | None = None
    ) -> None:
        """`retry`: why there is this attempt, if it is not the first."""
        self.ends: dict[int, End] = {}
        self._phase: Phase = phases.Running(AttemptRecord(program=bool(job.script)))
        self._group = group
        self._events = events
        self._logs = RankLogs(logs, self._world)
        self._messages: queue.SimpleQueue[Received] = queue.SimpleQueue()
        post = self._messages.put  # a signal handler may call SimpleQueue.put
        self._agents = AgentCalls(group, events, post, bool(job.restart.max))
        self._hangs = HangMonitor(group, job.hang, events, logs, post, bool(job.script))
        self._quiesce = Quiesce(group, bool(job.script))
        hosts = [slot.node.host for slot in group.plan.slots]
        self._slow = SlowRanks(hosts, job.watch.slow, job.train.gc)
        self._meeting = Meeting(group, job, time.time(), retry)
        self._exceptions: dict[int, kinds.Raised] = {}

    @property
    def stop_signal(self) -> Stopped | None:
        """The signal that ended the attempt."""
        return self._phase.record.stopped

    @property
    def stepped(self) -> bool:
        """Whether a rank has made a step."""
        return self._meeting.stepped

    @property
    def fit(self) -> int:
        """The number of the last raydist.fit that began; 0: none."""
        return self._meeting.fit

    @property
    def resize(self) -> str:
        """Why the ranks were stopped to change the number of nodes; empty if they were not."""
        return self._phase.record.resize

    @property
    def made_way(self) -> str:
        """For which other run the ranks were stopped; empty for none."""
        return self._phase.record.makes_way

    @property
    def slow(self) -> list[Slow]:
        """The stragglers in the latest report."""
        return self._slow.latest

    def run(self) -> list[End]:
        """Return how each rank ended, by rank. A signal ends them all, and is kept in `stopped`."""
        group = self._group
        events = self._events
        post = self._messages.put
        with ExitStack() as stack:
            stack.enter_context(signals.passed_to(post))
            stack.enter_context(self._logs)
            for rank in range(self._world):
                self._request_news(rank)
            stack.enter_context(self._hangs)
            stack.enter_context(self._agents.cuts)
            stack.enter_context(LeaveMonitor(group, post))
            stack.enter_context(ResizeMonitor(group, events, post))
            stack.enter_context(self._quiesce)
            stack.enter_context(Vitals(events, self._pace, group.plan, group.call))
            self._loop()
        if times := self._slow.times:
            work = {str(rank): own[1:] for rank, own in sorted(times.items())}
            events.add(kinds.Work(ranks=work))
        return [self.ends[rank] for rank in range(self._world)]

    def _loop(self) -> None:
        """Handle messages until all ranks have ended; look at the deadline after each message."""
        look_at = 0.0
        while len(self.ends) < self._world:
            self._receive_next()
            self._look_at_deadline()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                self._look_at_agents()
                if not self._stopping and self._meeting.have_settled(time.time()):
                    self._group.hosts.start_other_actors()

    def _receive_next(self) -> None:
        """Handle the next message, if it comes before the deadline and the next agent check."""
        left = max(0.0, self._phase.due - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._receive(self._messages.get(timeout=min(left, LOOK_S)))

    def _look_at_deadline(self) -> None:
        if time.monotonic() < self._phase.due:
            return
        if self._stopping:
            # Replies that came in time, in a run of many ranks.
            for _ in range(self._messages.qsize()):
                self._receive(self._messages.get())
        self._advance(phases.TimePassed())

    def _advance(self, happening: phases.Happening) -> None:
        """Enter the next phase, and do what is to be done then."""
        self._phase, action = phases.advance(self._phase, happening, time.monotonic(), self._world)
        match action:
            case Stop():
                self._stop(action)
            case RequestQuiesce():
                if self._quiesce.request():
                    self._advance(phases.Quiesced())
            case DeclareLost(since, stuck):
                self._declare_lost(since, stuck)

    def _stop(self, stop: Stop) -> None:
        self._events.add(kinds.Stop(cause=stop.reason.value, reason=stop.text))
        # Lost ranks too: an agent that Ray took for dead, or that was paused, may be there again.
        ranks = [rank for rank in range(self._world) if self._may_run(rank)]
        hang = self._phase.record.hang if stop.reason is StopReason.HANG else None
        hung = {rank for rank in ranks if hang is not None and hang.blames(rank)}
        fails = stop.reason in (StopReason.FAILURE, StopReason.HANG)
        keep = fails and self._meeting.keeps(self.ends.values(), hung)
        self._group.stop(ranks, stop.grace_s, self._running_ranks - hung if keep else ())

    def _may_run(self, rank: int) -> bool:
        return rank not in self.ends or self.ends[rank].how == "lost"

    def _declare_lost(self, since: float, stuck: bool) -> None:
        """Handle the loss of agents that have not answered since then.

        `stuck`: the processes of the other ranks were sent SIGKILL, and do not end.
        """
        for rank in sorted(self._running_ranks):
            if not self._agents.has_answered(rank, since):
                self._on_lost(rank)
            elif stuck:
                self._on_stuck(rank)

    def _request_news(self, rank: int) -> None:
        self._agents.request_news(rank, self._meeting.running_s(time.time()))

    def _look_at_agents(self) -> None:
        """Report agents that do not answer.

        Once nothing else makes progress, or all other ranks have ended, determine whether their
        ranks have ended or are lost.
        """
        for rank in self._agents.report_silent():
            self._hangs.leave_out(rank)
        silent, running = self._agents.silent, self._running_ranks
        if (
            silent
            and not self._stopping
            and (self._agents.none_answers(running, bool(self.ends)) or self._hangs.stalled())
        ):
            self._agents.reach(running.intersection(silent))

    def _on_reached(self, nodes: frozenset[str]) -> None:
        self._agents.note_reachable()
        if not self._stopping:
            for rank in self._agents.ask_nodes(nodes, self._running_ranks):
                self._on_lost(rank)

    def _on_cut(self, cut: NodesCut) -> None:
        """Handle the loss of nodes that Ray has not given up yet."""
        lost, heard = set[str](), set[str]()
        ranks = [rank for rank in sorted(self._running_ranks) if self._node(rank) in cut.nodes]
        for rank in ranks:
            answered = self._agents.has_answered(rank, cut.since)
            (heard if answered else lost).add(self._node(rank))
        lost -= heard
        self._group.hosts.leave_out(lost)
        for rank in ranks:
            if self._node(rank) in lost:
                self._on_lost(rank, cut=cut.why)

    def _on_node_answer(self, rank: int, answer: Future[RecordedEnd | None]) -> None:
        found = answer.result() if answer.exception() is None else None
        if rank in self.ends or rank not in self._agents.silent:
            return
        if found is None:
            self._on_lost(rank)
            return
        text = (
            f"rank {rank} on {self._host(rank)} has ended, as its node reports; its last events "
            "and output are lost"
        )
        self._events.add(kinds.Warning(rank=rank, text=text))
        self._group.keep_value(rank, found.value)
        self._on_end(rank, found.end, silent=True)

    def _receive(self, message: Received) -> None:
        match message:
            case AgentAnswer(rank, news):
                self._on_reply(rank, news)
            case ReachableNodes(nodes):
                self._on_reached(nodes)
            case NodesCut():
                self._on_cut(message)
            case NodeAnswer(rank, found):
                self._on_node_answer(rank, found)
            case DrainNotice():
                self._events.add(
                    kinds.Notice(
                        text=message.text,
                        ranks=message.ranks,
                        hosts=message.hosts,
                        s=message.left_s,
                    )
                )
                self._advance(message)
            case _:
                self._advance(message)

    def _on_reply(self, rank: int, reply: Future[RankNews]) -> None:
        try:
            news = reply.result()
        except Exception as error:
            self._on_lost(rank, error)
            return
        self._agents.note(rank, news)
        self._logs.append(rank, news.log, news.nccl)
        self._events.show(rank, news.log)
        for event in news.events:
            self._on_event(rank, event)
        if news.end is not None:
            self._on_end(rank, news.end)
        elif rank not in self.ends:
            if not self._stopping:  # a rank that is about to end does not hang
                self._on_heartbeat(rank, news)
            self._request_news(rank)

    def _on_heartbeat(self, rank: int, news: RankNews) -> None:
        self._hangs.note(rank, news.beat, news.quiet)
        for event in self._slow.note(rank, news.work, news.pauses, time.monotonic()):
            self._events.add(event)

    def _pace(self) -> dict[int, Pace]:
        """Return the pace of each running rank that has made a step."""
        beats, times = self._hangs.beats(), dict(self._slow.times)
        steps = {rank: step or times.get(rank, (0,))[0] for rank, (step, _, _) in beats.items()}
        return {
            rank: (step, *times.get(rank, (0, 0.0, 0.0))[1:])
            for rank, step in steps.items()
            if step
        }

    def _on_event(self, rank: int, found: EventJson) -> None:
        # With a node's clock that is minutes ahead, a run of seconds would seem to take minutes.
        event = kinds.from_json({**found, "t": self._agents.here(rank, found["t"])})
        if isinstance(event, kinds.MeetRequest):
            self._meeting.introduce(rank, event)
            return
        if isinstance(event, kinds.SaveShards):
            self._group.save_shards(event)
        else:
            self._events.add(event)
        if isinstance(event, kinds.Held | kinds.Released):
            self._set_timeouts(event)
        if self._quiesce.note(rank, event):
            self._advance(phases.Quiesced())
        if isinstance(event, kinds.Raised):
            self._exceptions[rank] = event
            if not event.code:  # after sys.exit a program may have much to do, such as an upload
                self._advance(phases.RankRaised())
        for milestone in self._meeting.add(rank, event):
            self._events.add(milestone)

    def _set_timeouts(self, event: kinds.Held | kinds.Released) -> None:
        """Have all ranks wait for one in the debugger as long as it takes, or no longer."""
        reason = f"rank {event.rank}"
        for rank in self._running_ranks:
            if isinstance(event, kinds.Held):
                self._group.call(rank, HoldTimeouts(reason))
            else:
                self._group.call(rank, LetGoTimeouts(reason))

    def _on_end(self, rank: int, report: RankEnd, silent: bool = False) -> None:
        """Handle the end of a rank's process. `silent`: its agent does not answer."""
        more = classify.log_tells_more(report, self._exceptions.get(rank))
        log_tail = self._logs.tail(rank) if more else ""
        report = replace(report, at=self._agents.here(rank, report.at))
        end = classify.classify_end(report, self._record_of(rank), self._phase.record, log_tail)
        self._note_end(replace(end, silent=silent))

    def _on_lost(self, rank: int, error: BaseException | None = None, cut: str = "") -> None:
        """Handle the loss of a rank's agent.

        `error`: of the call to the agent; None if the agent did not answer in time. `cut`: who
        does not reach its node; empty if that is unknown.
        """
        host, interval = self._host(rank), deadlines.longest_interval(self._world)
        at = classify.lost_at(
            host,
            self.ends.values(),
            self._agents.answered_at(rank),
            time.time(),
            interval,
            math.isinf(self._phase.due),
        )
        self._note_end(
            classify.classify_lost(self._record_of(rank), self._hangs.beat(rank), at, error, cut)
        )

    def _on_stuck(self, rank: int) -> None:
        """Handle a rank whose process was sent SIGKILL and does not end."""
        record, beat = self._record_of(rank), self._hangs.beat(rank)
        self._note_end(classify.classify_stuck(record, beat, time.time(), deadlines.DYING_S))

    def _note_end(self, end: End) -> None:
        if end.rank in self.ends:
            return
        self._agents.note_end(end.rank)
        self.ends[end.rank] = end
        self._hangs.note_end(end.rank)
        self._events.add(
            kinds.Ended(rank=end.rank, how=end.how, code=end.code, signal=end.signal, step=end.step)
        )
        self._advance(end)

    @property
    def _world(self) -> int:
        return self._group.plan.world_size

    @property
    def _running_ranks(self) -> set[int]:
        return set(range(self._world)) - self.ends.keys()

    @property
    def _stopping(self) -> bool:
        return isinstance(self._phase, Stopping)

    def _record_of(self, rank: int) -> RankRecord:
        return RankRecord(
            rank, self._host(rank), str(self._logs.path(rank)), self._exceptions.get(rank)
        )

    def _host(self, rank: int) -> str:
        return self._group.plan.slots[rank].node.host

    def _node(self, rank: int) -> str:
        return self._group.plan.slots[rank].node.id
