"""How a rank ended, from its agent's report and what the driver knew: one row for each way."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from raydist.cluster.drain import DrainNotice
from raydist.messages.agent import RankEnd, RecordedError
from raydist.recovery.blame import is_victim
from raydist.recovery.classify import (
    NCCLS,
    AttemptRecord,
    RankRecord,
    classify_end,
    classify_lost,
    log_tells_more,
    lost_at,
)
from raydist.recovery.hang_verdict import ConfirmedHang, Diagnosis, RankState
from raydist.shared import kinds
from raydist.shared.errors import CallLost, Stopped
from raydist.shared.outcome import End

RAISED = kinds.Raised(t=90.0, rank=1, type="ValueError", message="nan", traceback="line 31", step=7)
CLOSED = "[/pytorch/gloo/transport/tcp/pair.cc:561] Connection closed by peer [192.0.2.2]:684"
LOST_PEER = kinds.Raised(t=90.0, rank=1, type="RuntimeError", message=CLOSED, step=7)
EARLIER = kinds.Raised(t=70.0, rank=1, type="RuntimeError", message=CLOSED, step=7)
RANK = RankRecord(1, "node-1", "/logs/rank-1.log")
EXITS = kinds.Raised(t=90.0, rank=1, type="SystemExit", message="4", step=7, code=4)
STATES = (
    RankState(
        1, "node-1", stack='Current thread 0x1:\n  File "/home/me/train.py", line 31 in job\n'
    ),
)
HANG = ConfirmedHang(Diagnosis("rank 1 is stopped", (1,), True, STATES), since=80.0)
OTHER_HANG = replace(HANG, diagnosis=replace(HANG.diagnosis, culprits=(0,)))
NOBODYS_HANG = ConfirmedHang(Diagnosis("none could be examined"), since=80.0)
DRAIN, OTHER_DRAIN = DrainNotice((1,), ("node-1",), 30.0), DrainNotice((0,), ("node-0",), 30.0)


def report(code: int = 0, signum: int = 0, **more: Any) -> RankEnd:
    """Return the report of an agent whose rank ended at 100 seconds."""
    return RankEnd(code, signum, 100.0, step=8, phase="forward", **more)


def stopped(code: int = 0, signum: int = 0, **more: Any) -> RankEnd:
    """Return the report of a rank that was to stop before it failed."""
    return report(code, signum, stop_requested=True, **more)


def stop_at(seconds: float) -> Stopped:
    """Return the signal that stopped the run then."""
    stopped = Stopped(signal.SIGTERM)
    stopped.at = seconds
    return stopped


WAY = AttemptRecord(makes_way="gpt of ana@login")
RESIZED = AttemptRecord(resize="3 nodes now, 2 before", program=True)


@pytest.mark.parametrize(
    ("given", "rank", "attempt", "how", "at"),
    [
        (stopped(), RANK, WAY, "finished", 100),
        (stopped(signum=15), RANK, WAY, "stopped", 100),
        # a program that saves its state on SIGTERM, and ends well: it is to be started again
        (stopped(), RANK, replace(WAY, program=True), "stopped", 100),
        (report(), RANK, replace(WAY, program=True), "finished", 100),
        (stopped(), RANK, RESIZED, "stopped", 100),
        (stopped(1, error=RecordedError("X", "x", "")), RANK, RESIZED, "stopped", 100),  # it came with SIGTERM
        (report(), RANK, RESIZED, "finished", 100),
        (report(), RANK, AttemptRecord(), "finished", 100),
        (report(3), RANK, AttemptRecord(), "exited", 100),
        (report(signum=9), RANK, AttemptRecord(), "killed", 100),
        # a stop explains a signal or a code, not a good end
        (stopped(signum=9), RANK, AttemptRecord(), "stopped", 100),
        (stopped(1), RANK, AttemptRecord(), "stopped", 100),
        (stopped(), RANK, AttemptRecord(), "finished", 100),
        # an exception counts from when it was raised, whatever became of the process
        (report(1), replace(RANK, raised=RAISED), AttemptRecord(), "raised", 90),
        (stopped(signum=9), replace(RANK, raised=RAISED), AttemptRecord(), "raised", 90),
        (report(), replace(RANK, raised=RAISED), AttemptRecord(hang=HANG), "raised", 90),
        # so does one in an error file, if the process failed
        (report(1, error=RecordedError("KeyError", "x", "")), RANK, AttemptRecord(), "raised", 100),
        (report(0, error=RecordedError("KeyError", "x", "")), RANK, AttemptRecord(), "finished", 100),
        # a hang is the end of its culprits, since they fell silent
        (stopped(signum=9), RANK, AttemptRecord(hang=HANG), "hung", 80),
        (stopped(signum=9), RANK, AttemptRecord(hang=NOBODYS_HANG), "hung", 80),
        (stopped(signum=9), RANK, AttemptRecord(hang=OTHER_HANG), "stopped", 100),
        (stopped(signum=9), RANK, AttemptRecord(hang=HANG, stopped=Stopped(15)), "stopped", 100),
        # while the ranks of a hang are stopped, the last ones lose their peers; before it, that is
        # how they end
        (stopped(signum=9), replace(RANK, raised=LOST_PEER), AttemptRecord(hang=HANG), "hung", 80),
        (stopped(1, error=RecordedError("RuntimeError", CLOSED, "")), RANK, AttemptRecord(hang=HANG), "hung", 80),
        (stopped(signum=9), replace(RANK, raised=LOST_PEER), AttemptRecord(hang=OTHER_HANG), "stopped", 100),
        (stopped(signum=9), replace(RANK, raised=EARLIER), AttemptRecord(hang=HANG), "raised", 70),
        # so do the last ranks of a stop, maybe before the stop has reached their own agents
        (report(1), replace(RANK, raised=LOST_PEER), AttemptRecord(stopped=stop_at(85)), "stopped", 100),
        (report(1), replace(RANK, raised=LOST_PEER), AttemptRecord(stopped=stop_at(95)), "raised", 90),
        (report(1), replace(RANK, raised=RAISED), AttemptRecord(stopped=stop_at(85)), "raised", 90),
        # a drain is the end of ranks on drained nodes, once all were stopped
        (stopped(signum=9), RANK, AttemptRecord(drain=DRAIN), "drained", 100),
        (stopped(), RANK, AttemptRecord(drain=DRAIN), "drained", 100),
        (stopped(signum=9), RANK, AttemptRecord(drain=OTHER_DRAIN), "stopped", 100),
        (report(signum=9), RANK, AttemptRecord(drain=DRAIN), "killed", 100),
        (stopped(signum=9), RANK, AttemptRecord(drain=DRAIN, stopped=Stopped(15)), "stopped", 100),
        (stopped(1), replace(RANK, raised=RAISED), AttemptRecord(drain=DRAIN), "drained", 100),
        (report(1), replace(RANK, raised=RAISED), AttemptRecord(drain=DRAIN), "raised", 90),
        # mpirun ends a rank
        (report(1, by_mpirun=True, lost="a rank failed"), RANK, AttemptRecord(), "ended", 100),
        (stopped(1, by_mpirun=True, lost="a rank failed"), RANK, AttemptRecord(), "stopped", 100),
    ],
)  # fmt: skip
def test_each_way_to_end(
    given: RankEnd, rank: RankRecord, attempt: AttemptRecord, how: str, at: float
) -> None:
    end = classify_end(given, rank, attempt)
    assert (end.how, end.at) == (how, at)
    assert (end.rank, end.host, end.log, end.code, end.signal) == (
        1, "node-1", "/logs/rank-1.log", given.code, given.signal
    )  # fmt: skip


@pytest.mark.parametrize("ended", [report(4), report(signum=9), report(4, lost="flushed")])
def test_a_rank_that_was_exiting_exited_whatever_ended_it(ended: RankEnd) -> None:
    """What runs while it exits closes connections: the errors of others may be known first."""
    end = classify_end(ended, replace(RANK, raised=EXITS), AttemptRecord())
    assert (end.how, end.code, end.signal, end.at, end.step) == ("exited", 4, 0, 90.0, 7)


def test_an_exit_that_follows_from_a_stop_is_the_stop() -> None:
    exits = replace(RANK, raised=EXITS)
    assert classify_end(stopped(4), exits, AttemptRecord()).how == "stopped"
    at_85 = AttemptRecord(stopped=stop_at(85))
    assert classify_end(stopped(4), exits, at_85).how == "stopped"


def test_an_exception_keeps_its_own_words_and_step() -> None:
    end = classify_end(report(1), replace(RANK, raised=RAISED), AttemptRecord())
    assert (end.type, end.message, end.traceback, end.step) == ("ValueError", "nan", "line 31", 7)


def test_an_error_of_nccl_has_that_of_cuda_from_the_log() -> None:
    """torch's exception does not name it, and a broken GPU is the first cause."""
    raised = kinds.Raised(t=90.0, rank=1, type=NCCLS, message="NCCL operation failed")
    assert log_tells_more(report(1), raised)
    log = "CUDA error during end event query: CUDA error: uncorrectable ECC error encountered\n"
    end = classify_end(report(1), replace(RANK, raised=raised), AttemptRecord(), log)
    assert end.message == (
        "NCCL operation failed (CUDA error: uncorrectable ECC error encountered)"
    )
    assert not is_victim(end)
    plain = classify_end(report(1), replace(RANK, raised=raised), AttemptRecord(), "step 3\n")
    assert plain.message == "NCCL operation failed"
    assert not log_tells_more(report(1), RAISED)


