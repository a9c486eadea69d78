"""The rule of restarts: a table, and what holds for every history."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.recovery.blame import first_cause
from raydist.recovery.policy import GiveUp, Retry, decide, restart_rule, without_progress
from raydist.settings.config import Backend, Job, Restart
from raydist.shared.errors import LaunchError, Stopped
from raydist.shared.outcome import Attempt, End

RULE = Restart(max=3, window_s=100.0)
KILLED = End(rank=1, host="a", how="killed", at=0.0, step=10, signal=signal.SIGKILL)
RAISED = End(
    rank=1, host="a", how="raised", at=0.0, step=10, type="ValueError", message="bad batch 17"
)
LOST = End(rank=1, host="a", how="lost", at=0.0, step=10)
PREEMPTED = replace(LOST, preempted=True)
FINISHED = End(rank=0, host="a", how="finished", at=0.0, step=10)


def attempt(end: End, step: int, at: float = 0.0) -> Attempt:
    """Return an attempt that ended like this, when another rank had done as many steps."""
    return Attempt(
        ends=[
            replace(end, step=step, at=at),
            End(rank=0, host="a", how="stopped", at=at, step=step),
        ]
    )


def history(*ends: tuple[End, int] | tuple[End, int, float]) -> list[Attempt]:
    return [attempt(*end) for end in ends]


def test_what_went_well_or_was_stopped_is_not_done_again() -> None:
    assert decide(RULE, [Attempt(ends=[FINISHED])]) == GiveUp("")
    stopped = replace(attempt(KILLED, 5), error=Stopped(signal.SIGINT))
    assert decide(RULE, [stopped]) == GiveUp("")
    assert decide(RULE, [replace(attempt(KILLED, 5), error=LaunchError("no place"))]) == GiveUp("")


def test_a_run_that_made_way_goes_on_elsewhere_unless_it_has_finished() -> None:
    ends = [End(rank, "a", "stopped", 2.0 + rank, step=7) for rank in (0, 1)]
    made_way = Attempt(ends, made_way="gpt of ana@login")
    verdict = decide(Restart(max=0), [made_way])
    assert isinstance(verdict, Retry)
    assert verdict.elsewhere
    assert (verdict.cause, verdict.failures, verdict.since) == (None, 0, 3.0)
    finished = replace(made_way, ends=[replace(end, how="finished") for end in ends])
    assert decide(Restart(max=0), [finished]) == GiveUp("")
    stopped = replace(made_way, error=Stopped(signal.SIGINT))
    assert decide(RULE, [stopped]) == GiveUp("")
    assert without_progress([*history((KILLED, 10)), made_way, *history((KILLED, 10))]) == 2


@pytest.mark.parametrize("end", [KILLED, RAISED, LOST, PREEMPTED])
def test_a_first_failure_is_forgiven_and_the_restart_knows_what_it_mends(end: End) -> None:
    verdict = decide(RULE, history((end, 10)))
    assert isinstance(verdict, Retry)
    assert verdict.cause is not None
    assert (verdict.number, verdict.reached, verdict.cause.rank) == (1, 10, 1)
    facts = verdict.as_event(RULE)
    assert (facts.number, facts.most, facts.rank, facts.step) == (1, 3, 1, 10)
    assert re.match("rank 1 on a, (last heartbeat at )?step 10: ", facts.text)


def test_restart_none_forgives_nothing_and_gives_no_reason() -> None:
    assert decide(replace(RULE, max=0), history((KILLED, 10))) == GiveUp("")


@pytest.mark.parametrize("kind", ["ConfigError", "LaunchError"])
def test_what_can_only_come_again_is_not_tried_again(kind: str) -> None:
    assert decide(RULE, history((replace(RAISED, type=kind), 10))) == GiveUp(
        f"another attempt would end with the same {kind}"
    )


def test_more_failures_than_are_forgiven_end_it() -> None:
    three = history((KILLED, 10), (KILLED, 20), (KILLED, 30))
    assert isinstance(decide(RULE, three), Retry)
    assert decide(RULE, [*three, attempt(KILLED, 40)]) == GiveUp(
        "4 failures within 100 s, restart.max=3"
    )


@pytest.mark.parametrize(
    ("job", "ranks", "most"),
    [
        (Job(), 1, 3),
        (Job(), 1023, 3),
        (Job(), 16384, 19),
        (Job(restart=Restart(max=3)), 16384, 3),
        (Job(script="train.py"), 16384, 0),
        (Job(backend=Backend(name="mpi")), 16384, 0),
    ],
)
def test_the_usual_limit_grows_with_the_ranks(job: Job, ranks: int, most: int) -> None:
    assert restart_rule(job, ranks).max == most


def test_an_old_failure_is_forgotten() -> None:
    old = history((KILLED, 10, 0.0), (KILLED, 20, 1.0), (KILLED, 30, 2.0))
    assert isinstance(decide(RULE, [*old, attempt(KILLED, 40, at=101.0)]), Retry)
    assert isinstance(decide(RULE, [*old, attempt(KILLED, 40, at=99.0)]), GiveUp)
    never = Restart(max=3, window_s=None)
    assert decide(never, [*old, attempt(KILLED, 40, at=1e6)]) == GiveUp("4 failures, restart.max=3")


def test_a_node_that_was_taken_away_costs_nothing() -> None:
    taken = [attempt(PREEMPTED, step) for step in range(10, 100, 10)]
    assert isinstance(decide(RULE, taken), Retry)
    lost = [attempt(LOST, step) for step in range(10, 100, 10)]
    assert isinstance(decide(RULE, lost), GiveUp)


def test_the_same_error_at_the_same_step_is_tried_twice_at_most() -> None:
    again = replace(RAISED, message="bad batch 18")  # numbers in the words are no difference
    assert decide(RULE, history((RAISED, 10), (again, 10))) == GiveUp(
        "the same failure came twice at step 10"
    )
    stopped = replace(
        again, code=0, signal=signal.SIGKILL
    )  # before it had exited, because other ranks failed too
    assert isinstance(decide(RULE, history((RAISED, 10), (stopped, 10))), GiveUp)
    assert isinstance(decide(RULE, history((RAISED, 10), (RAISED, 11))), Retry)
    assert isinstance(
        decide(RULE, history((RAISED, 10), (replace(RAISED, type="KeyError"), 10))), Retry
    )


def test_a_repeated_signal_from_outside_is_retried_but_a_repeated_crash_is_not() -> None:
    assert isinstance(decide(RULE, history((KILLED, 10), (KILLED, 10))), Retry)
    crash = replace(KILLED, signal=signal.SIGSEGV)
    assert isinstance(decide(RULE, history((crash, 10), (crash, 10))), GiveUp)


def test_without_a_step_in_between_there_is_an_end_however_many_are_forgiven() -> None:
    rule = replace(RULE, max=100)
    assert isinstance(decide(rule, history((KILLED, 10), (KILLED, 10))), Retry)
    assert decide(rule, history((KILLED, 10), (KILLED, 10), (KILLED, 9))) == GiveUp(
        "3 failures in a row without a step beyond step 9"
    )
    assert isinstance(decide(rule, history((KILLED, 10), (KILLED, 10), (KILLED, 11))), Retry)


def test_each_fit_of_a_job_has_its_own_steps() -> None:
    rule = Restart(max=100)
    first, second, third = (
        replace(attempt(KILLED, step), fit=fit) for fit, step in ((1, 1000), (2, 50), (2, 90))
    )
    assert isinstance(decide(rule, [first, second, third]), Retry)
    stuck = [first, second, third, third, third]
    assert decide(rule, stuck) == GiveUp("3 failures in a row without a step beyond step 90")
    raised = [replace(attempt(RAISED, 10), fit=fit) for fit in (1, 2)]
    assert isinstance(decide(rule, raised), Retry)
    assert isinstance(decide(rule, [*raised, raised[1]]), GiveUp)


def test_a_job_that_reports_no_step_fails_as_often_as_is_allowed() -> None:
    rule = Restart(max=5, window_s=None)
    assert isinstance(decide(rule, history(*[(KILLED, 0)] * 5)), Retry)
    assert decide(rule, history(*[(KILLED, 0)] * 6)) == GiveUp("6 failures, restart.max=5")
    fit = [replace(attempt(KILLED, 0), fit=1)] * 3
    assert decide(rule, fit) == GiveUp("3 failures in a row without a step beyond step 0")
    twice = history((RAISED, 0), (RAISED, 0))
    assert decide(rule, twice) == GiveUp("the same failure came twice at step 0")


@pytest.mark.parametrize("end", [KILLED, RAISED])
def test_a_program_that_reports_no_step_fails_as_often_as_is_allowed(end: End) -> None:
    rule = Restart(max=5, window_s=None)
    assert isinstance(decide(rule, history(*[(end, 0)] * 5), program=True), Retry)
    assert decide(rule, history(*[(end, 0)] * 6), program=True) == GiveUp(
        "6 failures, restart.max=5"
    )
    stuck = history((RAISED, 10), (RAISED, 10))  # one that reports its steps is judged by them
    assert isinstance(decide(rule, stuck, program=True), GiveUp)


ENDS = st.builds(
    replace,
    st.sampled_from([KILLED, RAISED, LOST, PREEMPTED]),
    step=st.integers(0, 5),
    at=st.floats(0, 1000),
)
HISTORIES = st.lists(ENDS.map(lambda end: Attempt(ends=[end])), min_size=1, max_size=30)
RULES = st.builds(Restart, max=st.integers(0, 5), window_s=st.floats(1, 1000))


@given(RULES, HISTORIES)
def test_every_history_ends_or_goes_on_with_a_reason(rule: Restart, past: list[Attempt]) -> None:
    verdict = decide(rule, past)
    if isinstance(verdict, Retry):
        assert verdict.number == len(past)
        assert verdict.cause == first_cause(past[-1].ends)
    else:
        assert bool(verdict.reason) == bool(rule.max)


@given(HISTORIES)
def test_no_job_is_tried_for_ever_without_a_step(past: list[Attempt]) -> None:
    stuck = [*past, *[replace(attempt(KILLED, 0), fit=1)] * 4]
    assert isinstance(decide(Restart(max=10**6), stuck), GiveUp)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_progress_is_a_step_that_was_not_done_before(steps: list[int]) -> None:
    count = without_progress([attempt(KILLED, step) for step in steps])
    last = len(steps) - count
    assert steps[last] == max(steps)
    assert last == steps.index(max(steps))
