"""Events -> failures -> pages, by hand-written streams: times that are known, words that must be
there."""

from __future__ import annotations

import errno
import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from raydist.recovery import blame
from raydist.recovery.arrival import Arrival
from raydist.reporting import page_files
from raydist.reporting.advice import RULES, advice_for
from raydist.reporting.failures import Failure, Failures
from raydist.reporting.goodput import Spent
from raydist.reporting.page import page
from raydist.reporting.page_files import Pages
from raydist.shared import kinds
from raydist.shared.errors import ConfigError
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from raydist.shared.outcome import End
from tests.records import changed, event
from tests.reporting.folds import fold_failures

T0 = 1_000_000.0
KILLED = End(
    1, "node-7", "killed", T0 + 10.0, 20, "forward", signal=signal.SIGKILL, log="logs/rank-1.log"
)
ECHO = End(
    0,
    "node-6",
    "raised",
    T0 + 10.2,
    20,
    type="RuntimeError",
    message="Connection closed by peer [::1]:1",
)
STOPPED = End(2, "node-8", "stopped", T0 + 10.3, 21)
SLOTS = [
    {"rank": rank, "host": f"node-{6 + rank}", "ip": f"10.0.0.{rank}", "gpus": ["3"]}
    for rank in range(3)
]


def at(seconds: float, kind: str, **facts: Any) -> Event:
    return event(kind, t=T0 + seconds, **facts)


def report(seconds: float, step: int) -> Event:
    return at(seconds, "report", rank=0, step=step, values={})


def failure(first: End = KILLED, *others: End) -> Event:
    return changed(blame.failure_event(first, [first, *others], 0), t=T0 + 10.4)


LAUNCH = [
    at(0, "run", name="digits", dir="runs/x", pages=0),
    at(0.1, "plan", backend="gloo", world_size=3, slots=SLOTS),
    at(1, "phase", name="connect", s=1.0),
    *[report(1 + step * 0.4, step) for step in range(1, 21)],
]
BROKEN = [
    *LAUNCH,
    at(10.25, "stop", cause="failure", reason="a rank failed"),
    failure(KILLED, ECHO, STOPPED),
]
RESTART = [
    at(
        10.41,
        "restart",
        number=1,
        most=3,
        rank=1,
        host="node-7",
        how="killed",
        step=20,
        text="…",
        free=False,
    ),
    at(10.5, "placed", number=1, moved=[]),
    *[at(10.6 + rank / 100, "began", rank=rank, host="h", pid=1) for rank in range(3)],
    *[at(10.7 + rank / 100, "joined", rank=rank, pid=1) for rank in range(3)],
    at(10.8, "begin", rank=0, resumed=18),
    report(11.0, 19),
    at(11.01, "restarted", number=1, step=19, s=1.0, repeated=2),
]


def test_the_time_between_a_failure_and_the_next_step_is_told_part_by_part() -> None:
    (only,) = fold_failures([*BROKEN, *RESTART])
    parts = {
        "detect": 0.25,
        "kill": 0.15,
        "place": 0.1,
        "fork": 0.12,
        "rendezvous": 0.1,
        "restore": 0.08,
        "first step": 0.2,
    }
    assert only.parts == pytest.approx(parts)
    assert sum(only.parts.values()) == pytest.approx(only.s or 0)
    assert (only.status, only.repeated, only.resumed, only.slot["ip"]) == (
        "restarted",
        2,
        18,
        "10.0.0.1",
    )


def test_a_failure_that_ends_the_run_knows_what_is_on_the_disk() -> None:
    saved = at(10.6, "saved", rank=0, step=16, path="runs/x/checkpoints/step-16", s=0.1)
    (only,) = fold_failures(
        [*BROKEN, saved, at(10.7, "result", status="failed", why_last="enough", failure="…")]
    )
    assert (only.status, only.repeated, only.why_last) == ("failed", 5, "enough")
    assert only.parts["save"] == pytest.approx(0.3)
    text = page(only, "runs/x")
    for words in (
        "not restarted: enough",
        "step 16 is saved, 5 steps after it lost",
        "with resume=runs/x",
    ):
        assert words in text


