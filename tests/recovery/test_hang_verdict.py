"""Which rank blocks the others. The recorder's entries are those of gloo in torch 2.15."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raydist.recovery.hang_verdict import RankState, diagnose

TORCH = "/env/lib/python3.11/site-packages/torch"
WAITS = (
    (f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "w"),
)
GROUP = (
    (f"{TORCH}/distributed/distributed_c10d.py", 867, "_create_nccl2_process_group"),
    (f"{TORCH}/distributed/distributed_c10d.py", 7270, "_new_group_with_tag"),
    (f"{TORCH}/distributed/distributed_c10d.py", 7137, "new_group"),
    (f"{TORCH}/distributed/c10d_logger.py", 97, "wrapper"),
)
JOB = (
    ("/home/me/train.py", 31, "job"),
    ("/pkg/raydist/worker/main.py", 104, "call"),
    ("<frozen runpy>", 88, "_run_code"),
)


def entry(
    number: int, name: str = "all_reduce", sizes: Any = ((3,),), done: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": f"gloo:{name}", "input_sizes": [list(one) for one in sizes], "state": "scheduled",
        "retired": done, **more,
    }  # fmt: skip


def stack(*frames: tuple[str, int, str]) -> str:
    """As faulthandler writes it: another thread first, the current one last, the innermost frame at
    the top."""
    other = (
        "Thread 0x00007f1 (most recent call first):\n  File "
        '"/pkg/raydist/worker/channel.py", line 70 in _serve\n\n'
    )
    own = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
    return other + "Current thread 0x00007f2 (most recent call first):\n" + own


def waits(rank: int, *entries: dict[str, Any], **more: Any) -> RankState:
    """Return a rank that waits for the others."""
    return RankState(
        rank,
        "a",
        state="S",
        stack=stack(*WAITS, *JOB),
        collectives=[entry(9, done=True), *entries],
        **more,
    )


def elsewhere(rank: int, *frames: tuple[str, int, str], **more: Any) -> RankState:
    return RankState(
        rank,
        "b",
        **{"state": "S", **more},
        stack=stack(*frames, *JOB),
        collectives=[entry(9, done=True)],
    )


def test_a_stopped_rank_is_named_and_certain() -> None:
    verdict = diagnose(
        [waits(0, entry(10)), RankState(1, "b", pid=42, state="T"), waits(2, entry(10))]
    )
    assert verdict.culprits == (1,)
    assert verdict.certain
    assert (
        verdict.text == "rank 1 on b is stopped by a signal (SIGSTOP); kill -CONT 42 would wake it"
    )


def test_a_debugger_is_let_do_its_work() -> None:
    verdict = diagnose([waits(0, entry(10)), RankState(1, "b", state="t")])
    assert not verdict.certain
    assert "debugger" in verdict.text


def test_different_collectives_are_certain_and_the_few_are_the_culprits() -> None:
    verdict = diagnose([waits(0, entry(10)), waits(1, entry(10, "broadcast")), waits(2, entry(10))])
    assert verdict.culprits == (1,)
    assert verdict.certain
    assert (
        "ranks 0, 2 wait in all_reduce of [[3]], number 10 at line 31 of /home/me/train.py, in job"
        in verdict.text
    )
    assert "rank 1 on a waits in broadcast of [[3]], number 10" in verdict.text


def test_a_rank_that_is_behind_may_only_lack_the_cpu() -> None:
    """The others have completed number 11 with it, so it has not called another collective."""
    verdict = diagnose([waits(0, entry(12)), waits(1, entry(11)), waits(2, entry(12))])
    assert (verdict.culprits, verdict.certain, verdict.if_it_lasts) == ((1,), False, True)


def test_a_rank_that_is_ahead_after_another_collective_is_certain() -> None:
    ahead = waits(0, entry(11, done=True), entry(12))
    verdict = diagnose([ahead, waits(1, entry(11, sizes=((5,),))), replace(ahead, rank=2)])
    assert (verdict.culprits, verdict.certain) == ((1,), True)
    alike = diagnose([ahead, waits(1, entry(11)), replace(ahead, rank=2)])
    assert (alike.certain, alike.if_it_lasts) == (False, True)


def test_other_sizes_count_where_they_must_be_equal_and_only_there() -> None:
    assert diagnose([waits(0, entry(10)), waits(1, entry(10, sizes=((5,),)))]).certain
    uneven = [waits(rank, entry(10, "all_to_all", sizes=((rank,),))) for rank in range(2)]
    assert not diagnose(uneven).certain
    assert "different" not in diagnose(uneven).text


def test_what_may_only_be_slow_is_not_certain() -> None:
    pair = [
        waits(0, entry(10, process_group=["1", "a"])),
        waits(1, entry(10, process_group=["2", "b"])),
    ]
    assert not diagnose(pair).certain
    ring = [waits(0, entry(0, "send 0->1", is_p2p=True, p2p_seq_id=4)), waits(1, entry(11))]
    assert not diagnose(ring).certain
    assert not diagnose([waits(0, entry(10), busy=0.9), waits(1, entry(10, "broadcast"))]).certain


def creates(rank: int, *entries: dict[str, Any], **more: Any) -> RankState:
    """Return a rank that creates a process group."""
    return replace(waits(rank, *entries, **more), stack=stack(*GROUP, *JOB))


def test_a_group_that_ranks_create_and_a_collective_of_all_exclude_each_other() -> None:
    verdict = diagnose([creates(0), waits(1, entry(10)), creates(2)])
    assert (verdict.culprits, verdict.certain, verdict.if_it_lasts) == ((1,), False, True)
    assert verdict.text == (
        "the ranks wait in different collectives: "
        "ranks 0, 2 wait in new_group at line 31 of /home/me/train.py, in job; "
        "rank 1 on a waits in all_reduce of [[3]], number 10 at line 31 of /home/me/train.py, in job"
    )


@pytest.mark.parametrize(
    "ranks",
    [
        # The others' data is in transit: they come to create the group as well.
        [creates(0, entry(10)), waits(1, entry(10))],
        # Rank 1 waits for rank 2, in a group without rank 0.
        [creates(0), *(waits(rank, entry(10, process_group=["1", "a"])) for rank in (1, 2))],
        [creates(0), waits(1, entry(10, "send 1->0", is_p2p=True))],
        [creates(0), waits(1)],
        [creates(0), waits(1, entry(10), busy=0.9)],
        [creates(0), waits(1, entry(10)), elsewhere(2)],
        [creates(0), creates(1)],
    ],
)
def test_ranks_that_may_still_come_to_create_a_group(ranks: list[RankState]) -> None:
    verdict = diagnose(ranks)
    assert not verdict.certain
    assert not verdict.if_it_lasts


def test_a_group_that_ranks_create_is_named_to_the_one_that_is_not_there() -> None:
    verdict = diagnose([creates(0), elsewhere(1)])
    assert (verdict.culprits, verdict.certain) == ((1,), False)
    assert verdict.text.startswith("rank 0 on a waits in new_group, but rank 1 on b waits at line")


def test_the_same_collective_everywhere_is_the_network() -> None:
    verdict = diagnose([waits(rank, entry(10)) for rank in range(3)])
    assert (verdict.culprits, verdict.certain) == ((), False)
    assert "is the network cut?" in verdict.text


def test_ranks_that_wait_for_others_which_have_ended_are_told_so() -> None:
    verdict = diagnose([waits(rank, entry(10)) for rank in range(3)], ended={3, 5})
    assert (verdict.culprits, verdict.certain) == ((), False)
    assert verdict.text.startswith("ranks 0-2 wait in all_reduce of [[3]], number 10 at line")
    assert verdict.text.endswith(
        "but ranks 3, 5 have ended: does each rank make the same number of steps?"
    )
    alone = diagnose([waits(0, entry(10))], ended=[1])
    assert "rank 0 on a waits in all_reduce" in alone.text
    assert "but rank 1 has ended" in alone.text
    # One that has not come yet is to blame first; a group of some ranks may be without them.
    assert diagnose([waits(0, entry(10)), elsewhere(1)], ended=[2]).culprits == (1,)
    ours = [waits(rank, entry(10, process_group=["7", "mesh"])) for rank in range(2)]
    assert "ended" not in diagnose(ours, ended=[2]).text


def test_a_finished_collective_is_not_waited_in() -> None:
    nccl = entry(8, state="completed")
    assert waits(0, nccl, entry(10)).waits_in == entry(10)
    assert waits(0, nccl).waits_in is None


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (
            elsewhere(1, (f"{TORCH}/utils/data/dataloader.py", 1200, "_try_get_data")),
            "waits for its data loader",
        ),
        (elsewhere(1, state="D"), "waits for a disk or a device"),
        (elsewhere(1, busy=0.98), "computes at line 31 of /home/me/train.py, in job"),
        (elsewhere(1, phase="save"), "waits at line 31 of /home/me/train.py, in job (save)"),
        (RankState(1, "b", state="S"), "does not answer"),
    ],
)
def test_the_one_that_is_not_there_is_named_with_what_it_does(look: RankState, words: str) -> None:
    verdict = diagnose([waits(0, entry(10)), look, waits(2, entry(10))])
    assert verdict.culprits == (1,)
    assert not verdict.certain
    assert verdict.text.startswith(
        "ranks 0, 2 wait in all_reduce of [[3]], number 10, but rank 1 on b "
    )
    assert words in verdict.text


def test_a_broken_gpu_is_named_and_its_rank_is_the_culprit_of_what_is_not_certain() -> None:
    fault = "NVML has counted 1 uncorrectable ECC error of GPU 3 since its driver was loaded"
    verdict = diagnose([waits(0, entry(10)), replace(waits(1, entry(10)), gpu_fault=fault)])
    assert (verdict.culprits, verdict.certain) == ((1,), False)
    assert verdict.text.endswith(f"; {fault} (rank 1 on a)")
    stopped = RankState(2, "b", pid=42, state="T")
    verdict = diagnose([replace(waits(0, entry(10)), gpu_fault=fault), stopped])
    assert (verdict.culprits, verdict.certain) == ((2,), True)
    assert fault in verdict.text
    computing = [elsewhere(0, busy=1.0), replace(elsewhere(1, busy=1.0), gpu_fault=fault)]
    assert diagnose(computing).text == f"{fault} (rank 1 on b)"


def test_horovod_has_no_recorder_but_a_stack() -> None:
    horovod = (("/env/lib/python3.11/site-packages/horovod/torch/mpi_ops.py", 1200, "synchronize"),)
    waiting = [RankState(rank, "a", state="S", stack=stack(*horovod, *JOB)) for rank in (0, 2)]
    verdict = diagnose([waiting[0], elsewhere(1), waiting[1]])
    assert verdict.culprits == (1,)
    assert "ranks 0, 2 wait in a collective" in verdict.text


def test_horovods_waiting_is_known_by_its_stack_and_so_is_a_job_that_has_returned() -> None:
    """As busy as Horovod's two threads are that ask every millisecond, on a machine with much to
    do."""
    horovod = (("/env/lib/python3.11/site-packages/horovod/torch/mpi_ops.py", 1285, "synchronize"),)
    leaving = (
        ("/home/me/raydist/worker/backends/horovod.py", 152, "join"),
        ("/usr/lib/python3.11/contextlib.py", 144, "__exit__"),
        ("/home/me/raydist/worker/backends/__init__.py", 86, "join"),
        ("/usr/lib/python3.11/contextlib.py", 144, "__exit__"),
        ("/home/me/raydist/worker/main.py", 113, "run_job"),
    )
    waiting = [
        RankState(rank, "a", state="S", busy=0.4, stack=stack(*horovod, *JOB)) for rank in (0, 2)
    ]
    gone = RankState(1, "b", state="S", busy=0.4, stack=stack(*horovod, *leaving))
    verdict = diagnose([waiting[0], gone, waiting[1]])
    assert (verdict.culprits, verdict.certain) == ((1,), False)
    assert verdict.text == (
        "ranks 0, 2 wait in a collective, but rank 1 on b has returned from the job, and waits "
        "for the others to leave"
    )
    joining = RankState(
        1, "b", stack=stack(*(frame for frame in leaving if frame[2] != "__exit__"))
    )
    assert not joining.left


def test_many_that_are_not_there_are_counted() -> None:
    assert (
        "and 6 more"
        in diagnose([waits(0, entry(10)), *(elsewhere(rank) for rank in range(1, 11))]).text
    )


def test_ranks_that_compute_are_left_alone() -> None:
    assert diagnose([elsewhere(rank, busy=1.0) for rank in range(3)]).text == ""
    assert diagnose([]).text == ""


def test_a_run_that_is_ended_names_somebody_whatever_was_found() -> None:
    busy = [elsewhere(rank, busy=1.0, phase="forward") for rank in range(2)]
    verdict = diagnose(busy)
    assert (verdict.text, verdict.culprits) == ("", ())
    assert verdict.final.culprits == (0, 1)
    assert verdict.final.text.startswith(
        "rank 0 on b computes at line 31 of /home/me/train.py, in job (forward); rank 1"
    )
    assert diagnose([waits(0, entry(10)), waits(1, entry(10))]).final.culprits == (0, 1)
    named = diagnose([waits(0, entry(10)), RankState(1, "b", state="T")])
    assert named.final == named
    assert diagnose([]).final.text == "no rank makes progress, and none could be examined"


def test_the_stack_is_told_from_the_jobs_own_first_line_on() -> None:
    verdict = diagnose([waits(0, entry(10)), waits(1, entry(10, "broadcast"))])
    lines = verdict.stack_of(1).splitlines()
    assert lines[0] == 'File "/home/me/train.py", line 31, in job'
    assert lines[-1].endswith("in all_reduce")
    assert len(lines) == 3