@pytest.mark.parametrize(
    ("end", "raised", "message"),
    [
        (report(1), RAISED, "nan; the GPU has fallen off the bus"),
        (report(signum=6), None, "the GPU has fallen off the bus"),
        (report(1), None, "the GPU has fallen off the bus"),
    ],
)
def test_a_rank_whose_gpu_is_lost_says_so_and_is_no_victim(
    end: RankEnd, raised: kinds.Raised | None, message: str
) -> None:
    lost = replace(end, gpu_report="the GPU has fallen off the bus")
    found = classify_end(lost, replace(RANK, raised=raised), AttemptRecord())
    assert found.message == message
    assert not is_victim(found)


def test_a_rank_that_was_stopped_keeps_what_nvml_said_of_its_gpu() -> None:
    end = classify_end(stopped(signum=9, gpu_report="Xid 119"), RANK, AttemptRecord())
    assert (end.how, end.message) == ("stopped", "Xid 119")


def test_a_hang_keeps_the_diagnosis_and_the_stack() -> None:
    end = classify_end(stopped(signum=9), RANK, AttemptRecord(hang=HANG))
    assert (end.message, end.traceback) == (
        HANG.diagnosis.text,
        'File "/home/me/train.py", line 31, in job',
    )


def test_a_drained_rank_uses_up_no_restart() -> None:
    end = classify_end(stopped(signum=9), RANK, AttemptRecord(drain=DRAIN))
    assert (end.preempted, end.message) == (True, DRAIN.text)
    assert not classify_end(stopped(signum=9), RANK, AttemptRecord(drain=OTHER_DRAIN)).preempted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (report(signum=signal.SIGABRT), "free(): invalid pointer"),
        (report(signum=signal.SIGABRT, lost="its server is gone"), "its server is gone"),
        (report(signum=signal.SIGSEGV), ""),
    ],
)
def test_only_an_abort_is_explained_by_the_log(given: RankEnd, message: str) -> None:
    assert (
        classify_end(given, RANK, AttemptRecord(), "step 3\nfree(): invalid pointer\n").message
        == message
    )


