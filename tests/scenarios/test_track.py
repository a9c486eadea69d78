"""track=…: each tracker has each step once, the settings, the pages and the truth, whatever happens
to the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

import raydist
from raydist.reporting.result import Result
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, RunFailed
from raydist.shared.kinds import Event
from raydist.worker import context
from tests import trackers
from tests.faults import Fault, kill, training, two_trainings
from tests.leftovers import processes_of
from tests.programs import Program
from tests.records import read_events
from tests.waiting import wait_until

TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
ALL = f"track=[{','.join(TRACKERS)}]"
JOB = """
from tests.faults import Fault, kill, training

def job(config):
    return training(config, 0.2, (kill(0, 6), kill(0, 12, 1), Fault("wait", 0, 24, ())))["figures"]
"""
SCRIPT = """
import json, os, sys
names = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"{sys.argv[1]}-{attempt}", "w").write(json.dumps([os.environ[name] for name in names]))
sys.exit(attempt == "0")
"""


@pytest.fixture(scope="module")
def there() -> Iterator[Path]:
    """A folder for all tests: MLflow takes seconds to make a database."""
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="t-", dir=fast, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def stores(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where trackers of a test keep what they are told."""
    env = {"TRACKIO_DIR": f"{there}/trackio", "MLFLOW_TRACKING_URI": f"sqlite:///{there}/mlflow.db",
            "WANDB_MODE": "offline", "HOME": str(there), "TMPDIR": str(there)}  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return env


def ledger(folder: Path, name: str) -> Any:
    return json.loads((folder / "track" / f"{name}.json").read_text())


def opened(program: Program) -> bool:
    """Return whether each tracker has opened its run."""
    lines = [event["text"] for event in program.events("track")]
    return {*TRACKERS} <= {line.partition(" ")[0] for line in lines}


def go_once_opened(*names: str) -> Callable[[Event], None]:
    """Return a reader that creates `go`, for which ranks wait, once these trackers have opened.

    On a busy machine that takes longer than the time that they have after the end of a run.
    """
    missing = {*names}

    def read(event: Event) -> None:
        if isinstance(event, kinds.Track):
            missing.discard(event.text.partition(" ")[0])
            if not missing:
                Path("go").touch()

    return read


