"""The monitor loop over ranks that the test plays: what is stopped, when, and how each rank is said
to have ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.messages.agent import (
    Examine,
    GetNews,
    RankActivity,
    RankEnd,
    RankNews,
    RankValue,
    RecordedEnd,
)
from raydist.messages.rank import Holding, HoldRank, StopAfter
from raydist.messages.request import Request
from raydist.recovery import deadlines, hang, leave_monitor, resize, straggler
from raydist.recovery.blame import describe_end
from raydist.recovery.cut_monitor import NodesCut
from raydist.recovery.policy import Retry
from raydist.recovery.silences import Silences
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.outcome import Attempt, End
from raydist.shared.signals import stoppable
from tests.records import event
from tests.recovery.fake_group import Trial
from tests.reporting.folds import fold_figures
from tests.waiting import wait_until

PEER_GONE = "[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [::1]:1."


def raised(rank: int, kind: str = "ValueError", message: str = "nan", step: int = 3) -> Event:
    return event("raised", rank=rank, type=kind, message=message, traceback="line 31", step=step)


def ways(trial: Trial) -> list[str]:
    return [end.how for end in trial.ends()]


def test_answers_are_taken_in_any_order_and_the_ends_are_by_rank(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        trial.answer(1, event("joined", rank=1, pid=1), log=b"one\n")
        trial.answer(0, event("joined", rank=0, pid=0), log=b"zero\n", nccl=b"NCCL INFO\n")
        trial.answer(
            1, event("report", rank=1, step=1, values={}), log=b"two\n", work=(30, 0.01, 0.02)
        )
        trial.end(1)
        # race: a supervisor that finds both ends at once takes them by rank
        wait_until(lambda: trial.kinds("ended"), "the end of rank 1")
        trial.end(0)
        assert [(end.rank, end.how) for end in trial.ends()] == [(0, "finished"), (1, "finished")]
    assert [event["rank"] for event in trial.kinds("ended")] == [1, 0]
    assert [event["name"] for event in trial.kinds("phase")] == ["rendezvous", "first step"]
    assert trial.kinds("work")[0]["ranks"] == {"1": [0.01, 0.02]}
    assert trial.group.settled == 0  # a short run goes without the actors that host no agent
    assert trial.group.stops == []
    assert (trial.logs / "rank-1.log").read_bytes() == b"one\ntwo\n"
    assert (trial.logs / "rank-0.nccl").read_bytes() == b"NCCL INFO\n"
    # one call is open to each agent at a time, and none after the end of its rank
    assert sorted(trial.group.recipients(GetNews)) == [0, 0, 1, 1, 1]


def test_the_actors_that_host_no_agent_start_once_the_ranks_have_run_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydist.recovery.supervisor.LOOK_S", 0.01)
    monkeypatch.setattr("raydist.recovery.arrival.OTHERS_S", 0.3)
    with Trial(tmp_path) as trial:
        trial.answer(0, event("joined", rank=0, pid=0))
        time.sleep(0.5)  # longer than OTHERS_S
        assert trial.group.settled == 0  # not all have met
        trial.answer(1, event("joined", rank=1, pid=1))
        wait_until(lambda: trial.group.settled, "the other actors are started")
        time.sleep(0.1)  # time to start them again, by mistake
        trial.end(0)
        trial.end(1)
        trial.ends()
    assert trial.group.settled == 1


def test_a_rank_with_long_pauses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler, "CHECK_S", 0.0)
    with Trial(tmp_path) as trial:
        for _ in range(straggler.LASTING):
            trial.answer(1, pauses=0.2)
        for rank in range(2):
            trial.end(rank)
        assert ways(trial) == ["finished", "finished"]
    (pause,) = trial.kinds("slow")
    assert [(each["rank"], each["pauses"]) for each in pause["ranks"]] == [(1, 0.2)]


def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    with Trial(tmp_path, ranks=3) as trial:
        trial.end(1, code=3, step=7)
        assert trial.stopped() == ([0, 2], 0.0)
        trial.end(0, signum=9, step=7)
        trial.end(2, signum=9, step=6)
        assert ways(trial) == ["stopped", "exited", "stopped"]
        assert trial.cause().rank == 1
    assert trial.kinds("stop")[0]["cause"] == "failure"


@pytest.mark.parametrize(
    "ahead", [{}, {0: -5.0}, {2: -5.0, 1: 0.01}, {1: 7.0, 0: -0.01}, {0: 60.0, 1: -60.0}]
)
def test_clocks_that_differ_change_neither_the_cause_nor_how_ranks_ended(
    tmp_path: Path, ahead: dict[int, float]
) -> None:
    with Trial(tmp_path, ranks=3) as trial:
        trial.ahead = ahead
        trial.answer(0, step=2)
        trial.answer(1, step=2)
        trial.end(1, signum=11, step=2)
        assert trial.stopped()[0] == [0, 2]
        time.sleep(0.02)
        own = event("raised", t=trial.now(2), rank=2, type="ValueError", message="nan", step=2)
        trial.end(2, own, code=1, step=2, stop_requested=False)  # by itself, a little later
        trial.end(0, signum=9, step=2)
        assert ways(trial) == ["stopped", "killed", "raised"]
        assert trial.cause().rank == 1


@pytest.mark.parametrize("ahead", [300.0, -300.0])
def test_a_nodes_clock_changes_no_time_of_the_run(tmp_path: Path, ahead: float) -> None:
    with Trial(tmp_path, ranks=1) as trial:
        trial.ahead = {0: ahead}
        trial.events.add(kinds.Run(name="a", dir="d"))
        for step in (1, 2):
            trial.answer(0, event("report", t=trial.now(0), step=step), step=step)
        trial.end(0, event("done", t=trial.now(0)), step=2)
        assert ways(trial) == ["finished"]
    figures = fold_figures(kinds.from_json(each) for each in trial.seen)
    assert figures.wall_s < 60
    assert [happened["t"] for happened in trial.seen] == pytest.approx(
        [time.time()] * len(trial.seen), abs=60
    )


def test_an_exception_ends_the_others_even_if_its_process_hangs(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        began = time.monotonic()
        trial.answer(1, raised(1), step=4)
        assert trial.stopped() == ([0, 1], 0.0)
        assert time.monotonic() - began >= deadlines.VICTIM_S
        trial.end(1, signum=9, step=4)
        trial.end(0, signum=9, step=4)
        assert ways(trial) == ["stopped", "raised"]
        cause = trial.cause()
    assert (cause.rank, cause.type, cause.step, cause.traceback) == (1, "ValueError", 3, "line 31")


def test_a_victim_before_its_culprit_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "VICTIM_S", 30.0)  # the culprit's end is what stops the others
    with Trial(tmp_path, ranks=3) as trial:
        trial.end(0, raised(0, "RuntimeError", PEER_GONE), code=1)
        trial.answer(2, step=3)
        assert trial.group.stops == []
        trial.end(1, signum=9)
        assert trial.stopped() == ([2], 0.0)
        trial.end(2, signum=9)
        assert ways(trial) == ["raised", "killed", "stopped"]
        assert trial.cause().rank == 1
    assert [event["kind"] for event in trial.kinds("stop", "ended")] == [
        "ended",
        "ended",
        "stop",
        "ended",
    ]


def test_a_victim_whose_culprit_does_not_show_ends_the_others_alone(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        trial.end(0, raised(0, "RuntimeError", PEER_GONE), code=1)
        assert trial.stopped() == ([1], 0.0)
        trial.end(1, signum=9)
        assert ways(trial) == ["raised", "stopped"]


def test_a_signal_stops_all_ranks_with_a_grace_period_and_is_no_failure(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial, stoppable():
        trial.answer(0, step=1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert trial.stopped() == ([0, 1], deadlines.GRACE_S)
        trial.end(0, signum=15)
        trial.end(1, code=1)
        assert ways(trial) == ["stopped", "stopped"]
        assert trial.supervisor.stop_signal is not None
        assert trial.supervisor.stop_signal.signum == signal.SIGTERM
    assert trial.kinds("stop")[0]["cause"] == "signal"


def test_an_agent_that_does_not_answer_after_the_stop_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "SILENT_S", 0.2)
    with Trial(tmp_path) as trial:
        trial.answer(1, step=5)
        trial.end(0, signum=9, step=6)
        trial.stopped()
        ends = trial.ends()
    assert [(end.how, end.silent) for end in ends] == [("killed", False), ("lost", True)]
    assert (ends[1].step, ends[1].phase) == (5, "forward")
    assert trial.cause().rank == 0


def test_a_process_that_takes_long_to_end_is_waited_for_while_its_agent_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It frees a lot of memory. It was lost after 5 s, and the next attempt began while it still
    ran."""
    monkeypatch.setattr(deadlines, "SILENT_S", 0.2)
    with Trial(tmp_path) as trial:
        trial.end(0, code=3)
        trial.stopped()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # several times as long as an agent may be silent
            trial.answer(1, step=5)
            time.sleep(0.01)
        trial.end(1, signum=9)
        assert ways(trial) == ["exited", "stopped"]


