"""When the driver's machine counts as lost, and which other machine reports it. (pure)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raydist.messages.deputy import Raylet

QUIET_S = 10.0
"""Seconds without a message from the driver after which its machine is called. The driver asks each
node for news every second; between two attempts it may be silent while it waits for a node."""
EVERY_S = 5.0
"""Seconds between two calls."""
CALL_S = 3.0
"""Limit on the wait for the answer to a call."""
LOST = 9
"""Consecutive calls without an answer after which a machine is lost. With QUIET_S that is within a
minute: Ray's processes continue without their head for that long, and then their pod ends."""
MAX_UNANSWERED = 60
"""Consecutive calls without an answer after which a machine that may be cut off gives up."""
MAX_ASKED = 16
"""Maximum number of other machines that are called before a loss is reported."""

Act = Literal["end", "listen", "call", "ask"]
Claim = Literal["", "mine", "taken"]
"""Whether this machine has the right to send the message, by a file in the run folder.

Empty: the machine does not see this folder, or the storage does not answer.
"""


@dataclass(frozen=True)
class Signs:
    """What a deputy knows about the driver."""

    dismissed: bool = False
    """Whether the driver has sent that the run is over."""
    left: bool = False
    """Whether the agents of this machine are gone: Ray ends them when the driver is gone."""
    answered: bool = False
    """Whether the driver's machine has answered a call after that."""
    quiet_s: float = 0.0
    """Seconds since the driver sent something, or its machine answered."""
    unanswered_calls: int = 0
    """Consecutive calls without an answer."""


def next_act(signs: Signs) -> Act:
    """Return what a deputy does next.

    If the driver has died but its machine answers, the deputy ends without a message: a process on
    that machine sends it.
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
    """Return at most MAX_ASKED other machines, which show whether this one is cut off."""
    others = [node for number, node in enumerate(nodes) if number != own]
    return others[:: max(1, math.ceil(len(others) / MAX_ASKED))]


def is_cut_off(asked: int, answered: int) -> bool:
    """Return whether this machine may be cut off: most of the others do not answer.

    Without other machines to ask the answer is no: if it is cut off, its message does not arrive.
    """
    return 2 * answered < asked


def tells(claim: Claim, lower: bool) -> bool:
    """Return whether this machine sends the message.

    `lower`: whether a machine answers that comes before this one in the order of all machines. That
    one sends the message if no file in the run folder decides.
    """
    return claim == "mine" or (claim == "" and not lower)
