"""Checkpoints at a URL: complete or absent, found again, pruned, and no reason to stop when the
network is gone."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from raydist.launch import run_storage
from raydist.messages.server import WriteCheckpoint
from raydist.node import snapshots
from raydist.settings.config import Checkpoint, Job
from raydist.settings.run_folder import run_folder
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, RaydistError
from raydist.state import checkpoint_files, object_store, write
from raydist.state.distributed_checkpoint import (
    Contents,
    RankPart,
    RankPlanner,
    commit,
    load_into,
    temporary_name,
    write_part,
)
from raydist.state.object_store import Remote, environment, parse_path
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import LAST_SLOT, blank_page
from raydist.state.write import SaveRequest
from raydist.worker import checkpoint, context
from tests.programs import Program
from tests.records import Seen
from tests.stores import SECRET, Store, store

RUN = "s3://bucket/runs/digits/now"


@pytest.fixture(scope="module")
def s3() -> Iterator[Store]:
    with store() as server:
        yield server


@pytest.fixture
def events(s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """This process as the only rank of a run whose checkpoints go to the bucket; what it tells."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAYDIST_RESUME", raising=False)
    monkeypatch.setenv("RAYDIST_CHECKPOINTS", f"{RUN}/checkpoints")
    monkeypatch.setattr(checkpoint_files, "PAUSES_S", (0.0,))
    events = Seen()
    me = context.Rank(run_dir=tmp_path / "run")
    context.enter(context.Context(rank=me, emit=events, beat=lambda step, phase: None))
    yield events
    context.enter(None)
    with environment(s3.env):
        Remote(RUN).drop()


def put(
    step: int, metrics: dict[str, float] | None = None, keep: int = 3, best: str | None = None
) -> Remote:
    state = {"weights": torch.full((100,), float(step))}
    path = checkpoint.save(step, state, metrics, Checkpoint(keep=keep, best=best))
    assert isinstance(path, Remote)
    return path


def there() -> list[str]:
    return sorted({file.split("/")[0] for file in (Remote(RUN) / "checkpoints").sizes()})


def test_what_is_saved_comes_back(events: Seen) -> None:
    path = put(7, {"accuracy": 0.5})
    assert str(path) == f"{RUN}/checkpoints/step-00000007"
    latest = checkpoint.latest()
    assert latest is not None
    assert (latest.step, latest.path, latest.metrics) == (7, path, {"accuracy": 0.5})
    assert latest.state["weights"].sum() == 700
    assert [event["kind"] for event in events] == ["saved"]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.usefixtures("events")
