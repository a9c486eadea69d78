"""Which agents have not answered for too long. (pure)"""

from __future__ import annotations

import math

PAUSE_S = 5.0
"""A check this late shows that the driver itself was paused: its agents had no chance to answer."""


class Silences:
    """The open calls to the ranks' agents. Times are seconds on the driver's monotonic clock."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        """Seconds after which an agent that has not answered is silent."""
        self.ranks: set[int] = set()
        """The ranks whose agents are silent."""
        self._open_since: dict[int, float] = {}
        self._looked_at: float | None = None

    def note_call(self, rank: int, now: float) -> None:
        """Note that a call to this agent is open."""
        self._open_since[rank] = now

    def note_answer(self, rank: int) -> None:
        """Note that the agent has answered, or its rank has ended."""
        self._open_since.pop(rank, None)
        self.ranks.discard(rank)

    def has_answered(self, rank: int, since: float) -> bool:
        """Return whether this agent has answered a call since then."""
        return self._open_since.get(rank, -math.inf) >= since

    def over(self, seconds: float) -> bool:
        """Return whether, at the last check, an agent had not answered for `seconds`."""
        return self._looked_at is not None and any(
            self._looked_at - at > seconds for at in self._open_since.values()
        )

    def look(self, now: float) -> list[int]:
        """Return the ranks whose agents are silent from now on."""
        late = self._looked_at is not None and now - self._looked_at > PAUSE_S
        self._looked_at = now
        if late:
            self._open_since = dict.fromkeys(self._open_since, now)
        new = sorted(
            rank
            for rank, at in self._open_since.items()
            if now - at > self.limit and rank not in self.ranks
        )
        self.ranks.update(new)
        return new
