from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from raydist.shared.events import Event, Events, event, read_events


def test_every_event_has_a_time_and_a_kind() -> None:
    made = event("phase", name="connect", s=0.5)
    assert made["kind"] == "phase"
    assert made["t"] > 1.7e9


def test_events_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with Events(path) as events:
        events.say("run", name="digits")
    with Events(path) as events:
        events.say("result", status="finished")
    assert [happened["kind"] for happened in read_events(path)] == ["run", "result"]


def test_readers_see_events_as_they_come(tmp_path: Path) -> None:
    seen: list[Event] = []
    with Events(tmp_path / "e", (seen.append,)) as events:
        events.say("wait", text="for a node")
        assert seen[-1]["text"] == "for a node"
        events.say("work", ranks={1: (0.1, 0.2)}, path=tmp_path)
    assert seen == [*read_events(tmp_path / "e")]


def test_a_reader_that_raises_is_dropped_and_named_and_breaks_nothing(tmp_path: Path) -> None:
    seen: list[Event] = []

    def bad(happened: Event) -> None:
        raise KeyError("oops")

    with Events(tmp_path / "e", (bad, seen.append)) as events:
        events.say("one")
        events.say("two")
    assert [happened["kind"] for happened in seen] == ["warning", "one", "two"]
    assert "KeyError" in seen[0]["text"]


def test_events_of_several_threads_are_lines_of_their_own(tmp_path: Path) -> None:
    """The monitors' threads add events while the supervisor adds those of the ranks."""
    seen: list[Event] = []
    with Events(tmp_path / "e", (seen.append,)) as events:

        def add(kind: str) -> None:
            for _ in range(500):
                events.say(kind, text="x" * 999)

        threads = [threading.Thread(target=add, args=(kind,)) for kind in ("report", "hang")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == len([*read_events(tmp_path / "e")]) == 1000


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "e"
    path.write_text(json.dumps(event("one")) + "\n" + '{"t": 1, "kind": "tw')
    assert [happened["kind"] for happened in read_events(path)] == ["one"]


def test_what_was_said_outlives_a_killed_driver(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib; from raydist.shared.events import Events\n"
        "events = Events(pathlib.Path(sys.argv[1])); events.say('one'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "e")], env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    assert [happened["kind"] for happened in read_events(tmp_path / "e")] == ["one"]


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    with Events(tmp_path / "e") as events:
        events.say("report", values={"where": Path("/x")})
    assert next(read_events(tmp_path / "e"))["values"] == {"where": "/x"}
