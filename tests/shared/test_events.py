from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from raydist.shared import events as events_file
from raydist.shared import kinds
from raydist.shared.events import Events, read_kind
from raydist.shared.events import read_events as read_typed
from raydist.shared.kinds import Event
from tests.records import event, read_events


def test_every_event_has_a_time_and_a_kind() -> None:
    happened = event("phase", name="connect", s=0.5)
    assert happened.kind == "phase"
    assert happened.t > 1.7e9


def test_events_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with Events(path) as events:
        events.add(kinds.Run(name="digits", dir="runs/x"))
    with Events(path) as events:
        events.add(kinds.Result(status="finished"))
    assert [happened["kind"] for happened in read_events(path)] == ["run", "result"]


def test_readers_see_events_as_they_come(tmp_path: Path) -> None:
    seen: list[Event] = []
    with Events(tmp_path / "e", (seen.append,)) as events:
        events.add(kinds.Wait(t=1.0, text="for a node"))
        assert seen == [kinds.Wait(t=1.0, text="for a node")]
        events.add(kinds.Work(ranks={"1": (0.1, 0.2)}))
        events.add(kinds.Report(rank=0, values={"where": tmp_path}))
    assert [each.to_json() for each in seen] == [*read_events(tmp_path / "e")]


def test_a_reader_that_raises_is_named_once_and_gets_the_next_events(tmp_path: Path) -> None:
    seen: list[Event] = []

    def bad(happened: Event) -> None:
        read.append(happened.kind)
        raise KeyError("oops")

    read: list[str] = []
    with Events(tmp_path / "e", (bad, seen.append)) as events:
        events.add(event("one"))
        events.add(event("two"))
    warning, *others = seen
    assert isinstance(warning, kinds.Warning)
    assert [happened.kind for happened in others] == ["one", "two"]
    assert all(word in warning.text for word in ("bad", "`one`", "KeyError"))
    assert read == ["one", "warning", "two"]


def test_events_of_several_threads_are_lines_of_their_own(tmp_path: Path) -> None:
    """The monitors' threads add events while the supervisor adds those of the ranks."""
    seen: list[Event] = []
    with Events(tmp_path / "e", (seen.append,)) as events:

        def add(kind: str) -> None:
            for _ in range(500):
                events.add(event(kind, text="x" * 999))

        threads = [threading.Thread(target=add, args=(kind,)) for kind in ("wait", "hang")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == len([*read_events(tmp_path / "e")]) == 1000


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_text(json.dumps(event("one").to_json()) + "\n" + '{"t": 1, "kind": "tw')
    assert [happened.kind for happened in read_typed(path)] == ["one"]


def test_a_run_in_the_folder_of_one_that_was_cut_off_loses_none_of_its_events(
    tmp_path: Path,
) -> None:
    path = tmp_path / "e"
    path.write_text(json.dumps(event("one").to_json()) + "\n" + '{"t": 1, "kind": "report", "val')
    with Events(path) as events:
        events.add(kinds.Run(name="second", dir="runs/x"))
        events.add(kinds.Report(rank=0, step=1, values={}))
        assert [happened.step for happened in events.all(kinds.Report)] == [1]
    assert [happened.kind for happened in read_typed(path)] == ["one", "run", "report"]
    assert [happened.step for happened in read_kind(kinds.Report, path)] == [1]


def test_a_damaged_line_hides_no_other(tmp_path: Path) -> None:
    """Two lines in one, as older versions left them; bytes that are no text; JSON that is no
    event."""
    path = tmp_path / "e"
    one, two = (
        json.dumps(event("report", step=1).to_json()).encode(),
        json.dumps(event("report", step=2).to_json()).encode(),
    )
    torn = b'{"t": 1, "kind": "report", "va'
    path.write_bytes(b"\n".join([one, torn + one, b"\xff\x00", b"[1]", b"{}", b"", two, b""]))
    assert [vars(happened)["step"] for happened in read_typed(path)] == [1, 2]
    assert [happened.step for happened in read_kind(kinds.Report, path)] == [1, 2]


def test_what_was_said_outlives_a_killed_driver(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib; from raydist.shared.events import Events\n"
        "events = Events(pathlib.Path(sys.argv[1])); events.warn('one'); os.kill(os.getpid(), "
        "signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "e")], env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    assert [happened["text"] for happened in read_events(tmp_path / "e")] == ["one"]


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    with Events(tmp_path / "e") as events:
        events.add(kinds.Report(rank=0, values={"where": Path("/x")}))
    assert next(read_events(tmp_path / "e"))["values"] == {"where": "/x"}


def simulated(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[Events, list[Event], list[float]]:
    clock, live = [0.0], list[Event]()
    monkeypatch.setattr(
        events_file, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0])
    )
    return Events(folder / "events.jsonl", (live.append,)), live, clock


def test_a_run_of_a_week_leaves_a_file_of_bounded_size_and_readers_get_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """64 ranks left 1.1 GB a day, a loop of 1,000 reports a second 17 GB; the end of the run parsed
    all of it."""
    monkeypatch.setattr(events_file, "RANK_0", (200_000, 500.0))
    monkeypatch.setattr(events_file, "OTHERS", (20_000, 50.0))
    events, live, clock = simulated(monkeypatch, tmp_path)
    for step in range(10_000):
        clock[0] += 0.05
        events.add(kinds.Report(rank=0, step=step, values={"loss": 1.0}))
        events.add(kinds.Report(rank=1 + step % 63, step=step, values={"loss": 1.0}))
    clock[0] += 1e6  # a pause does not save up for more than at the beginning
    events.add(kinds.Report(rank=0, step=10_000, values={"loss": 1.0}))
    size = events.path.stat().st_size
    assert size < 200_000 + 500 * 500 + 20_000 + 50 * 500 + 1000
    assert len(live) == 20_001
    kept = [event["step"] for event in read_events(events.path) if event["rank"] == 0]
    assert kept[:1500] == list(range(1500))
    events.__exit__()


def test_the_reports_of_a_normal_loop_are_all_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events, _, _ = simulated(monkeypatch, tmp_path)
    budget = events._budgets[0]
    assert all(
        budget.take(180, 0.1 * step) for step in range(9 * 3600 * 10)
    )  # a step in 0.1 s, for nine hours
    assert all(budget.take(180, 0.1 * 9 * 36000 + step) for step in range(7 * 86400))
    others = events._budgets[1]
    written = sum(200 for step in range(400_000) if others.take(200, step / 400))
    assert written < (1 << 20) + 51 * 1000
    events.__exit__()


def test_the_newest_report_is_in_the_file_before_any_other_event(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(events_file, "RANK_0", (100, 0.0))
    events, _, _ = simulated(monkeypatch, tmp_path)
    for step in range(10):
        events.add(kinds.Report(rank=0, step=step, values={"loss": 1.0}))
    events.add(kinds.Saved(rank=0, step=9, path="x", s=0.1))
    written = [(each["kind"], each["step"]) for each in read_events(events.path)]
    assert written == [("report", 0), ("report", 9), ("saved", 9)]
    assert [saved.step for saved in events.all(kinds.Saved)] == [9]
    assert [*events.all(kinds.Restart)] == []
    events.__exit__()
