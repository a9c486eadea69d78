"""Agreement of all ranks on a step, and what they do after it for a person. (rank side)"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Action:
    """What to do after a step."""

    step: int
    what: str
    """save, …: as in messages.rank.DoAfter."""
    values: Mapping[str, Any] = field(default_factory=dict)
    fit: int | None = 0
    """The number of the raydist.fit whose step it is; 0: a step outside of one; None: of any."""


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
        self._fit = self._limit_fit = 0
        """The numbers of the raydist.fit whose steps these are; 0: outside of one."""
        self._known = threading.Event()
        """Set when a paused rank can continue."""

    def begin(self, step: int) -> None:
        """Set the number of steps that are done at the beginning."""
        with self._lock:
            self._done = step

    def enter_fit(self, number: int, step: int) -> None:
        """Note that a fit begins after this step. `number`: as Context.fit."""
        with self._lock:
            self._fit = number
            self.begin(step)

    def hold(self) -> int:
        """Ask the rank to pause after its next step; return that step.

        Another thread may call it.
        """
        with self._lock:
            if self._limit is None:
                self._limit, self._limit_fit = self._done + 1, self._fit
                self._known.clear()
            return self._limit

    def hold_in_fit(self) -> tuple[int, int]:
        """Ask the rank to pause after its next step; return that step, and its fit's number."""
        with self._lock:
            return self.hold(), self._limit_fit

    def release(self) -> None:
        """Let a paused rank continue, because not all ranks hold."""
        with self._lock:
            self._limit = None
            self._known.set()


class AgreedActions(StepLimit):
    """The agreement of all ranks on the step after which they do something.

    Inside a raydist.fit its steps count, outside those of torch's optimizers.
    """

    def __init__(self, armed: Sequence[Action] = ()) -> None:
        """`armed`: what is known from the beginning."""
        super().__init__()
        self.armed = armed
        self._outside = 0
        """Steps outside of a fit so far."""
        self._actions = list(armed)

    def leave_fit(self) -> None:
        """Note that the fit has ended; what was agreed for its later steps is dropped."""
        with self._lock:
            self._actions = [each for each in self._actions if each.fit != self._fit]
            self._fit = 0
            self.begin(self._outside)

    def agree(self, action: Action) -> None:
        """Let a paused rank continue, and do this after its step."""
        with self._lock:
            self._actions.append(action)
            self.release()

    def repeat(self, actions: Sequence[Action]) -> None:
        """Do these, which an earlier attempt had agreed on, after their steps."""
        with self._lock:
            self._actions += actions

    def arm(self, actions: Sequence[Action]) -> None:
        """Do these without another word, in a later attempt of this process too."""
        with self._lock:
            self.armed = actions
            self._actions += actions

    def count(self) -> int:
        """Return the number of the step that an optimizer has made; 0 inside a fit."""
        with self._lock:
            self._outside += not self._fit
            return 0 if self._fit else self._outside

    def due(self, step: int) -> list[Action]:
        """Note that a step is done; return what is to be done after it.

        Pauses while that is not known yet.
        """
        while True:
            with self._lock:
                self._done = step
                if self._limit is None or step < self._limit:
                    found = [
                        each
                        for each in self._actions
                        if each.fit in (None, self._fit) and each.step <= step
                    ]
                    self._actions = [each for each in self._actions if each not in found]
                    return found
            self._known.wait()
