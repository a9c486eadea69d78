"""Notices, while ranks train, that a node is cut off and the run can continue without it. (driver)

Ray gives up such a node only after 8 to 65 s, because it has nobody else to ask. This monitor has:
a node of which no agent answers is lost if its kernel accepts no connection, neither from the
driver's machine nor from other nodes. So a node that is only busy, or whose agent is stopped, is
not taken for lost, nor is one to which only the driver's own link is broken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from raydist.cluster import connect
from raydist.cluster.reach import Address, reached_addresses
from raydist.launch.standby import Witness
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import FindReached
from raydist.recovery import deadlines
from raydist.recovery.suspects import Suspects

LOOK_S = 0.25
"""Seconds between two looks at the open calls."""
PAUSED_S = 1.0
"""A look this late shows that the driver itself was paused, or had no CPU."""
AGAIN_S = 1.0
"""Seconds after which a suspect that is not lost is examined again."""
AT_ONCE_S = 0.15
"""Within these seconds a node that is only busy accepts the driver's connection, and no other node
is asked."""
REACH_S = 0.75
"""Within these seconds a connection must be accepted, or refused."""
WITNESS_S = 3.0
"""After these seconds without an answer of a witness, which may be busy, others are asked. Its
answer counts when it comes."""
WITNESSES = 2
"""Other nodes that are asked."""


@dataclass(frozen=True)
class NodesCut:
    """A message: nodes accept no connections."""

    nodes: frozenset[str]
    since: float
    """They have not answered since then, on the monotonic clock."""
    why: str
    """What each rank on them was lost to, for a person."""


class CutMonitor(AbstractContextManager["CutMonitor"]):
    """Monitors the nodes of one attempt.

    Inside the `with` block a thread looks at the calls to the agents, and calls `post` for nodes
    that are lost.
    """

    def __init__(
        self, group: WorkerGroup, post: Callable[[NodesCut], None], enabled: bool = True
    ) -> None:
        """`enabled`: whether it is worth while: the run may be restarted."""
        self._group = group
        self._post = post
        self._enabled = enabled and group.hosts.standby is not None
        self._suspects = Suspects(
            [slot.node.id for slot in group.plan.slots],
            deadlines.suspect_after(group.plan.world_size),
        )
        self._lock = threading.Lock()
        """Guards the suspects: Ray's threads note the answers."""
        self._addresses: Mapping[str, Address] = {}
        """By node: the address of its raylet, if the driver has reached it in this attempt. A
        firewall may keep the driver from it."""
        self._own_ip = ""
        """The address of the driver's machine."""
        self._mute = set[str]()
        """The nodes that, as witnesses, did not answer in time: others are asked first."""
        self._asked: dict[tuple[str, frozenset[Address]], Future[set[Address]]] = {}
        """What witnesses were asked about the present suspects and have not answered yet."""
        self._closed = threading.Event()

    def __enter__(self) -> CutMonitor:
        if self._enabled:
            threading.Thread(target=self._watch, name="raydist-cut", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def note_call(self, rank: int) -> None:
        """Note that a call to this agent is open."""
        with self._lock:
            self._suspects.note_call(rank, time.monotonic())

    def note_answer(self, rank: int) -> None:
        """Note that the agent has answered, or its rank has ended."""
        with self._lock:
            self._suspects.note_answer(rank)

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._closed.wait(LOOK_S):
            now = time.monotonic()
            if now - began > LOOK_S + PAUSED_S:
                with self._lock:
                    self._suspects.begin_again(now)
            with contextlib.suppress(Exception):  # Ray does not answer: it is asked again
                self._look(now)
            began = time.monotonic()

    def _look(self, now: float) -> None:
        if not self._addresses:
            self._find_addresses()
        with self._lock:
            suspects = self._suspects.look(now) & self._addresses.keys()
        standby = self._group.hosts.standby
        if not suspects or standby is None or not standby.remains_without(suspects):
            self._asked.clear()
            return
        if lost := self._examine(suspects):
            self._post(lost)
        self._closed.wait(AGAIN_S)

    def _find_addresses(self) -> None:
        """Find out which nodes the driver can reach while they answer."""
        raylets = connect.raylets()
        own = {slot.node.id for slot in self._group.plan.slots}
        found = reached_addresses([raylets[node] for node in own & raylets.keys()], REACH_S)
        self._own_ip = raylets.get(connect.own_node(), ("", 0))[0]
        self._addresses = {
            node: raylets[node] for node in own & raylets.keys() if raylets[node] in found
        }

    def _examine(self, suspects: Collection[str]) -> NodesCut | None:
        """Return the suspects that neither the driver nor a witness reaches; None for none."""
        since = time.monotonic()
        addresses = {self._addresses[node] for node in suspects}
        addresses -= reached_addresses(addresses, AT_ONCE_S)
        witnesses = self._choose_witnesses(suspects) if addresses else []
        if not witnesses:
            return None
        keys = [(each.node.id, frozenset(addresses)) for each in witnesses]
        request = FindReached(tuple(addresses), REACH_S)
        answers = [
            self._asked.pop(key) if key in self._asked else each.ask(request)
            for key, each in zip(keys, witnesses, strict=True)
        ]
        addresses -= reached_addresses(addresses, REACH_S)
        if addresses:
            wait(answers, WITNESS_S)
        # They count when they come: the driver looks again each time, so its own view is not older.
        self._asked |= {
            key: answer for key, answer in zip(keys, answers, strict=True) if not answer.done()
        }
        for each, answer in zip(witnesses, answers, strict=True):
            if not answer.done() or answer.exception() is not None:
                self._mute.add(each.node.id)
                return None
            addresses -= answer.result()
        nodes = frozenset(node for node in suspects if self._addresses[node] in addresses)
        hosts = " and ".join(each.node.host for each in witnesses)
        why = f"its node accepts no connections: not from the driver's machine, nor from {hosts}"
        return NodesCut(nodes, since, why) if nodes else None

    def _choose_witnesses(self, suspects: Collection[str]) -> Sequence[Witness]:
        """Return nodes to ask: on other machines than the driver's, and none that is suspect."""
        call, standby = self._group.call, self._group.hosts.standby
        there = [Witness(slot.node, partial(call, slot.rank)) for slot in self._group.plan.leads]
        if standby is not None:
            there += standby.witnesses()
        fit = [
            each for each in there if each.node.id not in suspects and each.node.ip != self._own_ip
        ]
        return sorted(fit, key=lambda each: each.node.id in self._mute)[:WITNESSES]
