"""The process of a tracker: which run it continues, and that it learns how the run ended."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.reporting.points import Position
from raydist.settings.config import Job
from raydist.shared.events import Events
from raydist.state.write import SaveRequest, write
from raydist.watch import track
from raydist.watch.trackers import Ending, Ledger, Measured, Task
from raydist.watch.trackers.child import FailurePages, Follower, Life
from raydist.watch.trackers.mlflow import Mlflow, plain
from raydist.watch.trackers.tensorboard import unused
from raydist.watch.trackers.wandb import Wandb
from tests.records import event, line, read_events

OLD = Ledger(id="1", newest=Position(2, 9), sent_kinds=["failed"])


def test_a_new_training_in_the_folder_of_a_finished_one_has_its_own_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `resume=auto`, where nothing is resumed. It lost its curves, and was never said to have
    failed."""
    ended = SimpleNamespace(stdout=io.StringIO(""), stdin=io.StringIO(), poll=lambda: 0)
    monkeypatch.setattr(track, "start", lambda task, job: ended)
    job = Job(dir=str(tmp_path), resume="auto")
    for before, found in ((None, Ledger()), (tmp_path, OLD)):
        OLD.write(tmp_path, "mlflow")
        with Events(tmp_path / "events.jsonl") as events:
            track.TrackerProcess("mlflow", job, events, before)
        assert Ledger.read(tmp_path, "mlflow") == found


@pytest.mark.parametrize("storage", ["", "storage"])
def test_a_resumed_run_is_one_run_of_a_tracker_but_trials_are_runs_of_their_own(
    tmp_path: Path, storage: str
) -> None:
    """All trials from one checkpoint wrote into its run; a killed run has no copy in the storage."""
    runs = tmp_path / "runs/mine"
    stored = tmp_path / storage / "mine" if storage else runs
    for name in ("first", "sweep/1"):
        folder = str(stored / name / "checkpoints")
        write(SaveRequest(1, {"n": 1}, {}, 1, folder, str(stored / name), 3, None))
        OLD.write(runs / name, "mlflow")
    first = str(stored / "first")
    store = str(tmp_path / storage) if storage else ""

    def found(name: str, resume: str, sweep: str = "") -> Path | None:
        job = Job(dir=str(runs / name), name="mine", resume=resume, storage=store)
        job = replace(job, sweep=replace(job.sweep, dir=sweep))
        with Events(tmp_path / "events.jsonl") as events:
            return track.resumed_folder(job, events)

    assert found("second", first) == runs / "first"
    assert found("sweep/2", first, str(runs / "sweep")) is None
    if not storage:
        assert found("sweep/1", str(runs / "sweep/1"), str(runs / "sweep")) == runs / "sweep/1"


@pytest.mark.parametrize("inside", ["", "training-2/"])
def test_a_run_from_an_older_checkpoint_is_a_new_one_for_trackers(
    tmp_path: Path, inside: str
) -> None:
    """Its steps were dropped, as the tracker had others of the same numbers."""
    run = tmp_path / "runs/1"
    for step in (1, 2):
        folder = str(run / inside / "checkpoints")
        write(SaveRequest(step, {"n": step}, {}, 1, folder, str(run), 3, None))
    newest, older = (run / inside / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    here = tmp_path / "runs/2"
    assert track.earlier_runs(str(older), here) == []
    for named in (newest, newest.parent, run):
        assert run in track.earlier_runs(str(named), here)


def test_a_page_is_sent_once_it_says_what_came_of_the_failure(tmp_path: Path) -> None:
    """Trackers had the draft, without the restart and the end."""
    page = tmp_path / "blame-1.txt"
    pages = FailurePages(tmp_path)
    pages.read(event("failure", cause={}))
    page.write_text("a draft")
    assert [*pages.due(over=False)] == []
    pages.read(event("restarted", step=4, repeated=0, s=1.0))
    assert [*pages.due(over=False)] == []  # the driver may still be writing it
    assert [*pages.due(over=False)] == [page]
    assert [*pages.due(over=True)] == []
    pages.read(event("failure", cause={}))
    second = tmp_path / "blame-2.txt"
    second.write_text("the end")
    assert [*pages.due(over=True)] == [second]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What an imitation of MLflow is given: text by run and file."""
    kept: dict[str, str] = {}
    client = SimpleNamespace(
        update_run=lambda id, status: None,
        log_text=lambda id, text, file: kept.update({f"{id}/{file}": text}),
    )
    made: Any = SimpleNamespace(
        MlflowClient=lambda: client, get_tracking_uri=lambda: "http://bob:hunter2@host:5000"
    )
    monkeypatch.setitem(sys.modules, "mlflow", made)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    return kept


@pytest.mark.usefixtures("kept")
def test_no_password_of_a_store_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    said, life = list[dict[str, Any]](), Life("mlflow", lambda **message: None, 0)
    task = Task("mlflow", str(tmp_path), "digits", {}, False, False, 0)
    Follower(task, lambda **message: said.append(message), life)._open()
    (message,) = said
    assert message["track"] == "mlflow  http://***@host:5000 run abc"
    assert "hunter2" in message["variables"]["MLFLOW_TRACKING_URI"]  # the program needs it


def test_the_page_of_a_resumed_run_is_beside_that_of_the_run_before(
    tmp_path: Path, kept: dict[str, str]
) -> None:
    """It replaced it: one run of MLflow, or of W&B, has the pages of both."""
    saved: list[str] = []
    wandb: Any = object.__new__(Wandb)
    wandb._run = SimpleNamespace(
        save=lambda path, base_path, policy: saved.append(os.path.relpath(path, base_path))
    )
    for name in ("first", "resumed"):
        page = tmp_path / name / "blame-1.txt"
        page.parent.mkdir()
        page.write_text(name)
        Mlflow(Task("mlflow", str(page.parent), name, {}, False, False, 0), "abc").page(page)
        wandb.page(page)
    assert kept == {"abc/first/blame-1.txt": "first", "abc/resumed/blame-1.txt": "resumed"}
    assert saved == ["first/blame-1.txt", "resumed/blame-1.txt"]


@pytest.mark.usefixtures("kept")
def test_a_request_that_fails_makes_no_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try made another one, if the settings of the run could not be sent."""
    made, sent, answers = list[str](), list[Any](), iter([False, False, True, True])

    def create_run(experiment: str, run_name: str, tags: object) -> Any:
        made.append(run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{len(made)}"))

    def log_batch(run: str, params: Any = (), metrics: Any = ()) -> None:
        if not next(answers):
            raise ConnectionError
        sent.append((run, [*params], [*metrics]))

    client: Any = sys.modules["mlflow"]
    vars(client.MlflowClient()).update(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="7"),
        create_run=create_run,
        log_batch=log_batch,
    )
    entities: Any = SimpleNamespace(Param=lambda *own: own, Metric=lambda *own: own)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    refused: Any = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", refused)
    task = Task("mlflow", str(tmp_path / "1"), "digits", {"seed": 3}, False, False, 0)
    follower = Follower(task, lambda **message: None, Life("mlflow", lambda **message: None, 0))
    follower._placed = True
    follower._rows.queue.append(Measured(5.0, 2, {"loss": 0.5}))
    with pytest.raises(ConnectionError):
        follower._bring_up_to_date()
    follower._bring_up_to_date()
    assert made == ["1"]
    assert sent == [("id-1", [("seed", "3")], []), ("id-1", [], [("loss", 0.5, 5000, 2)])]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("/loss", "loss"), ("a//b/", "a/b"), ("../x", "__/x"), ("a%b", "a_b"), ("/", "_")],
)
def test_mlflow_takes_any_name(name: str, accepted: str) -> None:
    """It refuses some, and with them all that is sent together."""
    assert plain(name) == accepted


