"""Ranks that hang, for real: who is named, and what becomes of the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.flow import run_job
from raydist.recovery import hang_verdict, stall
from raydist.recovery.hang_verdict import RankState
from raydist.settings import compose
from raydist.shared.errors import RunFailed
from raydist.shared.kinds import EventJson
from tests.horovod_ranks import requires_horovod
from tests.leftovers import alive
from tests.records import read_events

pytestmark = pytest.mark.ray
WORDS = ("scale=1x3", "watch.progress=none", "hang.after_s=1", "restart=none")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def another() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.ones(4), 0)


def train(fault: Callable[[], None], at: int = 60, steps: int = 1_000_000) -> int:
    """Steps that wait for all ranks; rank 1 has a fault in one of them."""
    import torch
    import torch.distributed as dist

    for step in range(1, steps + 1):
        time.sleep(0.01)
        if step == at and dist.get_rank() == 1:
            fault()
        dist.all_reduce(torch.ones(3))
        raydist.report(step=step)
    return steps


def hangs(folder: Path) -> list[EventJson]:
    return [
        happened for happened in read_events(folder / "events.jsonl") if happened["kind"] == "hang"
    ]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (stop, ["rank 1 on", "stopped by a signal"]),
        (
            another,
            [
                "ranks 0, 2 wait in all_reduce of [[3]], number 61",
                "waits in broadcast of [[4]], number 61",
            ],
        ),
    ],
)
def test_what_can_not_get_better_ends_the_run_and_names_the_culprit(
    on_ray: Path, fault: Callable[[], None], words: list[str]
) -> None:
    with pytest.raises(RunFailed) as caught:
        raydist.run(train, *WORDS, args=(fault,))
    result = caught.value.result
    assert (result.cause.rank, result.cause.how) == (1, "hung")
    assert {end.how for end in result.ends if end.rank != 1} == {"stopped"}
    for word in words:
        assert word in str(caught.value)
    # On a busy machine ranks may be silent for a second before that.
    (hang,) = [each for each in hangs(result.dir) if each["certain"]]
    assert hang["ranks"] == [1]
    assert "in train" in (result.dir / "logs" / "rank-0.stacks").read_text()
    pids = [
        happened["pid"]
        for happened in read_events(result.dir / "events.jsonl")
        if happened["kind"] == "began"
    ]
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("gloo", "killed by SIGABRT (native code aborted"),
        pytest.param(
            "horovod",
            "HorovodInternalError: Mismatched ALLREDUCE tensor shapes",
            marks=requires_horovod,
        ),
    ],
)
def test_ranks_that_disagree_on_a_shape_are_told_as_that(
    on_ray: Path, backend: str, words: str
) -> None:
    """gloo aborts the one that gets more than it has room for, and reports it in its log; Horovod
    raises on all ranks."""

    def job() -> None:
        import torch

        size = 5 if raydist.rank().rank == 1 else 3
        if backend == "horovod":
            import horovod.torch as hvd

            hvd.allreduce(torch.ones(size), name="grads")
        else:
            torch.distributed.all_reduce(torch.ones(size))

    with pytest.raises(RunFailed) as caught:
        raydist.run(
            job,
            "scale=1x2",
            "group=inline",
            "watch.progress=none",
            "restart=none",
            f"backend={backend}",
        )
    page = (caught.value.result.dir / "blame-1.txt").read_text()
    for each in (
        words,
        "only the job can tell which of the two is wrong",
        "all must call the same collectives",
    ):
        assert each in page
    assert backend == "horovod" or "Received data size doesn't match expected size" in page


def test_horovods_ranks_too(on_ray: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built: raydist horovod build")

    def job() -> None:
        import horovod.torch as hvd
        import torch

        for step in range(1, 1_000_000):
            time.sleep(0.01)
            if step == 60 and hvd.rank() == 1:
                stop()
            hvd.allreduce(torch.ones(3), name="grads")
            raydist.report(step=step)

    with pytest.raises(RunFailed, match=r"rank 1 on .* is stopped by a signal"):
        raydist.run(job, *WORDS, "backend=horovod")


def named_late(folder: Path) -> list[EventJson]:
    """Return the hangs in which the others wait for rank 1 at its fault.

    On a busy machine ranks may be silent for a second before that.
    """
    late = "ranks 0, 2 wait in all_reduce of [[3]], number 61, but rank 1 on"
    return [hang for hang in hangs(folder) if late in hang["text"]]


def nap() -> None:
    time.sleep(0.5)


def take_long() -> None:
    """Come late, until that is told and for 3 s after it, always at the same line."""
    while not named_late(raydist.rank().run_dir):
        nap()
    for _ in range(6):
        nap()


def test_who_only_takes_long_is_named_once_and_let_go_on(on_ray: Path) -> None:
    done = raydist.run(train, *WORDS, args=(take_long,), steps=80)
    assert done.values == (80, 80, 80)
    (hang,) = named_late(done.dir)
    assert (hang["ranks"], hang["certain"]) == ([1], False)


def test_the_limit_ends_ranks_that_all_compute_too_and_it_is_a_failure(on_ray: Path) -> None:
    def job() -> None:
        raydist.report(step=1)
        while True:
            pass

    with pytest.raises(RunFailed, match=r"rank 0 on .* hangs: rank 0 on") as caught:
        raydist.run(job, *WORDS, "hang.limit_s=5")
    assert caught.value.result.cause.how == "hung"


def set_up(elsewhere: Callable[[], None]) -> None:
    """Create a process group before the first step; rank 1 does something else."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        elsewhere()
    dist.new_group()


def reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))


def loop() -> None:
    while True:
        pass


def test_a_collective_in_place_of_a_group_that_the_others_create_ends_the_run(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No flight recorder has the call that creates a group, so it takes two examinations."""
    monkeypatch.setattr(stall, "UNKNOWN_S", 3.0)
    with pytest.raises(RunFailed) as caught:
        raydist.run(set_up, *WORDS, args=(reduce,))
    cause = caught.value.result.cause
    assert (cause.rank, cause.how, cause.phase, cause.step) == (1, "hung", "start", 0)
    # On a busy machine the ranks are examined while they join, too.
    found = [hang for hang in hangs(caught.value.result.dir) if "new_group" in hang["text"]]
    assert [hang["certain"] for hang in found[-2:]] == [False, True]
    for words in ("ranks 0, 2 wait in new_group at line", "waits in all_reduce of [[3]], number 2"):
        assert words in cause.message


def test_the_limit_ends_a_rank_that_never_comes_to_create_a_group(on_ray: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        raydist.run(set_up, *WORDS, "hang.limit_s=20", args=(loop,))
    cause = caught.value.result.cause
    assert (cause.rank, cause.how, cause.phase, cause.step) == (1, "hung", "start", 0)
    assert "ranks 0, 2 wait in new_group, but rank 1 on" in cause.message
    assert "in loop (start)" in cause.message


def test_without_hang_end_it_is_only_told(on_ray: Path) -> None:
    def job() -> Any:
        import threading

        # somebody wakes it up again, from outside of Python
        pid, folder = os.getpid(), raydist.rank().run_dir
        if os.fork() == 0:
            while not any(each["certain"] for each in hangs(folder)):
                time.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        threading.Event()
        return train(stop, steps=80)

    done = raydist.run(job, *WORDS, "hang.end=false")
    assert done.values == (80, 80, 80)
    # On a busy machine ranks may be silent for a second before that.
    assert [hang["ranks"] for hang in hangs(done.dir) if hang["certain"]] == [[1]]


@pytest.mark.parametrize(
    ("program", "args"),
    [("sleep", "[9]"), ("quiet.py", "[]")],
)
def test_a_program_that_says_nothing_is_looked_at_and_lives(
    on_ray: Path, program: str, args: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does with signals of its own: this one would have taken SIGUSR2 for its word to
    save and leave."""
    quiet = (
        "import signal, sys, time\nsignal.signal(signal.SIGUSR2, lambda *_: "
        "sys.exit(3))\ntime.sleep(9)\n"
    )
    (on_ray / "quiet.py").write_text(quiet + "print('whole')\n")
    monkeypatch.setattr(stall, "UNKNOWN_S", 1.0)
    looked: list[RankState] = []
    judge = hang_verdict.diagnose

    def note(looks: Sequence[RankState], ended: Collection[int]) -> hang_verdict.Diagnosis:
        looked.extend(looks)
        return judge(looks, ended)

    monkeypatch.setattr(hang_verdict, "diagnose", note)
    command = [f"script={program}", f"args={args}", "scale=1x1", "watch.progress=none"]
    done = run_job(compose.compose(command, claim=True))
    assert done.status == "finished"
    assert looked
