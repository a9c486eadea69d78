"""What each phase of an attempt makes of what happens: one row for each case."""

from __future__ import annotations

import itertools
import math
import signal
from dataclasses import replace

import pytest

from raydist.cluster.drain import DrainNotice
from raydist.launch.limits import SILENT_S, longest
from raydist.recovery.classify import AttemptRecord
from raydist.recovery.deadlines import DYING_S, GRACE_S, MAKE_WAY_S, PROGRAM_S, VICTIM_S
from raydist.recovery.hang_verdict import ConfirmedHang, Diagnosis
from raydist.recovery.phases import (
    Action,
    DeclareLost,
    Failing,
    Finishing,
    Happening,
    MakeWay,
    Phase,
    Quiesced,
    Quiescing,
    RankRaised,
    RequestQuiesce,
    Running,
    Stop,
    Stopping,
    TimePassed,
    advance,
)
from raydist.recovery.resize import NodesJoined
from raydist.shared.errors import Stopped
from raydist.shared.outcome import End, StopReason

NOW = 100.0
FINISHED = End(1, "b", "finished", 5.0)
KILLED = End(1, "b", "killed", 5.0, signal=signal.SIGKILL)
VICTIM = End(
    0, "a", "raised", 4.0, type="RuntimeError", message="Connection closed by peer [::1]:1"
)
HANG = ConfirmedHang(Diagnosis("rank 1 hangs", (1,)), 90.0)
DRAIN = DrainNotice((1,), ("b",), 30.0)
"""Its share is 10 s."""
DRAINED = AttemptRecord(drain=DRAIN)
PROGRAM = AttemptRecord(program=True)
GROWTH = "3 nodes now, 2 before"
SIGTERM = Stopped(signal.SIGTERM)


def stopping(record: AttemptRecord, grace_s: float = 0.0) -> Stopping:
    """The phase after a stop that is sent now."""
    killed = NOW + grace_s
    return Stopping(record, killed + SILENT_S, since=NOW, final=killed + max(SILENT_S, DYING_S))


BY_SIGNAL = Stop(StopReason.SIGNAL, str(SIGTERM), GRACE_S)
BY_HANG = Stop(StopReason.HANG, "ranks hang")
BY_FAILURE = Stop(StopReason.FAILURE, "a rank failed")
BY_DRAIN = Stop(StopReason.DRAIN, "its nodes are drained", 10.0)
WANTED = "gpt of ana@login"
BY_QUEUE = Stop(StopReason.MAKE_WAY, f"makes way for {WANTED}", GRACE_S)
BY_RESIZE = Stop(StopReason.RESIZE, f"the size changes: {GROWTH}")

SENT = Stopping(DRAINED, 105.0, since=95.0, final=140.0)
"""A stop was sent, and its deadline is to come."""
OVERDUE = replace(SENT, due=99.0)
ALL = [
    Running(),
    Finishing(),
    Finishing(DRAINED, 103.0),
    Quiescing(DRAINED, 103.0),
    Quiescing(growth=GROWTH),
    Quiescing(due=103.0, wanted_by=WANTED),
    Failing(due=100.2),
    SENT,
]