def test_of_two_that_create_a_file_one_does(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver of the store is old, a file is not created twice unless that is at once."""
    file = Remote(RUN) / "claim.json"
    if not knows:
        write = file.store.pipe_file
        monkeypatch.setattr(file.store, "pipe_file", lambda path, value: write(path, value))
    assert object_store.create_file(file, "one")
    assert not object_store.create_file(file, "other")
    looks = iter([False, True])  # the first is before the other has written
    monkeypatch.setattr(Remote, "exists", lambda _: next(looks))
    assert object_store.create_file(file, "other") == (not knows)
    assert file.read_text() == ("one" if knows else "other")


def test_a_file_that_cannot_be_created_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnicodeEncodeError):
        object_store.create_file(tmp_path / "new" / "claim.json", "\ud800")
    assert [*(tmp_path / "new").iterdir()] == []
    assert object_store.create_file(tmp_path / "new" / "claim.json", "one")
    assert not object_store.create_file(tmp_path / "new" / "claim.json", "other")


def test_the_newest_and_the_best_are_kept(events: Seen) -> None:
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.6)):
        put(step, {"accuracy": accuracy}, keep=2, best="max:accuracy")
    assert there() == ["step-00000002", "step-00000003", "step-00000004"]


def test_without_its_last_file_it_is_not_there(
    events: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(1)
    half = put(2)
    (half / "meta.json").drop()
    assert checkpoint_files.newest_step(parse_path(f"{RUN}/checkpoints")) == 1
    latest = checkpoint.latest()
    assert latest is not None
    assert latest.step == 1
    assert events[2:] == []  # no warning: it was on its way
    put(3)
    assert there() == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]  # another writer may be uploading it now
    assert 0 <= time.time() - (half / "state.pt").changed() < write.WRITER_SILENT_S
    monkeypatch.setattr(checkpoint_files, "WRITER_SILENT_S", -60.0)
    put(4)
    assert there() == ["step-00000001", "step-00000003", "step-00000004"]  # a killed writer left it


def test_an_upload_that_breaks_off_leaves_no_file(events: Seen) -> None:
    file = Remote(f"{RUN}/checkpoints/step-00000005/state.pt")
    with contextlib.suppress(KeyError), file.writing() as opened:
        opened.write(b"half of it")
        raise KeyError("the network")
    assert there() == []


def test_a_checkpoint_that_is_written_again_is_never_half_there(
    events: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(5).parent

    def breaks(state: object, file: Any) -> None:
        file.write(b"half of it")
        assert checkpoint_files.newest(folder) is None
        raise OSError("the network")

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(OSError, match="the network"):
        write.write(
            write.SaveRequest(5, {"weights": torch.ones(3)}, {}, 1, str(folder), "runs", 3, None)
        )
    assert checkpoint_files.newest(folder) is None


def test_another_size_is_passed_over_and_other_bytes_are_refused(events: Seen) -> None:
    put(1)
    (put(2) / "state.pt").write_text("short")
    latest = checkpoint.latest()
    assert latest is not None
    assert latest.step == 1
    assert "step-00000002 is skipped: state.pt has 5 bytes instead of" in events[-1]["text"]
    size = latest.meta.files["state.pt"].bytes
    (Remote(str(latest.path)) / "state.pt").write_text("x" * size)
    with pytest.raises(RaydistError, match="another checksum"):
        _ = latest.state


def test_nothing_is_unpickled(events: Seen, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    evil = tmp_path / "state.pt"
    torch.save({"weights": Evil()}, evil)
    path = put(1)
    (path / "state.pt").put(evil)
    facts = {"bytes": evil.stat().st_size, "xxh3_128": object_store.checksum_of(evil)}
    (path / "meta.json").write_text(
        json.dumps(json.loads((path / "meta.json").read_text()) | {"files": {"state.pt": facts}})
    )
    latest = checkpoint.latest()
    assert latest is not None
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        _ = latest.state
    assert not (tmp_path / "ran").exists()


def test_the_ranks_of_a_node_fetch_it_once(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the size of the model stayed in TMPDIR for the whole run."""
    monkeypatch.setenv("RAYDIST_SCRATCH", str(tmp_path / "node"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    path = put(1)
    for _ in range(2):  # the second time as after a restart
        monkeypatch.setenv("LOCAL_RANK", "0")
        first = checkpoint.load(path)
        again = checkpoint.load(path)
        state = (path / "state.pt").read_bytes()
        (path / "state.pt").write_text("gone")
        monkeypatch.setenv("LOCAL_RANK", "1")
        second = checkpoint.load(path)
        assert torch.equal(first["weights"], second["weights"])
        assert torch.equal(first["weights"], again["weights"])
        assert [each.stat().st_size for each in (tmp_path / "node").iterdir()] == [
            0,
            0,
        ]  # what guards it
        (tmp_path / "state").write_bytes(state)
        (path / "state.pt").put(tmp_path / "state")


def test_of_a_file_of_shards_no_copy_stays_where_one_rank_of_the_node_needs_it(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's share of the checkpoint stayed in TMPDIR until the run ended: it waited for the
    other ranks."""
    monkeypatch.setenv("RAYDIST_SCRATCH", str(tmp_path / "node"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    folder, state = Remote(f"{RUN}/checkpoints"), {"weights": torch.ones(100)}
    beside = temporary_name(folder, 4, "x")
    files = write_part(beside, RankPart(0, 1, state, RankPlanner(0).plan(state)))
    assert commit(folder, beside, Contents(4, 1, files), Checkpoint()) == ([], "")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        latest = {"weights": torch.zeros(100)}
        load_into(folder / "step-00000004", latest)
        assert torch.equal(latest["weights"], state["weights"])
        sizes = sorted(each.stat().st_size for each in (tmp_path / "node").iterdir())
        assert sum(size > 8 for size in sizes) == (
            rank == "0"
        )  # the metadata, which each rank reads


def test_a_state_is_not_lost_when_nobody_answers(
    s3: Store, events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        path = checkpoint.save(2, {"weights": torch.ones(3)})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000002"
    assert checkpoint_files.verify(path).step == 2
    assert [event["kind"] for event in events] == ["saved", "warning", "saved"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.env["AWS_ENDPOINT_URL"])
    assert (
        checkpoint.save(3, {"weights": torch.ones(3)})
        == tmp_path / "run" / "checkpoints" / "step-00000003"
    )  # not tried at once again
    monkeypatch.setattr(checkpoint_files, "QUIET_S", 0.0)
    assert checkpoint.save(4, {"weights": torch.ones(3)}) == Remote(
        f"{RUN}/checkpoints/step-00000004"
    )
    assert f"step 2 could not be written to {RUN}/checkpoints" in events[1]["text"]


def test_the_last_state_is_not_lost_when_nobody_answers(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer ended when it asked the store whether the state was there already."""
    memory = os.memfd_create("test")
    os.pwrite(memory, blank_page(), 0)
    request = SaveRequest(0, {}, {}, 1, f"{RUN}/checkpoints", str(tmp_path / "run"), 3, None)
    SnapshotBuffer(memory).fill_request(LAST_SLOT, request)
    own = {"random": torch.zeros(1, dtype=torch.uint8), "loss": 0.5, "world_size": 1}
    SnapshotBuffer(memory).write(2, {"own": own, "weights": torch.ones(3)})
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        warning, saved = snapshots.write_checkpoint({0: memory}, WriteCheckpoint())
    os.close(memory)
    assert f"step 2 could not be written to {RUN}/checkpoints" in str(warning)
    assert isinstance(saved, kinds.Saved)
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert (saved.path, checkpoint_files.verify(path).step) == (str(path), 2)


def test_a_restart_goes_on_without_the_store(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(3)
    job, seen = (
        Job(name="digits", dir=str(tmp_path / "now"), storage="s3://bucket/runs", resume="auto"),
        list[str](),
    )
    training = run_storage.RunCheckpoints(job)
    assert [var.value for var in training.variables(seen.append)] == [
        f"{RUN}/checkpoints/step-00000003"
    ]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        assert training.variables(seen.append) == []
        assert "the checkpoints in s3://bucket/runs/digits/now can't be read" in seen[-1]
        with pytest.raises(
            ConfigError,
            match="resume=auto: the checkpoints in s3://bucket/runs/digits/now can't be read",
        ):
            run_storage.RunCheckpoints(job).variables(seen.append)


def test_a_store_that_lists_but_gives_nothing_is_named_at_the_start(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints were taken for damaged ones, and the run began anew."""
    job = Job(name="digits", dir=str(tmp_path / "now"), storage="s3://bucket/runs", resume="auto")
    put(3)

    def denied(self: Remote) -> bytes:
        raise PermissionError("Access Denied")

    seen = list[str]()
    training = run_storage.RunCheckpoints(job)
    assert len(training.variables(seen.append)) == 1
    monkeypatch.setattr(Remote, "read_bytes", denied)
    with pytest.raises(ConfigError, match=r"can't be read \(PermissionError: Access Denied\)"):
        run_storage.RunCheckpoints(job).variables(seen.append)
    assert seen == []
    assert training.variables(seen.append) == []  # a restart: the ranks may have a state in memory
    assert "Access Denied" in seen[-1]


@pytest.mark.parametrize(
    ("text", "value", "suggestion"),
    [
        ("s3://me:secret@bucket/runs", "s3://…", "storage=s3://bucket/runs"),
        ("az://box/runs?sig=abc", "az://…", "storage=az://box/runs"),
        ("s3:///runs", "s3:///runs", "storage=s3://BUCKET/FOLDER"),
        ("s4://bucket", "s4://bucket", "storage=s3://BUCKET/FOLDER"),
        ("memory://bucket", "memory://bucket", "storage=s3://BUCKET/FOLDER"),
    ],
)
def test_a_url_that_can_t_be_right_is_refused(text: str, value: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as refused:
        object_store.check_url("storage", text)
    error = refused.value
    assert (error.key, error.value, error.suggestion) == ("storage", value, suggestion)
    assert "secret" not in error.message
    assert "abc" not in error.message


def test_a_folder_is_a_folder() -> None:
    assert parse_path("file:///a/b") == Path("/a/b")
    assert parse_path("runs/there") == Path("runs/there").absolute()
    assert run_folder(Job(name="n", dir="/x/n/now", storage="s3://b/r/")) == Remote(
        "s3://b/r/n/now"
    )
    assert run_folder(Job(name="n", dir="/x/n/now")) == Path("/x/n/now")


class AccountStore(MemoryFileSystem):  # type: ignore[misc]
    """A store whose driver takes the account from the URL, as that of Azure does."""

    protocol = "acct"

    def __init__(self, account_name: str, **options: Any) -> None:
        super().__init__(**options)
        self.account_name = account_name

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"account_name": path.partition("@")[2].partition(".")[0]}


def test_a_store_is_reached_in_the_account_that_its_url_names() -> None:
    """The account was left to the environment, which may name another one."""
    fsspec.register_implementation("acct", AccountStore, clobber=True)
    folder = Remote("acct://box@ours.example/runs/a::b")
    assert folder.store.account_name == "ours"
    (folder / "one").write_text("text")
    assert [each.url for each in folder.iterdir()] == [f"{folder}/one"]
    assert folder.sizes() == {"one": 4}


WORDS = (
    "train.epochs=1",
    "optim.schedule=constant",
    "scale=1x2",
    "watch.progress=none",
    "storage=s3://bucket/made",
)


HELD = """
import os, time
import torch
import raydist

def hold(step, values):
    while step == 30 and not os.path.exists("THERE/go"):
        time.sleep(0.05)

def job(config):
    data = torch.utils.data.TensorDataset(torch.randn(1408, 4), torch.randint(2, (1408,)))
    net, loss = torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy
    raydist.fit(config, model=net, train=data, test=data, loss=loss, on_step=hold)
"""
"""A job that waits after its first checkpoint; an epoch has 22 steps."""


def started(folder: Path, s3: Store, *words: str, address: str | None = None) -> Program:
    """Start a run whose credentials come from a file: the processes of the cluster have none."""
    folder.mkdir(exist_ok=True)
    (folder / "credentials").write_text(
        "".join(f"{name}={value}\n" for name, value in s3.env.items())
    )
    return Program(folder, *WORDS, "env_file=credentials", *words, address=address)


@pytest.mark.ray
def test_a_run_goes_on_elsewhere_from_the_bucket(
    s3: Store, tmp_path: Path, ray_address: str
) -> None:
    first = started(tmp_path / "first", s3, address=ray_address)
    assert first.wait() == 0, first.screen
    files = s3.files("made/digits/")
    run = f"made/digits/{first.run_dir.name}"
    assert f"{run}/checkpoints/step-00000022/meta.json" in files, sorted(files)
    assert {
        f"{run}/{name}"
        for name in ("settings.json", "result.json", "events.jsonl", "logs/rank-1.log")
    } <= set(files)
    assert not (first.run_dir / "checkpoints").exists()
    for path in (
        *files.values(),
        *(each.read_bytes() for each in first.run_dir.rglob("*") if each.is_file()),
    ):
        assert SECRET.encode() not in path
    before = f"resume=s3://bucket/{run}"
    second = started(tmp_path / "second", s3, before, "train.epochs=2", address=ray_address)
    assert second.wait() == 0, second.screen
    assert second.events("begin")[0]["resumed"] == 22


@pytest.mark.ray
def test_a_bucket_that_is_not_there_starts_nothing(s3: Store, tmp_path: Path) -> None:
    missing = started(tmp_path, s3, "storage=s3://no-such-bucket/runs")
    assert missing.wait() == 2, missing.screen
    assert (
        "storage=s3://no-such-bucket/runs: it cannot be written (FileNotFoundError"
        in missing.screen
    )
    assert missing.events("plan") == []
    absent = started(tmp_path, s3, "resume=s3://bucket/none")
    assert absent.wait() == 2, absent.screen
    assert "no complete checkpoint is there" in absent.screen


@pytest.mark.ray
def test_a_run_outlives_its_bucket(tmp_path: Path, ray_address: str) -> None:
    (tmp_path / "held.py").write_text(HELD.replace("THERE", str(tmp_path)))
    with store() as lost:
        run = started(tmp_path, lost, "job=held.py", "train.epochs=8", address=ray_address)
        run.wait_until(
            lambda: any(tmp_path.glob("runs/*/*/events.jsonl")) and bool(run.events("saved")),
            "checkpoint",
        )
        lost.stop()
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.screen
    result = run.result()
    assert any("could not be written to s3://bucket/made" in text for text in result["warnings"]), (
        result["warnings"]
    )
    assert checkpoint_files.verify(Path(result["checkpoint"])).step == 176
