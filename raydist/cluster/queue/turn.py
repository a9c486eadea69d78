"""A run's way through the queue: it waits for its turn, holds room, makes way. (driver)"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raydist.cluster import connect, placement, ray_private
from raydist.cluster.nodes import Node, ResourceRequest, still_to_come
from raydist.cluster.queue import order, store
from raydist.cluster.queue.entry import (
    CANCEL,
    LEAVING,
    MOVE,
    PAUSE,
    PLACING,
    RESUME,
    RUNNING,
    WAITING,
    Demand,
    Entry,
    Instruction,
    WayRequest,
)
from raydist.cluster.queue.first_entry import first_entry
from raydist.cluster.queue.order import Cluster, Verdict
from raydist.cluster.queue.others import OtherRuns
from raydist.cluster.queue.outer import has_outer_queue
from raydist.cluster.queue.stop_cost import StopCost, cost_after
from raydist.cluster.queue.wait_limits import WaitLimits
from raydist.settings.config import Job
from raydist.shared import kinds, signals
from raydist.shared.errors import RaydistError, Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import Event

BEAT_S = 1.0
"""Seconds between two beats of an entry."""
ASKED_S = 0.25
"""Seconds between two checks whether a run must make way. Each takes a millisecond."""
FIRST_S, LATER_S = 0.25, 1.0
"""Seconds between two checks of the first run in line, and of the later ones."""
LOOKING = 1 / 200
"""Limit on the part of its time for which a waiting driver computes the order: with hundreds of
runs a check takes milliseconds."""
TRY_S = 2.0
"""Seconds in which Ray places a group that has room."""
WORKERS_S = 60
"""Seconds after which Ray ends the workers that a waiting run has started and not used."""


class TurnPassed(Exception):
    """This run's placement group must be given back.

    Another run comes first now and there is no room for it, or a person has paused or cancelled the
    run.
    """


class MakesWay(Exception):
    """This run waits for nodes in the middle of its work, and has been asked to make way."""

    def __init__(self, for_whom: str) -> None:
        super().__init__(for_whom)
        self.for_whom = for_whom
        """Another run, or a person's command, as a text."""


class PersonsRequest(WayRequest):
    """What a person has asked of a run: no other run takes its room."""


class Turn:
    """What placing a run must know about the queue. This class is for a run outside the queue."""

    waited_s = 0.0
    """Seconds that the run has waited for its turn in this placement."""

    @contextlib.contextmanager
    def entered(self, request: ResourceRequest) -> Iterator[None]:
        """Be in the queue with this request while the block runs."""
        yield

    def wait(self) -> None:
        """Wait until the run may be placed."""

    def fit(self, request: ResourceRequest) -> ResourceRequest:
        """Return what the run asks Ray for, now that it is its turn. `request`: as in entered()."""
        return request

    def patience(self, wait_s: float) -> float:
        """Return how long Ray may take to place the run, in seconds. `wait_s`: scale.wait_s."""
        return wait_s

    def check(self) -> None:
        """Raise TurnPassed if a placement group that has no room yet must be given back.

        LaunchError: the run has waited too long for room that no run in the queue holds.
        """

    def note_placement(self, nodes: Sequence[Node]) -> None:
        """Note that the run has room. `nodes`: that of each bundle.

        TurnPassed: the run must give it back; nothing may start there.
        """

    def wanted_by(self) -> str:
        """Return the run that this one must make way for, as a text; empty if there is none."""
        return ""

    def check_while_lacking(self) -> None:
        """Raise MakesWay if the run, which waits for nodes instead of lost ones, must make way.

        Nothing else looks meanwhile: no ranks run.
        """
        if wanted_by := self.wanted_by():
            raise MakesWay(wanted_by)

    def nodes_wanted(self) -> WayRequest | None:
        """Return which nodes this run must give up, and for whom; None for none."""
        return None

    def may_grow(self) -> bool:
        """Return whether the run may take more nodes: nobody waits for them."""
        return True

    def may_keep(self) -> bool:
        """Return whether the next run of this process may have the nodes of this one."""
        return True

    def note_size(self, held: Mapping[str, int], spare: Sequence[str]) -> None:
        """Note that the run has another number of nodes. The arguments are those of an Entry."""


