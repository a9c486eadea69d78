"""Standby nodes: without ranks but with warm fork servers, as spares or to grow a job. (driver)"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from raydist.cluster import drain, placement
from raydist.cluster.nodes import Node, fit_count, matches
from raydist.cluster.placement import Plan
from raydist.cluster.queue.turn import Turn
from raydist.cluster.shortage import describe_shortage
from raydist.launch import bundles
from raydist.launch.actors import POLL_S, Actors, Waiting
from raydist.launch.flush import Ask
from raydist.messages.agent import Close, Open, Opened
from raydist.settings.config import Scale
from raydist.shared import kinds
from raydist.shared.errors import CallLost, last_line
from raydist.shared.events import Events
from raydist.shared.rank_names import counted

PENDING = 8
"""Maximum bundles that wait for a node concurrently: each is a separate placement group."""

AVOID_S = 30.0
"""Seconds that a placement group waits for a node without incidents; afterwards a node with
incidents is used."""


UNUSABLE_S = 60.0
"""Seconds after which a node is tried again that could not be used: its port may be up by then."""


class Unusable:
    """Nodes that could not be opened, or whose network or CPUs do not suit the run."""

    def __init__(
        self, events: Events, check: Callable[[Node, Opened], None] = lambda node, reply: None
    ) -> None:
        """`check`: raises if the ranks of the run could not start on a node that has opened."""
        self._events = events
        self._check = check
        self._until: dict[str, float] = {}
        """By node id: when it may be tried again, on the monotonic clock."""
        self._reported: set[tuple[str, str]] = set()

    def judge(self, node: Node, reply: Future[Opened]) -> bool:
        """Return whether the agent of a node is of no use; warn once of each cause.

        `reply`: of its agent, if it has come.
        """
        if not reply.done():
            return False
        try:
            self._check(node, reply.result())
        except CallLost:  # the agent or its node is gone: another one may be started
            return True
        except Exception as error:  # of the agent, which may have any cause
            self._until[node.id] = time.monotonic() + UNUSABLE_S
            cause = last_line(error)
            if (node.id, cause) not in self._reported:
                self._reported.add((node.id, cause))
                self._events.warn(f"{node.host} ({node.ip}) is not used for this run: {cause}")
            return True
        return False

    def ids(self) -> set[str]:
        """Return the ids of these nodes."""
        return {*self._until}

    def forget_old(self) -> bool:
        """Forget those that may be tried again; return whether there were any."""
        old = [id for id, until in self._until.items() if time.monotonic() > until]
        for id in old:
            del self._until[id]
        return bool(old)


class WarmNode(NamedTuple):
    """A standby node whose fork server is warm or warming."""

    node: Node
    run: str
    """The name of its fork server."""
    first_reply: Future[Opened]
    """The reply of its first agent."""


class Witness(NamedTuple):
    """A node that can tell whether it reaches another one."""

    node: Node
    ask: Ask
    """Sends to the node's first agent."""