def test_an_attempt_that_fails_before_it_restores_loses_no_checkpoint() -> None:
    saved = at(9, "saved", rank=0, step=16, path="/runs/x/checkpoints/step-16", s=0.1)
    again = changed(failure(), t=T0 + 12, cause={**asdict(KILLED), "at": T0 + 11.9}, reached=0)
    ended = at(12.5, "result", status="failed", why_last="enough", failure="…")
    _, last = fold_failures([*BROKEN[:-1], saved, BROKEN[-1], *RESTART[:-2], again, ended])
    assert (last.saved, last.repeated) == (16, 5)
    assert "the run ended; step 16 is saved, 5 steps after it lost\n" in page(last, "runs/x")


def test_what_a_program_that_reports_no_step_has_lost_is_unknown() -> None:
    silent = changed(failure(), reached=0)
    ended = at(10.7, "result", status="failed", why_last="enough", failure="…")
    (only,) = fold_failures([*BROKEN[:-1], silent, ended])
    assert only.repeated is None
    assert "the run ended\n" in page(only, "runs/x")


def test_a_checkpoint_of_a_second_fit_is_newer_than_all_of_the_first() -> None:
    first = at(2, "saved", rank=0, step=400, path="/runs/x/checkpoints/step-400", s=0.1)
    second = at(10.6, "saved", rank=0, step=16, path="/runs/x/checkpoints/fit-2/step-16", s=0.1)
    late = at(10.65, "saved", rank=0, step=8, path="/runs/x/checkpoints/fit-2/step-8", s=0.1)
    ended = at(10.7, "result", status="failed", why_last="enough", failure="…")
    (only,) = fold_failures([*BROKEN, first, second, late, ended])
    assert (only.checkpoint, only.repeated) == ("/runs/x/checkpoints/fit-2/step-16", 5)


def test_a_resumed_run_that_saves_nothing_still_has_the_checkpoint_it_came_from() -> None:
    earlier = "/runs/w/checkpoints/step-12"
    resumed = [*LAUNCH[:3], at(1, "begin", rank=0, resumed=12, checkpoint=earlier), *LAUNCH[3:]]
    ended = at(10.7, "result", status="failed", why_last="enough", failure="…")
    text = page_of(*resumed, *BROKEN[len(LAUNCH) :], ended)
    assert "step 12 is saved, 9 steps after it lost" in text
    assert f"with resume={earlier}" in text
    saved = at(9, "saved", rank=0, step=16, path="/runs/x/checkpoints/step-16", s=0.1)
    text = page_of(*resumed, saved, *BROKEN[len(LAUNCH) :], ended)
    assert "step 16 is saved, 5 steps after it lost" in text
    assert "with resume=runs/x" in text


@pytest.mark.parametrize(("key", "advised"), [("resume", False), ("train.loss_per", True)])
def test_a_checkpoint_that_the_job_refuses_is_not_advised(key: str, advised: bool) -> None:
    begin = at(1, "begin", rank=0, resumed=12, checkpoint="/runs/w/checkpoints/step-12")
    wrong = ConfigError.of(key, "/runs/w", "the model has other parameters")
    end = replace(KILLED, how="raised", signal=0, type="ConfigError", message=wrong.message)
    ended = at(10.7, "result", status="failed", why_last="enough", failure="…")
    text = page_of(*LAUNCH, begin, failure(end), ended)
    assert "correct the setting that the message names" in text
    assert ("to continue from the checkpoint" in text) == advised


def test_one_that_broke_again_before_its_first_step_is_a_failure_of_its_own() -> None:
    later = changed(failure(), t=T0 + 12, cause={**asdict(KILLED), "at": T0 + 11.9})
    first, second = fold_failures([*BROKEN, *RESTART[:-2], later])
    assert (first.status, first.s, second.status) == ("restarted", None, "running")
    assert second.page == "blame-2.txt"


def test_clocks_that_differ_make_no_negative_time() -> None:
    ahead = [
        *LAUNCH,
        at(10.25, "stop", cause="failure", reason="a rank failed"),
        failure(replace(KILLED, at=T0 + 11)),
    ]
    assert all(s >= 0 for only in fold_failures([*ahead, *RESTART]) for s in only.parts.values())


def page_of(*events: Event) -> str:
    (only,) = fold_failures(events)
    return page(only, "runs/x")


