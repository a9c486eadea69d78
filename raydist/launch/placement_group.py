"""A worker group on the cluster: placement group, an actor per rank, node replacement. (driver)"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raydist.cluster import connect, drain, node_history, placement, ray_private, shortage
from raydist.cluster.connect import alive_nodes, own_actor, remaining_nodes
from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan
from raydist.cluster.queue.turn import Turn, TurnPassed
from raydist.launch import bundles, runtime_env
from raydist.launch.actors import POLL_S, Actors, Waiting
from raydist.launch.bundles import Groups, create_group
from raydist.launch.gangs import Gang, Gangs
from raydist.launch.hosts import Hosts
from raydist.launch.left_out import LeftOut
from raydist.launch.limits import longest
from raydist.launch.standby import StandbyNodes
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import Opened
from raydist.messages.request import AnyReply, Request
from raydist.network import checks_node
from raydist.node import kept_server
from raydist.settings import validate
from raydist.settings.config import Job
from raydist.shared import kinds, signals
from raydist.shared.events import Events
from raydist.shared.outcome import End, Slow

T = TypeVar("T")
WAIT_S = 1
"""Seconds after which a wait for room is reported; an integer, because Ray truncates fractions."""
PLACE_S = 1
"""Longest wait for a placement on nodes that have room in Ray's view, which may be a moment old."""
PLACE_AGAIN_S = 10
"""Longest wait for a placement on the nodes on which Ray had placed the same bundles."""


@contextlib.contextmanager
def placed_group(
    job: Job,
    request: ResourceRequest,
    events: Events,
    turn: Turn | None = None,
    gangs: Gangs | None = None,
) -> Iterator[WorkerGroup]:
    """Yield the worker group of a job: a placement group on each node, one actor per rank.

    Leaving the block removes them. `turn`: in the cluster's queue, if the run obeys it. `gangs`: a
    store from which both may be taken and to which they may be returned.
    """
    import ray

    began = time.time()
    address = ray.get_runtime_context().gcs_address
    options = runtime_env.actor_options(job)
    turn = turn or Turn()
    groups: Groups = {}
    actors: Actors | None = None
    with turn.entered(request):
        try:
            gang = gangs.take(request, options) if gangs else None
            if gang is not None:
                groups, plan = dict(gang.actors.groups), gang.actors.plan
                try:
                    turn.note_placement(plan.bundle_nodes)
                except TurnPassed:
                    gang.remove()
                    gang, groups = None, {}
            if gang is None:
                groups, nodes, request = groups_in_turn(job, request, address, events, turn)
                plan = placement.assign_ranks(request, nodes)
            if turn.waited_s:
                events.add(kinds.Phase(name="queue", s=turn.waited_s))
            events.add(kinds.Phase(name="place", s=time.time() - began - turn.waited_s))
            if gang is not None:
                actors = gang.actors
                actors.start(lead.rank for lead in plan.leads)
            else:
                actors = Actors(plan, groups, options)
            hosts = RayHosts(job, address, actors, events)
            hosts.take_turn(turn)
            with WorkerGroup(plan, hosts, events) as group:
                yield group
            kept = gangs is not None and hosts.standby is None and turn.may_keep()
            # Later runs number their ranks by the nodes of a gang as it was placed.
            if gangs is not None and kept and actors.groups == groups:
                gangs.put(Gang(request, options, actors))
                actors, groups = None, {}
            elif not options:
                keep_s = min(job.scale.keep_warm_s, kept_server.most_s())
                connect.keep_workers(actors.by_node(), keep_s)
        finally:
            try:
                if actors is not None:
                    actors.kill_all()
            finally:
                bundles.drop_bundles(groups if actors is None else actors.groups)


