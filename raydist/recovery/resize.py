"""Learn while ranks train that nodes have joined which the run can use. (driver)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from raydist.launch.worker_group import WorkerGroup

LOOK_S = 1.0
"""Seconds between two looks at the nodes of the cluster."""


@dataclass(frozen=True)
class NodesJoined:
    """There are more nodes than the ranks use."""

    text: str


class ResizeMonitor(AbstractContextManager["ResizeMonitor"]):
    """One attempt's watch over the number of nodes. Inside the `with` block a thread looks, and calls `post` once."""

    def __init__(self, group: WorkerGroup, post: Callable[[NodesJoined], None]) -> None:
        self._group, self._post = group, post
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydist-resize", daemon=True)

    def __enter__(self) -> ResizeMonitor:
        if self._group.standby is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._group.standby is not None:
            self._thread.join()

    def _watch(self) -> None:
        standby, posted = self._group.standby, False
        while standby is not None and not self._closed.wait(LOOK_S):
            text = standby.growth()  # also prepares the nodes that have joined
            if text and not posted:
                self._post(NodesJoined(text))
                posted = True
