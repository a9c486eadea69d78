"""When ranks are stopped, why, and when an agent is lost: one row for each case."""

from __future__ import annotations

import signal

import pytest

from raydist.cluster.drain import DrainNotice
from raydist.launch.limits import ANSWER_S, SILENT_S
from raydist.messages.agent import DYING_S
from raydist.node import agent
from raydist.recovery.deadlines import (
    VICTIM_S,
    Deadlines,
    answer_interval,
    culprit_wait,
    longest_interval,
    stop_when_due,
)
from raydist.shared.outcome import End, StopReason

KILLED = End(1, "b", "killed", 5.0, signal=signal.SIGKILL)
VICTIM = End(
    0, "a", "raised", 4.0, type="RuntimeError", message="Connection closed by peer [::1]:1"
)
DRAIN = DrainNotice((1,), ("b",), 30.0)


@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        (End(0, "a", "finished", 1.0), None),
        (End(0, "a", "stopped", 1.0), None),
        (KILLED, 0.0),
        (End(0, "a", "exited", 1.0, code=1), 0.0),
        (End(0, "a", "raised", 1.0, type="ValueError"), 0.0),
        (End(0, "a", "lost", 1.0), 0.0),
        (VICTIM, VICTIM_S),
        (End(0, "a", "killed", 1.0, signal=signal.SIGABRT), VICTIM_S),
        (End(0, "a", "ended", 1.0), VICTIM_S),
    ],
)
def test_a_victim_leaves_its_culprit_time(end: End, seconds: float | None) -> None:
    assert culprit_wait(end) == seconds


def test_the_earlier_deadline_counts_and_no_failure_after_the_stop_moves_it() -> None:
    none = Deadlines()
    assert none.left(7.0) is None
    victim = none.stop_within(0.5, now=10.0)
    assert victim.left(10.2) == pytest.approx(0.3)
    assert victim.left(11.0) == 0.0
    assert victim.stop_within(0.5, now=10.4).due == 10.5
    assert victim.stop_within(0.0, now=10.1).due == 10.1
    sent = victim.stop_sent(1.0, now=10.1)
    assert (sent.due, sent.stopping) == (10.1 + 1.0 + SILENT_S, True)
    assert sent.stop_within(0.0, now=10.2) == sent
    assert (
        sent.stop_sent(1.0, now=12.0).due == 12.0 + 1.0 + SILENT_S
    )  # a signal after the stop for a failure


@pytest.mark.parametrize(
    ("ends", "drain", "reason", "grace_s"),
    [
        ([KILLED], None, StopReason.FAILURE, 0.0),
        ([], None, StopReason.FAILURE, 0.0),  # a rank has raised, and its process has not ended
        ([], DRAIN, StopReason.DRAIN, 10.0),
        ([End(0, "a", "finished", 1.0)], DRAIN, StopReason.DRAIN, 10.0),
        ([KILLED], DRAIN, StopReason.FAILURE, 0.0),
    ],
)
def test_what_is_done_at_the_deadline(
    ends: list[End], drain: DrainNotice | None, reason: StopReason, grace_s: float
) -> None:
    stop = stop_when_due(ends, drain)
    assert (stop.reason, stop.grace_s) == (reason, grace_s)


@pytest.mark.parametrize(
    ("running_s", "ranks", "seconds"),
    [
        (0.0, 2, 0.5),
        (10.0, 2, 0.5),
        (16.0, 2, 0.8),
        (1000.0, 2, 1.0),
        (0.0, 300, 1.0),
        (1000.0, 3000, 10.0),
    ],
)
def test_agents_answer_less_often_in_long_runs_and_with_many_ranks(
    running_s: float, ranks: int, seconds: float
) -> None:
    assert answer_interval(running_s, ranks) == pytest.approx(seconds)
    assert answer_interval(running_s, ranks) <= longest_interval(ranks)


def test_a_start_waits_longer_than_the_agent_for_a_process_that_does_not_end() -> None:
    assert agent.STOP_S + DYING_S < ANSWER_S, "the driver would take the agent for silent"
