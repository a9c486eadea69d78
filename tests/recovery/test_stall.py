"""How long a rank may be silent: learned from its own steps."""

from __future__ import annotations

import pytest

from raydist.recovery.deadlines import late_answer, longest_interval
from raydist.recovery.stall import UNKNOWN_S, StallCheck
from raydist.settings.config import Hang


def steady(
    step_s: float, steps: int = 10, settings: Hang | None = None, phase: str = "end"
) -> StallCheck:
    """Return a check with the heartbeats of one rank, the last of them at `steps * step_s` seconds."""
    check = StallCheck(settings or Hang(after_s=4, steps=3))
    for step in range(1, steps + 1):
        check.note(0, (step, phase, 1000 + step * step_s), step * step_s)
    return check


@pytest.mark.parametrize("step_s", [0.01, 1.0, 60.0])
def test_silence_is_allowed_for_a_few_steps_and_some_seconds(step_s: float) -> None:
    check, last = steady(step_s), 10 * step_s
    assert not check.silent(last + 3.9 + 3 * step_s)
    assert check.silent(last + 4.1 + 3 * step_s)


def test_one_slow_step_among_many_does_not_count() -> None:
    check = steady(0.1, 20)
    check.note(0, (21, "end", 1100.0), 100.0)
    assert not check.silent(104.2)
    assert check.silent(104.5)


def test_the_clock_of_the_rank_may_be_another_than_ours() -> None:
    check = StallCheck(Hang(after_s=4, steps=3))
    for step in range(1, 10):
        check.note(0, (step, "end", 5_000_000 + step * 0.1), step * 0.1)
    assert not check.silent(4.8)
    assert check.silent(5.3)


def test_many_steps_between_two_heartbeats_are_as_good_as_one() -> None:
    check = StallCheck(Hang(after_s=4, steps=3))
    check.note(0, (10, "end", 1000.0), 0.0)
    check.note(0, (35, "end", 1000.25), 0.25)
    assert check.silent(4.5)


@pytest.mark.parametrize("phase", ["start", "evaluate", "save"])
def test_what_is_no_step_has_a_minute(phase: str) -> None:
    check = steady(0.1)
    check.note(0, (10, phase, 1002.0), 2.0)
    assert not check.silent(2 + UNKNOWN_S - 1)
    assert check.silent(2 + UNKNOWN_S + 1)


def test_before_three_steps_nothing_is_known() -> None:
    check = steady(0.1, 3)
    assert not check.silent(UNKNOWN_S)
    assert check.silent(UNKNOWN_S + 1)


def test_the_limit_is_the_longest_of_all() -> None:
    settings = Hang(after_s=4, steps=3, limit_s=10)
    assert steady(100.0, settings=settings).silent(1011)
    assert not steady(100.0, settings=settings).silent(1009)


def test_any_other_sign_of_life_counts_too() -> None:
    check = steady(0.1)
    check.note(0, (10, "backward", 1005.0), 5.0)
    assert not check.silent(9.2)


def test_one_rank_is_enough_and_one_that_has_ended_is_not_silent() -> None:
    check = steady(0.1)
    for step in range(1, 101):
        check.note(1, (step, "end", 1000 + step * 0.1), step * 0.1)
    assert check.silent(10.0)
    check.forget(0)
    assert not check.silent(10.0)


def test_after_a_look_in_vain_the_next_comes_after_twice_the_silence() -> None:
    check = steady(0.1)
    check.note_examination(6.0)
    assert not check.silent(10.9)
    assert check.silent(11.1)
    check.note(0, (11, "end", 1020.0), 20.0)
    assert check.silent(25.0)


def test_a_look_in_vain_puts_off_the_limit_no_more_than_once() -> None:
    check = steady(0.1, settings=Hang(limit_s=10))
    check.note_examination(6.0)  # twice that would be beyond the limit
    assert not check.silent(10.9)
    assert check.silent(11.1)
    check.note_examination(
        11.1
    )  # its ranks have no heartbeat, or it would be over: not at every moment from here on
    assert not check.silent(21.0)
    assert check.silent(21.3)


def test_nobody_is_never_silent() -> None:
    assert not StallCheck(Hang()).silent(1e9)


def test_a_program_that_reports_no_step_is_looked_at_and_never_over() -> None:
    """One was ended half an hour after its first checkpoint."""
    check = StallCheck(Hang(limit_s=100), program=True)
    check.note(0, (0, "", 0.0), 0.0)
    assert check.silent(UNKNOWN_S + 1)
    assert not check.over(1_000_000.0)
    check.note(0, (0, "save", 4.0), 9.0)
    assert not check.over(1_000_000.0)
    check.note(0, (1, "end", 5.0), 10.0)
    assert not check.over(109.0)
    assert check.over(111.0)


def test_with_many_ranks_answers_come_less_often_and_no_rank_is_silent_between_two() -> None:
    few, many = (StallCheck(Hang(after_s=3, steps=3), late_answer(ranks)) for ranks in (8, 1024))
    between = longest_interval(1024)
    for check in (few, many):
        for step in range(1, 11):
            check.note(0, (step * 30, "end", 1000 + step * between), step * between)
    assert between > 3 + 3 * 0.12
    assert few.silent(11 * between)
    assert not many.silent(11 * between)
    assert many.silent(12 * between)


def test_nobody_is_silent_while_a_person_holds_a_rank() -> None:
    check = steady(0.1, settings=Hang(after_s=4, steps=3, limit_s=10))
    check.note(1, (10, "debugger", 1001.0), 1.0)
    assert not check.silent(1000.0)
    assert not check.over(1000.0)
    check.note(1, (10, "end", 2000.0), 1000.0)  # the others begin anew, too
    assert not check.over(1001.0)
    assert not check.silent(1004.0)
    assert check.silent(1004.5)
    assert check.over(1010.5)
