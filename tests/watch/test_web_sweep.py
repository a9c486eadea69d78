"""The folder of a sweep -> what its page shows; and its line in the list of runs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.watch.web.runs import MAX_RUNS, find_place, list_rows
from raydist.watch.web.sweep import Axis, FollowedSweep, SweepViewer, axes, trials_shown


def record(
    number: int, state: str, values: dict[str, Any], step: int = 10, **settings: str
) -> dict[str, Any]:
    return {"number": number, "settings": settings, "state": state, "step": step, "values": values, "why": "",
            "wall_s": 1.0, "dir": str(number)}  # fmt: skip


def sweep_json(
    folder: Path, trials: list[dict[str, Any]], space: dict[str, str], **facts: Any
) -> Path:
    """Write a folder like that of a sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"state": "running", "space": space, "objectives": [{"name": "loss", "direction": "minimize"}],
               "best": [], "sampler": "grid", "prune": "asha", "importance": {}, "trials": trials, **facts}  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(summary))
    return folder


def section(sweep: FollowedSweep) -> Any:
    return asyncio.run(sweep.section())


def test_the_best_is_first_and_what_has_no_value_last(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"loss": 0.1},
        {"loss": 0.3},
        {"loss": "nan"},
        {},
        {"loss": 0.2},
    ]
    states = ["paused", "finished", "failed", "waiting", "finished"]
    trials = [
        record(n, state, one, lr="0.1")
        for n, (state, one) in enumerate(zip(states, values, strict=True))
    ]
    sweep = FollowedSweep(sweep_json(tmp_path / "s", trials, {"lr": "0.1,0.2"}, best=[4]))
    assert [each["trial"] for each in section(sweep)["trials"]] == [4, 0, 1, 2, 3]
    assert section(sweep)["trials"][3]["values"] == {"loss": None}
    objectives = [{"name": "loss", "direction": "maximize"}]
    sweep_json(tmp_path / "s", trials, {"lr": "0.1,0.2"}, objectives=objectives)  # it has changed
    assert [each["trial"] for each in section(sweep)["trials"]] == [1, 4, 0, 2, 3]
    sweep_json(tmp_path / "s", trials, {"lr": "0.1,0.2"}, objectives=[])
    assert [each["trial"] for each in section(sweep)["trials"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "values", "axis"),
    [
        ("mlp,cnn", ["mlp", "cnn"], Axis("x", "choice", ["mlp", "cnn"])),
        ("64,8,16", ["64", "8", "16"], Axis("x", "choice", ["8", "16", "64"])),
        ("0.1,auto", ["0.1", "auto"], Axis("x", "choice", ["0.1", "auto"])),
        ("interval(1,2)", ["1.5", "1.25"], Axis("x", "linear", [1.25, 1.5])),
        ("interval(1e-4,1)", ["0.001", "0.1"], Axis("x", "log", [0.001, 0.1])),
        ("tag(log, interval(1,2))", ["1.5", "1.25"], Axis("x", "log", [1.25, 1.5])),
        ("interval(-1,100)", ["-0.1", "90"], Axis("x", "linear", [-0.1, 90.0])),
        ("range(1,20)", [str(n) for n in range(1, 20)], Axis("x", "linear", [1.0, 19.0])),
    ],
)
def test_the_axis_of_a_setting(text: str, values: list[str], axis: Axis) -> None:
    trials = [record(n, "finished", {}, x=value) for n, value in enumerate(values)]
    summary = {"space": {"x": text}, "objectives": [{"name": "loss", "direction": "minimize"}], "best": [],
               "trials": trials}  # fmt: skip
    assert list(axes(trials_shown(summary), summary)) == [axis]
    trials[0]["values"] = {"loss": 2}
    assert list(axes(trials_shown(summary), summary)) == [
        axis,
        Axis("loss", "linear", [2.0, 2.0], objective=True),
    ]


def test_a_trial_under_way_is_as_far_as_its_events_say(tmp_path: Path) -> None:
    trials = [
        record(0, "finished", {"loss": 0.5}, lr="1"),
        record(1, "running", {}, step=0, lr="2"),
    ]
    sweep = FollowedSweep(sweep_json(tmp_path / "s", trials, {"lr": "1,2"}, best=[0]))
    assert [each["step"] for each in section(sweep)["trials"]] == [10, 0]  # it has no events yet
    with Events(tmp_path / "s/1/events.jsonl") as events:
        for step in range(1, 501):
            events.add(kinds.Report(rank=0, step=step, values={"loss": 1 / step, "lr": 0.1}))
    shown = section(sweep)["trials"][1]
    assert (shown["trial"], shown["step"], shown["values"]) == (1, 500, {"loss": 1 / 500})
    curves = asyncio.run(sweep.curves())
    assert curves.keys() >= {"loss", "lr"}
    assert curves["loss"].keys() == {1}
    steps, values = curves["loss"][1]
    assert len(steps) == len(values) <= 240
    assert (steps[0], steps[-1], values[-1]) == (1, 500, 0.002)


