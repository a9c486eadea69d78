"""Notices, while ranks train, that nodes have joined, or that another run needs some. (driver)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from raydist.launch.worker_group import WorkerGroup
from raydist.shared.errors import last_line
from raydist.shared.events import Events

LOOK_S = 1.0
"""Seconds between two checks of the nodes of the cluster."""


@dataclass(frozen=True)
class NodesJoined:
    """A message: there are more nodes than the ranks use, or another run needs some of theirs."""

    text: str


class ResizeMonitor(AbstractContextManager["ResizeMonitor"]):
    """Monitors the number of nodes during one attempt.

    Inside the `with` block a thread checks it, and calls `post` once.
    """

    def __init__(
        self, group: WorkerGroup, events: Events, post: Callable[[NodesJoined], None]
    ) -> None:
        self._group = group
        self._events = events
        self._post = post
        self._last_warning = ""
        """The last warning."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydist-resize", daemon=True)

    def __enter__(self) -> ResizeMonitor:
        if self._group.hosts.standby is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._group.hosts.standby is not None:
            self._thread.join()

    def _watch(self) -> None:
        posted = False
        while not self._closed.wait(LOOK_S):
            text = self._growth()
            if text and not posted:
                self._post(NodesJoined(text))
                posted = True

    def _growth(self) -> str:
        """Return the growth, for a person; empty if there is none.

        Also prepares the nodes that have joined.
        """
        standby = self._group.hosts.standby
        if standby is None:
            return ""
        try:
            return standby.growth()
        except Exception as error:  # Ray's head does not answer now: the next check tries again
            text = f"can't look for more nodes now: {type(error).__name__}: {last_line(error)}"
            if text != self._last_warning:
                self._events.warn(text)
            self._last_warning = text
            return ""