class QueuedTurn(Turn):
    """The turn of a run in the cluster's queue, in all its placements."""

    def __init__(self, job: Job, events: Events) -> None:
        self._job = job
        self._events = events
        self._entry: Entry | None = None
        """Stays while the run is between two placements."""
        self._lock = threading.RLock()
        """Held while the entry changes: the thread of `_beat` changes it as well."""
        self._over = threading.Event()
        self._request: WayRequest | None = None
        """What another run, or a person, has asked of this one."""
        self._ends = ""
        """Why the run ends instead of waiting, for a person; empty: it waits."""
        self._others = OtherRuns()
        self._began = 0.0
        """When the placement group was created, by the monotonic clock."""
        self._limits = WaitLimits(job.scale.wait_s)
        self._stop_cost = StopCost()

    def note_event(self, event: Event) -> None:
        """Keep what a stop of the run costs. The other runs read it in the next beat."""
        self._stop_cost = cost_after(self._stop_cost, event, bool(self._job.script))

    @contextlib.contextmanager
    def entered(self, request: ResourceRequest) -> Iterator[None]:
        stays = self._job.queue.requeue or isinstance(self._request, PersonsRequest)
        if self.wanted_by() and not (stays or self._own.paused_by or self._ends):
            self._ends = "it does not wait again: queue.requeue=false"
        self._request = None
        self.waited_s = 0.0
        self._over = threading.Event()
        self._limits = WaitLimits(self._job.scale.wait_s)
        entry = self._entry or first_entry(self._job, request)
        entry = replace(entry, state=WAITING, placed=0.0, held={}, spare=(), outside=False)
        self._write(replace(entry, demand=Demand.of(request)))
        beating = threading.Thread(target=self._beat, name="raydist-queue", daemon=True)
        beating.start()
        try:
            yield
        finally:
            self._over.set()
            beating.join()
            with contextlib.suppress(Exception):  # the GCS is gone, and the entry with it
                # One that came after the last look of `_beat`.
                if (instruction := store.instruction_for(self._own.id)) is not None:
                    self._follow(instruction)
                store.remove_entry(self._own.id)

    def wait(self) -> None:
        last_reason = ""
        asked = False
        began = time.monotonic()
        while True:
            spent_s = time.thread_time()
            if (verdict := self._look()).may_try:
                break
            spent_s = time.thread_time() - spent_s
            requests = {
                **{id: WayRequest(for_whom(self._own, why)) for id, why in verdict.asks.items()},
                **{id: WayRequest(for_whom(self._own), n) for id, n in verdict.shrinks.items()},
            }
            for id, request in requests.items():
                with contextlib.suppress(Exception):  # the GCS does not answer: the next look asks
                    store.request_way(id, request)
            if verdict.asks and not asked:
                asked = True
                if not (self._job.pip or self._job.working_dir):  # a runtime_env has own workers
                    start_workers(verdict.asks)
            if (reason := why_waiting(verdict)) != last_reason:
                self._events.add(kinds.Wait(text=f"in the queue: {reason}"))
            last_reason = reason
            # A run before it may just be starting, and there may be room for both.
            soon = verdict.first or time.monotonic() - began < TRY_S
            pause_s = max(FIRST_S if soon else LATER_S, spent_s / LOOKING)
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                signals.raise_again()
                time.sleep(FIRST_S / 2)
        self._change(state=PLACING)
        self._began = time.monotonic()
        self.waited_s += self._began - began if last_reason else 0.0

    def check(self) -> None:
        if time.monotonic() - self._began > TRY_S and not self._look().may_try:
            self._change(state=WAITING)
            raise TurnPassed

    def fit(self, request: ResourceRequest) -> ResourceRequest:
        return placement.with_bundles(request, self._own.demand.bundles)

    def patience(self, wait_s: float) -> float:
        return math.inf  # _look() gives up

    def note_placement(self, nodes: Sequence[Node]) -> None:
        held = dict(Counter(node.id for node in nodes))
        now = time.time()
        self._stop_cost = replace(self._stop_cost, state_at=now)
        # A request that came as the run left another placement.
        with contextlib.suppress(Exception):  # the GCS does not answer: it makes way in vain
            store.forget_request(self._own.id)
        with self._lock:
            # The thread of `_beat` read a pause or cancellation while Ray placed the run. It leaves
            # before its ranks start: a program could not be stopped after a step.
            if self._own.paused_by or self._ends:
                self._change(state=WAITING)
                raise TurnPassed
            self._change(state=RUNNING, placed=now, held=held, stop=self._stop_cost, outside=False)

    def wanted_by(self) -> str:
        request = self._request
        return request.for_whom if request and not request.nodes else ""

    def nodes_wanted(self) -> WayRequest | None:
        request = self._request
        return request if request and request.nodes else None

    def may_grow(self) -> bool:
        waiting = self._who_waits()
        return waiting is not None and all(each.outside for each in waiting)

    def may_keep(self) -> bool:
        waiting = self._who_waits()
        if self.wanted_by() or waiting is None:
            return False
        own = self._own
        before = [each for each in waiting if each.job != own.job and not each.outside]
        return all(each.priority < own.priority for each in before)

    def _who_waits(self) -> list[Entry] | None:
        """Return the other runs in line; None if the GCS does not answer."""
        try:
            entries = store.read_all().entries
        except Exception:
            return None
        waiting = [each for each in entries if each.in_line and each.id != self._own.id]
        return [each for each in waiting if self._others.is_alive(each)]

    def note_size(self, held: Mapping[str, int], spare: Sequence[str]) -> None:
        # Before the request is forgotten: another driver would repeat it.
        shrinkable = spare if self._job.queue.shrink else ()
        if (dict(held), tuple(shrinkable)) != (self._own.held, self._own.spare):
            self._change(held=dict(held), spare=tuple(shrinkable))
        request = self._request
        # Met, or it cannot be: with fewer nodes since, the run needs those that it was asked for.
        if request and request.nodes and not set(shrinkable) & set(request.nodes):
            self._request = None
            with contextlib.suppress(Exception):  # the GCS does not answer
                store.forget_request(self._own.id)

    @property
    def _own(self) -> Entry:
        assert self._entry is not None, "not in the queue"
        return self._entry

    def _look(self) -> Verdict:
        """Return whether this run may be placed now, and if not, why.

        Stopped: a person has cancelled it, or it does not wait again. LaunchError: it has waited
        too long for room that no run in the queue holds.
        """
        try:
            verdict = self._verdict()
        except RaydistError:
            raise
        except Exception:  # whatever Ray raises while the GCS restarts, or its machine is busy
            if self._limits.gcs_is_gone():
                raise
            return Verdict(False, "Ray's GCS does not answer")
        self._limits.note(verdict)
        if verdict.outside != self._own.outside:
            self._change(outside=verdict.outside)
        return verdict

    def _verdict(self) -> Verdict:
        if self._ends:
            self._events.add(kinds.Wait(text=f"in the queue: {self._ends}"))
            raise Stopped(signal.SIGTERM)
        if by := self._own.paused_by:
            return Verdict(False, f"paused by {by}; type: raydist queue resume {self._own.name}")
        found = store.read_all()
        others = [each for each in found.entries if each.id != self._own.id]
        alive = [each for each in others if self._others.is_alive(each)]
        # A silent run keeps its room and cannot be asked to make way.
        living = {each.id for each in alive}
        requests = {id: request for id, request in found.requests.items() if id in living}
        freeing = self._others.freeing(others)
        cluster = seen_cluster()
        size = self._size_in(cluster)
        if self._own.state == WAITING and size != self._own.demand.bundles:
            self._change(demand=replace(self._own.demand, bundles=size))
        elif size < self._own.demand.bundles:  # the placement group has a fixed size
            return Verdict(False, "nodes that had room are taken")
        entries = [*alive, *freeing, self._own]
        verdicts = order.order_runs(entries, cluster, requests, time.time())
        return verdicts[self._own.id]

    def _size_in(self, cluster: Cluster) -> int:
        """Return for how many bundles the run asks in this cluster.

        An elastic run takes the nodes that have room, and does not wait for those that had it when
        it entered. With queue.shrink it begins with its minimum.
        """
        scale, demand = self._job.scale, self._own.demand
        if scale.max_nodes is None or self._job.queue.shrink:
            return demand.bundles
        ready = len(order.bundles_by_node(demand, cluster.free, cluster.nodes))
        return placement.elastic_size(scale, ready)

    def _beat(self) -> None:
        """Show that this driver is alive, and look for requests and instructions."""
        over, beat_at = self._over, 0.0
        while not over.wait(ASKED_S):
            # The entry is written every second: a GCS that restarts without persistent storage
            # loses it.
            with contextlib.suppress(Exception):
                if time.monotonic() - beat_at >= BEAT_S:
                    self._change(beat=self._own.beat + 1, stop=self._stop_cost)
                    beat_at = time.monotonic()
                    if (instruction := store.instruction_for(self._own.id)) is not None:
                        self._follow(instruction)
                        store.forget_instruction(self._own.id)
                if self._own.state == RUNNING and (request := store.request_for(self._own.id)):
                    self._obey(request)

    def _follow(self, instruction: Instruction) -> None:
        """Do what a person wants of this run."""
        command = instruction_text(instruction.act, instruction.by)
        if instruction.act == MOVE:
            self._change(priority=instruction.priority)
        elif instruction.act == RESUME:
            self._change(paused_by="")
        elif instruction.act in (PAUSE, CANCEL):
            with self._lock:  # until it has left: the run may just be placed
                if self._own.has_room and not self._own.yields:
                    return  # typed when it had no room
                if instruction.act == PAUSE:
                    self._change(paused_by=instruction.by)
                else:
                    self._ends = command
                if self._own.state == RUNNING:
                    self._leave(PersonsRequest(command))

    def _obey(self, request: WayRequest) -> None:
        """Do what another run asks of this one."""
        if request.nodes:
            if set(request.nodes) & set(self._own.spare):
                self._request = request
            else:  # whoever asked has read an earlier entry, and would count on these nodes
                store.forget_request(self._own.id)
            return
        had_its_time = time.time() >= self._own.ends
        since = time.time() if had_its_time else self._own.since
        self._leave(WayRequest(request.for_whom), since=since)

    def _leave(self, request: WayRequest, **fields: Any) -> None:
        self._request = request
        self._change(state=LEAVING, **fields)

    def _change(self, **fields: Any) -> None:
        with self._lock:
            self._write(replace(self._own, **fields))

    def _write(self, entry: Entry) -> None:
        self._entry = entry
        with contextlib.suppress(Exception):  # the GCS does not answer: the next beat writes it
            store.put_entry(entry)


