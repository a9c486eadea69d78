"""Raises the timeouts of a rank's process groups while a rank is in the debugger. (rank side)"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from raydist.worker import torch_private

HELD = timedelta(days=7)
"""The timeout of a collective in which ranks wait for one that a person looks into."""


class GroupTimeouts:
    """The timeouts of the process groups of this rank. The channel's thread uses it."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._before: list[tuple[Any, timedelta]] = []
        """The groups whose timeout is raised, and what it was."""

    def hold(self, reason: str) -> int:
        """Raise them until `let_go`; return how many collectives the default group has begun.

        A collective that has begun keeps its timeout. `reason`: there may be several at a time.
        """
        self._reasons.add(reason)
        if not self._before:
            self._before = torch_private.group_timeouts()
            for group, _ in self._before:
                self._set(group, HELD)
        return collectives_begun()

    def let_go(self, reason: str) -> None:
        """Put them back unless there is another reason."""
        self._reasons.discard(reason)
        if not self._reasons:
            self.put_back()

    def put_back(self) -> None:
        """Put them back, for whatever reason they were raised."""
        self._reasons.clear()
        for group, limit in self._before:
            self._set(group, limit)
        self._before = []

    def _set(self, group: Any, limit: timedelta) -> None:
        with contextlib.suppress(Exception):  # the program has destroyed it meanwhile
            torch_private.set_timeout(group, limit)


def collectives_begun() -> int:
    """Return how many collectives this rank has begun in the default group; 0: it is not known."""
    if not torch_private.group_timeouts():
        return 0
    with contextlib.suppress(Exception):
        use = torch_private.group_use()
        return use[1] if use is not None else 0
    return 0
