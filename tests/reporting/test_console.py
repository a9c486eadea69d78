"""What a person sees: every event kind, on a terminal, in a log, and when they asked for nothing.
(driver)"""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raydist.reporting import wording
from raydist.reporting.console import Console, screen
from raydist.reporting.lines import Lines
from raydist.reporting.terminal import Terminal
from raydist.settings.config import Watch
from raydist.shared import kinds
from raydist.shared.errors import Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from tests.records import event

ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
FOLDER = "/data/runs/digits/2026-11-21_02-30-00"


def at(t: float, kind: str, **facts: Any) -> Event:
    return event(kind, t=t, **facts)


def report(t: float, step: int, /, **values: Any) -> Event:
    return at(t, "report", rank=0, step=step, values=values)


def fit(step: int, steps: int = 100, every: float = 0.1) -> Event:
    """Return a report like those of the loop."""
    words = {"steps": steps, "epoch": 1 + step // 50, "epochs": 2, "samples": 64 * step}
    return report(step * every, step, loss=1 / step, **words)


def slots(ranks: int, per_node: int = 8) -> list[dict[str, Any]]:
    return [
        {"rank": r, "host": f"node-{r // per_node}", "ip": f"10.0.0.{r // per_node}", "local_rank": r % per_node,
         "gpus": [r % per_node]}
        for r in range(ranks)
    ]  # fmt: skip


def result(status: str = "finished", **facts: Any) -> Event:
    event_facts = {
        "status": status, "dir": FOLDER, "world_size": 2, "metrics": {"loss": 0.05, "samples": 6400, "accuracy": 0.978},
        "launch": {"connect": 1.12, "place": 0.03, "first step": 0.2}, "wall_s": 12.34, "goodput": 0.625,
        "throughput": 1234.5, "checkpoint": None, "warnings": [], "signal": 0, "error": "", "failure": "",
    }  # fmt: skip
    return at(99, "result", **{**event_facts, **facts})


def a_run() -> list[Event]:
    return [
        at(0, "run", name="digits", dir=FOLDER),
        at(0, "cluster", address="10.0.0.1:6379", started=True, nodes=1),
        at(0, "phase", name="connect", s=1.12),
        at(0, "wait", text="waiting for 1 more node with 8 GPU"),
        at(0, "phase", name="place", s=0.03),
        at(0, "plan", backend="gloo", world_size=2, slots=slots(2)),
        at(0, "began", rank=0, host="node-0", pid=1),
        at(0, "joined", rank=0, pid=1),
        at(0, "begin", rank=0, steps=100, resumed=40),
        *[fit(step) for step in range(1, 101)],
        report(10, 100, accuracy=0.978, test_loss=0.1),
        at(10, "saved", rank=0, step=100, path=f"{FOLDER}/checkpoints/100", s=0.1),
        at(11, "warning", text="the disk is slow", rank=1),
        at(11, "done", rank=0),
        at(12, "ended", rank=0, how="finished", code=0, signal=0, step=100),
        result(),
    ]


def show(events: list[Event], progress: str, stream: Any = None, every_s: float = 10.0) -> str:
    """Return the output of a console with these settings."""
    stream = io.StringIO() if stream is None else stream
    with Console(Watch(progress=progress, every_s=every_s), stream) as console:
        for happened in events:
            console(happened)
    return str(stream.getvalue())


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_a_whole_run_is_told(progress: str) -> None:
    text = ESCAPE.sub("", show(a_run(), progress))
    for words in (
        f"run   digits, in {FOLDER}",
        "started here, at 10.0.0.1:6379: 1 node\n",
        "waiting for 1 more node with 8 GPU",
        "2 ranks on 1 node, backend gloo",
        "rank  host    ip        local_rank  gpus",
        "1     node-0  10.0.0.0  1           1",
        "resumes after step 40",
        "epoch 1/2",
        "step 1/100",
        "step 100/100",
        "640 samples/s",
        "accuracy 0.978",
        "warning: the disk is slow (rank 1)",
        "finished in 12.3 s",
        "accuracy    0.978",
        "throughput  1,234 samples/s",
        "launch      connect 1.12 + place 0.03 + first step 0.20 = 1.35 s",
        "goodput     62% of the time",
        f"folder      {FOLDER}",
    ):
        assert words in text, f"{words!r} is not in:\n{text}"


def test_the_summary_holds_what_was_measured_and_no_progress_words() -> None:
    text = show(a_run(), "lines")
    summary = text[text.index("finished in") :]
    assert "samples " not in summary.replace("samples/s", "")
    assert summary.index("accuracy") < summary.index("loss"), (
        "what the evaluation found comes first"
    )


def test_a_log_has_no_control_characters_and_is_ascii() -> None:
    text = show(a_run(), "lines")
    assert text.isascii()
    assert not re.search(r"[^\x20-\x7e\n]", text)


def test_a_log_gets_a_line_of_progress_each_ten_seconds_plus_first_and_last() -> None:
    text = show([fit(step, steps=1000) for step in range(1, 1001)], "lines", every_s=10)
    assert len(text.splitlines()) == 11
    assert "step 1/1000" in text.splitlines()[0]
    assert "step 1000/1000" in text.splitlines()[-1]
    assert "[0:50] " in text


def test_evaluations_and_saves_are_told_whatever_the_rate() -> None:
    events = [
        fit(1),
        fit(2),
        report(0.2, 2, accuracy=0.5),
        at(0.3, "saved", rank=0, step=2, path="x", s=0.1),
        fit(3),
    ]
    lines = show(events, "lines", every_s=3600).splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("step 2/100, accuracy 0.5")
    assert lines[2].endswith("step 2/100, checkpoint saved")


def test_a_job_that_saves_at_every_step_does_not_flood_the_log() -> None:
    saves = [at(100 + n / 10, "saved", rank=0, step=n, path="x", s=0.01) for n in range(100)]
    assert len(show([fit(1), *saves], "lines").splitlines()) == 1 + 10


def test_a_loop_that_reports_twice_each_step_does_not_flood_the_log() -> None:
    events = [report(step, step, **{name: 1.0}) for step in range(100) for name in ("loss", "lr")]
    assert len(show(events, "lines", every_s=3600).splitlines()) <= 3


def test_what_other_ranks_report_is_not_shown() -> None:
    others = [
        at(1, "report", rank=1, step=5, values={"loss": 1.0}),
        at(1, "begin", rank=1, resumed=3),
    ]
    assert show(others, "lines") == ""


def test_the_bar_is_redrawn_at_most_five_times_a_second() -> None:
    text = show([fit(step, steps=9999, every=0.001) for step in range(1, 5001)], "bar")
    assert 20 <= text.count("samples/s") <= 26


def test_the_bar_fills_and_shows_the_time_left() -> None:
    frames = ESCAPE.sub("", show([fit(step) for step in range(1, 100)], "bar")).split("\r")
    assert any("step 51/100" in frame and "0:05 left" in frame for frame in frames)
    assert all("━" in frame for frame in frames if "step" in frame)


def test_where_no_end_is_known_there_is_a_counter_and_no_bar() -> None:
    text = show([report(step, step, loss=0.5) for step in range(9)], "bar")
    assert "step 8  loss 0.5  1 steps/s" in text
    assert "━" not in text


@pytest.mark.parametrize("columns", [40, 60, 80, 99, 100, 140])
def test_no_live_line_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = ESCAPE.sub("", show([fit(step) for step in range(1, 101)], "bar"))
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= columns
    assert "step 100/100" in text
    assert "loss 0.01" in text


def test_in_a_narrow_terminal_a_long_host_name_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    placed = [{**slot, "host": "pod-" + "x" * 60} for slot in slots(2)]
    text = ESCAPE.sub("", show([at(0, "plan", backend="gloo", world_size=2, slots=placed)], "bar"))
    assert max(map(len, text.splitlines())) <= 60
    assert "10.0.0.0  1           1" in text


def test_a_path_is_never_broken_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    folder = "/a/folder-whose-name/that-is-longer/than-the-terminal/is-wide/runs"
    text = show(
        [
            at(0, "run", name="x", dir=folder),
            result(dir=folder, checkpoint=f"{folder}/checkpoints/1"),
        ],
        "bar",
    )
    assert text.count(folder) == 3


def test_the_launch_budget_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = ESCAPE.sub("", show([result()], "bar"))
    launch = [line for line in text.splitlines() if "connect" in line or "1.35 s" in line]
    assert len(launch) == 2
    assert max(map(len, launch)) <= 40


def test_more_than_sixteen_ranks_take_a_row_for_each_node() -> None:
    text = show([at(0, "plan", backend="nccl", world_size=24, slots=slots(24))], "lines")
    assert "24 ranks on 3 nodes, backend nccl" in text
    assert "node-2  10.0.0.2  16-23  0-7" in text
    assert len(text.splitlines()) == 5


def test_more_nodes_than_a_screen_holds_are_counted() -> None:
    text = show([at(0, "plan", backend="nccl", world_size=800, slots=slots(800))], "lines")
    assert len(text.splitlines()) == 2 + 32 + 1
    assert "and 68 more nodes" in text


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ([0, 1], "0-1"),
        (["GPU-aa", "GPU-bb"], "GPU-aa, GPU-bb"),
        ([], "-"),
        (None, "-"),
        (0.5, "0.5"),
    ],
)
def test_gpus_of_a_slot_as_far_as_they_are_known(gpus: Any, text: str) -> None:
    slots = [{"rank": 0, "host": "h", "ip": "i", "local_rank": 0, "gpus": gpus}]
    assert wording.slot_rows(slots)[1][-1] == text


