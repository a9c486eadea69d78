"""The trace of a real run that was struck."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema

import raydist
from raydist.reporting.trace import trace_of
from raydist.shared.errors import ConfigError
from raydist.shared.kinds import Event
from raydist.tools import watch
from tests.faults import kill, training
from tests.records import event

WHOLE, TEXT, MARK = (
    {"type": "integer", "minimum": 0},
    {"type": "string", "minLength": 1},
    {"type": "object"},
)
FORMAT = {
    phase: {"type": "object", "additionalProperties": False, "required": [*facts],
            "properties": {"ph": {"const": phase}, "name": TEXT, "pid": {**WHOLE, "minimum": 1}, "tid": WHOLE, **facts}}
    for phase, facts in {
        "X": {"ts": WHOLE, "dur": WHOLE, "args": MARK},
        "i": {"ts": WHOLE, "s": {"enum": ["g", "p", "t"]}},
        "M": {"name": {"enum": ["process_name", "thread_name", "thread_sort_index"]}, "args": MARK},
    }.items()
}  # fmt: skip
"""The phases that a trace has, by "Trace Event Format" (Duca and Sinclair, Google, 2016).
Perfetto's own reader is a program that its package downloads from a foreign host."""


def assert_well_formed(text: str) -> list[Any]:
    """Hold a file against the format; what a reader draws of it."""

    def no_number(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    spans: list[Any] = json.loads(text, parse_constant=no_number)["traceEvents"]
    for each in spans:
        jsonschema.validate(each, FORMAT[each["ph"]])
    lanes: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for each in spans:
        if each["ph"] == "X":
            lanes[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for lane in lanes.values():  # a reader drops a span that begins in another and ends after it
        for (_, end), (begin, later) in pairwise(sorted(lane)):
            assert begin >= end - 2 or later <= end + 2
    assert {
        (each["pid"], each["tid"]) for each in spans if each["name"] == "thread_name"
    } >= lanes.keys()
    return spans


def test_a_trace_has_launch_steps_saves_and_failures(tmp_path: Path, capsys: Any) -> None:
    words = ("scale=1x2", "group=inline", "train.epochs=1", "data.batch_size=8", "snapshot.every=1")
    done = raydist.run(
        training,
        f"hydra.run.dir={tmp_path}/run",
        *words,
        "watch.progress=none",
        struck=(kill(1, 5),),
        pause=0.02,
    )
    assert watch.main(["--trace", str(tmp_path / "out.json"), str(done.dir)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    spans = assert_well_formed((tmp_path / "out.json").read_text())
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in spans
        if each["name"] == "thread_name"
    }
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in spans:
        if each["ph"] == "X":
            lanes[names[each["pid"], each["tid"]]].append(each)
    assert lanes.keys() == {"launch", "failures", "checkpoints", "rank 0", "rank 1"}
    assert [each["name"] for each in lanes["launch"]] == [
        "actors",
        "warm-up",
        "rendezvous",
        "first step",
    ]
    assert [each["name"] for each in lanes["checkpoints"]] == ["step 16"]
    (failure,) = lanes["failures"]
    assert failure["name"].startswith("rank 1 on ")
    # of rank 0 each step once, in its order, none before the one before it has ended
    own = lanes["rank 0"]
    assert [each["name"] for each in own if each["name"] != "evaluate"] == [
        *(f"step {n}" for n in range(1, 17)),
        "save",
    ]
    assert all(one["ts"] + one["dur"] <= other["ts"] + 2 for one, other in pairwise(own))
    # the failure lies between the last step before it and the first one after it
    steps = {each["name"]: each for each in own}
    assert steps["step 5"]["ts"] <= failure["ts"] <= steps["step 6"]["ts"]
    assert (
        abs(failure["ts"] + failure["dur"] - steps["step 6"]["ts"] - steps["step 6"]["dur"])
        < 50_000
    )
    assert steps["step 3"]["args"]["loss"] > 0
    marks = {each["name"] for each in spans if each["ph"] == "i"}
    assert {"joined", "finished", "ended: finished", "killed at step 5"} <= marks


def test_a_trace_of_a_diverged_run_that_failed_twice_is_whole() -> None:
    def failed(at: float, text: str) -> Event:
        cause = {"rank": 0, "host": "a", "how": "killed", "step": 1, "at": at}
        return event("failure", t=at + 0.5, cause=cause, text=text, reason="", reached=1, others=[])

    slots = [{"rank": 0, "host": "a", "ip": "10.0.0.1", "node": "a"}]
    events = [
        event("run", t=1.0, name="x", dir="x", pages=0),
        event("plan", t=1.1, backend="gloo", world_size=1, slots=slots),
        event("report", t=2.0, rank=0, step=1, values={"loss": 1.0}),
        event("report", t=3.0, rank=0, step=2, values={"loss": math.nan}),
        failed(4.0, "first"),
        failed(6.0, "second"),
        event("result", t=9.0, status="failed"),
    ]
    spans = assert_well_formed(json.dumps(trace_of(events)))
    found = {each["name"]: each for each in spans if each["ph"] == "X"}
    assert found["step 2"]["args"] == {"loss": "nan"}
    assert (found["first"]["dur"], found["second"]["dur"]) == (2_000_000, 3_000_000)


def test_a_folder_without_events_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert (
        watch.main(["--trace", str(tmp_path / "out.json"), str(tmp_path)]) == ConfigError.exit_code
    )
    assert "no run is in that folder" in capsys.readouterr().err
