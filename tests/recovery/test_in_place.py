"""Which ranks keep their processes, and when all of them have told the driver where they are."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import cast

import pytest

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.rank import Meet
from raydist.recovery.in_place import Meeting, why_all_forked, why_not_kept
from raydist.settings.config import Job, Restart
from raydist.shared import kinds
from raydist.shared.outcome import End
from tests.recovery.fake_group import FakeGroup, job

AUTO = replace(job(3), restart=Restart(in_place="auto"))
KILLED = End(1, "b", "killed", 5.0, signal=signal.SIGKILL)
KEPT = End(0, "a", "stopped", 5.0, kept=True)
BUSY = End(2, "c", "stopped", 5.0, why_not_kept="it was busy")
RAISED = End(1, "b", "raised", 5.0, type="ValueError")
VICTIM = replace(RAISED, rank=2, type="RuntimeError", message="Connection closed by peer")
FINISHED = End(2, "c", "finished", 4.0)


@pytest.mark.parametrize(
    ("job", "ends", "why"),
    [
        (AUTO, [KILLED], ""),
        (AUTO, [KILLED, KEPT, BUSY], ""),
        (AUTO, [KILLED, replace(KILLED, rank=2)], ""),
        (AUTO, [replace(KILLED, how="hung"), KEPT], ""),
        (AUTO, [RAISED], "rank 1 was not killed: raised"),
        (AUTO, [KILLED, FINISHED], "rank 2 was not killed: finished"),
        (AUTO, [KILLED, VICTIM], ""),
        (AUTO, [VICTIM], "the rank that failed first is not known"),
        (AUTO, [replace(KILLED, how="lost"), KEPT], ""),
        (AUTO, [replace(KILLED, how="lost", stuck=True)], "rank 1 was not killed: lost"),
        (job(3), [KILLED], "restart.in_place=off"),
        (replace(AUTO, script="train.py"), [KILLED], "a program (script=) has a loop of its own"),
    ],
)
def test_ranks_keep_their_processes_if_others_were_killed(
    job: Job, ends: list[End], why: str
) -> None:
    assert why_all_forked(job, ends) == why


@pytest.mark.parametrize(
    ("job", "ends", "kept", "hosts", "why"),
    [
        (AUTO, [KEPT, KILLED, replace(KEPT, rank=2)], (0, 2), "aba", ""),
        (AUTO, [KEPT, KILLED, BUSY], (0,), "abc", "rank 2: it was busy"),
        (
            AUTO,
            [KEPT, KILLED, replace(BUSY, why_not_kept="")],
            (0,),
            "abc",
            "rank 2: its process has ended",
        ),
        (AUTO, [KEPT, KILLED], (), "a", "the number of ranks has changed"),
        (AUTO, [KEPT, KILLED], (), "ba", "ranks on nodes that stayed have other numbers"),
        (AUTO, [KEPT, KILLED], (), "ab", "rank 0: its process has ended while it waited"),
        (AUTO, [KEPT, KILLED], (), "cb", "rank 0: its node a was lost while it waited"),
        (AUTO, [replace(KEPT, kept=False), RAISED], (), "ab", "rank 1 was not killed: raised"),
        (AUTO, [KILLED, replace(KILLED, rank=0)], (), "ab", ""),
        (AUTO, [KEPT, KILLED, VICTIM], (0,), "abb", "rank 2: it failed because it had lost a peer"),
        (job(3), [replace(KEPT, kept=False), KILLED], (), "ab", ""),
    ],
)
def test_why_ranks_that_had_not_failed_were_started_anew(
    job: Job, ends: list[End], kept: tuple[int, ...], hosts: str, why: str
) -> None:
    assert why_not_kept(job, ends, kept, hosts) == why


def test_all_ranks_get_the_contacts_of_all_once_the_last_has() -> None:
    group = FakeGroup(3)
    meeting = Meeting(cast("WorkerGroup", group), AUTO, 0.0, None)
    for rank in (2, 0):
        meeting.introduce(rank, kinds.MeetRequest(rank=rank, number=0, contact=f"at {rank}"))
    meeting.introduce(1, kinds.MeetRequest(rank=1, number=7, contact="of another attempt"))
    assert not group.calls
    meeting.introduce(1, kinds.MeetRequest(rank=1, number=0, contact="at 1"))
    meet = Meet(0, ["at 0", "at 1", "at 2"])
    assert sorted(group.calls, key=lambda call: call[0]) == [(0, meet), (1, meet), (2, meet)]
