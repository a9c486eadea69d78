"""How long a run waits in the queue for what may never come. (driver)"""

from __future__ import annotations

import time

from raydist.cluster.queue.order import Verdict
from raydist.cluster.shortage import gave_up

GCS_S = 60.0
"""Seconds that a run in line waits for an answer of the GCS. Ray's own processes wait as long
(gcs_rpc_server_reconnect_timeout_s)."""
STEADY_S = 3.0
"""Seconds that a run waits for others in the queue until its wait for room outside of it is over.
For two seconds room that was given back may count twice (others.py)."""


class WaitLimits:
    """The limits of one wait in the queue. There is none while runs in the queue hold the room."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s`: scale.wait_s, the limit for room that no run in the queue holds."""
        self._wait_s = wait_s
        self._answered = time.monotonic()
        """When the GCS last answered. All times are those of the monotonic clock."""
        self._outside_since: float | None = None
        """Since when the run has waited for room outside of the queue."""
        self._outside_at = 0.0
        """When it last waited for that."""

    def note(self, verdict: Verdict) -> None:
        """Note what a look at the queue has found. LaunchError: the limit is over."""
        now = self._answered = time.monotonic()
        if verdict.outside:
            self._outside_at = now
            if self._outside_since is None:
                self._outside_since = now
            if now - self._outside_since > self._wait_s:
                raise gave_up(self._wait_s, verdict.reason)
        elif now - self._outside_at > STEADY_S:
            self._outside_since = None

    def gcs_is_gone(self) -> bool:
        """Return whether the GCS has not answered for too long."""
        return time.monotonic() - self._answered > GCS_S
