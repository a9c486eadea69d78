"""Events -> what the page shows: curves, lanes, sections; and what a viewer is sent."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.reporting.curves import Curve, thinned
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.watch.web import mirror
from raydist.watch.web.follow import LOOKED_S, FollowedRun, SameFile, Silence, Viewer, read_from
from raydist.watch.web.lanes import COLUMNS, Lanes
from raydist.watch.web.mirror import Mirror, stored
from raydist.watch.web.model import Model
from raydist.watch.web.node_figures import port_rates
from raydist.watch.web.runs import TAIL, find_place, run_row
from raydist.watch.web.server import PageServer
from tests.records import changed, event, line


def happened(t: float, kind: str, **facts: Any) -> Event:
    return event(kind, t=t, **facts)


def slots(*hosts: str) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "host": host, "ip": "10.0.0.1", "node": host}
        for rank, host in enumerate(hosts)
    ]


def report(t: float, step: int | str, rank: int = 0, **values: Any) -> Event:
    return happened(t, "report", rank=rank, step=step, values={"steps": 100, **values})


CAUSE = {"rank": 1, "host": "node-b", "how": "killed", "step": 5, "at": 6.0}
RUN = [
    happened(0, "run", name="mine", dir="runs/mine/x", target="mine.py:job", pages=0),
    happened(1, "cluster", address="10.0.0.1:6379", nodes=2, started=False),
    happened(1, "phase", name="connect", s=1.0),
    happened(1, "plan", backend="gloo", world_size=2, slots=slots("node-a", "node-b")),
    happened(2, "began", rank=1, host="node-b", pid=12),
    happened(2, "joined", rank=1, pid=12),
    *[report(2 + step / 2, step, loss=1 / step, lr=0.1) for step in range(1, 7)],
    report(5, 6, rank=1),
    happened(5.5, "saved", rank=0, step=4, path="checkpoints/step-4", s=0.2),
    happened(6, "ended", rank=1, how="killed", code=0, signal=9, step=5),
    happened(6.5, "failure", cause=CAUSE, text="rank 1 on node-b: killed\n  more", reason="the only one", reached=6,
             others=[], ended=[]),
    happened(6.6, "restart", number=1, most=3, rank=1, host="node-b", how="killed", step=5, text="rank 1 on node-b"),
    *[report(7 + step / 2, step, loss=2 / step, lr=0.1) for step in range(5, 9)],
]  # fmt: skip


def fold(events: list[Event]) -> Model:
    model = Model()
    for each in events:
        model.add(each)
    return model


@pytest.mark.parametrize("kind", kinds.leaves(kinds.StartsAttempt))
def test_whatever_starts_an_attempt_starts_one_on_the_page(kind: type[Event]) -> None:
    fields = {"step": 5} if kind is kinds.Restart else {}
    model = fold([*RUN[:11], event(kind.kind, t=6, text="3 nodes now, 2 before", **fields)])
    sections = model.sections()
    assert sections["state"]["attempt"] == 2
    assert sections["state"]["waits"] == "for the restart"
    (mark,) = [mark for mark in sections["marks"]["marks"] if mark["kind"] == "restart"]
    assert (mark["step"], mark["text"]) == (5, "3 nodes now, 2 before")


def test_a_comparison_is_shown_unless_a_step_differs_which_is_a_warning() -> None:
    found = event("checked", t=9, text="step 5 as before", resumed=4, steps=1)
    model = fold([*RUN, found])
    assert model.sections()["state"]["checked"] == "step 5 as before"
    model.add(changed(found, differs=5, what="loss"))
    assert model.sections()["state"]["checked"] == ""


def test_a_curve_has_each_step_once_whatever_was_repeated() -> None:
    loss = fold(RUN).curves["loss"]
    assert list(loss.steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(loss.values) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 2 / 5, 2 / 6, 2 / 7, 2 / 8])
    assert loss.cuts == 1


def test_a_run_that_goes_on_in_its_folder_goes_on_with_its_curves() -> None:
    again = [
        happened(20, "run", name="mine", dir="x", target="", pages=1),
        happened(20.5, "report", rank=0, values={"loss": 6.0}),  # before the first step
        report(21, 8, loss=5.0),
        report(22, 9, loss=4.0),
    ]
    model = fold(RUN + again)
    assert list(model.curves["loss"].steps) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (model.attempt, model.figures.failures.found) == (1, [])
    state = model.sections()["state"]
    assert (state["began"], state["run_began"]) == (0, 20)
    assert min(model.curves["loss"].times) >= state["began"]


def test_what_is_no_number_is_a_gap() -> None:
    model = fold(
        [
            report(1, 1, loss=1.0),
            report(2, 2, loss=math.nan),
            report(3, 3, loss=math.inf, note="text"),
        ]
    )
    assert model.curves["loss"].piece() == ([1, 2, 3], [1, 2, 3], [1.0, None, None], [])
    assert "note" not in model.curves


@pytest.mark.parametrize("count", [10, 1199, 1201, 100_000])
def test_a_thinned_curve_keeps_its_ends_and_extremes(count: int) -> None:
    values = [math.sin(i / 50) for i in range(count)]
    values[count // 3], values[count // 2], values[count // 4] = 9.0, -9.0, math.nan
    chosen = thinned(values, 0, count, 1200)
    assert len(chosen) <= 1200
    assert {0, count // 3, count // 2, count // 4, count - 1} <= set(chosen)
    assert list(chosen) == sorted(set(chosen))


def test_a_stretch_of_a_curve_has_all_its_points() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(step, step / 10, float(step))
    assert curve.piece(100, 104).steps == [100, 101, 102, 103, 104]
    assert curve.piece(10, 10.2, by="time").steps == [100, 101, 102]
    assert len(curve.piece().steps) <= 1200


def test_a_thinned_curve_has_the_mean_of_what_was_left_out() -> None:
    """Its points are extremes: what smooths them alone would follow the rare spikes."""
    curve = Curve()
    for step in range(10_000):
        curve.add(step, float(step), math.nan if step == 5 else 101.0 if step % 97 == 0 else 1.0)
    steps, _, values, means = curve.piece()
    assert len(steps) == len(means) < 1300
    assert (values[0], means[0]) == (101.0, 101.0)  # the first point has none before it
    ends = [*steps, 10_000]
    total = sum(
        mean * (step - before)
        for mean, step, before in zip(means[1:], ends[1:], ends, strict=False)
        if mean is not None
    )
    assert total / 10_000 == pytest.approx(1 + 100 / 97, rel=0.02)
    assert curve.piece(100, 110).means == []


def test_lanes_stay_small_and_keep_the_greatest() -> None:
    lanes = Lanes()
    for i in range(5 * COLUMNS):
        slow = {"1": (i, 0.9 if i == 333 else 0.1, 1.0)} if i >= 100 else {}
        lanes.add(float(i), {"0": (i, 0.5, 1.0), **slow})
    assert len(lanes.times) == len(lanes.shares[0]) == len(lanes.shares[1]) < 2 * COLUMNS
    assert lanes.shares[1][0] == -1
    assert max(lanes.shares[1]) == 90
    assert set(lanes.shares[0]) == {50}


def test_the_sections_of_a_run_that_was_restarted() -> None:
    sections = fold(
        [*RUN, happened(11, "pace", ranks={"0": [8, 0.2, 0.5], "1": [8, 0.4, 0.5]})]
    ).sections()
    state = sections["state"]
    assert (state["status"], state["attempt"], state["step"], state["steps"]) == (
        "running",
        2,
        8,
        100,
    )
    assert list(sections["ranks"]["ranks"]) == [
        1,
        0,
    ]  # the one with the most own work first… and it has failed
    assert sections["ranks"]["ranks"][1] == (8, "node-b", 12, 0.4, 0.5, "failed: killed")
    assert sections["lanes"]["shares"] == {1: [80], 0: [40]}
    (failure,) = sections["failures"]["failures"]
    assert (failure["rank"], failure["host"], failure["step"], failure["how"]) == (
        1,
        "node-b",
        5,
        "killed",
    )
    assert (failure["page"], failure["text"]) == ("blame-1.txt", "rank 1 on node-b: killed")
    assert [(mark["kind"], mark["step"]) for mark in sections["marks"]["marks"]] == [
        ("save", 4),
        ("restart", 5),
    ]
    assert sections["launch"]["launch"] == {"connect": 1.0}


def test_a_rank_that_goes_on_hangs_no_more() -> None:
    hang = happened(12, "hang", text="rank 1 sleeps", ranks=[1], certain=False, s=9.0)
    model = fold([*RUN, happened(11, "pace", ranks={"1": [8, 0.4, 0.5]}), hang])
    assert model.ranks[1].state == "hangs"
    model.add(happened(12.5, "pace", ranks={"1": [8, 0.4, 0.5]}))
    assert model.ranks[1].state == "hangs"
    model.add(report(12.8, 9, rank=1))
    model.add(happened(13, "pace", ranks={"1": [9, 0.4, 0.5]}))
    assert model.ranks[1].state == "runs"


def test_a_run_with_another_number_of_ranks_has_this_number() -> None:
    one = happened(
        12, "resize", backend="gloo", world_size=1, slots=slots("node-a"), nodes=1, before=2
    )
    assert fold([*RUN, one]).sections()["state"]["world_size"] == 1


def test_values_without_a_step_belong_to_the_newest_one() -> None:
    steps = [report(float(step), 10 * step, loss=1.0) for step in range(1, 101)]
    model = fold([*RUN[:6], *steps, happened(102, "report", rank=0, step=None, values={"acc": 1})])
    assert model.steps[0] == 1000
    assert list(model.curves["acc"].steps) == [1000]
    assert list(model.curves["steps/s"].steps)[-1] == 1000


def test_a_rank_that_slowed_the_others_is_no_alarm_after_a_restart() -> None:
    slow = happened(5.9, "slow", text="rank 1 on node-b slows the others", ranks=[])
    restart = RUN.index(next(each for each in RUN if each.kind == "restart"))
    model = fold([*RUN[:restart], slow])
    assert model.sections()["state"]["slow"] == "rank 1 on node-b slows the others"
    model.add(RUN[restart])
    assert model.sections()["state"]["slow"] == ""


@pytest.mark.parametrize(
    ("last", "waits"),
    [
        (RUN[0], "for Ray"),
        (happened(1, "wait", text="2 nodes with 8 GPUs"), "2 nodes with 8 GPUs"),
        (happened(1, "phase", name="warm-up", s=1.0), "until all ranks have met"),
        (
            happened(1, "hang", text="rank 3 sleeps", ranks=[3], certain=False, s=9.0),
            "rank 3 sleeps",
        ),
        (happened(1, "stop", reason="a rank failed"), "until all ranks have ended: a rank failed"),
        (report(1, 1), ""),
    ],
)
def test_what_a_run_waits_for(last: Event, waits: str) -> None:
    assert fold([last]).waits == waits


def test_a_program_that_reports_no_step_waits_until_it_makes_one() -> None:
    model = fold([happened(1, "phase", name="rendezvous", s=1.0)])
    assert model.waits == "for the first step"
    model.add(happened(2, "pace", ranks={"0": [5, 0, 0]}))
    assert model.waits == ""
    model.add(happened(70, "hang", text="rank 3 sleeps", ranks=[3], certain=False, s=60.0))
    model.add(happened(75, "pace", ranks={"0": [5, 0, 0]}))
    assert model.waits == "rank 3 sleeps"
    model.add(happened(85, "pace", ranks={"0": [6, 0, 0]}))
    assert model.waits == ""
    assert model.sections()["state"]["goodput"] is None


def test_bytes_become_rates() -> None:
    now, before = {"eth0": [300, 80], "ib0": [5, 5]}, {"eth0": [100, 100]}
    assert port_rates(now, before, 10) == {"eth0": [20, 0], "ib0": None}


def write(folder: Path, events: list[Event], torn: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(line(each) for each in events) + torn)
    return folder


def test_a_viewer_gets_only_what_is_new(tmp_path: Path) -> None:
    run = FollowedRun(write(tmp_path / "r", RUN[:9], torn='{"t": 1'))
    assert (
        asyncio.run(run.catch_up()) == 1.0
    )  # of the whole lines: the rest of this one is still to come, or never comes
    viewer = Viewer(run)
    first = {name: json.loads(text) for name, text in viewer.news(1.0)}
    assert first["curves"]["loss"] == [True, [[1, 2, 3], [2.5, 3, 3.5], [1.0, 0.5, 0.333333], []]]
    assert list(viewer.news(1.0)) == []
    write(run.folder, RUN[:10])
    asyncio.run(run.catch_up())
    again = {name: json.loads(text) for name, text in viewer.news(1.0)}
    assert again["curves"]["loss"] == [False, [[4], [4.0], [0.25], []]]
    assert set(again) == {"state", "ranks", "curves", "launch"}
    write(run.folder, RUN)
    asyncio.run(run.catch_up())
    replaced, (steps, *_) = json.loads(dict(viewer.news(1.0))["curves"])["loss"]
    assert (replaced, steps) == (True, [1, 2, 3, 4, 5, 6, 7, 8])


def test_a_folder_that_is_made_anew_is_another_run(tmp_path: Path) -> None:
    run = FollowedRun(write(tmp_path / "r", RUN))
    asyncio.run(run.catch_up())
    viewer = Viewer(run)
    assert dict(viewer.news(1.0)).keys() >= {"curves"}
    again = [
        happened(30, "run", name="other", dir="x", target="x", pages=0),
        report(31, 1, accuracy=1.0),
    ]
    for count in (
        2,
        200,
    ):  # shorter than what was read, and longer: in a file that may have the same inode
        (run.folder / "events.jsonl").unlink()
        asyncio.run(run.catch_up())  # it is not there: nothing is forgotten yet
        write(
            run.folder,
            [changed(each, t=each.t + count) for each in again] + [happened(60, "x")] * count,
        )
        asyncio.run(run.catch_up())
        assert run.model.run
        assert (run.model.run.name, [*run.model.curves]) == ("other", ["accuracy"])
        assert run.read == (run.folder / "events.jsonl").stat().st_size
        replaced, (steps, *_) = json.loads(dict(viewer.news(1.0))["curves"])["accuracy"]
        assert (replaced, steps) == (True, [1])
    assert run.files == 3


def test_a_file_is_another_one_if_its_beginning_differs_or_it_is_shorter(tmp_path: Path) -> None:
    path, file = tmp_path / "a", SameFile()
    path.write_text("one")
    assert not file.is_another(path, 0)
    path.write_text("one\ntwo")
    assert not file.is_another(path, 3)
    path.write_text("One\ntwo\nthree")
    assert file.is_another(path, 7)
    assert not file.is_another(path, 7)
    path.write_text("One\n")
    assert file.is_another(path, 7)
    (tmp_path / "b").write_text("One\ntwo")
    (tmp_path / "b").replace(path)
    assert file.is_another(path, 4)


def test_silence_does_not_go_by_the_clock_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    now, wall = 100.0, 5000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: wall)
    silence = Silence()
    silence.look(10)
    assert silence.seconds(last=wall - 70) == 70  # nobody has seen it come
    assert silence.seconds(last=wall + 300) == 0
    now += 5
    silence.look(20)
    now += 7
    silence.look(20)
    assert silence.seconds(last=wall - 3600) == silence.seconds(last=wall + 3600) == 7
    now += LOOKED_S + 1
    silence.look(30)  # it may have come at any time since
    assert silence.seconds(last=wall - 20) == 20


def test_a_line_that_a_crash_cut_off_hides_nothing(tmp_path: Path) -> None:
    run = FollowedRun(
        write(tmp_path / "r", RUN, torn='{"t": 1, "ki{"t": 9, "kind": "warning", "text": "x"}\n')
    )
    assert asyncio.run(run.catch_up()) == 1.0
    assert list(run.model.curves["loss"].steps)[-1] == 8


def test_an_event_that_the_page_cannot_read_hides_no_other_and_is_read_once(tmp_path: Path) -> None:
    broken = [
        report(20, "nine", loss=1.0),
        kinds.from_json({"t": 21.0, "kind": "report", "rank": 0}),
        report(22, 10, loss=0.1),
    ]
    run = FollowedRun(write(tmp_path / "r", RUN + broken))
    for _ in range(2):
        assert asyncio.run(run.catch_up()) == 1.0
    assert run.read == (run.folder / "events.jsonl").stat().st_size
    assert list(run.model.curves["loss"].steps)[-2:] == [8, 10]
    assert run.model.report_count == 12
    warnings = run.model.sections()["warnings"]["warnings"]
    assert all("the page cannot show an event `report`" in text for text in warnings)
    assert len(warnings) == 2


def test_the_end_of_a_log_then_what_is_added(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert read_from(log, -1) == ("", -1)
    log.write_text("".join(f"line {i}\n" for i in range(50_000)) + "half")
    text, at = read_from(log, -1)
    assert text.startswith("line ")
    assert text.endswith("line 49999\n")
    assert read_from(log, at) == ("half", at + 4)
    with log.open("a") as file:
        file.write(" a line\nnext\n")
    assert read_from(log, at)[0] == "half a line\nnext\n"


def test_runs_are_found_by_folder_and_by_age(tmp_path: Path) -> None:
    old = write(tmp_path / "runs/a/old", RUN)
    new = write(
        tmp_path / "runs/b/new",
        [*RUN, happened(20, "result", status="failed", failure="it broke\nmore")],
    )
    os.utime(old / "events.jsonl", (1, 1))
    write(tmp_path / "runs/b/.raydist-doctor-x", RUN)  # the doctor has it while it runs
    assert find_place("newest", tmp_path / "runs") == (new.parent, "new")
    assert find_place(str(old), tmp_path) == (old.parent, "old")
    assert find_place(str(tmp_path / "runs"), tmp_path) == (tmp_path / "runs", "")
    assert (run_row("b/new", new)["status"], run_row("b/new", new)["text"]) == (
        "failed",
        "it broke",
    )
    assert run_row("a/old", old)["status"] == "no events"
    os.utime(old / "events.jsonl")
    assert run_row("a/old", old)["status"] == "running"
    work = {str(rank): [0.123456789, 0.23456789] for rank in range(4096)}
    large = write(
        tmp_path / "runs/c/large", [*RUN, happened(20, "result", status="finished", work=work)]
    )
    assert (large / "events.jsonl").stat().st_size > 2 * TAIL
    assert run_row("c/large", large)["status"] == "finished"
    write(large, [happened(20, "result", status="finished"), happened(21, "run", name="mine")])
    assert run_row("c/large", large)["status"] == "running"


def test_a_run_in_a_hidden_folder_has_a_page_if_it_is_the_first(tmp_path: Path) -> None:
    write(tmp_path / ".scratch", RUN)
    request: Any = SimpleNamespace(query={})
    found = PageServer(tmp_path, ".scratch", "token").run(request)
    assert found.folder == tmp_path / ".scratch"


def test_files_from_elsewhere_come_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, calls = write(tmp_path / "store/run", RUN), []
    read_stored, late = stored(there), asyncio.Event()

    async def reader(name: str, follow: bool) -> AsyncIterator[bytes]:
        calls.append(name)
        async for block in read_stored(name, follow):
            yield block
        if name == EVENTS:  # a job that continues
            await late.wait()
            yield line(report(12, 9, loss=1.0)).encode()
            await asyncio.Event().wait()

    monkeypatch.setattr(mirror, "AGAIN_S", 0.01)
    here = Mirror(tmp_path / "here", reader, grows=True)
    run = FollowedRun(here.folder, here.fetch)

    async def look() -> None:
        await run.catch_up()
        assert list(run.model.curves["loss"].steps)[-1] == 8
        late.set()
        while len(run.model.curves["loss"].steps) < 9:
            await run.catch_up()
        await here.fetch("logs/rank-1.log")
        assert not (here.folder / "logs/rank-1.log").exists()
        (there / "logs").mkdir()
        (there / "logs/rank-1.log").write_text("it is late\n")
        while not (here.folder / "logs/rank-1.log").exists():
            await here.fetch("logs/rank-1.log")
            await asyncio.sleep(0.01)
        assert [line for _, _, line in run.search("LATE")] == ["it is late"]

    asyncio.run(asyncio.wait_for(look(), 20))
    assert calls.count(EVENTS) == 1


def test_a_program_that_runs_again_without_a_step_waits_for_nothing() -> None:
    run = [
        *RUN[:3],
        happened(
            6.5, "failure", cause=CAUSE, text="rank 1", reason="", reached=0, others=[], ended=[]
        ),
        happened(
            7,
            "restart",
            number=1,
            most=3,
            rank=1,
            host="node-b",
            how="killed",
            step=0,
            text="rank 1",
            free=False,
        ),
    ]
    assert fold(run).waits == "for the restart"
    model = fold([*run, happened(8, "restarted", number=1, step=0, s=2.0, repeated=0)])
    assert model.waits == ""
