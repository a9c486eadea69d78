"""(rule, past attempts) -> again, or stop and why. (pure)"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raydist.blame import End, cause, where
from raydist.config import Job, Restart
from raydist.result import Attempt

NEVER = frozenset({"ConfigError", "LaunchError"})
"""Exceptions that another attempt can only meet again: a word is wrong, or something is not there."""
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})
"""Signals that come from somebody else: the same one twice at the same step says nothing about the job."""
USUAL = 3
"""Failures that are forgiven where nobody said how many."""
STUCK = 3
"""Failures without a step in between after which there is no point in another attempt."""


@dataclass(frozen=True)
class Again:
    """Another attempt."""

    number: int
    """Attempts before it."""
    cause: End | None
    """What failed; None where nothing did, and only the size changes."""
    reached: int
    """The last step that any rank had noted."""
    since: float
    """When it ended, in seconds since the epoch."""

    @property
    def elsewhere(self) -> bool:
        """The nodes are still there, and about to be taken away."""
        return self.cause is not None and self.cause.how == "drained"

    def as_event(self, rule: Restart) -> dict[str, Any]:
        """The facts of the event `restart`."""
        end = self.cause
        assert end is not None, "nothing has failed"
        return {
            "number": self.number, "most": rule.max, "rank": end.rank, "host": end.host, "how": end.how,
            "step": end.step, "text": f"{where(end)} {brief(end)}",
            "free": end.preempted,
        }  # fmt: skip


@dataclass(frozen=True)
class Stop:
    """No other attempt."""

    reason: str
    """Why, for a person; empty where nothing failed, or where none was asked for."""


def rule(job: Job) -> Restart:
    """The job's rule, with what `restart.max` is where nobody said it."""
    fixed = job.scale.max_nodes is None and not job.scale.spares
    usual = 0 if job.backend.name == "mpi" or (job.script and fixed) else USUAL
    return job.restart if job.restart.max is not None else replace(job.restart, max=usual)


def decide(rule: Restart, past: Sequence[Attempt]) -> Again | Stop:
    """What to do after the last of these attempts."""
    last = past[-1]
    if last.error is None and last.cause is None and last.resize:
        return Again(len(past), None, last.reached, max(end.at for end in last.ends))
    if last.error is not None or (end := last.cause) is None or not rule.max:
        return Stop("")
    if end.type in NEVER:
        return Stop(f"a {end.type} would come again")
    if len(past) > 1 and same(past[-2].cause, end):
        return Stop(f"the same failure came twice at step {end.step}")
    if (stuck := without_progress(past)) >= STUCK:
        return Stop(f"{stuck} failures in a row, and not one step further than step {last.reached}")
    counted = [each for each in past if counts(rule, each, end.at)]
    if len(counted) > rule.max:
        within = "" if rule.window_s is None else f" within {rule.window_s:g} s"
        return Stop(f"{len(counted)} failures{within}, restart.max={rule.max}")
    return Again(len(past), end, last.reached, end.at)


def counts(rule: Restart, attempt: Attempt, now: float) -> bool:
    """Whether a failure uses up one of those that are forgiven: an old one, or a node taken away, does not."""
    end = attempt.cause
    return end is not None and not end.preempted and (rule.window_s is None or now - end.at <= rule.window_s)


def without_progress(past: Sequence[Attempt]) -> int:
    """So many failures in a row, up to the last one, since a step was done that had not been done before."""
    furthest, count = -1, 0
    for attempt in past:
        if attempt.cause is not None and attempt.cause.preempted:
            continue
        if attempt.reached > furthest:
            count = 0
        count += attempt.cause is not None
        furthest = max(furthest, attempt.reached)
    return count


def same(one: End | None, other: End) -> bool:
    """Whether two failures look like one and the same fault of the job: same place, same words, same step."""
    if one is None or other.how in ("lost", "drained") or (other.signal in FROM_OUTSIDE and not other.oom):
        return False
    return fault(one) == fault(other)


def fault(end: End) -> tuple[int, str, int, int, str, str]:
    """What makes a failure the same one, numbers in its message aside."""
    return end.step, end.how, end.code, end.signal, end.type, re.sub(r"0x[0-9a-f]+|\d+", "#", end.message)


def brief(end: End) -> str:
    """The failure on one line."""
    return cause(end).splitlines()[0][:200]