class StandbyNodes:
    """The nodes besides those of the ranks, for an elastic job or one with spares.

    Lost nodes are replaced by them.
    """

    turn = Turn()
    """The run's place in the cluster's queue. The owner sets it; this one is for a run outside."""

    def __init__(
        self,
        actors: Actors,
        scale: Scale,
        events: Events,
        nodes: Callable[[], list[Node]],
        reason_to_avoid: Callable[[Node, bool], str] = lambda node, avoided: "",
        check: Callable[[Node, Opened], None] = lambda node, reply: None,
    ) -> None:
        """`nodes`: returns the cluster's nodes that are alive and not draining.

        `reason_to_avoid`: describes a node's incidents, for a node that is avoided or is used
        nevertheless; empty without incidents. `check`: as in Unusable.
        """
        size = len(actors.plan.nodes)
        self._min, self._max = (
            (scale.nodes or 1, scale.max_nodes) if scale.max_nodes else (size, size)
        )
        self._actors = actors
        self._scale = scale
        self._events = events
        self._nodes = nodes
        self._reason_to_avoid = reason_to_avoid
        self._unusable = Unusable(events, check)
        self._warm: dict[int, WarmNode] = {}
        """By bundle: the standby node on it."""
        self._request: Open | None = None
        self._lost_bundles: set[tuple[int, str]] = set()
        """Bundles whose actor is gone, each with its node."""
        self._avoiding_since: dict[int, float] = {}
        """By bundle that waits for a node without incidents: since when."""
        self._avoid_none = False
        """Whether such a bundle got no node in time."""
        self._reported: set[tuple[str, bool]] = set()

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self._scale.max_nodes is not None

    def set_request(self, request: Open) -> None:
        """Set the request that opens every agent."""
        self._request = replace(request, warm_server=None)

    def refresh(self, running: bool = True) -> dict[int, Node]:
        """Warm the nodes without ranks, and request more if the job may grow.

        Returns the node of each bundle. `running`: whether the ranks run, so that all their bundles
        count as used; the supervisor notices the end of a lost rank.
        """
        with_ranks = {slot.bundle for slot in self._actors.plan.slots} if running else set[int]()
        seen = bundles.see_bundles(self._actors.groups)
        for bundle in bundles.lost_bundles(self._actors.groups, seen):
            if bundle not in with_ranks:  # the supervisor may start its actors
                bundles.drop_bundle(self._actors.groups, bundle)
                self._avoiding_since.pop(bundle, None)
        placed = bundles.placed_on(seen, self._nodes())
        if running:
            kept = with_ranks | placed.keys()
            self._leave_drained({b: id for b, (_, id) in seen.items() if id and b not in kept})
        used = with_ranks or self._bundles_in_use(placed)
        if self._unusable.forget_old():
            waiting = {bundle for bundle, (_, node) in seen.items() if not node} - with_ranks
            for bundle in (waiting & self._actors.groups.keys()) - self._avoiding_since.keys():
                self._drop(bundle)  # it is requested again, and may be on these nodes then
        for bundle, warm in list(self._warm.items()):
            gone = bundle not in placed or placed[bundle].id != warm.node.id
            if gone or self._unusable.judge(warm.node, warm.first_reply):
                del self._warm[bundle]
                self._actors.kill_bundle(bundle)
        self._stop_avoiding(placed)
        most = self._max if self.elastic else self._max + self._scale.spares
        if self.elastic and not self.turn.may_grow():
            most = self._min
            self._drop_unused(used, placed)
            placed = {each: node for each, node in placed.items() if each in self._actors.groups}
        taken = self._unusable.ids() | {
            node.id for bundle, node in placed.items() if bundle in used or bundle in self._warm
        }
        for bundle, node in placed.items():
            if bundle in used or bundle in self._warm:
                continue
            self._avoiding_since.pop(bundle, None)
            if node.id not in taken and not self._avoid(node, len(used & placed.keys()), placed):
                self._open(bundle, node)
                taken.add(node.id)
            else:  # the bundle's node has another bundle, can't be used, or is avoided
                self._drop(bundle)
        self._request_nodes(placed, most)
        if running and not self.elastic:  # a spare may be new, or gone
            held = {slot.bundle: slot.node.id for slot in self._actors.plan.slots}
            # Also where the run puts no ranks any more, as long as Ray reserves it.
            held |= {b: node for b, (_, node) in seen.items() if node and b in self._actors.groups}
            self.turn.note_size(Counter(held.values()), ())
        return placed

    def _leave_drained(self, nodes: Mapping[int, str]) -> None:
        """Give back those of these bundles that are on drained nodes.

        Ray ends such a node once nothing is reserved there, and places nothing else on it. `nodes`:
        the node's id by bundle; all are without ranks.
        """
        groups = self._actors.groups
        drained = drain.drain_deadlines() if nodes else {}
        for bundle in groups.keys() & nodes.keys():
            if nodes[bundle] in drained and not bundles.is_shared(groups, bundle):
                self._forget(bundle)

    def _avoid(self, node: Node, used: int, placed: Mapping[int, Node]) -> bool:
        """Return whether a node with incidents is left out; then request another node.

        That needs room on other nodes. `used`: the number of nodes with ranks.
        """
        count = used + len(self._warm) + len(self._avoiding_since)
        if not self.elastic or count < self._min or not self._reason_to_avoid(node, True):
            return False
        others = self._free_nodes(placed) if count < self._max and not self._avoid_none else []
        if others:
            bundle = self._request_node({each.id for each in self._nodes()} - set(others))
            self._avoiding_since[bundle] = time.monotonic()
        avoided = count >= self._max or bool(others)
        if (node.id, avoided) not in self._reported:
            self._reported.add((node.id, avoided))
            self._events.add(
                kinds.Avoid(
                    node=node.id, avoided=avoided, text=self._reason_to_avoid(node, avoided)
                )
            )
        return avoided

    def _stop_avoiding(self, placed: Mapping[int, Node]) -> None:
        """Remove bundles that have waited too long for a node without incidents."""
        for bundle, since in list(self._avoiding_since.items()):
            if bundle not in placed and time.monotonic() - since > AVOID_S:
                self._avoid_none = True
                del self._avoiding_since[bundle]
                bundles.drop_bundle(self._actors.groups, bundle)

    def _free_nodes(self, placed: Mapping[int, Node]) -> list[str]:
        """Return the ids of the nodes without incidents that have room for another bundle."""
        request, held = self._actors.plan.request, {node.id for node in placed.values()}
        fit = [
            node
            for node in self._nodes()
            if node.id not in held | self._unusable.ids() and matches(node.labels, request.selector)
        ]
        roomy = [node for node in fit if fit_count(node.free, request.bundles[0])]
        return [node.id for node in roomy if not self._reason_to_avoid(node, True)]

    def _drop(self, bundle: int) -> None:
        """Give back a bundle without actors, unless Ray would keep its room for others."""
        if not bundles.is_shared(self._actors.groups, bundle):
            bundles.drop_bundle(self._actors.groups, bundle)

    def _drop_unused(self, used: Collection[int], placed: Collection[int]) -> None:
        """Give back the bundles without ranks that the run can do without: another run waits.

        A node whose actor alone was lost gets another one.
        """
        groups = self._actors.groups
        with_ranks = {slot.bundle for slot in self._actors.plan.slots} & {*placed}
        for bundle in sorted(groups.keys() - {*used} - with_ranks, reverse=True):
            if len(groups) > self._min and not bundles.is_shared(groups, bundle):
                self._forget(bundle)

    def _forget(self, bundle: int) -> None:
        """Give back a bundle without ranks, warm or not."""
        self._warm.pop(bundle, None)
        self._avoiding_since.pop(bundle, None)
        self._give_back(bundle)

    def _give_back(self, bundle: int) -> None:
        """End the actors of an additional bundle, and free its room."""
        self._actors.kill_bundle(bundle)
        bundles.drop_bundle(self._actors.groups, bundle)

    def spare_nodes(self) -> list[str]:
        """Return the ids of the nodes with ranks that can be given up one by one, last one first.

        None if the run has its minimum. Ray frees only whole placement groups.
        """
        groups, leads = self._actors.groups, self._actors.plan.leads
        own = [
            slot
            for slot in leads
            if slot.bundle in groups and not bundles.is_shared(groups, slot.bundle)
        ]
        return [slot.node.id for slot in own[::-1]][: max(0, len(leads) - self._min)]

    def leaving(self) -> set[str]:
        """Return the ids of the nodes that another run needs, and this one can give up."""
        request = self.turn.nodes_wanted()
        return set(request.nodes) & set(self.spare_nodes()) if request else set()

    def growth(self) -> str:
        """Refresh, and return a description of how the job can grow; empty if it can't.

        It can if it can use more nodes and all standby nodes are warm. If another run needs some of
        its nodes, it shrinks instead.
        """
        self.refresh()
        now = len(self._actors.plan.nodes)
        request, leaving = self.turn.nodes_wanted(), self.leaving()
        if request and leaving:
            less = counted(now - len(leaving), "node")
            return f"{less} now, {now} before; makes way for {request.for_whom}"
        ready = [warm for warm in self._warm.values() if warm.first_reply.done()]
        if not self.elastic or not ready or len(ready) < len(self._warm) or now >= self._max:
            return ""
        return f"{counted(min(self._max, now + len(ready)), 'node')} now, {now} before"

    def enough_remain(self, without: Collection[str] = ()) -> bool:
        """Return whether enough nodes for the job are alive and not draining.

        Nodes that are still warming count. `without`: ids of nodes that do not.
        """
        remain = {node.id for node in self._node_by_bundle().values()} - set(without)
        remain -= self._unusable.ids()
        return len(remain) >= self._min

    def remains_without(self, nodes: Collection[str]) -> bool:
        """Return whether the job can continue at once without these nodes.

        Nodes that are still warming do not count.
        """
        ranks = {slot.node.id for slot in self._actors.plan.leads}
        return len((ranks | {each.node.id for each in self.witnesses()}) - set(nodes)) >= self._min

    def witnesses(self) -> list[Witness]:
        """Return the standby nodes that are warm. Other threads may call this too."""
        ready = [bundle for bundle in list(self._warm) if self._ready(bundle)]
        return [
            Witness(self._warm[bundle].node, partial(self._actors.send, (bundle, 0), 0))
            for bundle in ready
        ]

    def replace_nodes(self, lost: Sequence[int]) -> Plan:
        """Assign the ranks anew, and wait for enough nodes.

        Either these ranks have lost their actors, or nodes have joined. The caller knows that the
        first actor of every other node answers. MakesWay: the run must leave the nodes that it has.
        """
        waiting = Waiting(self._scale.wait_s, self._events)
        for slot in (self._actors.plan.slots[rank] for rank in lost):
            self._lost_bundles.add((slot.bundle, slot.node.id))
            self._actors.kill_bundle(slot.bundle)
        leaving = self.leaving()
        for slot in self._actors.plan.leads:
            if slot.node.id in leaving and slot.rank in lost:
                self._give_back(slot.bundle)
        while (plan := self._next_plan()) is None:
            self.turn.check_while_lacking()
            waiting.report(self._describe_missing())
            time.sleep(POLL_S)
        before = self._actors.plan.nodes
        self._actors.set_plan(plan)
        self._lost_bundles -= {(slot.bundle, slot.node.id) for slot in plan.slots}
        if len(plan.nodes) != len(before):
            self._events.add(
                kinds.Resize(nodes=len(plan.nodes), before=len(before), **plan.as_event())
            )
        for old, new in zip(before, plan.nodes, strict=False):
            if old.id != new.id and len(plan.nodes) == len(before):
                self._events.add(
                    kinds.Takeover(
                        node=new.id,
                        host=new.host,
                        ip=new.ip,
                        instead=old.id,
                        of=old.host,
                        **plan.as_event(),
                    )
                )
        return plan

    def promote(self) -> dict[str, tuple[str, Opened]]:
        """Drop the nodes that have ranks now.

        Returns, by node id, the name of the node's fork server and its first agent's reply.
        """
        used = {slot.bundle for slot in self._actors.plan.slots}
        promoted = [self._warm.pop(bundle) for bundle in list(self._warm) if bundle in used]
        return {warm.node.id: (warm.run, warm.first_reply.result()) for warm in promoted}

    def close(self) -> list[Future[Any]]:
        """Close the standby agents, and return the futures of their replies."""
        return [self._actors.send((bundle, 0), 0, Close()) for bundle in self._warm]

    def _next_plan(self) -> Plan | None:
        """Return the plan on the nodes that are ready now; None if they are too few."""
        placed = self.refresh(running=False)
        used = self._bundles_in_use(placed)
        ready = {
            b: node
            for b, node in placed.items()
            if b in used or (b in self._warm and self._ready(b))
        }
        return placement.resize_plan(self._actors.plan, ready, self._min, self._max)

    def _ready(self, bundle: int) -> bool:
        opened = self._warm[bundle].first_reply
        return opened.done() and opened.exception() is None

    def _bundles_in_use(self, placed: Mapping[int, Node]) -> set[int]:
        """Return the bundles whose ranks have not lost their actors."""
        kept = {
            (slot.bundle, slot.node.id) for slot in self._actors.plan.slots
        } - self._lost_bundles
        return {bundle for bundle, node in kept if bundle in placed and placed[bundle].id == node}

    def _node_by_bundle(self) -> dict[int, Node]:
        """Return the node of each placed bundle, if that node is alive and not draining."""
        return bundles.placed_on(bundles.see_bundles(self._actors.groups), self._nodes())

    def _open(self, bundle: int, node: Node) -> None:
        """Start the fork server of a node, without waiting for it."""
        run = uuid.uuid4().hex[:8]
        self._actors.kill_bundle(bundle)
        self._actors.start_actor((bundle, 0))
        assert self._request is not None, "set_request comes first"
        request = replace(self._request, run=run, node_id=node.id, node_ip=node.ip)
        self._warm[bundle] = WarmNode(node, run, self._actors.send((bundle, 0), 0, request))

    def _request_nodes(self, placed: Mapping[int, Node], most: int) -> None:
        """Request nodes from Ray, and thereby from its autoscaler, up to so many."""
        groups = self._actors.groups
        elsewhere = {node.id for node in placed.values()} | self._unusable.ids()
        for _ in range(min(most - len(groups), PENDING - (len(groups) - len(placed)))):
            self._request_node(elsewhere)

    def _request_node(self, elsewhere: Collection[str]) -> int:
        """Request one node that is none of these; return its bundle."""
        groups, plan = self._actors.groups, self._actors.plan
        # Not the number of a lost one, which may still have ranks.
        bundle = max([*groups, *(slot.bundle for slot in plan.slots)]) + 1
        groups[bundle] = bundles.create_group(plan.request, 1, elsewhere), 0
        return bundle

    def _describe_missing(self) -> str:
        """Return a text, for a person, about the nodes that the job waits for."""
        placed = self._node_by_bundle()
        if self._warm and all(bundle in placed for bundle in self._warm):
            return f"waiting for {counted(len(self._warm), 'node')} to get ready"
        request = self._actors.plan.request
        held = {node.id for node in placed.values()}
        lack = max(0, self._min - len(held - self._unusable.ids()))
        more = replace(request, bundles=request.bundles[:1] * max(1, lack), spares=0)
        return describe_shortage(more, [node for node in self._nodes() if node.id not in held])
