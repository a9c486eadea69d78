"""Agreement of all ranks on a step, and what they do after it for a person. (rank side)"""

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


class StepLimit:
    """The step after which a rank pauses, until it knows the step that is common to all ranks.

    Each rank replies with the step after its current one, and makes no step after that until it
    knows the common one, which is the largest of these. Therefore no rank is beyond the common
    step, even if a host runs ahead of its device. The reply comes from another thread, so a rank
    that waits in a collective replies too.
    """

    def __init__(self, done: int = 0) -> None:
        """`done`: the step that is done."""
        self._lock = threading.RLock()
        """Guards all but the event."""
        self._done = done
        self._limit: int | None = None
        """The step after which the rank pauses."""
        self._known = threading.Event()
        """Set when a paused rank can continue."""

    def begin(self, step: int) -> None:
        """Set the number of steps that are done at the beginning."""
        with self._lock:
            self._done = step

    def hold(self) -> int:
        """Ask the rank to pause after its next step; return that step.

        Another thread may call it.
        """
        with self._lock:
            if self._limit is None:
                self._limit = self._done + 1
                self._known.clear()
            return self._limit

    def release(self) -> None:
        """Let a paused rank continue, because not all ranks hold."""
        with self._lock:
            self._limit = None
            self._known.set()


class AgreedActions(StepLimit):
    """The agreement of all ranks on the step after which they do something."""

    def __init__(self) -> None:
        super().__init__(NOT_IN_FIT)
        self._actions: list[Action] = []

    def begin(self, step: int) -> None:
        """Note that a fit begins after this step; NOT_IN_FIT: that it has ended."""
        with self._lock:
            super().begin(step)
            if step == NOT_IN_FIT:
                self._actions.clear()

    def hold(self) -> int:
        """Ask the rank to pause after its next step; return that step, or NOT_IN_FIT."""
        with self._lock:
            return NOT_IN_FIT if self._done == NOT_IN_FIT else super().hold()

    def agree(self, action: Action) -> None:
        """Let a paused rank continue, and do this after its step."""
        with self._lock:
            self._actions.append(action)
            self.release()

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
