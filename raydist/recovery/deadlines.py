"""When and why to stop an attempt's ranks; when an agent that does not answer is lost. (pure)"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raydist.cluster.drain import DrainNotice
from raydist.launch.limits import SILENT_S, longest
from raydist.messages.agent import DYING_S as DYING_S
from raydist.recovery.blame import is_victim
from raydist.shared.outcome import End, StopReason

VICTIM_S = 0.5
"""Seconds that a failure which another rank may have caused waits for that rank's own failure."""
GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL when a signal stops the run; `ray job stop` allows three
seconds in all."""
ANSWER_S = (0.5, 1.0)
"""Seconds between two replies of one agent, unless its rank ends: at the start of a run, and later,
when the ranks need the CPU themselves (a reply costs 3 ms of it, nearly all in Ray)."""
AGENT_S = 10.0
"""Seconds after a reply is due within which an agent, or a fork server, must answer."""
NODE_S = 30.0
"""Seconds within which a node reports how a rank ended: a Ray worker may have to start there, and
has a low priority (Ray's worker_niceness is 15)."""
UNHEARD = 3
"""A run of which no agent answers any more is ended after this multiple of the limit, because its
ranks may well continue."""
ANSWERS_PER_S = 300.0
"""Replies that the driver handles per second; with more ranks each agent answers less often. 1,024
ranks then cost it a tenth of a core, of which more than half is Ray's part of the calls (bench
driver)."""


@dataclass(frozen=True)
class Stop:
    """An order to stop all ranks."""

    reason: StopReason
    text: str
    """The reason for a person."""
    grace_s: float = 0.0
    """Seconds between SIGTERM and SIGKILL; 0: SIGKILL at once."""


@dataclass(frozen=True)
class Deadlines:
    """The single deadline that an attempt has at a time, on the monotonic clock, in seconds."""

    due: float | None = None
    """Before the stop: when to stop all ranks. After it: when ranks whose agents no longer answer
    are lost."""
    stopping: bool = False
    """Whether the stop was sent."""
    since: float = 0.0
    """An agent that has not answered since then is lost at the deadline."""
    final: float = math.inf
    """When a rank is lost even if its agent answers: its process can't be killed."""

    def stop_within(self, seconds: float, now: float) -> Deadlines:
        """Stop all ranks in that many seconds, or earlier if an earlier time was set."""
        if self.stopping:
            return self
        return replace(
            self, due=now + seconds if self.due is None else min(self.due, now + seconds)
        )

    def stop_sent(self, grace_s: float, now: float, ranks: int = 0) -> Deadlines:
        """Note that so many ranks were sent a stop with that grace period.

        A second stop sets the deadline again.
        """
        killed = now + grace_s
        due = killed + longest(SILENT_S, ranks)
        return Deadlines(due, stopping=True, since=now, final=max(due, killed + DYING_S))

    def prolonged(self, now: float, ranks: int = 0) -> Deadlines:
        """Give the ranks whose agents still answer more time to end."""
        due = max(now, min(now + longest(SILENT_S, ranks), self.final))
        return replace(self, due=due, since=now)

    def left(self, now: float) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self.due is None else max(0.0, self.due - now)


def culprit_wait(end: End) -> float | None:
    """Return the seconds after this end within which all ranks are stopped; None if not a failure.

    A failure that another rank may have caused leaves that rank time to fail by itself.
    """
    if not end.failed:
        return None
    return VICTIM_S if is_victim(end) else 0.0


def stop_when_due(ends: Iterable[End], drain: DrainNotice | None) -> Stop:
    """Return the stop to send at the deadline.

    It is for the failure, or for the drain if no rank has failed.
    """
    if drain is not None and not any(end.failed for end in ends):
        return drain_stop(drain)
    return Stop(StopReason.FAILURE, "a rank failed")


def drain_stop(drain: DrainNotice) -> Stop:
    """Return the stop after which ranks leave nodes that are drained."""
    return Stop(StopReason.DRAIN, "its nodes are drained", drain.share_s)


def answer_interval(running_s: float, ranks: int) -> float:
    """Return the seconds that an agent may collect news before it answers.

    `running_s`: seconds since the ranks have met.
    """
    first, later = ANSWER_S
    return max(min(later, max(first, running_s / 20)), ranks / ANSWERS_PER_S)


def longest_interval(ranks: int) -> float:
    """Return the longest `answer_interval` of a run of that many ranks."""
    return max(ANSWER_S[1], ranks / ANSWERS_PER_S)


def late_answer(ranks: int) -> float:
    """Return the seconds that an agent answers later than with few ranks.

    The limits of a hang assume few ranks.
    """
    return longest_interval(ranks) - ANSWER_S[1]


def agent_limit(ranks: int) -> float:
    """Return the seconds after which an agent that has not answered a call is silent."""
    return AGENT_S + longest_interval(ranks)