def test_the_page_of_a_restart() -> None:
    text = page_of(*BROKEN, *RESTART)
    for words in (
        "rank 1 on node-7, step 20, in forward: killed by SIGKILL",
        "follow-on: rank 0: RuntimeError: Connection closed by peer",
        "node: host node-7, address 10.0.0.1, GPU 3",
        "rank 0's error is typical of losing a peer",
        "1.00 s until the next step, 2 steps repeated",
        "detect 0.25 + kill 0.15 + place 0.10 + fork 0.12 + rendezvous 0.10 + restore 0.08 + "
        "first step 0.20 = 1.00 s",
        "restart 1 of at most 3",
        "resumed after step 18",
        "what ends processes on that node",
    ):
        assert words in text


def test_the_number_of_a_restart_after_failures_that_no_longer_count_has_no_limit() -> None:
    text = page_of(*BROKEN, changed(RESTART[0], number=7), *RESTART[1:])
    assert "restart 7: all ranks forked again on their nodes" in text


def test_the_page_tells_who_moved_and_who_only_got_a_new_actor() -> None:
    """And the next page has the place where the rank is then."""
    slots = [{**slot, "node": str(slot["rank"])} for slot in SLOTS]
    later = [
        {**slots[0]},
        {**slots[1], "host": "node-9", "ip": "10.0.0.9", "node": "9"},
        {**slots[2]},
    ]
    launch = [
        at(0, "run", name="x", dir="runs/x"),
        at(0.1, "plan", backend="gloo", world_size=3, slots=slots),
    ]
    lost = failure(replace(KILLED, how="lost", signal=0, why=OOM.why, oom="kernel"), ECHO)
    again = [
        changed(each, moved=[1, 2], slots=later) if isinstance(each, kinds.Placed) else each
        for each in RESTART
    ]
    first, second = fold_failures([*launch, lost, *again, failure()])
    text = page(first, "runs/x")
    for words in (
        "rank 1 on node-7, last heartbeat at step 20, in forward: lost: out of memory",
        "node: host node-7, address 10.0.0.1",
        "all ranks forked again on other nodes",
        "another node for rank 1: node-9",
        "a new actor for rank 2: node-8",
    ):
        assert words in text
    assert (first.moved, first.renewed) == ({1: "node-9"}, {2: "node-8"})
    assert "node: host node-9, address 10.0.0.9" in page(second, "runs/x")


def test_a_restart_for_which_there_was_no_place_is_told_as_that() -> None:
    """And the time went with the wait for one."""
    end = at(40.4, "result", status="failed", failure="gave up after 30 s", why_last="")
    (only,) = fold_failures([*BROKEN, RESTART[0], end])
    assert only.parts == pytest.approx({"detect": 0.25, "kill": 0.15, "place": 30.0})
    assert "restart 1 of at most 3, but Ray could not place all ranks: gave up" in page(
        only, "runs/x"
    )


def test_nothing_in_a_page_moves_the_cursor() -> None:
    assert "\x1b" not in page_of(*LAUNCH, failure(replace(ECHO, message="\x1b[2Jgone")))


RAISED = replace(KILLED, how="raised", signal=0, type="ValueError")
HUNG = replace(
    KILLED, how="hung", signal=9, message="rank 1 on node-7 is stopped by a signal (SIGSTOP)"
)


def test_what_further_witnesses_say_of_a_hang_is_on_the_page() -> None:
    note = "no frames of C code of rank 1 on node-7: py-spy is not installed: pip install py-spy"
    assert f"also: {note}\n" in page_of(*LAUNCH, failure(replace(HUNG, notes=(note,))))
    assert "also:" not in page_of(*LAUNCH, failure(HUNG))


OOM = replace(KILLED, oom="kernel", why="out of memory: the kernel's out-of-memory killer chose it")