def test_a_process_that_cannot_be_killed_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "SILENT_S", 0.2)
    monkeypatch.setattr(deadlines, "DYING_S", 0.6)
    with Trial(tmp_path) as trial:
        trial.end(0, code=3)
        trial.stopped()
        while 1 not in trial.supervisor.ends:
            with contextlib.suppress(queue.Empty):
                trial.answer(1, step=5, within_s=0.1)
            time.sleep(0.01)
        ends = trial.ends()
    assert [(end.how, end.silent, end.gone) for end in ends[1:]] == [("lost", False, False)]
    assert "did not end within" in ends[1].why


def test_a_rank_that_never_pauses_delays_no_deadline(tmp_path: Path) -> None:
    """A stop was sent only once the queue was empty: not in a run whose output is more than the
    driver takes."""
    trial = Trial(tmp_path, ranks=3)
    call = trial.group.call

    def call_chatty(rank: int, request: Request[Any]) -> Future[Any]:
        if rank != 2 or not isinstance(request, GetNews) or trial.group.stops:
            return call(rank, request)
        reply: Future[Any] = Future()
        beat = (1, "forward", time.time())
        reply.set_result(
            RankNews((), b"x" * 1000, b"", beat, 0.0, (0, 0.0, 0.0), 0.0, sent=time.time())
        )
        return reply  # the next one is there before this one is read

    trial.group.call = call_chatty  # type: ignore[method-assign]
    with trial:
        trial.answer(0, raised(0))
        assert trial.stopped() == ([0, 1, 2], 0.0)
        for rank in range(3):
            trial.end(rank, signum=9)
        assert ways(trial) == ["raised", "stopped", "stopped"]


