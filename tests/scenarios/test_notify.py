"""notify.…: what receivers are told about real runs on Ray: each kind once, whoever is left."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.settings.config import Job, Notify
from raydist.shared import env_names
from raydist.shared.events import Events
from raydist.watch import track
from tests.programs import Program
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
SECRET = "T0/B0/hush-hush"
JOB = """
import os, signal, time
import raydist
from raydist import checkpoint

def job(config, fault="none"):
    found = checkpoint.latest()
    for step in range((found.step if found else 0) + 1, 1000):
        raydist.report(step=step, loss=1 / step)
        checkpoint.save(step, {"step": step}, {})
        if step >= 5 and raydist.rank().rank == 1:
            if fault == "raise":
                raise ValueError("struck")
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        if step >= 10 and fault == "none":
            return
        time.sleep(0.05)
"""
WORDS = ("job=job.py", "scale=1x2", "watch.progress=lines")


class Webhook:
    """A webhook that keeps what it is told."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.heard: list[dict[str, Any]] = []
        heard = self.heard

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                heard.append({**body, "path": self.path})
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    made = Webhook()
    yield made
    made.close()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "told", "watches"),
    [(("failed",), (), True), (("finished",), (), False), (("failed",), ("failed",), False)],
)
def test_nobody_watches_for_a_run_whose_failure_nobody_wants_to_know(
    wanted: tuple[str, ...],
    told: tuple[str, ...],
    watches: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`told`: what the receiver knows from the run that this one resumes."""

    def receiver(name: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(name=name, run="", ledger=SimpleNamespace(id="", sent_kinds=told))

    monkeypatch.setattr(track, "TrackerProcess", receiver)
    notify = Notify(webhook="http://127.0.0.1:9", events=list(wanted))
    with Events(tmp_path / "events.jsonl") as events:
        duty = track.Trackers(Job(dir=str(tmp_path), notify=notify), events).duty()
    assert (duty is not None) is watches


def assert_hidden(program: Program) -> None:
    """The secret is on no line of the screen, and in no file of the run."""
    assert SECRET not in program.screen
    files = [path for path in program.run_dir.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_hang_that_fails_the_run_is_told_and_the_url_is_nowhere(
    there: Path, webhook: Webhook, ray_address: str
) -> None:
    """Neither in the run folder, of which its page is made, nor on the screen."""
    words = ("job.args.fault=stop", "restart=none", f"notify.webhook={webhook.url}")
    run = Program(there, *WORDS, "hang.after_s=1", *words, address=ray_address)
    assert run.wait(600) == 1, run.screen
    assert run.leftovers() == []
    hung, failed = webhook.heard
    assert (hung["event"], failed["event"]) == ("hung", "failed")
    assert "rank 1 on" in hung["cause"]
    assert "stopped by a signal" in hung["cause"]
    assert hung["todo"].startswith("raydist stacks")
    assert failed["cause"].startswith("rank 1 on")
    assert Path(failed["page"]) == run.run_dir / "blame-1.txt"
    assert Path(failed["page"]).is_file()
    assert failed["path"] == f"/{SECRET}"
    assert "notify.webhook" in run.screen  # the warning that a command line is no place for it
    assert_hidden(run)


def test_a_dead_webhook_costs_a_warning_and_a_command_gets_the_cause(
    there: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank raises in each of two attempts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv(env_names.NOTIFY_WEBHOOK, f"http://127.0.0.1:{port}/{SECRET}")
    words = ("job.args.fault=raise", "restart.max=1", "notify.command=cat >> told.json")
    run = Program(there, *WORDS, *words, address=ray_address)
    assert run.wait(600) == 1, run.screen
    assert run.leftovers() == []
    (told,) = map(json.loads, (there / "told.json").read_text().splitlines())
    assert told["event"] == "failed"
    assert told["cause"].startswith("rank 1 on")
    assert told["cause"].endswith("ValueError: struck")
    assert told["page"].endswith("blame-2.txt")
    # on a busy machine the driver is not there any more to warn
    log = (run.run_dir / "logs" / "track-webhook.log").read_text()
    assert log.startswith("the message `failed` was not delivered: ")
    assert log.count("\n") == 1
    assert "notify.webhook: the " in run.screen
    assert_hidden(run)


def test_a_dead_driver_is_told_and_the_run_that_resumes_tells_only_the_rest(
    there: Path, webhook: Webhook, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_names.NOTIFY_WEBHOOK, webhook.url)
    killed = Program(there, *WORDS, "job.args.fault=wait", address=ray_address)
    killed.wait_for_step(3, timeout=600)
    killed.signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: webhook.heard, "a message about the driver", 300)
    (failed,) = webhook.heard
    assert failed["event"] == "failed"
    assert failed["cause"].startswith("the driver ended without a result")
    assert Path(failed["dir"]) == killed.run_dir
    assert killed.leftovers() == []

    slack = ("resume=auto", "notify.form=slack", "notify.events=[failed,finished]")
    again = Program(there, *WORDS, *slack, address=ray_address)
    assert again.wait(600) == 0, again.screen
    assert again.leftovers() == []
    (finished,) = webhook.heard[1:]
    assert finished.keys() == {"text", "path"}
    assert f"*job/{again.run_dir.name} has finished after" in finished["text"]
    told = json.loads((again.run_dir / "track" / "webhook.json").read_text())["told"]
    assert told == ["failed", "finished"]
    assert_hidden(again)
