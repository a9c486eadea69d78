"""The flow: words -> Job -> cluster -> plan -> gang -> ranks -> Result. (driver)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from raydist import attempts, backends, cluster, home, inline, notice, placement, preload, records, restart, result
from raydist.config import Job
from raydist.errors import RaydistError
from raydist.events import Events
from raydist.group import Gang
from raydist.parcel import Call
from raydist.result import Attempt, Result
from raydist.signals import stoppable
from raydist.watch.console import Console
from raydist.watch.metadata import Metadata
from raydist.watch.pages import Pages, there
from raydist.words import compose

T = TypeVar("T")


@overload
def run(job: Callable[..., T], *words: str, args: Sequence[Any] = (), **kwargs: Any) -> Result[T]: ...
@overload
def run(job: Job | str, *words: str) -> Result[Any]: ...
def run(job: Job | str | Callable[..., T], *words: str, args: Sequence[Any] = (), **kwargs: Any) -> Result[Any]:
    """Run a job on every rank and give back its Result; RunFailed if a rank failed, ConfigError before anything starts.

    `job`: a function, a word as after `job=`, or a whole Job. `words`: as typed after `python -m raydist.train`.
    A function is called on each rank with `args` and `kwargs`, and with `config` if it has a parameter of that name.

        raydist.run(train, "scale=2x8", "backend=nccl", args=(0.1,)).values
    """
    if isinstance(job, Job):
        return run_job(job)
    if isinstance(job, str):
        return run_job(compose.compose([f"job={job}", *words], claim=True))
    return run_job(compose.compose(words, function=job, claim=True), Call.of(job, args, kwargs))


def run_job(job: Job, call: Call | None = None) -> Result[Any]:
    """THE FLOW: an attempt, what it came to, and one page about it."""
    folder, console = Path(job.dir), Console(job.watch)
    with stoppable(), console, Events(folder / "events.jsonl", (Pages(folder), console, Metadata())) as events:
        try:
            events.say("run", name=job.name, dir=str(folder), target=job.job.target, pages=there(folder))
            tried = attempt(job, call, events)
        except RaydistError as error:
            tried = Attempt(error=error)
        outcome: Result[Any] = result.conclude(folder, tried, events.all())
        outcome.save()
        events.say("result", **outcome.to_json())
        records.gather(job, events)
    if tried.error is not None:
        raise tried.error
    return outcome.or_raise()


def attempt(job: Job, call: Call | None, events: Events) -> Attempt:
    """Place the job where it said, run it there, gather what came of it."""
    backends.check_there(job.backend.name, job.script)
    records.claim(job)
    if job.group == "inline":
        return attempt_inline(job, call, events)
    home.warm(job)  # while Ray answers
    with cluster.connect(job, events):
        past: list[Attempt] = []
        while (done := attempt_placed(job, call, events, past)) is None:
            pass  # it has left nodes that are about to be taken away: another place for it
        return done


def attempt_placed(job: Job, call: Call | None, events: Events, past: list[Attempt]) -> Attempt | None:
    """One placement, for as long as the cluster leaves it there. `past`: the attempts before, in other places."""
    try:
        ask = placement.ask(job, notice.staying(job, cluster.nodes()), cluster.node_types())
        with cluster.placed(job, ask, events) as gang:
            return carry_out(job, call, gang, events, past)
    except RaydistError as error:
        return attempts.cut_short(past, error)


def attempt_inline(job: Job, call: Call | None, events: Events) -> Attempt:
    """Without Ray, on this machine."""
    here = inline.this_machine(job)
    plan = placement.seat(ask := placement.ask(job, [here]), [here] * len(ask.bundles))
    if plan.world_size == 1 and not job.script:
        return inline.run_here(attempts.settled(job, plan), plan, call, events)
    with inline.in_thread(plan, events) as gang:
        done = carry_out(job, call, gang, events, [])
    assert done is not None, "this machine is never drained"
    return done


def carry_out(job: Job, call: Call | None, gang: Gang, events: Events, past: list[Attempt]) -> Attempt | None:
    """Two rounds, then listen; after a failure again, as long as the rule says so. None: again, but elsewhere."""
    events.say("plan", **gang.plan.as_event())
    job = attempts.settled(job, gang.plan)
    gang.open(job, preload.of(job), home.warm(job), len(past))
    past.append(attempts.moved(job, call, gang, events, past) if past else attempts.attempt(job, call, gang, events))
    while isinstance(verdict := restart.decide(job.restart, past), restart.Again):
        if verdict.elsewhere and not gang.going():
            attempts.leave(job, gang, events, verdict)
            return None
        past.append(attempts.another(job, call, gang, events, verdict, past[-1]))
    return attempts.conclude(job, past, verdict, gang, events)
