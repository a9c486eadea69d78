"""One attempt after the other: what each starts from, its ranks' ends, and what all came to. (driver)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raydist import fabric, mpi, records, restart
from raydist.config import Job
from raydist.errors import RaydistError
from raydist.events import Events
from raydist.fabric import Var
from raydist.group import Gang
from raydist.parcel import Call, unpack_all
from raydist.placement import Plan
from raydist.restart import Again, Stop
from raydist.result import Attempt
from raydist.vigil import Vigil


def settled(job: Job, plan: Plan) -> Job:
    """The job with the backend that `auto` became, and with the restarts that it has."""
    return replace(job, backend=replace(job.backend, name=plan.ask.backend), restart=restart.rule(job))


def attempt(job: Job, call: Call | None, gang: Gang, events: Events, after: Again | None = None) -> Attempt:
    """Start the ranks, and listen until all have ended. `after`: the failure that this attempt mends."""
    job = sized(job, gang.first, gang.plan.world_size)
    with mpi.launching(job, gang):
        gang.start(job, variables(job, gang, events), call.packed if call else None)
        vigil = Vigil(gang, events, Path(job.dir) / "logs", job, after)
        tried = Attempt(ends=vigil.keep(), error=vigil.stopped, resize=vigil.resize)
        gang.report_to(tried.cause if tried.error is None else None, vigil.slow)
        return tried


def another(job: Job, call: Call | None, gang: Gang, events: Events, after: Again, before: Attempt) -> Attempt:
    """A further attempt; if there is no place for it, what was before, with the reason."""
    if after.cause is None:
        events.say("regroup", number=after.number, text=before.resize)
    else:
        events.say("restart", **after.as_event(job.restart))
    if after.elsewhere:  # those that stay have all of it in memory; the disk is for the case that they go too
        gang.flush()
    try:
        moved = gang.again(job, after.number, resize=after.cause is None)
        seats = {"seats": gang.plan.as_event()["seats"]} if moved else {}
        events.say("placed", number=after.number, moved=moved, **seats)
        return attempt(job, call, gang, events, after)
    except RaydistError as error:
        return replace(before, error=error)


def sized(job: Job, first: int, ranks: int) -> Job:
    """The job for so many ranks, as many samples a step as on the `first` ranks, in more passes if these are fewer.

    No pass takes more samples of a rank than at first, if there are enough for all: its memory may hold no more.
    """
    if job.scale.max_nodes is None or job.data.resize == "scale":
        return job
    batch = job.data.global_batch or job.data.batch_size * job.train.accumulate * first
    passes = min(math.ceil(job.train.accumulate * first / ranks), max(1, batch // ranks))
    return replace(job, data=replace(job.data, global_batch=batch), train=replace(job.train, accumulate=passes))


def leave(job: Job, gang: Gang, events: Events, after: Again) -> None:
    """Save, and leave nodes that are about to be taken away, where those that stay are too few to go on.

    The whole gang goes: Ray moves no part of a group.
    """
    events.say("restart", **after.as_event(job.restart))
    gang.flush()


def moved(job: Job, call: Call | None, gang: Gang, events: Events, past: Sequence[Attempt]) -> Attempt:
    """The attempt after one that has left its nodes, on others."""
    after = restart.decide(job.restart, past)
    assert isinstance(after, Again)
    events.say("placed", number=after.number, moved=[seat.rank for seat in gang.plan.seats])
    gang.first = len(past[0].ends)
    return attempt(job, call, gang, events, after)


def cut_short(past: Sequence[Attempt], error: RaydistError) -> Attempt:
    """What was before an error, with that as the reason of the end; where nothing was, the error itself."""
    if not past:
        raise error
    return replace(past[-1], error=error, earlier=tuple(past[:-1]))


def variables(job: Job, gang: Gang, events: Events) -> list[list[Var]]:
    """Each rank's environment, with the checkpoint to go on from: in a restart this run's own, if it has one by now."""
    ranks = gang.plan.world_size
    resume = records.resume(job, gang.meet.attempt, ranks, lambda text: events.say("warning", text=text))
    for found in resume:
        if found.value and not gang.meet.attempt:
            gang.check_sight(f"resume={found.value}", f"{found.value}/meta.json", "each rank reads it")
    return [[*each, *resume] for each in fabric.variables(job, gang.plan, gang.facts, gang.meet)]


def conclude(job: Job, past: Sequence[Attempt], verdict: Stop, gang: Gang, events: Events) -> Attempt:
    """All attempts as one: what the last came to. If it failed, its last state is on the disk when this returns."""
    last = past[-1]
    gang.say_network()
    if last.error is not None or last.cause is not None:
        gang.flush()
    if any(end.how == "lost" for end in last.ends):
        records.tell_saved(job, events)
    values, exceptions = unpack_all(gang.values())
    return replace(last, values=values, exceptions=exceptions, earlier=tuple(past[:-1]), why_last=verdict.reason)
