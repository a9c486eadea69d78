"""(rule, attempts so far) -> retry in place, retry elsewhere, or give up and why. (pure)"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raydist.cluster.placement import Plan
from raydist.recovery.blame import describe_end, first_cause, kind_of, where
from raydist.settings import in_place
from raydist.settings.config import Job, Restart
from raydist.shared import kinds
from raydist.shared.outcome import Attempt, End

NEVER = frozenset({"ConfigError", "LaunchError", "NonFiniteError"})
"""Exceptions for which a retry cannot help: a setting is wrong; a file, a module or a device is
missing; the numbers of a training are not finite."""
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})
"""Signals that another process sends: the same one twice at the same step is no evidence of a fault
in the job."""
USUAL = 3
"""`restart.max` of small jobs that do not set it."""
RANKS_PER_FAILURE = 1024
"""Large jobs are allowed one more failure for each of these ranks: with 16,384 GPUs four unrelated
failures within an hour are to be expected every other week (bench goodput)."""
STUCK = 3
"""Failures without a new step between them after which a retry is useless."""


@dataclass(frozen=True)
class Retry:
    """Another attempt."""

    past: tuple[Attempt, ...]
    """The attempts so far; the last one failed, was ended to change the number of nodes, or made
    way for another run."""
    elsewhere: bool = False
    """Whether it is in a new placement: the nodes are drained, and too few others are ready; or
    another run has them."""

    @property
    def number(self) -> int:
        """The number of attempts before it."""
        return len(self.past)

    @property
    def failures(self) -> int:
        """The number of this restart for a person: changing the number of nodes is no failure."""
        return sum(first_cause(attempt.ends) is not None for attempt in self.past)

    @property
    def cause(self) -> End | None:
        """The failure that it follows; None if only the nodes change."""
        return first_cause(self.past[-1].ends)

    @property
    def reached(self) -> int:
        """The last step that any rank reached, in the last attempt whose ranks made one."""
        made = (each.reached for each in reversed(self.past) if each.stepped and each.reached)
        return next(made, 0)

    @property
    def since(self) -> float:
        """When the previous attempt failed or ended, in seconds since the epoch."""
        return self.cause.at if self.cause else max(end.at for end in self.past[-1].ends)

    def as_event(self, rule: Restart) -> kinds.Restart:
        """Return the event with which this attempt begins."""
        end = self.cause
        assert end is not None, "no rank has failed"
        return kinds.Restart(
            number=self.failures,
            most=rule.max,
            rank=end.rank,
            host=end.host,
            how=end.how,
            step=end.step,
            text=f"{where(end)} {first_line(end)}",
            free=end.preempted,
        )


@dataclass(frozen=True)
class GiveUp:
    """No further attempt."""

    reason: str
    """Why, for a person; empty if nothing failed, or if restarts are off."""


def usual_limit(ranks: int) -> int:
    """Return `restart.max` of a job with this number of ranks that does not set it."""
    return USUAL + ranks // RANKS_PER_FAILURE


def restart_rule(job: Job, ranks: int = 1) -> Restart:
    """Return the job's restart rule, with the default of `restart.max` for this kind of job."""
    fixed = job.scale.max_nodes is None and not job.scale.spares
    usual = 0 if job.backend.name == "mpi" or (job.script and fixed) else usual_limit(ranks)
    return job.restart if job.restart.max is not None else replace(job.restart, max=usual)


def settle_job(job: Job, plan: Plan) -> Job:
    """Return the job with `backend=auto` and `restart.max=null` replaced by their values for it.

    ConfigError: the backend cannot do what `restart.in_place=on` requires.
    """
    backend = replace(job.backend, name=plan.request.backend)
    result = replace(job, backend=backend, restart=restart_rule(job, plan.world_size))
    in_place.check(result)
    return result


def decide(
    rule: Restart, past: Sequence[Attempt], replaceable: bool = False, program: bool = False
) -> Retry | GiveUp:
    """Return what follows the last of these attempts.

    `replaceable`: whether other nodes are ready to replace those that are drained. `program`:
    whether the ranks run one (script=).
    """
    last = past[-1]
    # A job or program need not report its steps: then nobody knows whether it makes progress.
    steps_known = any(attempt.reached or attempt.fit for attempt in past)
    end = first_cause(last.ends)
    if last.error is None and end is None and last.resize and unfinished(last):
        return Retry(tuple(past))
    if last.error is None and end is None and last.made_way and unfinished(last):
        return Retry(tuple(past), elsewhere=True)
    if last.error is not None or end is None or not rule.max:
        return GiveUp("")
    if end.type in NEVER:
        return GiveUp(f"another attempt would end with the same {end.type}")
    # A job that raises the same before it has reported a step has a bug at its beginning.
    if (steps_known or not program) and len(past) > 1 and same(past[-2], last):
        return GiveUp(f"the same failure came twice at step {end.step}")
    if steps_known and (stuck := without_progress(past)) >= STUCK:
        return GiveUp(f"{stuck} failures in a row without a step beyond step {last.reached}")
    counted = [attempt for attempt in past if counts(rule, attempt, end.at)]
    if len(counted) > rule.max:
        within = "" if rule.window_s is None else f" within {rule.window_s:g} s"
        return GiveUp(f"{len(counted)} failures{within}, restart.max={rule.max}")
    return Retry(tuple(past), elsewhere=is_drained(last) and not replaceable)


def unfinished(attempt: Attempt) -> bool:
    """Return whether a rank was stopped: all may have finished just before."""
    return any(end.how == "stopped" for end in attempt.ends)


def is_drained(attempt: Attempt) -> bool:
    """Return whether the attempt was ended because nodes are drained.

    Such nodes still run, and are about to be taken away.
    """
    end = first_cause(attempt.ends)
    return end is not None and end.how == "drained"


def counts(rule: Restart, attempt: Attempt, now: float) -> bool:
    """Return whether a failure counts towards `restart.max`.

    It does not if it is old, or if the cluster took the node away.
    """
    end = first_cause(attempt.ends)
    return (
        end is not None
        and not end.preempted
        and (rule.window_s is None or now - end.at <= rule.window_s)
    )


def without_progress(past: Sequence[Attempt]) -> int:
    """Return the consecutive failures since an attempt last reached a new step.

    A step is new if no earlier attempt had reached it; each raydist.fit of a job has its own steps.
    The last attempt is included.
    """
    furthest, count = (-1, -1), 0
    for attempt in past:
        end = first_cause(attempt.ends)
        if end is not None and end.preempted:
            continue
        at = (attempt.fit, attempt.reached)
        if at > furthest:
            count = 0
        count += end is not None
        furthest = max(furthest, at)
    return count


def same(earlier: Attempt, last: Attempt) -> bool:
    """Return whether the failures of two attempts are one fault of the job.

    They are if step, kind of end and message are the same.
    """
    one, other = first_cause(earlier.ends), first_cause(last.ends)
    if one is None or other is None or other.how in ("lost", "drained"):
        return False
    if other.how != "raised" and other.signal in FROM_OUTSIDE and not other.oom:
        return False
    at, before = (last.fit, other.step), (earlier.fit, one.step)
    return at == before and kind_of(one) == kind_of(other)


def first_line(end: End) -> str:
    """Return the failure on one line."""
    return describe_end(end).splitlines()[0][:200]
