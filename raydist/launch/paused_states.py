"""The states of a run that has made way: its nodes hold them in memory while it waits. (driver)"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

from raydist.cluster.placement import Plan, Slot
from raydist.launch.limits import ANSWER_S, longest
from raydist.messages.agent import HeldServer
from raydist.messages.request import Transport
from raydist.messages.server import HoldStates
from raydist.node import kept_server

KEEP_AFTER_S = 10.0
"""Seconds after which keepers are started: they would compete with the start of the run that takes
the room, and a short pause needs none (node.held_states.HOLD_S)."""

Places = frozenset[tuple[int, str, int]]
"""Of each rank: its number, the id of its node, its local rank."""


class PausedStates:
    """The states of one run, from when it makes way until its next placement.

    They are of use only if each rank is back where it was: a state has the random generators of its
    own rank. Else the ranks read the checkpoint, which is the same state.

    On each node a Ray task without resources keeps them. It ends with the driver, however that
    ends, and the node then frees the memory.
    """

    def __init__(self, plan: Plan, call: Transport, servers: Mapping[str, str]) -> None:
        """Have each node hold its states. `servers`: the fork servers' folders, by node id."""
        self.key = uuid.uuid4().hex
        self._places = places_of(plan)
        self._servers = servers
        self._tasks: list[Any] = []
        told = [call(slot.rank, HoldStates(self.key)) for slot in plan.leads]
        wait(told, timeout=longest(ANSWER_S, len(told)))
        self._timer = threading.Timer(KEEP_AFTER_S, self._keep)
        self._timer.daemon = True
        self._timer.start()

    def server(self, slot: Slot) -> HeldServer | None:
        """Return the server with the states of a node; None if it has none."""
        folder = self._servers.get(slot.node.id)
        return HeldServer(self.key, folder) if folder else None

    def fit(self, plan: Plan) -> bool:
        """Return whether each rank is where it was."""
        return self._places == places_of(plan)

    def settle(self, used: bool) -> None:
        """End the wait: the ranks take the states when they start, or the nodes may free them."""
        self._timer.cancel()
        self._timer.join()  # it may be starting the tasks
        if used or not self._tasks:
            return  # the servers end the keepers
        import ray

        for task in self._tasks:
            ray.cancel(task, force=True)

    def _keep(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        keep = ray.remote(kept_server.keep_states)
        # Without an answer of the GCS the states are held for a minute only.
        with contextlib.suppress(Exception):
            for node, folder in self._servers.items():
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
                self._tasks.append(keep.options(**options).remote(folder, self.key))


def places_of(plan: Plan) -> Places:
    return frozenset((slot.rank, slot.node.id, slot.local_rank) for slot in plan.slots)
