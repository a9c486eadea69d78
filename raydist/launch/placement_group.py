"""A worker group on the cluster: placement group, an actor per rank, node replacement. (driver)"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from raydist.cluster import connect, drain, node_history, placement, ray_private, shortage
from raydist.cluster.connect import alive_nodes, own_actor, remaining_nodes
from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan
from raydist.cluster.queue.turn import Turn, TurnPassed
from raydist.launch import runtime_env
from raydist.launch.actors import POLL_S, Actors, Waiting
from raydist.launch.gangs import Gang, Gangs
from raydist.launch.hosts import Hosts
from raydist.launch.left_out import LeftOut
from raydist.launch.standby import StandbyNodes
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.request import AnyReply, Request
from raydist.node import kept_server
from raydist.settings import validate
from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.shared.outcome import End, Slow

T = TypeVar("T")
WAIT_S = 1
"""Seconds of one wait for the placement group; an integer, because Ray truncates fractions."""
NAME = "raydist-"
"""Prefix of the names of placement groups that an actor has created."""


@contextlib.contextmanager
def placed_group(
    job: Job,
    request: ResourceRequest,
    events: Events,
    turn: Turn | None = None,
    gangs: Gangs | None = None,
) -> Iterator[WorkerGroup]:
    """Yield the worker group of a job: one placement group, one actor per rank.

    Leaving the block removes both. `turn`: in the cluster's queue, if the run obeys it. `gangs`: a
    store from which both may be taken and to which they may be returned.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    began = time.time()
    address = ray.get_runtime_context().gcs_address
    options = runtime_env.actor_options(job)
    turn = turn or Turn()
    held: Any = None
    actors: Actors | None = None
    with turn.entered(request):
        try:
            gang = gangs.take(request, options) if gangs else None
            if gang is not None:
                held = gang.group
                nodes = wait_until_placed(held, request, job.scale.wait_s, events)
                try:
                    turn.note_placement(nodes)
                except TurnPassed:
                    gang.remove()
                    gang = held = None
            if gang is None:
                held, nodes, request = group_in_turn(job, request, address, events, turn)
            if turn.waited_s:
                events.add(kinds.Phase(name="queue", s=turn.waited_s))
            plan = placement.assign_ranks(request, nodes)
            events.add(kinds.Phase(name="place", s=time.time() - began - turn.waited_s))
            if gang is not None:
                actors = gang.actors
                # Another node may have taken the place of a lost one since the gang was placed.
                actors.set_plan(plan)
                actors.start(lead.rank for lead in plan.leads)
            else:
                actors = Actors(plan, held, options)
            hosts = RayHosts(job, address, held, actors, events)
            hosts.take_turn(turn)
            with WorkerGroup(plan, hosts, events) as group:
                yield group
            if gangs is not None and hosts.standby is None and turn.may_keep():
                gangs.put(Gang(request, options, held, actors))
                actors = held = None
            elif not options:
                keep_s = min(job.scale.keep_warm_s, kept_server.most_s())
                connect.keep_workers(actors.by_node(), keep_s)
        finally:
            if actors is not None:
                actors.kill_all()
            if held is not None:
                remove_placement_group(held)


