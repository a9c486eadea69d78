"""Limits on waits for agents; longer with many ranks, whose replies come one by one. (pure)"""

from __future__ import annotations

OPEN_S = 300.0
"""For a node to import torch: a cold network file system takes minutes."""
ANSWER_S = 60.0
"""For a reply that needs no work."""
IDLE_S = 10.0
"""For an agent whose rank has ended: it has nothing else to do. A stopped agent is replaced."""
NETWORK_S = 2.0
"""For the network counters: the end of a run does not wait long for one line of its summary."""
CLOSE_S = 2.0
"""For agents to close before their actors are killed."""
LOAD_S = 5.0
"""For nodes to report how busy they are; one that does not answer is left out."""
EXAMINE_S = 7.0
"""For agents to examine their ranks; a rank whose agent does not answer is left out."""
SILENT_S = 5.0
"""After a stop's grace period, for every agent to report the end of its rank."""
REPLIES_PER_S = 300.0
"""Requests and their replies that the driver can handle per second if each were a separate Ray
call: 1.5 to 3 ms."""


def longest(limit_s: float, ranks: int) -> float:
    """Return the seconds to wait for so many ranks at once, each of which may take `limit_s`."""
    return limit_s + ranks / REPLIES_PER_S
