"""Which nodes may be lost: none of their agents has answered in time. (pure)"""

from __future__ import annotations

from collections.abc import Sequence


class Suspects:
    """The open calls to the ranks' agents. Times are seconds on the driver's monotonic clock."""

    def __init__(self, nodes: Sequence[str], limit_s: float) -> None:
        """`nodes`: the id of each rank's node.

        `limit_s`: after so many seconds a node of which no agent has answered is suspect.
        """
        self._nodes = nodes
        self._limit_s = limit_s
        self._open_since: dict[int, float] = {}

    def note_call(self, rank: int, now: float) -> None:
        """Note that a call to this agent is open."""
        self._open_since[rank] = now

    def note_answer(self, rank: int) -> None:
        """Note that the agent has answered, or its rank has ended."""
        self._open_since.pop(rank, None)

    def begin_again(self, now: float) -> None:
        """Suspect nobody for what was before: the driver itself was paused until now."""
        self._open_since = dict.fromkeys(self._open_since, now)

    def look(self, now: float) -> set[str]:
        """Return the ids of the nodes that are suspect now."""
        late, heard = set[str](), set[str]()
        for rank, since in self._open_since.items():
            (late if now - since > self._limit_s else heard).add(self._nodes[rank])
        return late - heard