def test_a_call_that_fails_means_that_the_agent_is_lost(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        trial.answer(0, step=2)
        trial.fail(0, RuntimeError("The actor died\nbecause its node did"))
        # the agent may be there still: Ray fails a call too if a connection breaks
        assert trial.stopped() == ([0, 1], 0.0)
        trial.end(1, signum=9)
        ends = trial.ends()
    assert [(end.how, end.silent) for end in ends] == [("lost", False), ("stopped", False)]
    assert (ends[0].step, ends[0].message) == (2, "because its node did")


def test_an_abort_is_explained_by_the_end_of_the_log(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        trial.answer(0, log=b"step 1\nfree(): invalid pointer\n")
        trial.end(0, signum=signal.SIGABRT)
        trial.stopped()
        trial.end(1, signum=9)
        assert trial.ends()[0].message == "free(): invalid pointer"


def stopped_by_a_signal(rank: int) -> RankActivity:
    return RankActivity(40 + rank, "T" if rank == 1 else "S", 0.0, "", ())


def test_a_hang_that_is_certain_ends_the_run_and_names_the_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "CHECK_S", 0.0)
    with Trial(tmp_path, replies={Examine: stopped_by_a_signal}) as trial:
        trial.answer(1, step=5)
        trial.answer(0, step=5, quiet=100.0)
        assert trial.stopped() == ([0, 1], 0.0)
        trial.end(0, signum=9, step=5)
        trial.end(1, signum=9, step=5)
        ends = trial.ends()
    assert [end.how for end in ends] == ["stopped", "hung"]
    assert ends[1].at < time.time() - 99  # since it fell silent
    assert [event["kind"] for event in trial.kinds("hang", "stop")] == ["hang", "stop"]
    assert trial.kinds("stop")[0]["cause"] == "hang"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitors look at the nodes without waiting."""
    monkeypatch.setattr(leave_monitor, "POLL_S", 0.01)
    monkeypatch.setattr(resize, "LOOK_S", 0.01)


STEPS = {HoldRank: lambda rank: Holding(5 + rank), StopAfter: lambda rank: None}


def test_ranks_make_way_after_a_step_of_all(tmp_path: Path, often: None) -> None:
    with Trial(tmp_path, replies=STEPS) as trial:
        trial.answer(0, event("begin", rank=0, resumed=0))
        trial.group.wanted = "gpt of ana@login"
        wait_until(lambda: len(trial.group.recipients(StopAfter)) == 2, "both ranks are to stop")
        trial.answer(1, event("left", rank=1, step=6), step=6)
        assert trial.group.stops == []
        trial.answer(0, event("left", rank=0, step=6), step=6)
        assert trial.stopped() == ([0, 1], deadlines.GRACE_S)
        trial.end(0, signum=15, step=6)
        # a rank that loses its peers because of the stop
        trial.answer(1, event("raised", rank=1, type="RuntimeError", message="gone", step=6))
        trial.end(1, code=1, step=6)
        ends = trial.ends()
    assert [end.how for end in ends] == ["stopped", "stopped"]
    assert trial.kinds("stop")[0]["reason"] == "makes way for gpt of ana@login"


def test_a_program_that_ends_well_as_it_makes_way_is_not_finished(
    tmp_path: Path, often: None
) -> None:
    """The run counted as a success, and was not started again."""
    with Trial(tmp_path, script="train.py") as trial:
        trial.group.wanted = "gpt of ana@login"
        assert trial.stopped() == ([0, 1], deadlines.PROGRAM_S)
        trial.end(0)
        trial.end(1)
        assert ways(trial) == ["stopped", "stopped"]


def test_drained_nodes_are_left_after_a_step_of_all_ranks(tmp_path: Path, often: None) -> None:
    with Trial(tmp_path, replies=STEPS) as trial:
        trial.answer(0, event("begin", rank=0, resumed=0))
        trial.group.away = {trial.group.plan.slots[1].node.id: time.time() + 90}
        wait_until(lambda: len(trial.group.recipients(StopAfter)) == 2, "both ranks are to stop")
        trial.answer(1, event("left", rank=1, step=6), step=6)
        assert trial.group.stops == []
        trial.answer(0, event("left", rank=0, step=6), step=6)
        ranks, grace_s = trial.stopped()
        assert (ranks, round(grace_s)) == ([0, 1], 30)
        trial.end(0, signum=15, step=6)
        trial.end(1, signum=15, step=6)
        ends = trial.ends()
    assert {(0, StopAfter(6)), (1, StopAfter(6))} <= set(trial.group.calls)
    assert [(end.how, end.preempted) for end in ends] == [("stopped", False), ("drained", True)]
    assert trial.kinds("stop")[0]["cause"] == "drain"


def test_nodes_that_join_are_used_after_a_step_of_all_ranks(tmp_path: Path, often: None) -> None:
    standby = SimpleNamespace(growth=lambda: "3 nodes now, 2 before")
    with Trial(tmp_path, replies=STEPS, reserve=standby) as trial:
        trial.answer(0, event("begin", rank=0, resumed=0))
        wait_until(lambda: len(trial.group.recipients(StopAfter)) == 2, "both ranks are to stop")
        for rank in (0, 1):
            trial.answer(rank, event("left", rank=rank, step=6), step=6)
        assert trial.stopped() == ([0, 1], 0.0)
        trial.end(0, signum=9)
        trial.end(1, signum=9)
        trial.ends()
    assert trial.kinds("stop")[0]["cause"] == "resize"


def test_a_program_leaves_drained_nodes_at_once(tmp_path: Path, often: None) -> None:
    with Trial(tmp_path, script="train.py") as trial:
        trial.group.away = {trial.group.plan.slots[1].node.id: time.time() + 90}
        ranks, grace_s = trial.stopped()
        assert (ranks, round(grace_s)) == ([0, 1], 30)
        trial.end(0)
        trial.end(1)
        assert ways(trial) == ["stopped", "drained"]


def test_drained_nodes_are_left_in_time_if_ranks_do_no_step(tmp_path: Path, often: None) -> None:
    with Trial(tmp_path) as trial:
        trial.group.away = {slot.node.id: time.time() + 0.6 for slot in trial.group.plan.slots}
        ranks, grace_s = trial.stopped()
        assert ranks == [0, 1]
        assert 0 < grace_s < 0.3
        trial.end(0, signum=15)
        trial.end(1)
        assert ways(trial) == ["drained", "drained"]


def test_a_rank_that_fails_while_its_node_is_drained_is_a_failure(
    tmp_path: Path, often: None
) -> None:
    with Trial(tmp_path) as trial:
        trial.group.away = {trial.group.plan.slots[1].node.id: time.time() + 90}
        wait_until(lambda: trial.kinds("notice"), "the notice")
        trial.end(1, signum=11)
        trial.stopped()
        trial.end(0, signum=9)
        assert ways(trial) == ["stopped", "killed"]
    assert trial.kinds("stop")[0]["cause"] == "failure"


def test_a_run_whose_first_rank_has_finished_does_not_grow(tmp_path: Path, often: None) -> None:
    """The others were stopped, and all ranks started once more."""
    checks: list[str] = []

    def growth() -> str:
        checks.append("3 nodes now, 2 before" if trial.kinds("ended") else "")
        return checks[-1]

    with Trial(tmp_path, script="train.py", reserve=SimpleNamespace(growth=growth)) as trial:
        trial.end(1)
        wait_until(lambda: len([*filter(None, checks)]) > 1, "the growth is reported")
        trial.end(0)
        assert ways(trial) == ["finished", "finished"]
        assert trial.supervisor.resize == ""
    assert trial.group.stops == []


def test_ranks_of_a_program_make_way_for_more_nodes_at_once(tmp_path: Path, often: None) -> None:
    with Trial(
        tmp_path, script="train.py", reserve=SimpleNamespace(growth=lambda: "3 nodes now, 2 before")
    ) as trial:
        assert trial.stopped() == ([0, 1], deadlines.PROGRAM_S)
        trial.end(0)  # on SIGTERM
        trial.end(1, signum=15)
        assert ways(trial) == ["stopped", "stopped"]
        assert trial.supervisor.resize == "3 nodes now, 2 before"
    assert trial.kinds("stop")[0]["cause"] == "resize"


def test_nodes_that_join_are_found_after_ray_did_not_answer(tmp_path: Path, often: None) -> None:
    """The look ended without a word, and the run never grew."""
    looks = iter([ConnectionError("GCS is down"), ConnectionError("GCS is down")])

    def growth() -> str:
        for error in looks:
            raise error
        return "3 nodes now, 2 before"

    standby = SimpleNamespace(growth=growth)
    with Trial(tmp_path, script="train.py", reserve=standby) as trial:
        assert trial.stopped() == ([0, 1], deadlines.PROGRAM_S)
        trial.end(0, signum=9)
        trial.end(1, signum=9)
        trial.ends()
    assert trial.supervisor.resize == "3 nodes now, 2 before"
    (warning,) = trial.kinds("warning")
    assert "GCS is down" in warning["text"]


def test_after_a_restart_its_cost_is_reported_once_and_no_launch(tmp_path: Path) -> None:
    cause = End(1, "b", "killed", time.time() - 2, step=9, signal=9)
    with Trial(tmp_path, retry=Retry((Attempt(ends=[cause]),))) as trial:
        for rank in (0, 1):
            trial.answer(rank, event("joined", rank=rank, pid=rank))
        trial.answer(
            0, event("begin", rank=0, resumed=8), event("report", rank=0, step=8, values={})
        )
        for step in (9, 10):
            trial.answer(0, event("report", rank=0, step=step, values={}))
        trial.end(0)
        trial.end(1)
        trial.ends()
    (cost,) = trial.kinds("restarted")
    assert (cost["number"], cost["step"], cost["repeated"], cost["resized"]) == (1, 9, 1, False)
    assert 2 <= cost["s"] < 60
    assert trial.kinds("phase") == []


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents are silent after a moment."""
    monkeypatch.setattr(deadlines, "AGENT_S", 0.1)
    monkeypatch.setattr(deadlines, "ANSWER_S", (0.1, 0.1))
    monkeypatch.setattr("raydist.recovery.supervisor.LOOK_S", 0.05)


def wait_for_text(trial: Trial, kind: str, part: str) -> None:
    """Return once an event of this kind has a text with this part."""
    wait_until(lambda: any(part in event.get("text", "") for event in trial.kinds(kind)), part)


@pytest.mark.usefixtures("short")
def test_an_agent_that_is_silent_is_named_and_the_training_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its actor stopped the run went on for minutes, and ranks that had finished were named as
    hanging."""
    # On a busy machine this test is late with the answers of the others.
    monkeypatch.setattr(deadlines, "AGENT_S", 1.0)
    with Trial(tmp_path, ranks=3) as trial:
        steps = itertools.count(1)

        def rank_1_is_named() -> bool:
            step = next(steps)
            for rank in (0, 2):
                trial.answer(rank, step=step)
            return any("the agent of rank 1 on" in each["text"] for each in trial.kinds("warning"))

        wait_until(rank_1_is_named)
        assert trial.group.stops == []
        trial.answer(1, step=39)  # it continues: it is not named any more
        for rank in (0, 1, 2):
            trial.end(rank)
        assert ways(trial) == ["finished"] * 3
    assert len(trial.kinds("warning")) == 1
    assert trial.kinds("hang") == []


@pytest.mark.usefixtures("short")
def test_a_run_ends_whose_other_ranks_have_finished(tmp_path: Path) -> None:
    with Trial(tmp_path, ranks=3) as trial:
        trial.answer(1, step=7)
        trial.end(0)
        trial.end(2)
        assert ways(trial) == ["finished", "lost", "finished"]
        assert (trial.ends()[1].step, trial.ends()[1].silent) == (7, True)
    assert trial.kinds("hang") == []


@pytest.mark.usefixtures("short")
def test_a_rank_that_has_finished_as_its_node_knows_is_not_run_again(tmp_path: Path) -> None:
    with Trial(tmp_path, ranks=3) as trial:
        for rank, code in ((1, 0), (2, 3)):
            end = RankEnd(code, 0, time.time(), step=7, phase="save")
            trial.group.recorded[rank] = RecordedEnd(end, RankValue(b"value"))
        trial.end(0)
        assert ways(trial) == ["finished", "finished", "exited"]
        assert [(end.step, end.silent) for end in trial.ends()[1:]] == [(7, True), (7, True)]
    assert trial.group.values == {1: RankValue(b"value"), 2: RankValue(b"value")}


@pytest.mark.usefixtures("short")
def test_ranks_that_wait_for_one_whose_agent_is_silent_are_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trial(tmp_path) as trial:
        monkeypatch.setattr(trial.supervisor._hangs, "stalled", lambda: True)
        while not trial.group.stops:  # rank 0 answers
            trial.answer(0, step=3)
            time.sleep(0.02)
        assert trial.stopped()[0] == [0, 1]
        trial.end(0, signum=9)
        assert ways(trial) == ["stopped", "lost"]


@pytest.mark.usefixtures("short")
def test_a_node_that_is_cut_off_is_left_to_ray_which_moves_its_actors(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        trial.group.cut = {trial.group.plan.slots[1].node.id}
        trial.end(0)
        wait_for_text(trial, "warning", "the agent of rank 1 on")
        assert trial.group.connecting.wait(10)
        trial.group.reconnect.set()
        time.sleep(0.3)
        assert set(trial.supervisor.ends) == {0}
        trial.fail(1, RuntimeError("The actor died because its node did"))
        assert ways(trial) == ["finished", "lost"]


@pytest.mark.usefixtures("short")
def test_nodes_that_are_cut_off_delay_no_message(tmp_path: Path) -> None:
    """Each of their ranks took half a second of the supervisor's loop: with 64 ranks a failure
    waited a minute."""
    with Trial(tmp_path, ranks=4) as trial:
        trial.group.cut = {slot.node.id for slot in trial.group.plan.slots[2:]}
        trial.end(0)
        assert trial.group.connecting.wait(10)
        trial.end(1, code=3)
        assert trial.stopped() == ([2, 3], 0.0)  # while the connections are tried
        trial.group.reconnect.set()
        for rank in (2, 3):
            trial.fail(rank, RuntimeError("The actor died because its node did"))
        assert ways(trial) == ["finished", "exited", "lost", "lost"]
        assert trial.cause().rank == 1


def test_the_ranks_of_a_node_that_is_cut_off_are_lost_before_ray_says_so(tmp_path: Path) -> None:
    with Trial(tmp_path, ranks=3) as trial:
        trial.answer(1, step=7)
        trial.group.open[1].get(timeout=10)  # the next call is open, and is not answered
        node = trial.group.plan.slots[1].node.id
        why = "its node accepts no connections: not from the driver's machine, nor from node-3"
        trial.supervisor._messages.put(NodesCut(frozenset({node}), time.monotonic(), why))
        assert trial.stopped() == ([0, 1, 2], 0.0)
        assert trial.group.left_out == {node}
        trial.end(0, signum=9)
        trial.end(2, signum=9)
        assert ways(trial) == ["stopped", "lost", "stopped"]
        assert describe_end(trial.cause()) == f"lost: {why}"
        assert (trial.cause().gone, trial.cause().step) == (True, 7)


def test_a_node_of_which_an_agent_has_answered_since_is_not_cut_off(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        since = time.monotonic()
        trial.answer(1, step=7)
        reply = trial.group.open[1].get(timeout=10)
        node = trial.group.plan.slots[1].node.id
        trial.supervisor._messages.put(NodesCut(frozenset({node}), since, "cut"))
        trial.group.open[1].put(reply)
        trial.end(0)
        trial.end(1)
        assert ways(trial) == ["finished", "finished"]
        assert trial.group.left_out == set()


def test_a_fork_server_that_is_silent_is_named_once(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        for quiet in (0.0, 9.0, 11.0, 12.0):
            trial.answer(0, step=1, server_quiet=quiet)
        trial.end(0)
        trial.end(1)
        assert ways(trial) == ["finished"] * 2
    (warning,) = trial.kinds("warning")
    assert "the fork server of" in warning["text"]
    assert "11 s" in warning["text"]


def test_a_driver_that_stood_still_itself_blames_no_agent() -> None:
    silences = Silences(10.0)
    silences.note_call(0, 100.0)
    silences.note_call(1, 100.0)
    assert [silences.look(at) for at in (101.0, 105.0, 109.0)] == [[], [], []]
    assert silences.look(500.0) == []  # a laptop was closed
    assert silences.look(504.0) == []
    silences.note_answer(1)
    assert silences.look(508.0) == []
    assert silences.look(511.0) == [0]
    assert silences.look(512.0) == []
    silences.note_answer(0)
    assert silences.ranks == set()


def test_more_ranks_have_more_time() -> None:
    assert deadlines.agent_limit(2) == pytest.approx(11.0)
    assert deadlines.agent_limit(2400) == pytest.approx(10 + 2400 / 300)
    assert deadlines.agent_limit(9000) == pytest.approx(10 + 10)
    assert deadlines.agent_limit(16_384) == pytest.approx(10 + 16.384)
