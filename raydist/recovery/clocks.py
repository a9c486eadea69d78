"""Times of nodes' clocks -> of the driver's: clocks differ by more than failures do. (pure)"""

from __future__ import annotations

from collections import deque

REPLIES = 64
"""Replies of a node from which its clock is read: the one with the shortest transit counts. More
would hide a drift."""


class Clocks:
    """How far each node's clock is behind the driver's.

    It is derived from the times at which replies were sent and received.
    """

    def __init__(self) -> None:
        self._behind: dict[str, deque[float]] = {}

    def note(self, host: str, sent: float, received: float) -> None:
        """Note when a reply was sent and received.

        Each time is in seconds since the epoch, on the sender's or the receiver's clock.
        """
        self._behind.setdefault(host, deque(maxlen=REPLIES)).append(received - sent)

    def here(self, host: str, at: float) -> float:
        """Return the time `at` of a node on the driver's clock.

        It is late by the shortest transit of a reply: milliseconds.
        """
        return at + min(self._behind.get(host, (0.0,)))
