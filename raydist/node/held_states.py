"""The states of runs that have made way, held by a fork server for their next placement. (actor)"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from raydist.node.snapshots import SnapshotBuffers
from raydist.shared import cgroup

HOLD_S = 60.0
"""Seconds for which states are held that nobody keeps: until the driver's keepers are there, or the
ranks of the next placement start."""
CHECK_S = 5.0
"""Seconds between two checks whether states are still wanted, and leave others enough memory."""


@dataclass(eq=False)
class Held:
    """The states of one run."""

    buffers: SnapshotBuffers
    until: float
    """On the monotonic clock: how long to hold them if nobody keeps them."""
    keepers: set[socket.socket] = field(default_factory=set)
    """Connections for whose life they are held."""


class HeldStates:
    """The held states of all runs, by their keys."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, key: str, buffers: SnapshotBuffers) -> None:
        """Hold the memories of a run, also when its agents have gone."""
        buffers.held = True
        self._held[key] = Held(buffers, time.monotonic() + HOLD_S)

    def find(self, key: str) -> bool:
        """Return whether these states are held; ranks that take them have HOLD_S to start."""
        if found := self._held.get(key):
            found.until = time.monotonic() + HOLD_S
        return found is not None

    def keep(self, key: str, keeper: socket.socket) -> bool:
        """Hold states as long as this connection lasts; return False if they are gone."""
        if found := self._held.get(key):
            found.keepers.add(keeper)
        return found is not None

    def descriptors(self) -> list[int]:
        """Return the memories that no agent uses: those of other runs, for a new child."""
        unused = (each.buffers for each in self._held.values() if not each.buffers.agents)
        return [descriptor for each in unused for descriptor in each.descriptors.values()]

    @property
    def keepers(self) -> set[socket.socket]:
        """All connections for whose life something is held."""
        return {keeper for each in self._held.values() for keeper in each.keepers}

    def leave(self, keeper: socket.socket) -> None:
        """Note that the connection of a keeper has closed: its driver has ended."""
        for each in self._held.values():
            if keeper in each.keepers:
                each.keepers.remove(keeper)
                each.until = time.monotonic()

    def take(self, key: str) -> tuple[SnapshotBuffers | None, Collection[socket.socket]]:
        """Give the memories of a run to its next placement; return its keepers too.

        None if they are not here, or an agent of the last placement still uses them.
        """
        found = self._held.get(key)
        if found is None or found.buffers.agents:
            return None, ()
        del self._held[key]
        found.buffers.held = False
        return found.buffers, found.keepers

    def drop_unwanted(self) -> Collection[socket.socket]:
        """Free what nobody wants any more, and all if memory gets short; return the keepers of it.

        Memory is short when less is left than the held states take: whoever needs it now goes
        before a run that waits, and all of these states are on the disk too.
        """
        now = time.monotonic()
        size = sum(each.buffers.size() for each in self._held.values())
        short = size > cgroup.memory_left()
        gone = [
            (key, each)
            for key, each in self._held.items()
            if short or (not each.keepers and now > each.until)
        ]
        for key, each in gone:
            del self._held[key]
            each.buffers.held = False
            each.buffers.free_unused()
        return [keeper for _, each in gone for keeper in each.keepers]
