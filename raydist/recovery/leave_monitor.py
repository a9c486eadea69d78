"""Notices, while ranks train, that they must leave: for a drain, or for another run. (driver)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from raydist.cluster.drain import DrainNotice, drain_notice
from raydist.launch.worker_group import WorkerGroup
from raydist.recovery.phases import MakeWay

POLL_S = 1.0
"""Seconds between two polls for drained nodes, of a millisecond each. Spot instances get 30 to 120
seconds of notice."""
WANTED_S = 0.1
"""Seconds between two looks at what this process knows of the queue."""


class LeaveMonitor(AbstractContextManager["LeaveMonitor"]):
    """Monitors the nodes of one attempt, and the run's place in the queue.

    Inside the `with` block a thread polls, and calls `post` at most once for each.
    """

    def __init__(self, group: WorkerGroup, post: Callable[[DrainNotice | MakeWay], None]) -> None:
        self._group = group
        self._post = post
        self._closed = threading.Event()

    def __enter__(self) -> LeaveMonitor:
        for poll, name in ((self._poll_drain, "raydist-drain"), (self._poll_queue, "raydist-way")):
            threading.Thread(target=poll, name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _poll_drain(self) -> None:
        while not self._closed.wait(POLL_S):
            draining = self._group.hosts.draining()
            if notice := drain_notice(self._group.plan.slots, draining, time.time()):
                self._post(notice)
                return

    def _poll_queue(self) -> None:
        while not self._closed.wait(WANTED_S):
            if wanted_by := self._group.hosts.wanted_by():
                self._post(MakeWay(wanted_by))
                return