def start_workers(asked: Collection[str]) -> None:
    """Make Ray start a worker on each node that the runs with these entries leave.

    Python and Ray are imported while they leave; the actor of the run that waits begins at once.
    """
    with contextlib.suppress(Exception):  # the GCS does not answer: the run is slower
        entries = store.read_all().entries
        nodes = {node for each in entries if each.id in asked for node in each.held}
        connect.keep_workers(dict.fromkeys(nodes, 1), WORKERS_S)


def instruction_text(act: str, by: str) -> str:
    """Return what a person has typed, and who, as the reason why a run leaves."""
    return f"`raydist queue {act}` of {by}"


def for_whom(entry: Entry, why: str = "") -> str:
    """Return for which run others make way, for a person. `why`: why just this one does."""
    return f"{entry.name} of {entry.owner}" + (f" ({why})" if why else "")


def why_waiting(verdict: Verdict) -> str:
    """Return why a run waits, for a person, with the time of day at which it has room."""
    if verdict.room_at is None or verdict.asks:
        return verdict.reason
    return f"{verdict.reason}; room by {time_of_day(verdict.room_at)} (queue.limit)"


def time_of_day(seconds: float) -> str:
    """Return hours and minutes of a time in seconds since the epoch, as on this machine's clock."""
    return time.strftime("%H:%M", time.localtime(seconds))


def settle_queue(job: Job) -> Job:
    """Return the job with `queue=auto` decided, for the Ray to which this process is connected.

    A Ray that this process started serves only its own runs, so it has no queue.
    """
    wanted = job.queue.enabled
    if wanted is None:
        wanted = not has_outer_queue(os.environ) and ray_private.has_store()
    return replace(job, queue=replace(job.queue, enabled=wanted and not connect.is_local_ray()))


def turn_of(job: Job, events: Events) -> Turn:
    """Return the turn of a run whose queue is settled."""
    if not job.queue.enabled:
        return Turn()
    turn = QueuedTurn(job, events)
    events.add_reader(turn.note_event)
    return turn


def seen_cluster() -> Cluster:
    """Return what the queue must know of the cluster: the same for each run."""
    nodes, types = connect.remaining_nodes(), connect.node_types()
    return Cluster(nodes, None if types is None else still_to_come(types, nodes))