def test_a_page_gets_the_curves_of_one_name_and_again_only_those_that_changed(
    tmp_path: Path,
) -> None:
    trials = [record(n, "running", {}, lr=str(n)) for n in range(3)]
    sweep = FollowedSweep(sweep_json(tmp_path / "s", trials, {"lr": "0,1,2"}))
    viewer = SweepViewer(sweep)
    assert news(viewer) == {"name": "", "names": [], "shown": [0, 1, 2], "trials": {}}
    for number in range(3):
        say(tmp_path / "s" / str(number), 1, 2)
    assert news(viewer) == {
        "name": "loss",
        "names": ["accuracy", "loss"],
        "shown": [0, 1, 2],
        "trials": {number: ([1, 2], [1.0, 0.5]) for number in range(3)},
    }
    assert news(viewer) == {}
    say(tmp_path / "s/1", 4)
    assert news(viewer)["trials"] == {1: ([1, 2, 4], [1.0, 0.5, 0.25])}
    say(tmp_path / "s/2", 2)  # a step again, after a restart: as many points as before
    assert news(viewer)["trials"].keys() == {2}
    share, changed = asyncio.run(
        SweepViewer(sweep, "accuracy").news(section(sweep)["trials"], -1.0)
    )
    assert (share, changed["name"], changed["trials"].keys()) == (
        0,
        "accuracy",
        {0, 1, 2},
    )  # without time: what is there


def test_a_trial_that_a_person_added_is_marked_and_may_have_more_settings(tmp_path: Path) -> None:
    own = record(0, "finished", {"loss": 0.5}, lr="1")
    added = {**record(2, "finished", {"loss": 0.7}, lr="3", epochs="9"), "added": "a request"}
    shown = section(FollowedSweep(sweep_json(tmp_path / "s", [own, added], {"lr": "1,2"})))
    assert [(each["trial"], each["added"]) for each in shown["trials"]] == [(0, False), (2, True)]
    assert shown["keys"] == ["lr", "epochs"]
    assert shown["axes"][0] == vars(Axis("lr", "choice", ["1", "3"]))


def say(folder: Path, *steps: int) -> None:
    """Reports of a trial."""
    with Events(folder / "events.jsonl") as events:
        for step in steps:
            events.add(kinds.Report(rank=0, step=step, values={"loss": 1 / step, "accuracy": 0.5}))


def news(viewer: SweepViewer) -> Any:
    """Return the message to a page once all trials are read."""
    share, changed = asyncio.run(viewer.news(section(viewer.sweep)["trials"], 60.0))
    assert share == 1
    return changed


def test_a_sweep_is_one_line_of_the_list_and_a_list_of_its_trials(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    trials = [record(0, "finished", {"loss": 0.0}, lr="1"), record(1, "failed", {}, lr="2")]
    folder = sweep_json(runs / "job/s", trials, {"lr": "1,2"}, best=[0], state="finished")
    for name in ("job/alone", "job/s/0", "job/s/1"):
        with Events(runs / name / "events.jsonl") as events:
            events.add(kinds.Report(rank=0, step=1, values={"loss": 1}))
    rows = {row["run"]: row for row in list_rows(runs)}
    assert rows.keys() == {"job/alone", "job/s"}
    assert (rows["job/s"]["sweep"], rows["job/s"]["status"]) == (True, "finished")
    assert rows["job/s"]["text"] == "2 trials, 1 finished, 1 failed, loss 0"
    assert {row["run"] for row in list_rows(folder)} == {"0", "1"}
    assert find_place(str(folder), runs) == (folder, "")
    assert find_place(str(folder / "1"), runs) == (folder, "1")
    assert find_place("newest", runs) == (folder, "")  # its newest trial is the newest run


def test_a_sweep_of_many_trials_hides_no_other_run(tmp_path: Path) -> None:
    folder = sweep_json(tmp_path / "job/s", [], {"lr": "1,2"}, best=[], state="running")
    for name in ("job/alone", *(f"job/s/{trial}" for trial in range(MAX_RUNS))):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "events.jsonl").touch()
    os.utime(tmp_path / "job/alone/events.jsonl", (0, 0))
    assert {row["run"] for row in list_rows(tmp_path)} == {"job/alone", "job/s"}
    assert len(list_rows(folder)) == MAX_RUNS
