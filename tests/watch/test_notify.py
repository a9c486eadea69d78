"""Events -> the messages about a run, their forms, and how one reaches a receiver once."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raydist.settings.config import Job, Notify, Sweep
from raydist.settings.notices import form_of, wrong_url
from raydist.shared.kinds import Event
from raydist.watch.notify import delivery
from raydist.watch.notify.delivery import post, run_receiver
from raydist.watch.notify.message import LONGEST, About, Messages, RunMessage
from raydist.watch.track import start, wanted
from raydist.watch.trackers import Ledger, Task
from tests.records import event, line

CAUSE = {"rank": 1, "host": "node-b", "how": "raised", "type": "KeyError", "step": 5, "at": 6.0}
BEGIN = (event("run", t=0, name="mine", dir="/runs/mine/x", pages=2),)
FAILURE = event("failure", t=6.5, cause=CAUSE, text="rank 1 on node-b: KeyError: 'x'", reached=5)
RESTART = event("restart", t=6.6, number=1, most=3, rank=1, host="node-b", how="raised", step=5)
FAILED = event(
    "result", t=75.0, status="failed", cause=CAUSE, failure="rank 1 on node-b: KeyError: 'x'\n  more",
    checkpoint="/runs/mine/x/checkpoints/step-4",
)  # fmt: skip
HANG = event("hang", t=5.0, text="rank 1 on node-b is stopped", ranks=[1], certain=True, s=4.0)
SLOW = event("slow", t=5.0, text="rank 0 is slow", ranks=[{"rank": 0, "host": "node-a"}])
RESUME = "to continue: the same command with resume=/runs/mine/x"


def messages() -> Messages:
    return Messages(About("mine/x", "login-1", "/runs/mine/x"))


@pytest.mark.parametrize(
    ("events", "kind", "cause", "todo"),
    [
        ((HANG,), "hung", "rank 1 on node-b is stopped", "raydist stacks /runs/mine/x shows"),
        ((SLOW,), "slow", "rank 0 is slow", "raydist ranks /runs/mine/x compares"),
        ((FAILURE, FAILED), "failed", "rank 1 on node-b: KeyError: 'x'", "correct the job at"),
        ((FAILURE, FAILED), "failed", "rank 1 on node-b: KeyError: 'x'", RESUME),
        (
            (event("result", status="failed", failure="no Ray\nmore", error="LaunchError"),),
            "failed",
            "no Ray",
            "",
        ),
        ((event("result", status="finished"),), "finished", "", ""),
        (
            (event("result", status="stopped", signal=2, checkpoint="x"),),
            "stopped",
            "stopped by SIGINT",
            RESUME,
        ),
        ((event("result", status="stopped", signal=2),), "stopped", "stopped by SIGINT", ""),
    ],
)
def test_an_event_and_what_is_told(
    events: tuple[Event, ...], kind: str, cause: str, todo: str
) -> None:
    of = messages()
    (told,) = filter(None, map(of.add, (*BEGIN, *events)))
    assert (told.event, told.cause, told.run) == (kind, cause, "mine/x")
    assert todo in told.todo
    assert (told.todo == "") == (todo == "")


def test_a_failure_after_which_the_run_goes_on_is_not_told() -> None:
    of = messages()
    assert not [*filter(None, map(of.add, (*BEGIN, FAILURE, RESTART)))]


def test_the_page_of_the_last_failure_and_the_time_are_told() -> None:
    of = messages()
    (told,) = filter(None, map(of.add, (*BEGIN, FAILURE, RESTART, FAILURE, FAILED)))
    assert told.page == "/runs/mine/x/blame-4.txt"  # two are of an earlier run
    assert told.title == "mine/x failed after 1:15"
    died = of.driver_died(200.0)
    assert (died.event, died.duration_s) == ("failed", 200.0)
    assert "driver" in died.cause


@pytest.mark.parametrize(
    ("events", "advice"),
    [
        ((), f"if the run has left a checkpoint, {RESUME}"),
        ((event("report", rank=0, values={}, step=1, kept=1),), RESUME),
        ((event("saved", rank=0, step=1, path="/a/step-1"),), RESUME),
        (
            (event("begin", rank=0, resumed=9, checkpoint="/b/9"),),
            "to continue: the same command with resume=/b/9",
        ),
    ],
)
def test_a_driver_that_died_is_continued_from_what_there_is(
    events: tuple[Event, ...], advice: str
) -> None:
    of = messages()
    for each in (*BEGIN, *events):
        of.add(each)
    assert of.driver_died(200.0).todo.endswith(f"a closed session; {advice}")


def message(cause: str = "a < b & c > d") -> RunMessage:
    of = messages()
    of.add(BEGIN[0])
    told = of.add(event("result", t=1.0, status="failed", failure=cause))
    assert told is not None
    return told


def test_the_forms_of_a_message() -> None:
    told = message()
    plain = json.loads(told.as_json())
    assert plain.keys() >= {"event", "run", "cause", "todo", "host", "dir", "page", "t", "duration_s", "goodput"}  # fmt: skip
    assert plain["goodput"] is None  # it has reported no step
    assert plain["text"].splitlines()[:2] == ["mine/x failed after 0:01", "cause: a < b & c > d"]
    slack = json.loads(told.as_slack())
    assert slack.keys() == {"text"}
    assert slack["text"].splitlines()[:2] == [
        "*mine/x failed after 0:01*",
        "cause: a &lt; b &amp; c &gt; d",
    ]
    assert told.variables()["RAYDIST_NOTIFY_TITLE"] == plain["title"]
    assert len(message("long\x1b[31m " * 999).cause) == LONGEST
    assert "\x1b" not in message("red \x1b[31m").as_json()


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("https://hooks.slack.com/services/T/B/x", "slack"),
        ("https://hooks.slack-gov.com/services/T/B/x", "slack"),
        ("https://hooks.slack.com.evil.org/services", "json"),
        ("https://example.org/hooks.slack.com", "json"),
    ],
)
def test_only_slack_gets_slacks_form(url: str, form: str) -> None:
    assert form_of(Notify(webhook=url)) == form
    assert form_of(Notify(webhook=url, form="json")) == "json"
    assert form_of(Notify(webhook=url, form="slack")) == "slack"


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("https://example.org/x?a=1,2", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:8080/x", True),
        ("example.org/x", False),
        ("ftp://example.org", False),
        ("https:///x", False),
        ("https://example.org:port/x", False),
        ("https://example.org:0/x", False),
        ("https://me:word@example.org/x", False),
        ("https://example.org/a b", False),
        ("https://example.org/\n", False),
    ],
)
def test_urls_to_which_nothing_can_be_sent(url: str, right: bool) -> None:
    assert (wrong_url(url) == "") == right
    assert url not in wrong_url(url)


def test_a_full_disk_leaves_the_ledger_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(sent_kinds=["slow"]).write(tmp_path, "webhook")

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    Ledger(sent_kinds=["slow", "failed"]).write(tmp_path, "webhook")
    assert Ledger.read(tmp_path, "webhook").sent_kinds == ["slow"]
    assert [each.name for each in (tmp_path / Ledger.FOLDER).iterdir()] == ["webhook.json"]


def test_a_trial_does_not_tell_that_it_has_finished() -> None:
    assert wanted(Job())["events"] == ["failed", "hung", "slow", "finished"]
    assert wanted(Job(sweep=Sweep(dir="s")))["events"] == ["failed", "hung", "slow"]


@contextmanager
def webhook(*answers: int) -> Iterator[tuple[str, list[Any]]]:
    """A webhook with these answers, one after the other; its URL, and what it got."""
    heard: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers[min(len(heard), len(answers)) - 1])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/SECRET", heard
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answers", "got", "why"),
    [
        ((200,), 1, ""),
        ((204,), 1, ""),
        ((503, 429, 200), 3, ""),
        ((503,), 3, "503"),
        ((404,), 1, "404"),
        ((302,), 1, "302"),
        ((500,), 1, "500"),
    ],
)
def test_a_message_is_sent_again_only_if_nobody_has_it(
    answers: tuple[int, ...], got: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "PAUSE_S", 0.01)
    with webhook(*answers) as (url, heard):
        reason = post(url, '{"a": 1}', time.monotonic() + 60)
    assert heard == [{"a": 1}] * got
    assert why in reason
    assert (reason == "") == (why == "")
    assert "SECRET" not in reason


def test_a_webhook_without_an_answer_gets_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "ANSWER_S", 0.2)
    monkeypatch.setattr(delivery, "PAUSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/SECRET"
        assert "it may have got it" in post(url, "{}", time.monotonic() + 60)
        silent.accept()[0].close()
        silent.settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent.accept()
    # nobody listens there any more
    assert "refused" in post(url, "{}", time.monotonic() + 60)


def test_a_command_gets_the_message_and_is_killed_if_it_does_not_end(tmp_path: Path) -> None:
    told, far = message(), time.monotonic() + 60
    out = tmp_path / "out"
    command = f'cat > {out}; printf "%s\\n" "$RAYDIST_NOTIFY_EVENT" "$RAYDIST_NOTIFY_TEXT" >> {out}'
    assert run_receiver(command, told, far) == ""
    first, event, cause, *_ = out.read_text().splitlines()
    assert json.loads(first)["title"] == told.title
    assert (event, cause) == ("failed", "cause: a < b & c > d")
    assert run_receiver("exit 3", told, far) == "it ended with 3"
    held = f"sleep 1000 & echo $! > {out}; wait"
    assert "did not end" in run_receiver(held, told, time.monotonic() + 1.0)


FINISHED = event("result", t=3.0, status="finished")


def test_a_command_gets_the_pythonpath_of_the_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of raydist's process has the standard library of its Python, and broke all others."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/person")
    (tmp_path / "events.jsonl").write_text("".join(map(line, (*BEGIN, FINISHED))))
    command = f'echo "$PYTHONPATH" > {tmp_path}/out'
    task = Task(
        name="command", folder=str(tmp_path), project="mine", settings={}, repeats=False, program=False, begin=0,
        notify=wanted(Job(notify=Notify(command=command))),
    )  # fmt: skip
    process = start(task, Job())
    process.communicate("\n", timeout=900)
    assert (tmp_path / "out").read_text() == "/of/the/person\n"


@pytest.mark.parametrize(
    ("events", "last_word", "before", "told", "warned"),
    [
        ((HANG, HANG, FINISHED), True, [], ["hung", "finished"], 0),
        ((HANG, SLOW), False, [], ["hung", "slow", "failed"], 0),
        ((HANG, SLOW), False, ["hung", "failed"], ["slow"], 0),
        ((HANG,), True, [], ["hung"], 1),
        ((FAILED,), False, [], ["failed"], 0),
    ],
    ids=["finished", "driver killed", "told before", "disk full", "killed after the result"],
)
def test_the_process_tells_each_kind_once(
    events: tuple[Event, ...],
    last_word: bool,
    before: list[str],
    told: list[str],
    warned: int,
    tmp_path: Path,
) -> None:
    """A driver that is killed closes the input without a last word."""
    (tmp_path / "events.jsonl").write_text("".join(map(line, (*BEGIN, *events))))
    Ledger(sent_kinds=before).write(tmp_path, "webhook")
    with webhook(200) as (url, heard):
        task = Task(
            name="webhook", folder=str(tmp_path), project="mine", settings={}, repeats=False, program=False, begin=0,
            notify=wanted(Job(notify=Notify(webhook=url))),
        )  # fmt: skip
        process = start(task, Job())
        out, _ = process.communicate("\n" if last_word else None, timeout=900)
    assert process.returncode == 0
    assert [each["event"] for each in heard] == told
    assert out.count("warning") == warned
    assert Ledger.read(tmp_path, "webhook").sent_kinds == before + told
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if "SECRET" in path.read_text()] == []
