"""All attempts of a run: what each starts from, how it ends, what follows, the outcome. (driver)"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from raydist.cluster.nodes import ResourceRequest
from raydist.cluster.queue.turn import MakesWay
from raydist.launch import mpi, run_storage
from raydist.launch.changes import Changes
from raydist.launch.deputies import Deputies
from raydist.launch.paused_states import PausedStates
from raydist.launch.payload import RemoteCall, unpack_all
from raydist.launch.worker_group import WorkerGroup
from raydist.network import variables as network_variables
from raydist.network.names import EnvVar
from raydist.recovery import policy
from raydist.recovery.blame import failure_event, first_cause
from raydist.recovery.classify import RankRecord, classify_lost
from raydist.recovery.policy import GiveUp, Retry
from raydist.recovery.supervisor import Supervisor
from raydist.settings.config import Job
from raydist.settings.mesh import mesh_shape
from raydist.shared import env_names, kinds, signals
from raydist.shared.errors import (
    CallLost,
    ConfigError,
    LaunchError,
    RaydistError,
    Stopped,
    last_line,
)
from raydist.shared.events import Events
from raydist.shared.outcome import Attempt, End

SAVED_S = 10.0
"""Limit on the wait for the last state of a run without agents: their fork servers have it written.
"""


class Attempts:
    """All attempts of a run: the retry loop, which decides once what follows each attempt."""

    def __init__(
        self,
        job: Job,
        call: RemoteCall | None,
        events: Events,
        deputies: Deputies | None = None,
    ) -> None:
        """`deputies`: who tells if this machine is lost; None if nobody."""
        self.outcome: Attempt | None = None
        """The last attempt, which contains the earlier ones; None until the run is over."""
        self.request: ResourceRequest | None = None
        """What the last placement of the run has requested; None before the first."""
        self._call = call
        self._events = events
        self._deputies = deputies
        self._checkpoints = run_storage.RunCheckpoints(job)
        self._past: list[Attempt] = []
        self._elsewhere: Retry | None = None
        """The retry for which the job gets a new placement; None in the first one."""
        self._paused: PausedStates | None = None
        """The states that nodes hold while the run waits, because it has made way."""
        self._why_unwritten = ""
        """Why no agent could have the last state written."""
        self._unwritten_step: int | None = None
        """The step of that state, according to rank 0's fork server; -1: there is none. None:
        unknown."""

    @property
    def changes(self) -> Changes:
        """The settings that were changed in the run."""
        return self._checkpoints.changes

    def take_paused(self) -> PausedStates | None:
        """Return the states that nodes hold since the run made way, for one placement."""
        paused, self._paused = self._paused, None
        return paused

    @property
    def count(self) -> int:
        """The number of attempts so far."""
        return len(self._past)

    def make(self, job: Job, group: WorkerGroup) -> None:
        """Make attempts with this group until the run is over, or continues elsewhere.

        This is the only place that acts on what policy.decide() says.
        """
        attempt = self._first_in_placement(job, group)
        while True:
            self._past.append(attempt)
            replaceable = policy.is_drained(attempt) and bool(group.draining_ranks())
            match policy.decide(job.restart, self._past, replaceable, bool(job.script)):
                case GiveUp(reason):
                    # A first Ctrl-C does not end it: shards of a checkpoint would be lost, which
                    # only the driver can have written, and the last state after them.
                    with signals.passed_to(lambda _: None):
                        self.outcome = self._conclude(job, group, reason)
                    return
                case Retry(elsewhere=True) as retry:
                    self._leave(job, group, retry)
                    return
                case Retry() as retry:
                    try:
                        attempt = self._in_place(job, group, retry)
                    except MakesWay as error:
                        self._past[-1] = replace(attempt, made_way=error.for_whom)
                        self._leave(job, group, retry)
                        return

    def lost_while_opening(self, job: Job, group: WorkerGroup, error: Exception) -> bool:
        """Return whether `error` is due to a node that was lost before this placement had ranks.

        It then counts as a failed attempt: another placement follows, or the run is over. In the
        first placement an agent that could not start at all, as without a package, is an error.
        """
        lost = bool(self._past) or actor_died(error)
        if not lost or not (ends := lost_before_start(group, error)):
            return False
        group.hosts.record_attempt(first_cause(ends), ())
        self._past.append(explain_failure(Attempt(ends), self._events, self.count))
        match policy.decide(job.restart, self._past, program=bool(job.script)):
            case GiveUp(reason):  # the state was saved when the last nodes were left
                earlier = tuple(self._past[:-1])
                self.outcome = replace(self._past[-1], earlier=earlier, why_last=reason)
            case Retry() as retry:
                self._elsewhere = retry
                self._events.add(retry.as_event(job.restart))
        return True

    def conclude(self) -> Attempt:
        """Return the outcome, once the agents have ended.

        A fork server that lost its agents has the last state written.
        """
        assert self.outcome is not None, "the run is not over"
        if paused := self.take_paused():
            paused.settle(used=False)
        left_alone = any(end.how == "lost" or end.silent for end in self.outcome.ends)
        wait_s = SAVED_S if self._why_unwritten else 0.0
        found = left_alone and self._checkpoints.report_saved(
            self._events, wait_s, self._unwritten_step
        )
        if self._why_unwritten and not found:
            self._events.warn(self._why_unwritten)
        return self.outcome

    def cut_short(self, error: RaydistError) -> None:
        """End the run with this error, after the attempts so far; raise it if there were none.

        A run that was over before the error keeps its outcome.
        """
        if self.outcome is not None:
            self._events.warn(f"after the end of the run: {last_line(error)}")
            return
        if not self._past:
            raise error
        self.outcome = replace(self._past[-1], error=error, earlier=tuple(self._past[:-1]))

    def _first_in_placement(self, job: Job, group: WorkerGroup) -> Attempt:
        """Make the first attempt in this placement."""
        retry = self._elsewhere
        if retry is not None:
            moved = list(range(group.plan.world_size))
            self._events.add(kinds.Placed(number=retry.number, moved=moved))
            group.first_world_size = len(self._past[0].ends)
        return self._attempt(job, group, retry)

    def _in_place(self, job: Job, group: WorkerGroup, retry: Retry) -> Attempt:
        """Retry in the same placement; on failure return the previous attempt, with the error.

        MakesWay: the run was asked to while it waited for a node.
        """
        if retry.cause is None:
            self._events.add(kinds.Regroup(number=retry.number, text=self._past[-1].resize))
        else:
            self._events.add(retry.as_event(job.restart))
        # The nodes that stay have the state in memory, but they may be taken away too; and those
        # that are given up to another run may hold shards of it.
        if policy.is_drained(self._past[-1]) or (retry.cause is None and group.draining_ranks()):
            self._flush(group)
        try:
            signals.raise_again()  # it came after the last end, and stopped no rank
            gone = {end.rank for end in self._past[-1].ends if end.gone}
            keep = any(end.kept for end in self._past[-1].ends)
            moved = group.prepare_attempt(job, retry.number, retry.cause is None, gone, keep)
            slots = {"slots": group.plan.as_event()["slots"]} if moved else {}
            self._events.add(kinds.Placed(number=retry.number, moved=moved, **slots))
            return self._attempt(job, group, retry)
        except RaydistError as error:
            return replace(self._past[-1], error=error)

    def _attempt(self, job: Job, group: WorkerGroup, retry: Retry | None) -> Attempt:
        """Make an attempt; its nodes know each other, so that one of them can tell for all."""
        if self._deputies is not None:
            self._deputies.appoint(group.plan, group.call)
        return run_attempt(job, self._call, group, self._events, self._checkpoints, retry)

    def _leave(self, job: Job, group: WorkerGroup, retry: Retry) -> None:
        """Save the last state: the job will be placed again, and leaves this group.

        All ranks leave, not only those on drained nodes: the run is placed anew as a whole.
        """
        self._elsewhere = retry
        last = self._past[-1]
        gone = {end.rank for end in last.ends if end.gone}
        end_kept(group, last)
        group.give_up(gone)
        if last.made_way:
            self._events.add(kinds.Pause(number=retry.number, text=f"made way for {last.made_way}"))
        else:
            self._events.add(retry.as_event(job.restart))
        self._flush(group)
        if last.made_way and not gone:  # of use only if each rank comes back to where it was
            self._paused = group.hold_states()

    def _flush(self, group: WorkerGroup) -> None:
        with signals.passed_to(lambda _: None):  # as in make()
            group.finish_saves()
        if why := group.flush():
            self._events.warn(why)

    def _conclude(self, job: Job, group: WorkerGroup, reason: str) -> Attempt:
        """Return all attempts as one. `reason`: why no other follows.

        If the last one failed, its last state is on the disk when this returns.
        """
        last = self._past[-1]
        end_kept(group, last)
        group.give_up({end.rank for end in last.ends if end.gone})
        group.finish_saves()
        group.report_network()
        if last.error is not None or first_cause(last.ends) is not None:
            self._why_unwritten = group.flush()
            if self._why_unwritten and any(end.rank == 0 and end.silent for end in last.ends):
                # Now, because its fork server continues once the agents have ended.
                self._unwritten_step = group.newest_state(SAVED_S)
        values, exceptions = unpack_all(group.values(), self._events.warn)
        earlier = tuple(self._past[:-1])
        return replace(last, values=values, exceptions=exceptions, earlier=earlier, why_last=reason)


def end_kept(group: WorkerGroup, last: Attempt) -> None:
    """End the ranks that wait for another attempt with this group: there is none."""
    if kept := [end.rank for end in last.ends if end.kept]:
        group.stop(kept, 0.0)


def run_attempt(
    job: Job,
    call: RemoteCall | None,
    group: WorkerGroup,
    events: Events,
    checkpoints: run_storage.RunCheckpoints,
    retry: Retry | None = None,
) -> Attempt:
    """Start the ranks, and supervise them until all have ended.

    `retry`: why there is this attempt, if it is not the first.
    """
    job = rescale(
        job, group.first_world_size, group.plan.world_size, group.plan.slots[0].local_world_size
    )
    with mpi.launching(job, group):
        resume = checkpoints.variables(events.warn)
        checkpoints.report_resumed(events)
        variables = rank_variables(job, group, resume)
        try:
            group.start(job, variables, call.packed if call else None)
        except LaunchError as error:
            if not (ends := lost_at_start(group, error)):
                raise
            group.hosts.record_attempt(first_cause(ends), ())
            return explain_failure(Attempt(ends), events, group.rendezvous.attempt)
        supervisor = Supervisor(group, events, Path(job.dir) / "logs", job, retry)
        attempt = Attempt(
            ends=supervisor.run(),
            error=supervisor.stop_signal,
            resize=supervisor.resize,
            made_way=supervisor.made_way,
            stepped=supervisor.stepped,
            fit=supervisor.fit,
        )
        group.hosts.record_attempt(
            first_cause(attempt.ends) if attempt.error is None else None, supervisor.slow
        )
        return explain_failure(attempt, events, group.rendezvous.attempt)


def lost_at_start(group: WorkerGroup, error: LaunchError) -> list[End]:
    """Return how the ranks of an attempt ended if a node was lost as they were started.

    A call that was lost counts as well: nobody knows whether its ranks were started. Empty if the
    agents answer, and one of them raised this error.
    """
    group.stop(range(group.plan.world_size), 0.0)  # ranks on other nodes may run
    gone = group.lost_ranks()
    ends = ends_of_loss(group, {*gone, *calls_lost(error)}, error)
    # An agent that answers is not replaced: it ends a rank that it may have started.
    return [replace(end, answers=end.how == "lost" and end.rank not in gone) for end in ends]


def lost_before_start(group: WorkerGroup, error: Exception) -> list[End]:
    """Return the same if a node was lost while agents were opened or the network was checked."""
    # By an agent, or about the settings.
    raised = isinstance(error, LaunchError) and not isinstance(error.__cause__, CallLost | None)
    if raised or isinstance(error, ConfigError | Stopped):
        return []
    # If a call was lost, other agents may just not be open yet: they still import torch.
    slots = group.plan.slots
    nodes = {slots[rank].node.id for rank in calls_lost(error) or group.lost_ranks()}
    return ends_of_loss(group, {slot.rank for slot in slots if slot.node.id in nodes}, error)


def actor_died(error: Exception) -> bool:
    """Return whether a call has failed because its actor died or cannot be reached, as Ray says."""
    from ray.exceptions import RayActorError

    found = error if isinstance(error, CallLost) else error.__cause__
    return isinstance(found, CallLost) and isinstance(found.cause, RayActorError)


def calls_lost(error: Exception) -> Sequence[int]:
    """Return the ranks whose calls were lost, according to WorkerGroup.call_each."""
    lost: Sequence[int] = error.facts.get("lost", ()) if isinstance(error, LaunchError) else ()
    return lost


def ends_of_loss(group: WorkerGroup, lost: Collection[int], error: Exception) -> list[End]:
    """Return the ends of an attempt that has lost these ranks and begun no step; empty for none."""
    now, cause = time.time(), error.__cause__ or error
    ends = []
    for slot in group.plan.slots:
        end = End(slot.rank, slot.node.host, "stopped", now)
        if slot.rank in lost:
            end = classify_lost(RankRecord(slot.rank, slot.node.host), (0, "", 0.0), now, cause)
        ends.append(end)
    return ends if lost else []


def explain_failure(attempt: Attempt, events: Events, number: int = 0) -> Attempt:
    """Return the attempt with the text of its failure, which is also in the event `failure`.

    Unchanged if no rank failed.
    """
    first = first_cause(attempt.ends)
    if first is None or attempt.error is not None:
        return attempt
    failure = failure_event(first, attempt.ends, number)
    events.add(failure)
    return replace(attempt, failure=failure.text)


def rescale(job: Job, first: int, ranks: int, per_node: int) -> Job:
    """Rescale gradient accumulation for `ranks` ranks, to keep the global batch of `first` ranks.

    Ranks of a tp group and stages of a pipeline have the same samples, and count once. `per_node`:
    ranks of each node. A rank's part of one pass does not grow beyond its size on `first` ranks,
    because the rank's memory may not hold more, as long as the global batch has a sample for every
    rank in every pass.
    """
    if job.scale.max_nodes is None or job.data.resize == "scale":
        return job
    first, ranks = (mesh_shape(job.parallel, number, per_node).data for number in (first, ranks))
    batch = job.data.global_batch or job.data.batch_size * job.train.accumulate * first
    passes = min(math.ceil(job.train.accumulate * first / ranks), max(1, batch // ranks))
    return replace(
        job, data=replace(job.data, global_batch=batch), train=replace(job.train, accumulate=passes)
    )


def rank_variables(job: Job, group: WorkerGroup, resume: list[EnvVar]) -> list[list[EnvVar]]:
    """Return each rank's environment.

    `resume`: the checkpoint to resume from, and where checkpoints go.
    """
    for variable in resume:
        if variable.name == env_names.RESUME and variable.value and not group.rendezvous.attempt:
            group.require_visible(
                f"resume={variable.value}", f"{variable.value}/meta.json", "each rank reads it"
            )
    return [
        [*own, *resume, *group.held_variables()]
        for own in network_variables.plan_variables(job, group.plan, group.facts, group.rendezvous)
    ]