@pytest.mark.parametrize(
    ("phase", "happening", "follows", "action"),
    [
        # Nothing speaks against the run.
        (Running(), TimePassed(), Running(), None),
        (Running(), Quiesced(), Running(), None),  # nobody wants to move
        (Running(), FINISHED, Finishing(), None),
        (Finishing(), FINISHED, Finishing(), None),
        # Others may go on for hours: a program's rank that had nothing more to do.
        (Finishing(), DRAIN, Finishing(DRAINED, NOW + 10.0), None),
        (Finishing(DRAINED, 103.0), FINISHED, Finishing(DRAINED, 103.0), None),
        (Finishing(DRAINED, 103.0), TimePassed(), Finishing(DRAINED, 103.0), None),
        (Finishing(DRAINED, 99.0), TimePassed(), stopping(DRAINED, 10.0), BY_DRAIN),
        (Finishing(), NodesJoined(GROWTH), Finishing(), None),
        # A failure: at once, or after what may have caused it.
        (Running(), KILLED, Failing(due=NOW), None),
        (Finishing(), KILLED, Failing(due=NOW), None),
        (Running(), VICTIM, Failing(due=NOW + VICTIM_S), None),
        (Running(), RankRaised(), Failing(due=NOW + VICTIM_S), None),
        (Failing(due=100.2), VICTIM, Failing(due=100.2), None),  # the earlier deadline counts
        (Failing(due=100.2), RankRaised(), Failing(due=100.2), None),
        (Failing(due=100.2), KILLED, Failing(due=NOW), None),
        (Failing(due=100.2), FINISHED, Failing(due=100.2), None),
        (Failing(due=100.2), TimePassed(), Failing(due=100.2), None),
        (Failing(due=100.0), TimePassed(), stopping(AttemptRecord()), BY_FAILURE),
        # Nodes are drained.
        (Running(), DRAIN, Quiescing(DRAINED, NOW + 10.0), RequestQuiesce()),
        (Quiescing(DRAINED, 103.0), Quiesced(), stopping(DRAINED, 10.0), BY_DRAIN),
        (Quiescing(DRAINED, 103.0), TimePassed(), Quiescing(DRAINED, 103.0), None),
        (Quiescing(DRAINED, 99.0), TimePassed(), stopping(DRAINED, 10.0), BY_DRAIN),
        (Quiescing(DRAINED, 103.0), FINISHED, Quiescing(DRAINED, 103.0), None),
        (Quiescing(DRAINED, 103.0), RankRaised(), Quiescing(DRAINED, 100.5), None),
        (Quiescing(DRAINED, 103.0), KILLED, Failing(DRAINED, NOW), None),
        (Failing(DRAINED, 100.2), Quiesced(), Failing(DRAINED, 100.2), None),
        (Failing(DRAINED, 100.0), TimePassed(), stopping(DRAINED), BY_FAILURE),
        (Failing(due=100.2), DRAIN, Failing(due=100.2), None),
        # Nodes join; no deadline.
        (Running(), NodesJoined(GROWTH), Quiescing(growth=GROWTH), RequestQuiesce()),
        (
            Quiescing(growth=GROWTH),
            Quiesced(),
            stopping(AttemptRecord(resize=GROWTH)),
            BY_RESIZE,
        ),
        (
            Quiescing(PROGRAM, growth=GROWTH),  # it has time to save, as under torchrun
            Quiesced(),
            stopping(replace(PROGRAM, resize=GROWTH), PROGRAM_S),
            replace(BY_RESIZE, grace_s=PROGRAM_S),
        ),
        (Quiescing(growth=GROWTH), KILLED, Failing(due=NOW), None),
        (
            Quiescing(growth=GROWTH, due=99.0),  # a rank has raised
            TimePassed(),
            stopping(AttemptRecord()),
            BY_FAILURE,
        ),
        (Failing(due=100.2), NodesJoined(GROWTH), Failing(due=100.2), None),
        # Both.
        (
            Quiescing(DRAINED, 103.0),
            NodesJoined(GROWTH),
            Quiescing(DRAINED, 103.0, GROWTH),
            RequestQuiesce(),
        ),
        (
            Quiescing(growth=GROWTH),
            DRAIN,
            Quiescing(DRAINED, NOW + 10.0, GROWTH),
            RequestQuiesce(),
        ),
        (Quiescing(DRAINED, 103.0, GROWTH), Quiesced(), stopping(DRAINED, 10.0), BY_DRAIN),
        # Another run needs the room.
        (
            Running(),
            MakeWay(WANTED),
            Quiescing(due=NOW + MAKE_WAY_S, wanted_by=WANTED),
            RequestQuiesce(),
        ),
        (
            Quiescing(due=103.0, wanted_by=WANTED),
            Quiesced(),
            stopping(AttemptRecord(makes_way=WANTED), GRACE_S),
            BY_QUEUE,
        ),
        (
            Quiescing(PROGRAM, wanted_by=WANTED),
            Quiesced(),
            stopping(replace(PROGRAM, makes_way=WANTED), PROGRAM_S),
            replace(BY_QUEUE, grace_s=PROGRAM_S),
        ),
        (
            Quiescing(due=99.0, wanted_by=WANTED),
            TimePassed(),
            stopping(AttemptRecord(makes_way=WANTED), GRACE_S),
            BY_QUEUE,
        ),
        (
            Finishing(),
            MakeWay(WANTED),
            Finishing(due=NOW + MAKE_WAY_S, wanted_by=WANTED),
            None,
        ),
        (
            Finishing(PROGRAM, 99.0, wanted_by=WANTED),
            TimePassed(),
            stopping(replace(PROGRAM, makes_way=WANTED), PROGRAM_S),
            replace(BY_QUEUE, grace_s=PROGRAM_S),
        ),
        (Failing(due=100.2), MakeWay(WANTED), Failing(due=100.2), None),
        (
            Quiescing(growth=GROWTH),
            MakeWay(WANTED),
            Quiescing(due=NOW + MAKE_WAY_S, growth=GROWTH, wanted_by=WANTED),
            None,
        ),
        (
            Quiescing(due=103.0, growth=GROWTH, wanted_by=WANTED),
            Quiesced(),
            stopping(AttemptRecord(makes_way=WANTED), GRACE_S),
            BY_QUEUE,
        ),
        (
            Quiescing(due=103.0, wanted_by=WANTED),
            NodesJoined(GROWTH),
            Quiescing(due=103.0, wanted_by=WANTED),
            None,
        ),
        # The drain decides: it leaves these nodes, too.
        (
            Quiescing(DRAINED, 103.0, wanted_by=WANTED),
            Quiesced(),
            stopping(DRAINED, 10.0),
            BY_DRAIN,
        ),
        (SENT, MakeWay(WANTED), SENT, None),
        # The stop was sent: nothing but a signal changes it.
        (SENT, KILLED, SENT, None),
        (SENT, RankRaised(), SENT, None),
        (SENT, HANG, SENT, None),
        (SENT, replace(DRAIN, left_s=60.0), SENT, None),
        (SENT, NodesJoined(GROWTH), SENT, None),
        (SENT, Quiesced(), SENT, None),
        (SENT, SIGTERM, stopping(replace(DRAINED, stopped=SIGTERM), GRACE_S), BY_SIGNAL),
        # Ranks whose agents answer get more time, but not for ever.
        (SENT, TimePassed(), SENT, None),
        (
            OVERDUE,
            TimePassed(),
            replace(OVERDUE, due=NOW + SILENT_S, since=NOW),
            DeclareLost(95.0, stuck=False),
        ),
        (
            replace(OVERDUE, final=102.0),
            TimePassed(),
            replace(OVERDUE, due=102.0, since=NOW, final=102.0),
            DeclareLost(95.0, stuck=False),
        ),
        (
            replace(OVERDUE, final=NOW),
            TimePassed(),
            replace(OVERDUE, due=NOW, since=NOW, final=NOW),
            DeclareLost(95.0, stuck=True),
        ),
    ],
)
def test_what_follows(
    phase: Phase, happening: Happening, follows: Phase, action: Action | None
) -> None:
    assert advance(phase, happening, NOW) == (follows, action)


