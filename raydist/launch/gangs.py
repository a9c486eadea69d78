"""The worker groups of ended runs, for later runs of this process with equal resources. (driver)

Placing a gang and starting its actors takes longer, and more CPU time, than everything else in the
launch of a small run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

from raydist.cluster import drain
from raydist.cluster.connect import alive_nodes
from raydist.cluster.nodes import ResourceRequest
from raydist.launch.actors import Actors
from raydist.launch.bundles import drop_bundles
from raydist.launch.limits import longest
from raydist.messages.agent import IsOpen
from raydist.shared.events import Reader
from raydist.shared.signals import Halt

ANSWER_S = 5.0
"""Limit on the wait for the actors of a gang that is to be reused."""


@dataclass(frozen=True)
class Gang:
    """Placement groups with their actors."""

    request: ResourceRequest
    options: Mapping[str, Any]
    """Further options of the actors, such as runtime_env."""
    actors: Actors

    def remove(self) -> None:
        """Kill the actors, and release the resources."""
        self.actors.kill_all()
        drop_bundles(self.actors.groups)

    def whole(self) -> bool:
        """Return whether all its nodes are alive and not draining, and its actors answer."""
        nodes = {slot.node.id for slot in self.actors.plan.slots}
        if not nodes <= {node.id for node in drain.not_draining(alive_nodes())}:
            return False
        leads = [slot.rank for slot in self.actors.plan.leads]
        replies = [self.actors.call(rank, IsOpen()) for rank in leads]
        return not wait(replies, longest(ANSWER_S, len(replies))).not_done and all(
            reply.exception() is None for reply in replies
        )


@dataclass
class Gangs:
    """The gangs that no run uses now. Runs in several threads take them and put them back."""

    _free: list[Gang] = field(default_factory=list)
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, gang: Gang) -> None:
        """Keep the gang of a run that has ended."""
        with self._lock:
            if not self._closed:
                self._free.append(gang)
                return
        gang.remove()

    def take(self, request: ResourceRequest, options: Mapping[str, Any]) -> Gang | None:
        """Return a whole gang of these resources, or None."""
        while (gang := self._pop(request, options)) is not None:
            if gang.whole():
                return gang
            gang.remove()
        return None

    def _pop(self, request: ResourceRequest, options: Mapping[str, Any]) -> Gang | None:
        with self._lock:
            fitting = [
                each for each in self._free if (each.request, each.options) == (request, options)
            ]
            self._free = (
                [each for each in self._free if each is not fitting[0]] if fitting else self._free
            )
        return fitting[0] if fitting else None

    def has(self, request: ResourceRequest) -> bool:
        """Return whether there is a gang of these resources."""
        with self._lock:
            return any(each.request == request for each in self._free)

    def clear(self, close: bool = False) -> None:
        """Remove all gangs. `close`: also those that are put here from now on."""
        with self._lock:
            free, self._free, self._closed = self._free, [], close
        for gang in free:
            gang.remove()


@dataclass(frozen=True)
class OneOfMany:
    """What a run has instead of screen and signals if it is one of several in its process."""

    reader: Reader
    """Receives the events."""
    halt: Halt
    gangs: Gangs | None = None
    """What its gang is left to, and taken from; None: it ends with the run."""