class RayHosts(Hosts):
    """The nodes of a worker group, through the actors on them."""

    def __init__(self, job: Job, address: str, actors: Actors, events: Events) -> None:
        """`address`: of the cluster."""
        self._job = job
        self._address = address
        self._actors = actors
        self._events = events
        self.turn = Turn()
        """In the cluster's queue."""
        self.ray_stays = not ray_private.started_processes()
        self._left_out = LeftOut(remaining_nodes)
        self.standby = None
        if validate.size_override(job.scale):
            reason_to_avoid = partial(node_history.reason_to_avoid, job, address)
            self.standby = StandbyNodes(
                actors,
                job.scale,
                events,
                self._left_out.remaining,
                reason_to_avoid,
                self._check_joining,
            )

    def _check_joining(self, node: Node, reply: Opened) -> None:
        """Raise RaydistError if the ranks could not start on a node that has opened."""
        if reply.facts is not None:
            checks_node.check_joining(self._job, self._actors.plan.request, node, reply.facts)

    def take_turn(self, turn: Turn) -> None:
        """Obey the queue in which this is the run's turn."""
        self.turn = turn
        if self.standby is not None:
            self.standby.turn = turn

    def call(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        return self._actors.call(rank, request)

    def gpus(self) -> Sequence[Sequence[str]] | None:
        return self._actors.gpus() if self._actors.plan.request.rank_resources.get("GPU") else None

    def start_other_actors(self) -> None:
        self._actors.start()

    def replace_nodes(self, lost: Sequence[int]) -> Plan:
        """Wait for replacement nodes for the lost ranks, and start actors there.

        Without standby nodes, a node that Ray has declared dead is replaced by another one, and all
        others stay. MakesWay: the run must leave the nodes that it has.
        """
        if self.standby is not None:
            plan = self.standby.replace_nodes(lost)
            used = {(slot.bundle, slot.node.id) for slot in plan.slots}
            held = Counter(node for _, node in used)
            held.update(node.id for node in plan.spares)
            self.turn.note_size(held, self.standby.spare_nodes())
            return plan
        before = self._actors.plan
        waiting, began = Waiting(self._job.scale.wait_s, self._events), time.monotonic()
        while len(found := self._replaced_bundles()) < len(before.request.bundles):
            self.turn.check_while_lacking()
            if time.monotonic() - began > WAIT_S:
                waiting.report(self._describe_missing(found))
            time.sleep(POLL_S)
        self._actors.replace(lost, placement.replace_nodes(before, found))
        # The queue counts on the room that its runs hold.
        self.turn.note_size(Counter(node.id for node in found.values()), ())
        return self._actors.plan

    def _describe_missing(self, found: Mapping[int, Node]) -> str:
        """Return a text, for a person, about what the run waits for.

        `found`: the node of each placed bundle.
        """
        plan, there = self._actors.plan, [node.id for node in found.values()]
        nodes = nodes_to_wait_for(alive_nodes(), there)
        lost = [slot.node_rank for slot in plan.slots if slot.bundle not in found]
        ranks = lost.count(lost[0])
        if plan.request.strategy == "STRICT_SPREAD" or ranks == 1:
            return shortage.describe_missing(plan.request, nodes, there)
        # The ranks of a lost node are placed together.
        asked = replace(
            plan.request,
            bundles=plan.request.bundles[:ranks],
            strategy="STRICT_PACK",
            spares=0,
        )
        return shortage.describe_shortage(asked, nodes)

    def _replaced_bundles(self) -> dict[int, Node]:
        """Return the node of each bundle that has one; request others for those that are lost."""
        groups, plan = self._actors.groups, self._actors.plan
        spread = plan.request.strategy == "STRICT_SPREAD"
        seen = bundles.see_bundles(groups)
        placed = bundles.placed_on(seen, alive_nodes())
        node_of = {slot.bundle: slot.node.id for slot in plan.slots}
        lost = set(bundles.lost_bundles(groups, seen))
        if spread:  # two that were requested at the same time may have been given the same node
            first = {node.id: bundle for bundle, node in reversed(placed.items())}
            lost |= {bundle for bundle, node in placed.items() if first[node.id] != bundle}
        by_node: dict[str, list[int]] = {}
        for bundle in sorted(lost):
            by_node.setdefault(node_of[bundle], []).append(bundle)
        placed = {bundle: node for bundle, node in placed.items() if bundle not in lost}
        elsewhere = {node.id for node in placed.values()} if spread else set[str]()
        for of_node in by_node.values():
            for bundle in of_node:
                bundles.drop_bundle(groups, bundle)
            groups |= bundles.create_on_one_node(plan.request, of_node, elsewhere)
        return placed

    def draining(self) -> Mapping[str, float]:
        return drain.drain_deadlines()

    def wanted_by(self) -> str:
        return self.turn.wanted_by()

    def record_attempt(self, cause: End | None, slow: Sequence[Slow]) -> None:
        """Record the incidents of an attempt in the node history.

        A cluster of one node has no other node to prefer, so nothing is recorded.
        """
        if len(alive_nodes()) > 1:
            now = time.time()
            node_history.note_incidents(
                node_history.history_file(),
                node_history.incidents(
                    self._address, self._job.dir, self._actors.plan, cause, slow, now
                ),
                now,
            )

    def reachable(self, node_ids: Collection[str]) -> set[str]:
        return connect.reachable(node_ids)

    def leave_out(self, node_ids: Collection[str]) -> None:
        self._left_out.add(node_ids)

    def put(self, call: bytes) -> Awaitable[bytes]:
        import ray

        return ray.put(call)  # type: ignore[no-any-return]

    def on_node(self, rank: int, look: Callable[..., T | None], *args: Any) -> Future[T | None]:
        return self._actors.on_node(rank, look, *args)


def groups_in_turn(
    job: Job, request: ResourceRequest, address: str, events: Events, turn: Turn
) -> tuple[Groups, list[Node], ResourceRequest]:
    """Return placement groups that have room, the node of each bundle, and the request.

    The queue learns of them. An elastic run may get fewer nodes than it has requested.

    With the queue, they are created when it is this run's turn: of two groups that wait, Ray places
    the one that it tries first, and may keep a large one waiting forever.
    """
    while True:
        turn.wait()
        fitted = turn.fit(request)
        groups: Groups = {}
        try:
            chosen = nodes_with_room(job, fitted, address, events)
            placed = place_on(fitted, chosen, PLACE_S, turn.check)
            waiting = Waiting(turn.patience(job.scale.wait_s), events)
            for last in (False, True):
                if placed is not None:
                    break
                held = create_group(fitted, len(fitted.bundles))
                groups = {bundle: (held, bundle) for bundle in range(len(fitted.bundles))}
                nodes = wait_until_placed(groups, fitted, waiting, turn.check)
                if last or len({node.id for node in nodes}) == 1:
                    placed = groups, nodes
                else:
                    bundles.drop_bundles(groups)
                    found = [node.id for node in nodes]
                    placed = place_on(fitted, found, PLACE_AGAIN_S, turn.check)
            assert placed is not None
            groups, nodes = placed
            turn.note_placement(nodes)
            return groups, nodes, fitted
        except BaseException as error:
            bundles.drop_bundles(groups)
            if not isinstance(error, TurnPassed):
                raise


def nodes_with_room(
    job: Job, request: ResourceRequest, address: str, events: Events
) -> list[str] | None:
    """Return the id of a node with room for each bundle; None if Ray is to choose the nodes.

    They are none with incidents in other runs, if there are enough others.
    """
    if own_actor():
        remove_orphans()
    nodes = remaining_nodes()
    avoided = node_history.avoided_nodes(job, request, nodes, address, events)
    others = [node for node in nodes if node.id not in avoided]
    random.shuffle(others)  # runs that begin at the same moment choose different ones
    chosen = placement.choose_nodes(request, others)
    # If all are on one node, one group is enough.
    return chosen if chosen and (avoided or len({*chosen}) > 1) else None


def place_on(
    request: ResourceRequest,
    nodes: Sequence[str] | None,
    within_s: float,
    check: Callable[[], None],
) -> tuple[Groups, list[Node]] | None:
    """Return placement groups on these nodes, and the node of each bundle.

    None if they have no room, or no longer. `nodes`: the id of that of each bundle. `within_s`: how
    long Ray may take, longer for many. `check`: may raise meanwhile.
    """
    if nodes is None:
        return None
    groups, found = Groups(), dict[int, Node]()
    until = time.monotonic() + longest(within_s, len(nodes))
    try:
        bundles.create_on(request, nodes, groups)
        waiting = [held for held, _ in groups.values()]
        while waiting := [held for held in waiting if not held.wait(WAIT_S)]:
            signals.raise_again()
            if time.monotonic() > until:
                break
            check()
        if not waiting:
            found = bundles.placed_on(bundles.see_bundles(groups), alive_nodes())
    finally:
        if len(found) < len(nodes):
            bundles.drop_bundles(groups)
    return (groups, [found[bundle] for bundle in sorted(found)]) if groups else None


def remove_orphans() -> None:
    """Remove the placement groups of earlier runs of this Ray job in actors that were killed.

    Such an actor may be a trial of Ray Tune. Ray keeps a group until both the actor that created it
    and the actor's job have ended.
    """
    from ray.util import placement_group_table
    from ray.util.placement_group import get_placement_group, remove_placement_group

    for each in placement_group_table().values():
        prefix, _, maker = each["name"].rpartition("-of-")
        if (
            prefix.startswith(bundles.NAME)
            and each["state"] != "REMOVED"
            and ray_private.is_dead(maker)
        ):
            with contextlib.suppress(ValueError):  # another run has removed it
                remove_placement_group(get_placement_group(each["name"]))


def wait_until_placed(
    groups: Groups, request: ResourceRequest, waiting: Waiting, check: Callable[[], None]
) -> list[Node]:
    """Wait until every bundle has a node, and return the nodes; report missing resources.

    `groups`: one of all bundles. `check`: may raise while there is no room.
    """
    held, _ = groups[0]
    while True:
        is_placed = held.wait(WAIT_S)
        nodes = alive_nodes()
        found = bundles.placed_on(bundles.see_bundles(groups), nodes)
        if is_placed and len(found) == len(groups):
            return [found[bundle] for bundle in sorted(found)]
        check()
        there = [node.id for node in found.values()]
        open_to_us = nodes_to_wait_for(nodes, there)
        waiting.report(shortage.describe_missing(request, open_to_us, there))
        time.sleep(POLL_S)


def nodes_to_wait_for(nodes: Sequence[Node], held: Collection[str]) -> list[Node]:
    """Return those of the nodes on which Ray places something, and those that the run holds.

    The free resources of a node that is drained are no room.
    """
    usable = {node.id for node in drain.not_draining(nodes)} | {*held}
    return [node for node in nodes if node.id in usable]
