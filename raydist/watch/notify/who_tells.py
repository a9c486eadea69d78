"""When the driver's machine counts as lost, and which of the others tells it. (pure)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raydist.messages.deputy import Raylet

QUIET_S = 10.0
"""Seconds without a word from the driver after which its machine is called. It asks each node for
news every second; between two attempts it may be silent for as long as it waits for a node."""
EVERY_S = 5.0
"""Seconds from one call to the next."""
CALL_S = 3.0
"""Longest wait for the answer to a call."""
LOST = 9
"""Calls in a row without an answer after which a machine is lost. With QUIET_S that is within a
minute: for so long Ray goes on without its head, and a pod ends with it."""
MAX_UNANSWERED = 60
"""Calls in a row without an answer after which a machine that may be cut off ends its watch."""
MAX_ASKED = 16
"""Maximum number of other machines that are called before a loss is told."""

Act = Literal["end", "listen", "call", "ask"]
Claim = Literal["", "mine", "taken"]
"""Whether this machine has the right to tell, by a file in the run folder.

Empty: it does not see this folder, or the storage does not answer.
"""


@dataclass(frozen=True)
class Signs:
    """What a deputy knows about its driver."""

    dismissed: bool = False
    """Whether the driver has said that the run is over."""
    left: bool = False
    """Whether the agents of this machine are gone: Ray ends them when it misses the driver."""
    answered: bool = False
    """Whether the driver's machine has answered the last call since then."""
    quiet_s: float = 0.0
    """Seconds since the driver was heard, or its machine answered."""
    unanswered_calls: int = 0
    """Calls in a row without an answer."""


def next_act(signs: Signs) -> Act:
    """Return what a deputy does next.

    It ends without a word if the machine of a driver that has died is there: a process there tells.
    """
    if (
        signs.dismissed
        or (signs.left and signs.answered)
        or signs.unanswered_calls >= MAX_UNANSWERED
    ):
        return "end"
    if signs.unanswered_calls >= LOST:
        return "ask"
    if signs.left or signs.unanswered_calls or signs.quiet_s >= QUIET_S:
        return "call"
    return "listen"


def others_to_ask(nodes: Sequence[Raylet], own: int) -> list[Raylet]:
    """Return the machines that show whether this one is cut off, at most MAX_ASKED."""
    others = [node for number, node in enumerate(nodes) if number != own]
    return others[:: max(1, math.ceil(len(others) / MAX_ASKED))]


def is_cut_off(asked: int, answered: int) -> bool:
    """Return whether this machine may be the one that is lost: most of the others do not answer.

    One that has no others to ask is not cut off if its message arrives.
    """
    return 2 * answered < asked


def tells(claim: Claim, lower: bool) -> bool:
    """Return whether this machine is the one that tells.

    `lower`: whether a machine before it in the order of all answers; that one tells if no file in
    the run folder decides.
    """
    return claim == "mine" or (claim == "" and not lower)
