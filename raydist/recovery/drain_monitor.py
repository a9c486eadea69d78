"""Notices, while ranks train, that their nodes are drained. (driver)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from raydist.cluster.drain import DrainNotice, drain_notice
from raydist.launch.worker_group import WorkerGroup

POLL_S = 1.0
"""Seconds between two polls, of a millisecond each. Spot instances get 30 to 120 seconds of notice.
"""


class DrainMonitor(AbstractContextManager["DrainMonitor"]):
    """Monitors the nodes of one attempt.

    Inside the `with` block a thread polls, and calls `post` at most once.
    """

    def __init__(self, group: WorkerGroup, post: Callable[[DrainNotice], None]) -> None:
        self._group = group
        self._post = post
        self._closed = threading.Event()

    def __enter__(self) -> DrainMonitor:
        threading.Thread(target=self._poll, name="raydist-drain", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _poll(self) -> None:
        while not self._closed.wait(POLL_S):
            draining = self._group.hosts.draining()
            if notice := drain_notice(self._group.plan.slots, draining, time.time()):
                self._post(notice)
                return