@pytest.mark.parametrize("phase", ALL)
def test_a_signal_stops_the_ranks_in_every_phase(phase: Phase) -> None:
    record = replace(phase.record, stopped=SIGTERM)
    assert advance(phase, SIGTERM, NOW) == (stopping(record, GRACE_S), BY_SIGNAL)


@pytest.mark.parametrize("phase", ALL[:-1])
def test_a_hang_stops_the_ranks_in_every_phase_before_the_stop(phase: Phase) -> None:
    assert advance(phase, HANG, NOW) == (stopping(replace(phase.record, hang=HANG)), BY_HANG)


def test_many_ranks_have_longer_to_end() -> None:
    failing = Failing(due=NOW)
    few, many = (advance(failing, TimePassed(), NOW, ranks)[0].due for ranks in (2, 1024))
    assert NOW + 5 < few < NOW + 5.1
    assert many == NOW + longest(SILENT_S, 1024) > NOW + 5 + 1024 * 0.003


HAPPENINGS: list[Happening] = [
    SIGTERM,
    HANG,
    DRAIN,
    NodesJoined(GROWTH),
    MakeWay(WANTED),
    FINISHED,
    KILLED,
    VICTIM,
    RankRaised(),
    Quiesced(),
    TimePassed(),
]


@pytest.mark.parametrize("gap_s", [0.0, 0.3, 50.0])
def test_whatever_happens_ranks_are_stopped_in_time_and_once(gap_s: float) -> None:
    for happenings in itertools.product(HAPPENINGS, repeat=3):
        phase: Phase = Running()
        failed, stops = math.inf, []
        for number, happening in enumerate(happenings):
            now = NOW + number * gap_s
            for each in (happening, TimePassed()):  # as the loop does
                before, (phase, action) = phase, advance(phase, each, now)
                stops += [action] if isinstance(action, Stop) else []
                assert isinstance(phase, Stopping) or not isinstance(before, Stopping)
                assert isinstance(phase, Stopping) or phase.due <= before.due
                # What is known is not forgotten: how ranks have ended depends on it.
                assert phase.record.drain is not None or before.record.drain is None
            assert phase.due > now or (isinstance(action, DeclareLost) and action.stuck)
            if happening in (KILLED, VICTIM, RankRaised()):
                failed = min(failed, now)
            assert isinstance(phase, Stopping) or now < failed + VICTIM_S
        by_itself = [stop for stop in stops if stop.reason is not StopReason.SIGNAL]
        assert by_itself in ([], stops[:1])  # a signal may come later
