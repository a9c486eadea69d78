"""The first step after a restart: what it cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raydist.recovery.arrival import Beginning, RestartCost
from raydist.recovery.policy import Retry
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.outcome import Attempt, End

FAILED = Attempt(ends=[End(1, "b", "killed", 100.0, step=9), End(0, "a", "stopped", 101.0, step=9)])
RESIZED = Attempt(
    ends=[End(rank, "a", "stopped", 100.0 + rank, step=9) for rank in (0, 1)], resize="3 nodes now"
)


def begin(resumed: int | None) -> Event:
    return kinds.Begin(t=105.0, rank=0, resumed=resumed)


def report(step: int | None) -> Event:
    return kinds.Report(t=110.0, rank=0, step=step, values={})


@pytest.mark.parametrize(
    ("attempt", "events", "cost"),
    [
        (FAILED, [begin(6), report(7)], (7, 10.0, 3, False)),
        (FAILED, [begin(9), report(10)], (10, 10.0, 0, False)),
        (FAILED, [begin(None), report(1)], (1, 10.0, 9, False)),
        (
            FAILED,
            [report(4)],
            (4, 10.0, 6, False),
        ),  # a loop of the user's own, which reports no begin
        (
            FAILED,
            [begin(6), report(6), report(None)],
            None,
        ),  # an evaluation, and a report of no step
        (FAILED, [begin(6)], None),
        (RESIZED, [begin(9), report(10)], (10, 9.0, 0, True)),
    ],
)
def test_the_first_new_step_ends_a_restart(
    attempt: Attempt, events: list[Event], cost: Any
) -> None:
    arrival = RestartCost(Retry((attempt,)))
    costs = [found for event in events if (found := arrival.add(0, event))]
    result = [(each.step, each.s, each.repeated, each.resized) for each in costs]
    assert result == ([cost] if cost else [])
    assert arrival.add(0, report(11)) is None or not cost  # once


def test_an_attempt_that_made_no_step_hides_none_that_are_repeated() -> None:
    """Its ranks end at the step from which they have resumed."""
    again = Beginning(2, 100.0, Retry((FAILED,)))
    for event in (begin(6), report(6)):  # an evaluation, then it fails
        assert again.add(0, event) == []
    ends = [replace(end, step=6) for end in FAILED.ends]
    none = Attempt(ends=ends, stepped=again.stepped)
    third = RestartCost(Retry((FAILED, none)))
    (cost,) = [found for event in (begin(6), report(7)) if (found := third.add(0, event))]
    assert cost.repeated == 3


def test_only_rank_0_counts() -> None:
    assert RestartCost(Retry((FAILED,))).add(1, report(7)) is None


def joined(t: float, rank: int) -> Event:
    return kinds.Joined(t=t, rank=rank, pid=7)


STEPLESS = replace(FAILED, ends=[replace(end, step=0) for end in FAILED.ends])
MADE_WAY = replace(
    STEPLESS, ends=[replace(end, how="stopped", step=0) for end in FAILED.ends], made_way="gpt"
)


def test_a_program_that_reports_no_step_is_back_once_all_its_ranks_run() -> None:
    beginning = Beginning(2, 103.0, Retry((STEPLESS,)), program=True)
    assert beginning.add(1, joined(104.5, 1)) == []
    (back,) = beginning.add(0, joined(104.0, 0))
    assert isinstance(back, kinds.Restarted)
    assert (back.number, back.step, back.s, back.repeated, back.paused) == (1, 0, 4.5, 0, False)
    assert beginning.add(0, report(1)) == []  # once

    beginning = Beginning(1, 103.0, Retry((MADE_WAY,), elsewhere=True), program=True)
    (back,) = beginning.add(0, joined(104.0, 0))
    assert isinstance(back, kinds.Restarted)
    assert (back.step, back.s, back.paused) == (0, 3.0, True)


def test_parts_of_a_launch_that_are_read_late_end_when_they_did() -> None:
    beginning = Beginning(2, 103.0, None)
    late = [(1, joined(104.5, 1)), (0, joined(104.0, 0)), (0, report(1))]
    found = [each for rank, event in late for each in beginning.add(rank, event)]
    assert found == [
        kinds.Phase(t=104.5, name="rendezvous", s=1.5),
        kinds.Phase(t=110.0, name="first step", s=5.5),
    ]
    loop = Beginning(1, 103.0, None)  # without collectives: it reports a step before it has joined
    found = [each for event in (report(1), joined(111.0, 0)) for each in loop.add(0, event)]
    assert found == [
        kinds.Phase(t=111.0, name="rendezvous", s=8.0),
        kinds.Phase(t=111.0, name="first step", s=0.0),
    ]


@pytest.mark.parametrize(("attempt", "program"), [(FAILED, True), (STEPLESS, False)])
def test_what_reports_steps_is_back_at_its_first_one(attempt: Attempt, program: bool) -> None:
    beginning = Beginning(1, 103.0, Retry((attempt,)), program=program)
    assert beginning.add(0, joined(104.0, 0)) == []
    (back,) = beginning.add(0, report(1))
    assert isinstance(back, kinds.Restarted)
    assert back.step == 1