def test_another_training_in_the_folder_has_its_own_curves(tmp_path: Path) -> None:
    assert unused(tmp_path / "tensorboard") == tmp_path / "tensorboard"
    (tmp_path / "tensorboard").mkdir()
    assert unused(tmp_path / "tensorboard") == tmp_path / "tensorboard-2"


class Refusing:
    """A tracker whose store takes no page."""

    def __init__(self) -> None:
        self.ends: list[Ending] = []

    def write(self, rows: object) -> None: ...

    def page(self, file: Path) -> None:
        raise PermissionError("no such bucket")

    def close(self, ending: Ending) -> None:
        self.ends.append(ending)


def test_a_tracker_that_refuses_a_page_learns_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = [event("plan", backend="gloo", world_size=1, slots=[]), event("result", status="failed", failure="x")]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(map(line, happened)))
    (tmp_path / "blame-1.txt").write_text("rank 0")
    life: Any = SimpleNamespace(over=threading.Event(), opened=threading.Event(), called_at=0.0)
    task = Task("mlflow", str(tmp_path), "digits", {}, False, False, 0)
    tracker, said = Refusing(), list[Any]()
    follower = Follower(task, lambda **facts: said.append(facts), life)
    monkeypatch.setattr(follower, "_open", lambda: tracker)
    follower.run()
    assert tracker.ends == [Ending("failed", "x")]
    assert "no such bucket" in said[-1]["warning"]


@pytest.mark.timeout(60)
def test_a_program_waits_no_longer_for_a_tracker_that_could_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, say = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True))
    process = SimpleNamespace(stdout=said, stdin=io.StringIO(), poll=lambda: None)
    monkeypatch.setattr(track, "start", lambda task, job: process)
    monkeypatch.setattr(track, "READY_S", 1e6)
    monkeypatch.setattr(track, "RETRY_S", 0.0)
    with say, Events(tmp_path / "events.jsonl") as events:
        tracker = track.TrackerProcess("mlflow", Job(dir=str(tmp_path)), events, None)
        for opening in (True, False):
            print(json.dumps({"opening": opening}), file=say, flush=True)
        assert tracker.variables() == {}


SLOW = """
import json, time
from types import SimpleNamespace

time.sleep(4)  # as on a busy machine
AlertLevel = SimpleNamespace(INFO="info", ERROR="error")
sent = []

def init(**facts):
    return SimpleNamespace(
        log=lambda values, step: sent.append(step),
        alert=lambda *words: None,
        finish=lambda: open("sent.json", "w").write(json.dumps(sent)),
    )
"""


def test_a_short_run_waits_until_its_tracker_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed in its import, and had nothing of the run."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "trackio.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raydist.watch.trackers.END_S", 3.0)
    run = tmp_path / "run"
    with (
        Events(run / "events.jsonl") as events,
        track.Trackers(Job(dir=str(run), track=["trackio"]), events),
    ):
        events.add(event("plan", backend="gloo", world_size=1, slots=[]))
        events.add(event("report", rank=0, step=1, values={"loss": 0.5}))
        events.add(event("result", status="finished"))
    warned = [each["text"] for each in read_events(events.path) if each["kind"] == "warning"]
    assert warned == []
    assert json.loads((tmp_path / "sent.json").read_text()) == [1]
