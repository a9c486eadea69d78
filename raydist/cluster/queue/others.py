"""What a waiting run remembers of the other runs between two looks at the queue. (driver)"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from raydist.cluster.queue.entry import LEAVING, Entry
from raydist.cluster.queue.order import only_on

SILENT_S = 8.0
"""Seconds without a beat after which a run is ignored: its driver is stopped, or cut off. On a busy
machine a beat may be seconds late, and another run would be asked to make way instead. The GCS
notices within milliseconds that a driver has ended."""
FREED_S = 2.0
"""Seconds after which Ray shows every room that was given back. It takes 0.1 s on an idle machine:
Ray removes a placement group in the background, and its nodes report what is free every 0.1 s."""


class OtherRuns:
    """The other runs in the queue, as one driver has seen them."""

    def __init__(self) -> None:
        self._beats: dict[str, tuple[int, float]] = {}
        """Entry id -> its last beat, and when this process first saw it, by the monotonic clock."""
        self._seen: dict[str, Entry] = {}
        """Those of the last look, by id."""
        self._given_back: list[tuple[float, Entry]] = []
        """Until when, by the monotonic clock, room may not be shown as free that was given back."""

    def is_alive(self, entry: Entry) -> bool:
        """Return whether the driver of an entry has shown that it is alive and not stopped."""
        now = time.monotonic()
        beat, since = self._beats.get(entry.id, (-1, now))
        if beat != entry.beat:
            since = now
        self._beats[entry.id] = entry.beat, since
        return now - since < SILENT_S

    def freeing(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return what was given back a moment ago, as runs that are leaving.

        A run's entry no longer has these nodes, but Ray may not show them as free yet. Without
        this, another run would be asked to make way as well. `entries`: those of this look.
        """
        now = time.monotonic()
        found = {each.id: each for each in entries}
        for id, before in self._seen.items():
            kept = found[id].held.keys() if id in found else set()
            if lost := before.held.keys() - kept:
                back = replace(only_on(before, lost), state=LEAVING)
                self._given_back.append((now + FREED_S, back))
        self._seen = found
        self._given_back = [(until, each) for until, each in self._given_back if now < until]
        return [each for _, each in self._given_back]
