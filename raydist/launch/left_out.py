"""Nodes that raydist has given up before Ray: no ranks until they are there again. (driver)"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from raydist.cluster import connect
from raydist.cluster.nodes import Node

CHECK_S = 2.0
"""Seconds between two checks whether such a node is there again."""


class LeftOut:
    """The nodes whose kernels do not answer although they are alive in Ray's tables."""

    def __init__(self, nodes: Callable[[], list[Node]]) -> None:
        """`nodes`: returns the cluster's nodes, as Ray knows them."""
        self._nodes = nodes
        self._ids: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        """Held while `_ids` changes: the thread that connects changes it as well."""
        self._checked_at = 0.0
        """On the monotonic clock."""
        self._checking = False
        """Whether a thread connects to them."""

    def add(self, node_ids: Collection[str]) -> None:
        """Leave out these nodes."""
        with self._lock:
            self._ids |= frozenset(node_ids)
        self._checked_at = time.monotonic()

    def remaining(self) -> list[Node]:
        """Return the cluster's nodes without those that are left out."""
        found = self._nodes()
        with self._lock:
            self._ids &= {node.id for node in found}  # Ray has given up the others, too
        late = time.monotonic() - self._checked_at > CHECK_S
        if self._ids and late and not self._checking:
            self._checking = True
            threading.Thread(target=self._check, name="raydist-left-out", daemon=True).start()
        return [node for node in found if node.id not in self._ids]

    def _check(self) -> None:
        """Take back the nodes that answer again."""
        with contextlib.suppress(Exception):  # Ray does not answer: the next check tries again
            answering = connect.reachable(self._ids)
            with self._lock:  # others may have been added meanwhile
                self._ids -= answering
        self._checked_at = time.monotonic()
        self._checking = False
