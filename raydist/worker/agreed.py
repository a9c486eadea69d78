"""What a person asks of a raydist.fit, done by all ranks after the same step. (rank side)"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_IN_FIT = -1
"""The step of a rank that is in no raydist.fit."""


@dataclass(frozen=True)
class Action:
    """What to do after a step."""

    step: int
    what: str
    """save, …: as in messages.rank.DoAfter."""
    values: Mapping[str, Any] = field(default_factory=dict)


class AgreedActions:
    """The agreement of all ranks on the step after which they do something.

    Each rank replies with the step after its current one, and makes no step after that until it
    knows the common one, which is the largest of these (as in context.StopRequest). The reply comes
    from another thread, so a rank that waits in a collective replies too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards all but the event."""
        self._done = NOT_IN_FIT
        self._limit: int | None = None
        """The step after which the rank pauses."""
        self._actions: list[Action] = []
        self._known = threading.Event()
        """Set when a paused rank can continue."""

    def begin(self, step: int) -> None:
        """Note that a fit begins after this step; NOT_IN_FIT: that it has ended."""
        with self._lock:
            self._done = step
            if step == NOT_IN_FIT:
                self._actions.clear()

    def hold(self) -> int:
        """Ask the rank to pause after its next step; return that step, or NOT_IN_FIT.

        Another thread calls it.
        """
        with self._lock:
            if self._done == NOT_IN_FIT:
                return NOT_IN_FIT
            if self._limit is None:
                self._limit = self._done + 1
                self._known.clear()
            return self._limit

    def release(self) -> None:
        """Let a paused rank continue, because not all ranks hold."""
        with self._lock:
            self._limit = None
            self._known.set()

    def agree(self, action: Action) -> None:
        """Let a paused rank continue, and do this after its step."""
        with self._lock:
            self._actions.append(action)
            self._limit = None
            self._known.set()

    def due(self, step: int) -> list[Action]:
        """Note that a step is done; return what is to be done after it.

        Pauses while that is not known yet.
        """
        while True:
            with self._lock:
                self._done = step
                if self._limit is None or step < self._limit:
                    found = [each for each in self._actions if each.step <= step]
                    self._actions = [each for each in self._actions if each.step > step]
                    return found
            self._known.wait()