def test_what_the_node_knows_of_memory_is_kept() -> None:
    end = classify_end(
        report(signum=9, why="out of memory: …", oom="kernel"), RANK, AttemptRecord()
    )
    assert (end.how, end.why, end.oom) == ("killed", "out of memory: …", "kernel")


class OutOfMemoryError(Exception):
    """As Ray names its own."""


class Preempted(Exception):
    preempted = True


@pytest.mark.parametrize(
    ("error", "message", "silent", "preempted", "oom"),
    [
        (None, "its agent stopped responding", True, False, ""),
        (RuntimeError("Traceback\nThe actor died\n"), "The actor died", False, False, ""),
        (CallLost(Preempted("the node was taken")), "the node was taken", False, True, ""),
        (CallLost(OutOfMemoryError("was 7GB / 8GB")), None, False, False, "ray"),
    ],
)
def test_a_lost_rank_keeps_its_last_heartbeat(
    error: BaseException | None, message: str | None, silent: bool, preempted: bool, oom: str
) -> None:
    end = classify_lost(RANK, (5, "data", 42.0), 99.0, error)
    assert (end.how, end.step, end.phase, end.at, end.log) == ("lost", 5, "data", 99.0, RANK.log)
    assert message is None or end.message == message
    assert (end.silent, end.preempted, end.oom, bool(end.why)) == (
        silent,
        preempted,
        oom,
        bool(oom),
    )


LOST = End(0, "node-1", "lost", 70.0)


@pytest.mark.parametrize(
    ("ends", "answered", "alone", "at"),
    [
        ([], 99.5, True, 100.0),
        ([], 97.0, True, 97.0),  # the node was cut off 3 seconds before Ray reported it
        (
            [],
            97.0,
            False,
            100.0,
        ),  # another rank has failed: a late answer must not make this one the first
        ([], None, True, 100.0),
        ([LOST], 97.0, False, 70.0),  # with the other ranks of its node
        ([replace(LOST, host="node-2")], 97.0, True, 97.0),
        ([replace(LOST, how="killed")], 97.0, True, 97.0),
    ],
)
def test_when_a_rank_was_lost(
    ends: list[End], answered: float | None, alone: bool, at: float
) -> None:
    assert lost_at("node-1", ends, answered, now=100.0, interval=1.0, alone=alone) == at
