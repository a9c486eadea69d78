"""The stall check at work: ranks are examined, a new finding is reported, and only a hang to end
the run is posted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import (
    AskNccl,
    Examine,
    GetNativeStack,
    NativeStack,
    RankActivity,
)
from raydist.recovery import hang, hang_verdict
from raydist.recovery.hang import HangMonitor
from raydist.recovery.hang_verdict import ConfirmedHang
from raydist.settings.config import Hang
from raydist.shared.events import Events
from tests.network.test_ras import answer_of, communicator
from tests.records import Seen
from tests.recovery.fake_group import PATIENCE_S, FakeGroup
from tests.recovery.test_hang_verdict import GROUP, JOB, WAITS, entry, stack

SLEEPS = (
    'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 31 in job\n'
)


def state(name: str, busy: float = 0.0) -> RankActivity:
    return RankActivity(42, name, busy, SLEEPS, ())


@dataclass
class Watched:
    """A monitor over two ranks, of which rank 1 is in the state that the test sets."""

    folder: Path
    events: Events
    found: dict[int, RankActivity]
    settings: Hang = field(default_factory=Hang)
    posted: list[ConfirmedHang] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group = FakeGroup(
            replies={Examine: lambda rank: self.found[rank], AskNccl: lambda rank: ""}
        )
        group = cast("WorkerGroup", self.group)
        self.monitor = HangMonitor(
            group, self.settings, self.events, self.folder, self.posted.append
        )

    def silent(self, seconds: float = 100.0) -> None:
        """Both agents answer, rank 1's heartbeat being that old. Returns when all was examined."""
        self.monitor.note(0, (5, "forward", 1000.0), 0.0)
        self.alone(seconds)

    def alone(self, seconds: float = 100.0) -> None:
        """The same, if only rank 1's agent answers."""
        self.monitor.note(1, (5, "forward", 1000.0), seconds)
        for thread in threading.enumerate():
            if thread.name == "raydist-hang":
                thread.join(PATIENCE_S)


@pytest.fixture
def reported() -> Seen:
    return Seen()


