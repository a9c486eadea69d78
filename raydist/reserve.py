"""Nodes beside those that have ranks, warm until needed: spares, newcomers of a job whose size may change. (driver)"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from raydist import placement
from raydist.config import Scale
from raydist.events import Events
from raydist.inventory import count, matches, slots
from raydist.placement import Ask, Node, Plan
from raydist.places import AGAIN_S, Places, Waiting

PENDING = 8
"""Most nodes that are asked for at once beside those that are there: each is a placement group of its own."""

CHOOSY_S = 30.0
"""Seconds after which a node that is avoided is taken, if none of the others came."""


class Warm(NamedTuple):
    """A node that gets ready, or is."""

    node: Node
    run: str
    """The name of its fork server."""
    opened: Future[Any]
    """What its first seat found."""


class Reserve:
    """Which nodes there are for a job whose size may change, or which has spares; and who sits where next."""

    def __init__(
        self,
        places: Places,
        scale: Scale,
        events: Events,
        nodes: Callable[[], list[Node]],
        hold: Callable[[Ask, int, Sequence[str]], Any],
        against: Callable[[Node, bool], str] = lambda node, avoided: "",
    ) -> None:
        """`nodes`: those of the cluster that are alive, and not about to be taken away.

        `hold`: makes a placement group, of so many bundles. `against`: what counts against a node, in words for one
        that is avoided, or is used all the same; empty if nothing does.
        """
        size = len(places.plan.nodes)
        self.elastic = scale.max_nodes is not None
        self._least, self._most = (scale.nodes or 1, scale.max_nodes) if scale.max_nodes else (size, size)
        self._places, self._events, self._wait_s = places, events, scale.wait_s
        self._nodes, self._hold, self._against = nodes, hold, against
        self._warm: dict[int, Warm] = {}
        self._ask: dict[str, Any] = {}
        self._first = places.groups[0][0]
        self._lost: set[tuple[int, str]] = set()
        """Bundles, each with the node where its actor is gone."""
        self._choosy: dict[int, float] = {}
        """Bundles asked for beside the nodes that are to be avoided, and when."""
        self._any_will_do = False
        """Such a bundle has found no place in time."""
        self._said: set[tuple[str, bool]] = set()

    def equip(self, ask: Mapping[str, Any]) -> None:
        """What every seat is opened with."""
        self._ask = {**ask, "home": None, "rank": -1, "lead": True, "store": None}

    def look(self, running: bool = True) -> dict[int, Node]:
        """See which nodes are there, get those ready that have no ranks, ask for more if there may be more.

        `running`: what the ranks have is theirs, whatever became of it: who listens to them will hear.
        """
        from ray.util.placement_group import remove_placement_group

        there = self._standing()
        used = {seat.bundle for seat in self._places.plan.seats} if running else self._used(there)
        for bundle, warm in list(self._warm.items()):
            gone = bundle not in there or there[bundle].id != warm.node.id
            if gone or (warm.opened.done() and warm.opened.exception() is not None):
                self._forget(bundle)
        self._settle_for_any(there)
        taken = {node.id for bundle, node in there.items() if bundle in used or bundle in self._warm}
        for bundle, node in there.items():
            if bundle in used or bundle in self._warm:
                continue
            self._choosy.pop(bundle, None)
            if node.id not in taken and not self._avoid(node, len(used & there.keys()), there):
                self._get_ready(bundle, node)
                taken.add(node.id)
            elif self._places.groups[bundle][0] is not self._first:  # a second place on a node is none
                remove_placement_group(self._places.groups.pop(bundle)[0])
        self._ask_for_more(there)
        return there

    def _avoid(self, node: Node, used: int, there: Mapping[int, Node]) -> bool:
        """Whether a node is left out for what it did to other runs: where there is room without it, as at the start.

        Then one is asked for beside it. `used`: so many have ranks.
        """
        have = used + len(self._warm) + len(self._choosy)
        if not self.elastic or have < self._least or not self._against(node, True):
            return False
        others = self._free_beside(there) if have < self._most and not self._any_will_do else []
        if others:
            bundle = self._ask_for_one(sorted({each.id for each in self._nodes()} - set(others)))
            self._choosy[bundle] = time.monotonic()
        avoided = have >= self._most or bool(others)
        if (node.id, avoided) not in self._said:
            self._said.add((node.id, avoided))
            self._events.say("avoid", node=node.id, avoided=avoided, text=self._against(node, avoided))
        return avoided

    def _settle_for_any(self, there: Mapping[int, Node]) -> None:
        """Give up on bundles beside the nodes that are to be avoided, if they have waited for too long."""
        from ray.util.placement_group import remove_placement_group

        for bundle, at in list(self._choosy.items()):
            if bundle not in there and time.monotonic() - at > CHOOSY_S:
                self._any_will_do = True
                del self._choosy[bundle]
                remove_placement_group(self._places.groups.pop(bundle)[0])

    def _free_beside(self, there: Mapping[int, Node]) -> list[str]:
        """The nodes with room for one more bundle against which nothing counts."""
        ask, held = self._places.plan.ask, {node.id for node in there.values()}
        fit = [node for node in self._nodes() if node.id not in held and matches(node.labels, ask.selector)]
        return [node.id for node in fit if slots(node.free, ask.bundles[0]) and not self._against(node, True)]

    def grown(self) -> str:
        """In words, if there are now more nodes, all of them ready; empty if not. Looks first."""
        self.look()
        now, ready = len(self._places.plan.nodes), [warm for warm in self._warm.values() if warm.opened.done()]
        if not self.elastic or not ready or len(ready) < len(self._warm) or now >= self._most:
            return ""
        return f"{count(min(self._most, now + len(ready)), 'node')} now, {now} before"

    def enough(self) -> bool:
        """Whether the nodes that stay are as many as the job needs, those among them that get ready."""
        return len({node.id for node in self._standing().values()}) >= self._least

    def regroup(self, lost: Sequence[int]) -> Plan:
        """Who sits where after these ranks have lost their seats, or because there are more nodes; waits for enough.

        It must be known which of them are alive: the first actor of each answers.
        """
        waiting = Waiting(self._wait_s, self._events)
        for seat in (self._places.plan.seats[rank] for rank in lost):
            self._lost.add((seat.bundle, seat.node.id))
            for key in self._places.keys_of(seat.bundle):
                self._places.drop(key)
        while (plan := self._next()) is None:
            waiting.still(self._missing())
            time.sleep(AGAIN_S)
        before = self._places.plan.nodes
        self._places.settle(plan)
        self._lost -= {(seat.bundle, seat.node.id) for seat in plan.seats}
        if len(plan.nodes) != len(before):
            self._events.say("resize", nodes=len(plan.nodes), before=len(before), **plan.as_event())
        for old, new in zip(before, plan.nodes, strict=False):
            if old.id != new.id and len(plan.nodes) == len(before):
                self._events.say(
                    "takeover", node=new.id, host=new.host, ip=new.ip, instead=old.id, of=old.host, **plan.as_event()
                )
        return plan

    def taken(self) -> dict[str, tuple[str, Any]]:
        """Of nodes that were in reserve and have ranks now: by id the name of its fork server, and what it found."""
        own = [bundle for bundle in self._warm if bundle in {seat.bundle for seat in self._places.plan.seats}]
        made = {bundle: self._warm.pop(bundle) for bundle in own}
        return {warm.node.id: (warm.run, warm.opened.result()) for warm in made.values()}

    def close(self) -> list[Future[Any]]:
        """Let go of all that are in reserve; the answers to come."""
        from ray.util.placement_group import remove_placement_group

        answers = [self._places.ask((bundle, 0), 0, "close") for bundle in self._warm]
        for held in {id(held): held for held, _ in self._places.groups.values()}.values():
            if held is not self._first:
                remove_placement_group(held)
        return answers

    def _next(self) -> Plan | None:
        """The plan on the nodes that are ready now."""
        there = self.look(running=False)
        used = self._used(there)
        ready = {b: node for b, node in there.items() if b in used or (b in self._warm and self._ready(b))}
        return placement.regroup(self._places.plan, ready, self._least, self._most)

    def _ready(self, bundle: int) -> bool:
        opened = self._warm[bundle].opened
        return opened.done() and opened.exception() is None

    def _used(self, there: Mapping[int, Node]) -> set[int]:
        """The bundles that have ranks, and have not lost them."""
        own = {(seat.bundle, seat.node.id) for seat in self._places.plan.seats} - self._lost
        return {bundle for bundle, id_ in own if bundle in there and there[bundle].id == id_}

    def _standing(self) -> dict[int, Node]:
        """The node of each bundle that has one, and that is there to stay."""
        from ray.util.placement_group import placement_group_table

        alive = {node.id: node for node in self._nodes()}
        tables = {id(held): placement_group_table(held) for held, _ in self._places.groups.values()}
        found = {}
        for bundle, (held, number) in self._places.groups.items():
            id_ = tables[id(held)]["bundles_to_node_id"].get(number)
            if id_ in alive and tables[id(held)]["state"] != "REMOVED":
                found[bundle] = alive[id_]
        return found

    def _get_ready(self, bundle: int, node: Node) -> None:
        """Have the fork server of a node brought up, without waiting for it."""
        run = uuid.uuid4().hex[:8]
        for key in self._places.keys_of(bundle):
            self._places.drop(key)
        self._places.bring((bundle, 0))
        ask = {**self._ask, "run": run, "node": node.id, "ip": node.ip}
        self._warm[bundle] = Warm(node, run, self._places.ask((bundle, 0), 0, "open", ask))

    def _forget(self, bundle: int) -> None:
        del self._warm[bundle]
        for key in self._places.keys_of(bundle):
            self._places.drop(key)

    def _ask_for_more(self, there: Mapping[int, Node]) -> None:
        """Ask Ray, and with it the autoscaler, for the nodes up to the most that there may be."""
        groups = self._places.groups
        more = min(self._most - len(groups), PENDING - (len(groups) - len(there)))
        if not self.elastic or more <= 0:
            return
        elsewhere = sorted({node.id for node in there.values()})
        for _ in range(more):
            self._ask_for_one(elsewhere)

    def _ask_for_one(self, elsewhere: Sequence[str]) -> int:
        """Ask Ray for a node that is none of these; the bundle that it will have."""
        groups = self._places.groups
        bundle = max(groups) + 1
        groups[bundle] = self._hold(self._places.plan.ask, 1, elsewhere), 0
        return bundle

    def _missing(self) -> str:
        """What is waited for, in words."""
        there = self._standing()
        if self._warm and all(bundle in there for bundle in self._warm):
            return f"waiting for {count(len(self._warm), 'node')} to get ready"
        ask = self._places.plan.ask
        lack = max(0, self._least - len(there))
        kept = {node.id for node in there.values()}
        more = replace(ask, bundles=ask.bundles[:1] * max(1, lack), spares=0)
        return placement.missing(more, [node for node in self._nodes() if node.id not in kept])
