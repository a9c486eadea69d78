"""Settings that a person has changed in a run, which each later attempt repeats. (driver)"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raydist.network.names import EnvVar
from raydist.settings.changeable import Values
from raydist.shared import env_names
from raydist.shared.errors import LaunchError


class Changes:
    """The changes of a run, in the order in which the ranks agreed on their steps."""

    def __init__(self) -> None:
        self.attempt = 0
        """The number of attempts that have begun."""
        self._changes: list[tuple[int, int, Values]] = []
        """The number of the raydist.fit, the step after which, and the new values."""
        self._lock = threading.Lock()
        """Guards both."""

    def begin_attempt(self) -> list[EnvVar]:
        """Return what the ranks of the next attempt need to know of the changes so far."""
        with self._lock:
            self.attempt += 1
            if not self._changes:
                return []
            return [EnvVar(env_names.CHANGES, json.dumps(self._changes), "raydist set")]

    @contextmanager
    def noted(self, attempt: int, fit: int, step: int, values: Values) -> Iterator[None]:
        """Note a change; the block tells it to the ranks, before another attempt can begin.

        Otherwise some ranks of that attempt could know the change, and others not. LaunchError:
        this attempt is over already.
        """
        with self._lock:
            if self.attempt != attempt:
                raise LaunchError("the ranks have been started again meanwhile; type it again")
            self._changes.append((fit, step, values))
            yield