class RayHosts(Hosts):
    """The nodes of a placement group, through the actors on them."""

    def __init__(self, job: Job, address: str, held: Any, actors: Actors, events: Events) -> None:
        """`address`: of the cluster. `held`: the placement group."""
        self._job = job
        self._address = address
        self._held = held
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
                create_group,
                reason_to_avoid,
            )

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

        Without standby nodes, Ray moves the bundles of a node that it has declared dead, and keeps
        all others where they are. MakesWay: the run must leave the nodes that it has.
        """
        if self.standby is not None:
            plan = self.standby.replace_nodes(lost)
            bundles = {(slot.bundle, slot.node.id) for slot in plan.slots}
            held = Counter(node for _, node in bundles)
            held.update(node.id for node in plan.spares)
            self.turn.note_size(held, self.standby.spare_nodes())
            return plan
        before = self._actors.plan
        patience, check = self._job.scale.wait_s, self.turn.check_while_lacking
        found = wait_until_placed(self._held, before.request, patience, self._events, check)
        self._actors.replace(lost, placement.replace_nodes(before, found))
        # The queue counts on the room that its runs hold.
        self.turn.note_size(Counter(node.id for node in found), ())
        return self._actors.plan

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


def group_in_turn(
    job: Job, request: ResourceRequest, address: str, events: Events, turn: Turn
) -> tuple[Any, list[Node], ResourceRequest]:
    """Return a placement group that has room, the node of each bundle, and its request.

    The queue learns of them. An elastic run may get fewer nodes than it has requested.

    With the queue, it is created when it is this run's turn: of two groups that wait, Ray places
    the one that it tries first, and may keep a large one waiting forever.
    """
    from ray.util.placement_group import remove_placement_group

    while True:
        turn.wait()
        fitted = turn.fit(request)
        held = steered_group(job, fitted, address, events)
        try:
            patience = turn.patience(job.scale.wait_s)
            nodes = wait_until_placed(held, fitted, patience, events, turn.check)
            turn.note_placement(nodes)
            return held, nodes, fitted
        except BaseException as error:
            remove_placement_group(held)
            if not isinstance(error, TurnPassed):
                raise


def steered_group(job: Job, request: ResourceRequest, address: str, events: Events) -> Any:
    """Return a placement group for this request.

    If there is room, it avoids nodes with incidents in other runs.
    """
    if own_actor():
        remove_orphans()
    with node_history.avoiding_offenders(
        job, request, remaining_nodes(), address, events
    ) as steered:
        held = create_group(request, len(request.bundles))
        if steered:
            held.wait(node_history.PLACE_S)
    return held


def remove_orphans() -> None:
    """Remove the placement groups of earlier runs of this Ray job in actors that were killed.

    Such an actor may be a trial of Ray Tune. Ray keeps a group until both the actor that created it
    and the actor's job have ended.
    """
    from ray.util import placement_group_table
    from ray.util.placement_group import get_placement_group, remove_placement_group

    for each in placement_group_table().values():
        prefix, _, maker = each["name"].rpartition("-of-")
        if prefix.startswith(NAME) and each["state"] != "REMOVED" and ray_private.is_dead(maker):
            with contextlib.suppress(ValueError):  # another run has removed it
                remove_placement_group(get_placement_group(each["name"]))


def group_name() -> str:
    """Return a name that tells remove_orphans() which actor created the group.

    Empty in a driver: its groups end with it.
    """
    actor = own_actor()
    return f"{NAME}{uuid.uuid4().hex[:8]}-of-{actor}" if actor else ""


def create_group(request: ResourceRequest, bundles: int, elsewhere: Sequence[str] = ()) -> Any:
    """Create a placement group of the first `bundles` bundles.

    `elsewhere`: ids of nodes that it must not use.
    """
    from ray.util.placement_group import placement_group

    labels = {
        **({"ray.io/node-id": f"!in({','.join(elsewhere)})"} if elsewhere else {}),
        **request.selector,
    }
    selector: dict[str, Any] = {"bundle_label_selector": [labels] * bundles} if labels else {}
    return placement_group(
        [dict(bundle) for bundle in request.bundles[:bundles]],
        strategy=request.strategy,
        name=group_name(),
        **selector,
    )


def wait_until_placed(
    held: Any,
    request: ResourceRequest,
    patience: float,
    events: Events,
    check: Callable[[], None] = lambda: None,
) -> list[Node]:
    """Wait until every bundle has a node, and return the nodes; report missing resources.

    `check`: may raise while there is no room.
    """
    waiting = Waiting(patience, events)
    while True:
        placed = held.wait(WAIT_S)
        nodes = alive_nodes()
        found = bundle_nodes(held, nodes) if placed else None
        if found is not None:
            return found
        check()
        waiting.report(
            shortage.describe_missing(request, nodes, _bundles(held)["bundles_to_node_id"].values())
        )
        time.sleep(POLL_S)


def bundle_nodes(held: Any, nodes: Sequence[Node]) -> list[Node] | None:
    """Return the node of each bundle; None if a bundle has none, or its node is not alive.

    `nodes`: those that are alive. The source is the placement group's table, which is known before
    any actor starts.
    """
    alive = {node.id: node for node in nodes}
    table = _bundles(held)
    placed: Mapping[int, str] = table["bundles_to_node_id"]
    if table["state"] != "CREATED" or not alive.keys() >= set(placed.values()):
        return None
    return [alive[placed[bundle]] for bundle in sorted(placed)]


def _bundles(held: Any) -> Any:
    """Return the placement group's entry in Ray's table."""
    from ray.util.placement_group import placement_group_table

    return placement_group_table(held)
