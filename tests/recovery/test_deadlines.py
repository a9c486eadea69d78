"""How long is waited before ranks are stopped, and for agents: one row for each case."""

from __future__ import annotations

import signal

import pytest

from raydist.launch.limits import ANSWER_S
from raydist.messages.agent import DYING_S
from raydist.node import rank_process, ras_client
from raydist.recovery import hang_evidence
from raydist.recovery.deadlines import (
    MPIRUN_S,
    VICTIM_S,
    answer_interval,
    culprit_wait,
    longest_interval,
)
from raydist.shared.outcome import End

KILLED = End(1, "b", "killed", 5.0, signal=signal.SIGKILL)
VICTIM = End(
    0, "a", "raised", 4.0, type="RuntimeError", message="Connection closed by peer [::1]:1"
)


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
        (End(0, "a", "ended", 1.0), MPIRUN_S),
    ],
)
def test_a_victim_leaves_its_culprit_time(end: End, seconds: float | None) -> None:
    assert culprit_wait(end) == seconds


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
    assert rank_process.STOP_S + DYING_S < ANSWER_S, "the driver would take the agent for silent"


def test_the_driver_waits_longer_than_the_agent_for_nccls_ras() -> None:
    agent_s = 2 * ras_client.ALIVE_S + ras_client.ANSWER_S
    assert agent_s < hang_evidence.RAS_S