@pytest.mark.parametrize(
    ("first", "others", "reason", "advice"),
    [
        (KILLED, [], "the only rank that failed", "what ends processes"),
        (OOM, [], "the only rank that failed", "the memory of the ranks"),
        (replace(KILLED, how="lost", signal=0), [ECHO], "rank 0's error is typical", "whether the node is up"),
        (replace(KILLED, how="lost", why="out of memory: Ray's memory monitor ended its actor", oom="ray"),
         [], "the only rank", "RAY_memory_usage_threshold"),
        (HUNG, [], "what the ranks were doing", "kill -STOP"),
        (replace(HUNG, message="ranks wait"), [], "what the ranks were doing", "compare the stacks"),
        (ECHO, [], "the rank that failed first is not known", "read the logs"),
        (ECHO, [replace(ECHO, rank=1)], "the rank that failed first is not known", "read the logs"),
        (KILLED, [replace(KILLED, rank=3, at=KILLED.at + 0.5)], "the first of 2 possible causes, 0.500 s",
         "what ends processes"),
        (KILLED, [replace(KILLED, rank=3, at=KILLED.at - 0.1, how="exited", code=1, signal=0)],
         "rank 3 exited first", "what ends processes"),
        (replace(RAISED, type="OutOfMemoryError", message="CUDA out of memory."), [], "the only", "data.batch_size"),
        (replace(KILLED, signal=signal.SIGBUS), [], "the only", "/dev/shm"),
        (replace(KILLED, signal=signal.SIGSEGV), [], "the only", "native stack"),
        (replace(KILLED, signal=signal.SIGABRT), [], "the only", "native stack"),
        (replace(KILLED, signal=signal.SIGABRT, message="free(): invalid pointer"), [replace(KILLED, rank=3)],
         "the first of 2", "native stack"),
        (replace(RAISED, message="unable to allocate shared memory(shm) for file </torch_7_8>: No space left on device (28)"),
         [], "", "/dev/shm"),
        (replace(RAISED, type="OSError", message="[Errno 28] No space left on device"), [], "", "space on the disk"),
        (replace(RAISED, type="ConfigError"), [], "", "correct the setting"),
        (RAISED, [], "", "last line shown"),
        (replace(RAISED, message="CUDA error: unknown; GPU 1 has fallen off the bus"), [], "", "dmesg for the Xid"),
        (replace(HUNG, message="silent; NVML has counted 2 uncorrectable ECC errors"), [], "", "dmesg for the Xid"),
        (replace(KILLED, how="drained", preempted=True), [], "nothing has failed", "if Ray found another node"),
    ],
)  # fmt: skip
def test_why_that_one_and_what_to_do(
    first: End, others: list[End], reason: str, advice: str
) -> None:
    text = page_of(*LAUNCH, failure(first, *others))
    assert reason in text.partition("\nreason\n")[2].partition("\ncost\n")[0]
    assert advice in text.partition("\nadvice\n")[2]


def test_every_rule_has_its_case() -> None:
    assert advice_for(replace(KILLED, how="ended", signal=0)) == advice_for(ECHO)
    assert advice_for(replace(KILLED, how="finished", signal=0)) == ""
    assert len({words for _, words in RULES}) == len(RULES)


def test_pages_are_written_when_they_are_known_and_none_is_ever_written_over(
    tmp_path: Path,
) -> None:
    for used in range(2):
        assert page_files.last_page(tmp_path) == used
        failures = Failures()
        with Events(tmp_path / "events.jsonl", (failures.add, Pages(tmp_path, failures))) as events:
            for happened in BROKEN:
                first = isinstance(happened, kinds.Run)
                events.add(changed(happened, pages=used) if first else happened)
            path = tmp_path / f"blame-{used + 1}"
            assert json.loads(path.with_suffix(".json").read_text())["status"] == "running"
            for happened in RESTART:
                events.add(happened)
            assert json.loads(path.with_suffix(".json").read_text())["status"] == "restarted"
            assert "resumed after step 18" in path.with_suffix(".txt").read_text()