def test_a_failure_is_told_instead_of_metrics() -> None:
    text = show(
        [fit(7), result("failed", failure="rank 1 on h, step 7: ValueError: x\n  log: l")], "lines"
    )
    assert "FAILED after 12.3 s, at step 7" in text
    assert "rank 1 on h, step 7: ValueError: x\n  log: l\n" in text
    assert "accuracy" not in text
    assert FOLDER in text


def test_what_the_caller_will_raise_is_not_said_twice() -> None:
    text = show([result("failed", failure="no Ray at 10.0.0.1", error="LaunchError")], "lines")
    assert "FAILED after 12.3 s: LaunchError" in text
    assert "no Ray" not in text


def test_a_stopped_run_says_by_what_and_where_things_are() -> None:
    saved = f"{FOLDER}/checkpoints/5"
    text = show(
        [
            fit(7),
            at(9, "stop", reason="stopped by SIGINT"),
            result("stopped", signal=2, checkpoint=saved),
        ],
        "lines",
    )
    assert "stopped by SIGINT after 12.3 s, at step 7" in text
    assert f"checkpoint  {saved} (resume=auto" in text
    assert f"folder      {FOLDER}" in text


def test_a_warning_is_shown_once_and_counted_in_the_end() -> None:
    warnings = [at(1, "warning", text="old torch") for _ in range(3)]
    text = show([*warnings, result(warnings=["old torch (3 times)"])], "lines")
    assert text.count("warning: old torch\n") == 1
    assert text.splitlines()[-1] == "  warning: old torch (3 times)"