@trackers.requires_trackers
@pytest.mark.timeout(900)
def test_each_step_once_whoever_is_killed(
    tmp_path: Path, stores: dict[str, str], monkeypatch: Any
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    words = ("job=job.py", "scale=1x2", "group=inline", "train.epochs=2", "data.batch_size=8", "snapshot.every=1",
             "env.API_KEY=hidden", "watch.progress=none", ALL)  # fmt: skip
    first = Program(tmp_path, *words)
    first.wait_for_step(20)
    # a tracker takes seconds to begin, or many where the machine is busy: the job waits for `go`,
    # so that the run does not end before
    first.wait_until(lambda: opened(first), "the trackers")
    before = first.run_dir
    first.signal(signal.SIGKILL)
    first.wait()
    # the trackers say what has become of it, and are gone
    assert first.leftovers() == []
    assert trackers.read("mlflow", ledger(before, "mlflow")["id"], env=stores)["status"] == "KILLED"

    again = Program(tmp_path, *words, "resume=auto")
    again.wait_until(lambda: again.run_dir != before and opened(again), "the trackers again")
    (tmp_path / "go").touch()
    assert again.wait() == 0, again.screen
    after = again.run_dir
    assert after != before
    ids = {name: ledger(after, name)["id"] for name in TRACKERS}
    assert ids == {name: ledger(before, name)["id"] for name in ids}
    wanted = {
        "tensorboard": ["tensorboard", ids["tensorboard"]], "mlflow": ["mlflow", ids["mlflow"]],
        "trackio": ["trackio", "job", ids["trackio"]], "wandb": ["wandb", str(before)], "rest": ["wandb", str(after)],
    }  # fmt: skip
    with ThreadPoolExecutor() as pool:
        read = {
            name: pool.submit(trackers.read, *words, env=stores) for name, words in wanted.items()
        }
    results = {name: each.result() for name, each in read.items()}
    rest = results.pop("rest")
    for name in results["wandb"]["curves"]:
        results["wandb"]["curves"][name] += rest["curves"][name]
    # what counted: the last that rank 0 reported of each step
    losses = {
        event["step"]: event["values"]["loss"]
        for folder in (before, after)
        for event in read_events(folder / "events.jsonl")
        if event["kind"] == "report" and event["rank"] == 0 and "loss" in event["values"]
    }
    for name, facts in results.items():
        assert [step for step, _ in facts["curves"]["loss"]] == sorted(losses), name
        assert dict(facts["curves"]["loss"]) == pytest.approx(losses, abs=1e-6), name
        assert [step for step, _ in facts["curves"]["test_loss"]] == [16, 32], name
        assert {"blame-1", "blame-2"} <= {
            Path(page).name.removesuffix(".txt") for page in facts["pages"]
        }, name
        if name in ("mlflow", "wandb"):
            assert f"{before.name}/blame-1.txt" in facts["pages"], name
        text = json.dumps(facts["config"])
        assert "hidden" not in text, name
        assert "***" in text, name
        assert "train.epochs" in text or facts["config"]["train"]["epochs"] == 2, name
    cpu = f"system/{socket.gethostname()}/cpu"
    assert cpu in rest["system"]
    assert cpu in results["tensorboard"]["curves"].keys() & results["mlflow"]["curves"].keys()
    assert cpu in results["trackio"]["system"]
    assert (results["mlflow"]["runs"], results["trackio"]["runs"]) == (1, 1)
    assert {*results["wandb"]["ids"], *rest["ids"]} == {ids["wandb"]}
    ends = (
        results["tensorboard"]["status"][-1],
        results["mlflow"]["status"],
        results["trackio"]["status"],
        rest["status"],
    )
    assert ends == ("finished", "FINISHED", ["finished"], [0])


@trackers.requires_trackers
def test_a_failed_run_is_no_finished_one(tmp_path: Path, stores: dict[str, str]) -> None:
    """In W&B; MLflow's end of a failed trial is in tests/scenarios/test_sweep_watched.py."""
    with pytest.raises(RunFailed) as caught:
        run(
            tmp_path, "track=[wandb]", "restart=none",
            struck=(Fault("wait", 0, 1), Fault("raise", 1, 3)), on_event=go_once_opened("wandb"),
        )  # fmt: skip
    facts = trackers.read("wandb", str(caught.value.result.dir), env=stores)
    assert facts["status"] == [1]
    assert "rank 1" in facts["culprit"]
    assert "struck at step 3" in facts["culprit"]


@trackers.requires_trackers
def test_each_fit_of_a_job_has_its_own_curves(tmp_path: Path, stores: dict[str, str]) -> None:
    """Steps of the second fit that the first had too were dropped."""
    done = raydist.run(
        two_trainings, f"hydra.run.dir={tmp_path}/run", "scale=1x2", "group=inline",
        "data.batch_size=8", "watch.progress=none", "track=[tensorboard,wandb]",
        struck=(Fault("wait", 0, 3), kill(0, 7)), on_event=go_once_opened("tensorboard", "wandb"),
    )  # fmt: skip
    assert not done.warnings
    for words in (["tensorboard", ledger(done.dir, "tensorboard")["id"]], ["wandb", str(done.dir)]):
        curves = trackers.read(*words, env=stores)["curves"]
        assert [step for step, _ in curves["loss"]] == [*range(1, 21)], words
        assert [step for step, _ in curves["fit2/loss"]] == [*range(1, 11)], words


def run(
    folder: Path,
    *words: str,
    struck: tuple[Fault, ...] = (),
    on_event: Callable[[Event], None] | None = None,
) -> Result[Any]:
    return raydist.run(
        training, f"hydra.run.dir={folder}/run", "scale=1x2", "group=inline", "train.epochs=1", "data.batch_size=16",
        "watch.progress=none", *words, struck=struck, on_event=on_event,
    )  # fmt: skip


@trackers.requires_trackers
def test_a_tracker_that_cannot_costs_one_warning(
    tmp_path: Path, stores: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has a full disk, or as good as that; one is never answered; one has no key; one is
    killed."""

    def job() -> None:
        raydist.report(step=1, loss=1.0)
        processes = [
            each for each in psutil.process_iter(["cmdline"]) if is_tracker(each, stores["TMPDIR"])
        ]
        assert len(processes) == 4
        (killed,) = [
            each
            for each in processes
            if "track-trackio.log" in os.readlink(f"/proc/{each.pid}/fd/2")
        ]
        killed.kill()
        wait_until(
            lambda: list((tmp_path / "run" / "wandb").glob("offline-run-*")), "W&B's file", 200
        )

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("no folder")
    monkeypatch.setattr("raydist.watch.trackers.END_S", 6.0)
    monkeypatch.setattr("raydist.watch.trackers.OPEN_S", 0.0)
    monkeypatch.delenv("WANDB_MODE")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        words = (
            "scale=1x1",
            "group=inline",
            "watch.progress=none",
            "track=[tensorboard,mlflow,wandb,trackio]",
        )
        done = raydist.run(job, f"hydra.run.dir={tmp_path}/run", *words)
    assert done.status == "finished"
    warned = [
        event["text"]
        for event in read_events(done.dir / "events.jsonl")
        if event["kind"] == "warning"
    ]
    assert sorted(text.partition(" ")[0].strip(":") for text in warned) == [
        "mlflow",
        "tensorboard",
        "trackio",
        "wandb",
    ]
    assert any(
        "trackio lacks part of the run: its process ended with -9" in text for text in warned
    )
    texts = [
        event["text"]
        for event in read_events(done.dir / "events.jsonl")
        if event["kind"] == "track"
    ]
    assert any("mlflow" in text and "waits up to 6 s" in text for text in texts)

    def left() -> list[str]:
        return [line for line in processes_of(stores["TMPDIR"]) if "fork_server" not in line]

    wait_until(lambda: not left(), lambda: str(left()))
    assert list((done.dir / "wandb").glob("offline-run-*"))


@trackers.requires_trackers
def test_an_event_that_nobody_understands_costs_one_warning_of_each_reader(
    tmp_path: Path, stores: dict[str, str]
) -> None:
    def job() -> None:
        for step in np.arange(1, 4):
            raydist.report(step=step, loss=1.0 / step)
            if step == 2:
                context.emit_event(kinds.Report(rank=0, step="two", values={"loss": 9.0}))  # type: ignore[arg-type]
        wait_until(Path("go").exists, "the tracker", 200)

    words = (
        "scale=1x1",
        "group=inline",
        "watch.progress=lines",
        "watch.every_s=0.001",
        "track=[tensorboard]",
    )
    where = f"hydra.run.dir={tmp_path}/run"
    done = raydist.run(job, where, *words, on_event=go_once_opened("tensorboard"))
    assert done.status == "finished"
    result = trackers.read("tensorboard", ledger(done.dir, "tensorboard")["id"], env=stores)
    assert [step for step, _ in result["curves"]["loss"]] == [1, 2, 3]
    assert result["status"][-1] == "finished"
    warned = [
        event["text"]
        for event in read_events(done.dir / "events.jsonl")
        if event["kind"] == "warning"
    ]
    assert [text.partition(" ")[0] for text in warned if "`report`" in text].count(
        "tensorboard:"
    ) == 1
    assert len({text.partition(" ")[0] for text in warned}) == len(warned)


def is_tracker(process: psutil.Process, mark: str) -> bool:
    """Return whether this is the process of a tracker of a test with this TMPDIR."""
    try:
        words = process.info["cmdline"] or ()  # None: the process has ended
        return "raydist.watch.trackers.child" in words and process.environ().get("TMPDIR") == mark
    except psutil.Error:
        return False


@trackers.requires_trackers
def test_a_program_goes_on_in_the_same_run(tmp_path: Path, stores: dict[str, str]) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    words = (f"script={tmp_path}/program.py", f"args={tmp_path}/ids", "scale=1x1", "restart.max=1")
    done = Program(
        tmp_path, *words, "watch.progress=none", "track=[wandb,mlflow]", "env.WANDB_RESUME=must"
    )
    assert done.wait() == 0, done.screen
    folder = done.run_dir
    first, second = (json.loads((tmp_path / f"ids-{attempt}").read_text()) for attempt in (0, 1))
    assert first == second
    assert first == [
        ledger(folder, "wandb")["id"],
        "must",
        ledger(folder, "mlflow")["id"],
        stores["MLFLOW_TRACKING_URI"],
    ]
    assert trackers.read("mlflow", first[2], env=stores)["status"] == "FINISHED"
    assert not (folder / "wandb").exists(), "the program's own tracker writes that run"


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [("track=mlfow", "track=mlflow"), ("track='tensorboard,mlflow'", "track=[tensorboard,mlflow]")],
)
def test_wrong_names_are_refused(word: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        raydist.run(training, word)
    assert caught.value.suggestion == suggestion
    assert not list(Path.cwd().glob("runs/*"))


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    with pytest.raises(ConfigError, match=r"pip install 'raydist\[trackio\]'"):
        raydist.run(training, "track=trackio")


class Controller(BaseHTTPRequestHandler):
    """Kubeflow Trainer's status server."""

    heard: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
def test_a_trainjob_gets_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "ca.crt", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Controller)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("of the job\n")
    monkeypatch.setenv(
        "KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{server.server_port}/status"
    )
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
    try:
        done = run(tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert not done.warnings
    assert {token for token, _ in Controller.heard} == {"Bearer of the job"}
    last = Controller.heard[-1][1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert {each["name"]: float(each["value"]) for each in last["metrics"]}[
        "loss"
    ] == pytest.approx(done.metrics["loss"], rel=1e-4)
    assert datetime.fromisoformat(last["lastUpdatedTime"]).tzinfo is not None
    assert all(status.get("progressPercentage", 0) < 100 for _, status in Controller.heard[:-1])