def test_a_page_that_finds_a_full_disk_is_a_warning_and_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a blame-1.json stayed, which no program can read."""

    def full(path: Path, data: str | bytes, *_: Any, **more: Any) -> None:
        with path.open("w" if isinstance(data, str) else "wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, full)
    failures, seen = Failures(), list[Event]()
    readers = (failures.add, Pages(tmp_path, failures), seen.append)
    with Events(tmp_path / "events.jsonl", readers) as events:
        for happened in BROKEN:
            events.add(happened)
    warnings = [each for each in seen if isinstance(each, kinds.Warning)]
    assert ["No space left on device" in each.text for each in warnings] == [True]
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]


def spent(*events: Event) -> Spent:
    counter = Spent()
    for happened in events:
        counter.add(happened)
    return counter


def test_where_the_time_of_a_run_went() -> None:
    """19 steps of 0.4 s, two of them done again; a second of restart; two steps more, an evaluation
    between them."""
    end = [
        at(11.5, "spent", rank=0, what="evaluate", s=0.3),
        report(11.8, 20),
        at(11.9, "spent", rank=0, what="save", s=0.05),
        at(12, "ended", rank=0),
    ]
    parts = spent(*BROKEN, *RESTART, *end).parts(12.0, T0 + 12)
    steps = 19 * 0.4 - 2 * 0.4 + (0.8 - 0.3)
    known = {
        "steps": steps,
        "launch": 1.0,
        "failures": 1.0,
        "repeated steps": 0.8,
        "evaluation": 0.3,
        "saves": 0.05,
    }
    assert parts == pytest.approx({**known, "rest": 12 - sum(known.values())})


def test_steps_are_repeated_also_after_an_attempt_that_made_none() -> None:
    """The second attempt fails before its first step, and the third one repeats the two steps."""
    second = changed(blame.failure_event(KILLED, [KILLED, ECHO], 0), t=T0 + 10.6)
    counter = spent(*BROKEN, *RESTART[:2], second, *RESTART)
    assert counter.repeated_s == pytest.approx(0.8)


def test_each_training_of_a_job_counts() -> None:
    second = [
        at(10, "begin", rank=0, steps=5),
        *[report(10 + step * 0.4, step) for step in range(1, 6)],
    ]
    first = at(9.5, "done", rank=0, spent={"step": 7.0, "evaluate": 0.5, "save": 0.25})
    last = at(12.5, "done", rank=0, spent={"step": 1.5, "evaluate": 0.25, "save": 0.25})
    assert spent(*LAUNCH, first, *second).step_s == pytest.approx(7.0 + 4 * 0.4)
    parts = spent(*LAUNCH, first, *second, last).parts(12.5, T0 + 12.5)
    expected = {"steps": 8.5, "evaluation": 0.75, "saves": 0.5}
    assert {name: parts[name] for name in expected} == expected


def test_a_loop_that_counts_by_itself_is_believed() -> None:
    done = at(9.5, "done", rank=0, spent={"step": 7.0, "evaluate": 0.5, "save": 0.25})
    parts = spent(*LAUNCH, at(9.4, "spent", rank=0, what="save", s=0.25), done).parts(10.0, T0 + 10)
    expected = {"steps": 7.0, "evaluation": 0.5, "saves": 0.25}
    assert {name: parts[name] for name in expected} == expected


def test_a_launch_after_a_failure_is_part_of_it() -> None:
    assert spent(*BROKEN, at(10.5, "phase", name="warm-up", s=9.0)).launch_s == 1.0


def test_failures_know_what_became_of_them_only_when_it_is_known() -> None:
    (only,) = fold_failures(BROKEN)
    assert isinstance(only, Failure)
    assert (only.s, only.repeated, only.status) == (None, None, "running")
    assert "recovery" not in page(only, "runs/x")


def test_a_launch_ends_with_a_step_and_no_part_of_it_is_negative() -> None:
    """A loop that waits for nobody does its first step before the others are there; and clocks of
    hosts differ."""

    def parts(*happened: Event) -> dict[str, float]:
        launch, result = Arrival(2, T0), dict[str, float]()
        for each in happened:
            over = {part.name: part.s for part in launch.add(each)}
            assert not result.keys() & over.keys()
            result |= over
        return result

    one, other = (at(second, "joined", rank=rank, pid=1) for rank, second in ((0, 0.25), (1, 0.75)))
    early, late = report(0.5, 1), report(1.0, 1)
    assert parts(one, other, late, report(1.5, 2)) == {"rendezvous": 0.75, "first step": 0.25}
    assert parts(other, one, late) == {
        "rendezvous": 0.75,
        "first step": 0.25,
    }  # received in another order
    assert (
        parts(one, early, other)
        == parts(one, other, early)
        == {"rendezvous": 0.75, "first step": 0.0}
    )
    assert parts(one, at(-0.5, "joined", rank=1, pid=1), at(0.3, "report", rank=0, values={})) == {
        "rendezvous": 0.25
    }