@pytest.fixture
def watched(tmp_path: Path, reported: Seen, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(hang, "CHECK_S", 0.0)
    with Events(tmp_path / "e", (reported,)) as events:
        yield Watched(tmp_path, events, {0: state("S"), 1: state("T")})


def test_ranks_that_go_on_are_not_examined(watched: Watched) -> None:
    watched.silent(seconds=1.0)
    assert watched.group.calls == []


def test_many_ranks_whose_agents_answer_in_turn_are_not_examined(watched: Watched) -> None:
    """A second of `hang.after_s` is used up between two answers of an agent; with 3,000 ranks it is
    ten seconds."""
    for ranks, examined in ((2, True), (3000, False)):
        watched.group = FakeGroup(
            ranks, {Examine: lambda rank: watched.found[rank % 2], AskNccl: lambda rank: ""}
        )
        monitor = HangMonitor(
            cast("WorkerGroup", watched.group),
            watched.settings,
            watched.events,
            watched.folder,
            watched.posted.append,
        )
        for step in range(5):
            monitor.note(0, (step, "forward", 1000.0 + step / 10), 0.0)
        monitor.note(0, (5, "forward", 1000.5), 9.0)
        assert bool(watched.group.calls) is examined


def test_a_certain_hang_is_reported_and_posted(watched: Watched, reported: Seen) -> None:
    watched.silent()
    (posted,) = watched.posted
    assert (posted.diagnosis.culprits, posted.diagnosis.certain) == ((1,), True)
    assert time.time() - posted.since == pytest.approx(100, abs=2)
    (event,) = reported
    assert (event["kind"], event["ranks"], event["certain"]) == ("hang", [1], True)
    assert event["s"] == pytest.approx(100, abs=2)
    assert (watched.folder / "rank-1.stacks").read_text() == SLEEPS
    assert watched.group.recipients(Examine) == [0, 1]
    assert watched.group.recipients(AskNccl) == []  # it would wait for the rank that is stopped


@pytest.mark.parametrize(
    ("native", "notes", "more"),
    [
        (NativeStack("sleep (libc.so.6)"), [], "\n\nwith C code:\nsleep (libc.so.6)"),
        (
            NativeStack("", "py-spy is not installed: pip install py-spy"),
            [
                "no frames of C code of rank 1 on node-2: py-spy is not installed: pip install "
                "py-spy"
            ],
            "",
        ),
    ],
)
def test_where_c_code_holds_the_gil_its_frames_are_read_once_or_the_reason_is_noted(
    watched: Watched, reported: Seen, native: NativeStack, notes: list[str], more: str
) -> None:
    watched.found[0] = RankActivity(41, "S", 0.0, stack(*WAITS, *JOB), (cast("Any", entry(10)),))
    watched.found[1] = replace(state("S"), way="signal")
    watched.group.replies[GetNativeStack] = lambda rank: native
    watched.silent()
    watched.silent(1000)
    assert watched.group.recipients(GetNativeStack) == [1]
    assert list(reported[0]["notes"]) == notes
    assert (watched.folder / "rank-1.stacks").read_text().rstrip() == SLEEPS.rstrip() + more


def test_nccls_ras_is_one_more_witness_that_changes_no_verdict(
    watched: Watched, reported: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a culprit counts if no other answers."""
    said = answer_of(communicator({42: {"AllReduce": 9}, 41: {"AllReduce": 10}}))
    watched.found[0] = RankActivity(41, "S", 0.0, stack(*WAITS, *JOB), (cast("Any", entry(10)),))
    watched.found[1] = state("S")
    watched.group.replies[AskNccl] = lambda rank: said if rank == 1 else ""
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    watched.silent()
    clock += 101
    watched.silent()
    assert len(watched.group.recipients(Examine)) == 8  # twice: each rank, and whether it moves
    assert watched.group.recipients(AskNccl) == [0, 1]  # once
    (event,) = reported
    assert (event["ranks"], event["certain"]) == ([1], False)
    assert event["notes"] == [
        "NCCL's RAS: communicator of ranks 0-1: AllReduce: rank 0 launched 10, rank 1 launched 9"
    ]
    assert (watched.folder / "nccl-ras.txt").read_text() == said


def test_a_diagnosis_that_fails_is_a_warning_and_the_next_one_is_made(
    watched: Watched, reported: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check ended without a word: no hang was found any more."""
    with monkeypatch.context() as broken:
        broken.setattr(hang_verdict, "diagnose", lambda *_: 1 / 0)
        watched.silent()
    assert [event["kind"] for event in reported] == ["warning"]
    assert "ZeroDivisionError" in reported[0]["text"]
    watched.silent()
    assert len(watched.posted) == 1


def test_what_may_only_be_slow_is_reported_once_and_not_posted(
    watched: Watched, reported: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.found[1] = state("D")
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    watched.silent()
    clock += 99  # less than twice the silence
    watched.silent()
    assert watched.group.recipients(Examine) == [0, 1]
    clock += 2
    watched.silent()
    assert watched.group.recipients(Examine) == [0, 1, 0, 1]
    assert [event["certain"] for event in reported] == [False]
    assert watched.posted == []


def test_what_can_only_last_is_reported_first_and_posted_after_minutes(
    watched: Watched, reported: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 creates a group, rank 1 waits in a collective of all ranks."""
    done: Any = entry(9, done=True)
    pending: Any = entry(10)
    watched.found = {
        0: RankActivity(42, "S", 0.0, stack(*GROUP, *JOB), (done,)),
        1: RankActivity(43, "S", 0.0, stack(*WAITS, *JOB), (done, pending)),
    }
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    watched.silent(seconds=61)
    assert watched.posted == []
    clock += 62
    watched.silent(seconds=123)
    (posted,) = watched.posted
    assert (posted.diagnosis.culprits, posted.diagnosis.certain) == ((0,), True)
    assert [event["certain"] for event in reported] == [False, True]


def test_without_hang_end_a_certain_hang_is_only_reported(watched: Watched, reported: Seen) -> None:
    watched.settings = Hang(end=False)
    watched.__post_init__()
    watched.silent()
    assert [event["certain"] for event in reported] == [True]
    assert watched.posted == []


def test_beyond_the_limit_the_run_is_ended_whatever_was_found(
    watched: Watched, reported: Seen
) -> None:
    watched.settings = Hang(end=False, limit_s=90)
    watched.found = {0: state("R", busy=1.0), 1: state("R", busy=1.0)}
    watched.__post_init__()
    watched.silent()
    (posted,) = watched.posted
    assert posted.diagnosis.culprits == (0, 1)
    assert posted.diagnosis.text
    assert [event["certain"] for event in reported] == [False]


def test_a_rank_that_waits_for_one_which_has_ended_is_told_so(watched: Watched) -> None:
    watched.settings = Hang(limit_s=90)
    waiting = replace(
        state("S"),
        stack=stack(*WAITS, *JOB),
        collectives=[entry(10)],  # type: ignore[list-item]
    )
    watched.found = {1: waiting}
    watched.__post_init__()
    watched.monitor.note_end(0)
    watched.alone()
    (posted,) = watched.posted
    assert "but rank 0 has ended" in posted.diagnosis.text


def test_ranks_that_went_on_while_they_were_examined_are_let_be(
    watched: Watched, reported: Seen
) -> None:
    def wakes(rank: int) -> RankActivity:
        watched.monitor.note(1, (6, "forward", time.time()), 0.0)
        return state("S")

    watched.group.replies[Examine] = wakes
    watched.silent()
    assert watched.group.recipients(Examine) == [0, 1]
    assert (reported, watched.posted) == ([], [])


def test_so_are_they_if_only_their_agents_know_it_yet(watched: Watched, reported: Seen) -> None:
    watched.found = {0: state("S"), 1: replace(state("S"), beat=(6, "forward", time.time() + 1))}
    watched.silent()
    assert watched.group.recipients(Examine) == [0, 1]
    assert (reported, watched.posted) == ([], [])


@pytest.mark.parametrize(
    ("paced", "moves"), [(False, True), (False, False), (True, True), (True, False)]
)
def test_ranks_that_make_collectives_are_at_work_whether_or_not_they_report_steps(
    watched: Watched, reported: Seen, paced: bool, moves: bool
) -> None:
    """They were caught between two collectives, and their run was ended as one that hangs.

    With steps: eight ranks on two busy cores, of which NCCL's watchdog knew late where they were.
    """
    watched.settings = Hang(limit_s=90)
    watched.__post_init__()
    counts = [10, 10]

    def waits(rank: int) -> RankActivity:
        counts[rank] += moves
        return replace(
            state("S"),
            stack=stack(*WAITS, *JOB),
            collectives=[entry(counts[rank] - moves, ("all_reduce", "broadcast")[rank])],  # type: ignore[list-item]
        )

    watched.group.replies[Examine] = waits
    for step in range(1, 5 if paced else 1):
        for rank in (0, 1):
            watched.monitor.note(rank, (step, "forward", 1000.0 + step), 0.0)
    watched.silent()
    assert len(watched.posted) == (not moves)
    assert len(watched.group.recipients(Examine)) == 4
    assert bool(reported) == bool(watched.posted)


def test_an_agent_that_does_not_answer_is_left_out(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "EXAMINE_S", 0.05)
    answers = {1: state("T")}

    def call(rank: int, request: Examine) -> Any:
        return FakeGroup(replies={Examine: answers.get} if rank in answers else {}).call(
            rank, request
        )

    monkeypatch.setattr(watched.group, "call", call)
    watched.silent()
    (posted,) = watched.posted
    assert [state.rank for state in posted.diagnosis.states] == [1]


def test_a_rank_that_has_ended_is_not_silent_and_its_last_heartbeat_is_forgotten(
    watched: Watched,
) -> None:
    watched.monitor.note(0, (7, "data", 1.0), 0.0)
    assert watched.monitor.beat(0) == (7, "data", 1.0)
    watched.monitor.note_end(0)
    assert watched.monitor.beat(0) == (0, "", 0.0)


def test_a_full_disk_keeps_no_hang_from_being_ended(watched: Watched) -> None:
    watched.folder /= "missing"
    watched.__post_init__()
    watched.silent()
    assert len(watched.posted) == 1


def test_nothing_is_reported_once_the_attempt_is_over(watched: Watched, reported: Seen) -> None:
    with watched.monitor:
        pass
    watched.silent()
    assert (reported, watched.posted) == ([], [])


def test_ranks_are_examined_once_at_a_time(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(hang, "wait", lambda calls, timeout: go_on.wait(PATIENCE_S))
    watched.monitor.note(1, (5, "forward", 1.0), 100.0)
    watched.monitor.note(1, (5, "forward", 1.0), 101.0)
    assert watched.group.recipients(Examine) == [1]
    go_on.set()
    watched.silent()