def test_many_metrics_are_folded() -> None:
    text = show([result(metrics={f"m{n}": n for n in range(20)})], "lines")
    assert "m11 " in text
    assert "m12 " not in text
    assert "8 more in result.json" in text


def test_who_asked_for_nothing_sees_warnings_and_the_essentials() -> None:
    text = show(a_run(), "none")
    assert text.splitlines() == [
        "warning: the disk is slow (rank 1)",
        "finished in 12.3 s",
        "  loss      0.05",
        "  accuracy  0.978",
        f"  folder    {FOLDER}",
    ]
    assert "ValueError: x" in show([result("failed", failure="rank 1: ValueError: x")], "none")


@pytest.mark.parametrize("progress", ["bar", "lines", "none"])
def test_brackets_and_control_characters_of_others_do_no_harm(progress: str) -> None:
    events = [
        at(0, "run", name="[bold red]x[/]", dir="/tmp/[a]"),
        at(
            0,
            "warning",
            text="a [link=x]b[/nothing] :smile:\x1b[31m red\x1b[0m\x07\x1b]0;title\x07 \rback",
        ),
        result("failed", failure="KeyError: '[/x]'"),
    ]
    text = show(events, progress)
    assert "a [link=x]b[/nothing] :smile: red back" in text
    assert "KeyError: '[/x]'" in text
    assert "\x07" not in text
    assert "title" not in text


ANYTHING = st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.lists(st.integers()))


@given(
    text=st.text(),
    name=st.text(),
    step=st.integers(-5, 5),
    value=ANYTHING,
    besides=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("steps", "epoch", "epochs", "samples"), ANYTHING)
    ),
)
@example(text="", name="", step=0, value=None, besides={"steps": -1.123405761029647e306})
@example(text="", name="", step=3, value=None, besides={"steps": 1e308})
@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_nothing_that_a_job_says_breaks_the_screen(
    progress: str, text: str, name: str, step: int, value: Any, besides: dict[str, Any]
) -> None:
    reports = [report(t, step + t, **{**besides, name: value}) for t in range(3)]
    events = [at(0, "run", name=text, dir=text), at(0, "warning", text=text), *reports]
    shown = ESCAPE.sub("", show([*events, result(metrics={name: value}, dir=text)], progress))
    control = (
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
        if progress == "lines"
        else r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
    )
    assert not re.search(control, shown)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_an_output_that_is_not_utf_8_shows_what_it_can(encoding: str, progress: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    with Console(Watch(progress=progress), stream) as console:
        for happened in [at(0, "run", name="zażółć \udc80", dir="/データ"), *a_run()]:
            console(happened)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert "finished in" in text
    assert ("/データ" if encoding == "utf-8" else r"/\u30c7\u30fc\u30bf") in text


def test_each_line_of_a_log_is_out_at_once() -> None:
    raw = io.BytesIO()
    with Console(Watch(progress="lines"), io.TextIOWrapper(raw, encoding="utf-8")) as console:
        console(at(0, "wait", text="for a node"))
        assert raw.getvalue() == b"wait  for a node\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")
    assert colour.search(show(a_run(), "bar"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(show(a_run(), "bar"))


def test_watching_starts_no_thread() -> None:
    before = threading.active_count()
    with Console(Watch(progress="bar"), io.StringIO()) as console:
        console(fit(1))
        assert threading.active_count() == before


def test_the_cursor_is_never_left_hidden() -> None:
    stream = io.StringIO()
    console = Console(Watch(progress="bar"), stream)
    console(fit(1))
    # before anything is closed: a second Ctrl-C ends the process right here
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    console.__exit__(None, None, None)
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")


def test_the_live_line_is_gone_before_the_summary() -> None:
    before, after = show([fit(50), result()], "bar").split("finished in")
    assert before.rindex("\x1b[2K") > before.rindex("step 50/100"), "erased"
    assert "step 50/100" not in after


class Terminals(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("progress", "stream", "term", "expected"),
    [
        ("auto", Terminals(), "xterm", Terminal),
        ("auto", Terminals(), "dumb", Lines),
        ("auto", io.StringIO(), "xterm", Lines),
        ("bar", io.StringIO(), "xterm", Terminal),
        ("lines", Terminals(), "xterm", Lines),
        ("none", Terminals(), "xterm", Lines),
    ],
)
def test_the_screen_is_the_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, progress: str, stream: io.StringIO, term: str, expected: type
) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(screen(Watch(progress=progress), stream)) is expected


def test_a_real_terminal_is_found_and_drawn_on() -> None:
    ours, its = pty.openpty()
    with os.fdopen(its, "w", encoding="utf-8") as stream, Console(Watch(), stream) as console:
        for happened in (fit(1), fit(2), result()):
            console(happened)
        stream.flush()
        text = ""
        while "finished in 12.3 s" not in text:  # the kernel hands over what was written in parts
            text += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "step 1/100" in text
    assert "\x1b[" in text


def test_a_terminal_that_went_away_does_not_break_the_end_of_a_run() -> None:
    stream = io.StringIO()
    with Console(Watch(progress="bar"), stream) as console:
        console(fit(1))
        stream.close()


def test_what_a_reader_raises_is_a_warning_but_a_signal_goes_through(tmp_path: Path) -> None:
    def reader(happened: Event) -> None:
        raise Stopped(signal.SIGINT) if isinstance(happened, kinds.Report) else ValueError("a bug")

    with Events(tmp_path / "events.jsonl", (reader,)) as events:
        events.add(kinds.Run(name="x", dir="y"))
        with pytest.raises(Stopped):
            events.add(fit(1))
    assert "left it out: ValueError: a bug" in (tmp_path / "events.jsonl").read_text()


def test_a_console_reads_the_stream_of_a_run(tmp_path: Path) -> None:
    stream = io.StringIO()
    with (
        Console(Watch(progress="lines"), stream) as console,
        Events(tmp_path / "events.jsonl", (console,)) as events,
    ):
        for happened in a_run():
            events.add(happened)
    assert "finished in 12.3 s" in stream.getvalue()
    assert "left it out" not in (tmp_path / "events.jsonl").read_text()
