"""Checkpoints: whole or not at all, checked, pruned, found, and never code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from raydist.launch import run_storage
from raydist.reporting.result import Result
from raydist.settings.config import Checkpoint, Job
from raydist.shared import kinds
from raydist.shared.errors import ConfigError
from raydist.shared.events import Events
from raydist.state import checkpoint_files, object_store, run_checkpoints, write
from raydist.worker import checkpoint, context
from tests.records import Seen


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """This process as the only rank of a run in tmp_path/run; what it tells."""
    monkeypatch.delenv("RAYDIST_RESUME", raising=False)
    events = Seen()
    stand(tmp_path / "run", events)
    yield events
    context.enter(None)


def stand(run_dir: Path, events: Seen, rank: int = 0) -> None:
    me = context.Rank(rank=rank, world_size=2, run_dir=run_dir)
    context.enter(context.Context(rank=me, emit=events, beat=lambda step, phase: None))


def put(step: int, metrics: dict[str, float] | None = None, **settings: Any) -> Path:
    path = checkpoint.save(
        step, {"weights": torch.full((100,), float(step))}, metrics, Checkpoint(**settings)
    )
    assert isinstance(path, Path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path) -> None:
    """Turn one byte in the middle of the state round."""
    raw = bytearray((path / "state.pt").read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    (path / "state.pt").write_bytes(raw)


def truncate(path: Path) -> None:
    raw = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(raw[: len(raw) // 2])


def unname(path: Path) -> None:
    (path / "state.pt").unlink()


def scramble(path: Path) -> None:
    (path / "meta.json").write_text('{"step": 3')


def empty(path: Path) -> None:
    (path / "meta.json").write_text("[]")


def lead_astray(path: Path) -> None:
    meta = path / "meta.json"
    meta.write_text(re.sub(r'"[0-9a-f]{32}"', '"../../elsewhere"', meta.read_text()))


def bare(path: Path) -> None:
    (path / "meta.json").unlink()


DAMAGES = {
    damage: "another checksum",
    truncate: "bytes instead of",
    unname: "state.pt is missing",
    scramble: "meta.json can't be read",
    empty: "meta.json can't be read",
    lead_astray: "meta.json can't be read",
    bare: "meta.json can't be read",
}


def test_what_is_saved_comes_back(events: Seen, tmp_path: Path) -> None:
    state = {
        "tensor": torch.arange(5.0),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "nested": {"list": [1, 2.5, "three", None, True], "tuple": (1, (2,))},
        "ordered": OrderedDict(a=torch.zeros(1)),
        "bytes": b"\x00\xff",
    }
    path = checkpoint.save(7, state, {"accuracy": 0.5})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000007"
    latest = checkpoint.latest()
    assert latest is not None
    assert (latest.step, latest.path, latest.metrics) == (7, path, {"accuracy": 0.5})
    assert latest.meta.world_size == 2
    back = latest.state
    assert torch.equal(back.pop("tensor"), torch.arange(5.0))
    assert back.pop("half").dtype == torch.bfloat16
    assert back.pop("ordered")["a"].shape == (1,)
    assert back == {key: state[key] for key in ("nested", "bytes")}
    (saved,) = events
    assert (saved["kind"], saved["step"], saved["path"]) == ("saved", 7, str(path))
    assert saved["s"] > 0


def test_what_rank_0_reported_is_recalled(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.report(step=1, loss=2.0, beta=0.5)
    context.report(step=2, loss=torch.tensor(1.0), odd=[1])
    path = put(2)
    monkeypatch.setenv("RAYDIST_RESUME", str(path))
    del events[:]
    assert checkpoint.latest() is not None
    (recalled,) = events
    values = {"loss": 1.0, "beta": 0.5}
    assert (recalled["kind"], recalled["step"], recalled["values"]) == ("recalled", 2, values)
    stand(tmp_path / "another", events)  # what another run reported is not this run's
    assert checkpoint.latest() is not None
    assert len(events) == 1
    meta = json.loads((path / "meta.json").read_text())
    del meta["reported"]
    (path / "meta.json").write_text(json.dumps(meta))
    stand(tmp_path / "run", events)
    assert checkpoint.latest() is not None  # an older raydist has saved it
    assert len(events) == 1


def test_nothing_to_go_on_from(events: Seen) -> None:
    assert checkpoint.latest() is None


def test_only_rank_0_writes(events: Seen, tmp_path: Path) -> None:
    stand(tmp_path / "run", events, rank=1)
    assert checkpoint.save(1, {"a": 1}) is None
    assert not (tmp_path / "run").exists()
    assert events == []


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_a_damaged_newest_is_passed_over_with_a_warning(events: Seen, harm: Any) -> None:
    put(1)
    harm(put(2))
    latest = checkpoint.latest()
    assert latest is not None
    assert latest.step == 1
    (warning,) = [event for event in events if event["kind"] == "warning"]
    assert "step-00000002 is skipped" in warning["text"]
    assert DAMAGES[harm] in warning["text"]


def test_a_file_that_may_not_grow_is_named_as_that(events: Seen, tmp_path: Path) -> None:
    """torch writes the end of the file nevertheless, and hides the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.save(1, {"weights": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.latest() is None


def test_a_checkpoint_is_written_where_old_ones_cannot_be_removed(
    events: Seen, tmp_path: Path
) -> None:
    """The error said that the new one could not be written."""
    put(1)
    (tmp_path / "run" / "checkpoints" / ".step-00000009").touch()  # no folder of a killed writer
    path = put(2)
    latest = checkpoint.latest()
    assert latest is not None
    assert (latest.step, latest.path) == (2, path)
    assert [event["kind"] for event in events] == ["saved", "warning", "saved"]
    assert f"old checkpoints in {path.parent} could not be removed: NotADir" in events[1]["text"]


def test_the_best_one_stays_if_it_cannot_be_read_now(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that answered a moment later."""
    put(1, {"accuracy": 0.9}, keep=1, best="max:accuracy")
    put(2, {"accuracy": 0.5}, keep=1, best="max:accuracy")
    read = write.Meta.read

    def fail_once(path: Path) -> write.Meta:
        if path.name == "step-00000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    with monkeypatch.context() as broken:
        broken.setattr(write.Meta, "read", fail_once)
        put(3, {"accuracy": 0.4}, keep=1, best="max:accuracy")
    assert "could not be removed: OSError" in events[-2]["text"]
    put(4, {"accuracy": 0.3}, keep=1, best="max:accuracy")
    folder = tmp_path / "run" / "checkpoints"
    assert names(folder) == ["step-00000001", "step-00000004"]


def test_keep_and_best(events: Seen, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.6), (5, float("nan"))):
        put(step, {"accuracy": accuracy}, keep=2, best="max:accuracy")
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000005"]
    assert checkpoint_files.best(folder, "min:accuracy") == folder / "step-00000004"
    put(6, {"accuracy": 0.9}, keep=1, best="max:accuracy")
    assert names(folder) == ["step-00000006"]
    put(7, keep=1, best="max:accuracy")
    assert names(folder) == ["step-00000006", "step-00000007"]
    put(8, keep=1)
    assert names(folder) == ["step-00000008"]


def test_steps_are_ordered_as_numbers(events: Seen, tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        put(step, keep=1)
    assert names(tmp_path / "run" / "checkpoints") == ["step-100000000"]


def test_settings_of_the_run_count_in_a_loop_of_ones_own(events: Seen, tmp_path: Path) -> None:
    context.current().checkpoint = Checkpoint(keep=1)
    for step in (1, 2):
        checkpoint.save(step, {"a": step})
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000002"]


def test_the_same_step_again_replaces_it(events: Seen, tmp_path: Path) -> None:
    for value in (1, 2):
        checkpoint.save(5, {"value": value})
    latest = checkpoint.latest()
    assert latest is not None
    assert latest.state == {"value": 2}
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000005"]


def test_what_killed_writers_left_is_swept_up_and_nothing_else(
    events: Seen, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = write.writers_here()
    left = [
        f".step-00000001{here}{ended.pid}",
        ".step-00000001-0123abcd",
        ".dropped-step-00000001",
        ".replaced-step-00000002-7",
    ]
    others = [
        f".step-00000003{here}{os.getppid()}",
        ".step-00000003-4567abcd",
        ".step-00000003-far-4026531836-9",
        ".snapshot",
    ]
    for name in (*left, *others):
        (folder / name).mkdir(parents=True)
        (folder / name / "state.pt").write_bytes(b"half")
    hours_ago = time.time() - 2 * write.WRITER_SILENT_S
    for path in (
        folder / left[1],
        folder / left[1] / "state.pt",
        folder / others[-1],
        folder / others[0],
    ):
        os.utime(path, (hours_ago, hours_ago))
    put(2)
    assert names(folder) == sorted([*others, "step-00000002"])


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"path": Path("x")}, "state['path'] is a pathlib.PosixPath"),
        ({"a": {"b": [1, np.float64(0.5)]}}, "state['a']['b'][1] is a numpy.float64"),
        ({"noise": np.random.default_rng(0)}, "state['noise'] is a numpy.random.Generator"),
        ({"array": np.zeros(2)}, "state['array'] is a numpy.ndarray"),
        ({"counts": {np.int64(3): 5}}, f"state['counts']: key {np.int64(3)!r} is a numpy.int64"),
        ({(1, Path("x")): 5}, f"state: key {(1, Path('x'))!r}[1] is a pathlib.PosixPath"),
        ({"layer": torch.nn.Linear(1, 1)}, "state['layer'] is a torch.nn.modules.linear.Linear"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    events: Seen, tmp_path: Path, state: dict[str, Any], where: str
) -> None:
    with pytest.raises(TypeError) as caught:
        checkpoint.save(1, state)
    assert str(caught.value).startswith(where)
    assert checkpoint.latest() is None


def test_a_step_may_be_of_numpy_and_must_be_one(events: Seen) -> None:
    """Over Ray no checkpoint was written: a process that unpickles nothing had to read the step."""
    assert checkpoint.save(np.int64(3), {"a": 1}) is not None
    found = checkpoint.latest()
    assert found is not None
    assert (found.step, type(found.step)) == (3, int)
    with pytest.raises(TypeError, match=r"save\(step=0.5\)"):
        checkpoint.save(0.5, {"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [1, 0.5, True, None, "a", b"a", (1, "a"), torch.float32])
def test_what_may_be_a_key_of_a_state_can_be_loaded(events: Seen, key: Any) -> None:
    path = checkpoint.save(1, {"counts": {key: 5}})
    assert path is not None
    assert checkpoint.load(path)["counts"] == {key: 5}


class Bomb:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain_pickle", [True, False])
def test_loading_runs_no_code(events: Seen, tmp_path: Path, plain_pickle: bool) -> None:
    path = put(1)
    if plain_pickle:
        (path / "state.pt").write_bytes(pickle.dumps({"a": Bomb(tmp_path / "boom")}, protocol=2))
    else:
        torch.save({"a": Bomb(tmp_path / "boom")}, path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(path)
    assert not (tmp_path / "boom").exists()
    if not plain_pickle:
        torch.load(path / "state.pt", weights_only=False)
        assert (tmp_path / "boom").exists(), "the charge was no charge"


def test_what_resume_named_comes_first(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(1)
    put(2)
    monkeypatch.setenv("RAYDIST_RESUME", str(first))
    latest = checkpoint.latest()
    assert latest is not None
    assert latest.step == 1
    monkeypatch.setenv("RAYDIST_RESUME", "")
    assert checkpoint.latest() is None


DAY = "2026-01-01_00-00-"
"""The beginning of the name of a run folder."""


def test_find(events: Seen, tmp_path: Path) -> None:
    for run, steps in ((f"{DAY}01", (5,)), (f"{DAY}03", (2, 4)), (f"{DAY}04", ())):
        stand(tmp_path / run, events)
        for step in steps:
            put(step)
    new, three = tmp_path / f"{DAY}05", tmp_path / f"{DAY}03"
    assert run_checkpoints.find_resume("none", new) is None
    assert run_checkpoints.find_resume("auto", new) == three / "checkpoints" / "step-00000004"
    assert (
        run_checkpoints.find_resume("auto", tmp_path / f"{DAY}01")
        == tmp_path / f"{DAY}01" / "checkpoints" / "step-00000005"
    )
    assert run_checkpoints.find_resume(str(three), new) == three / "checkpoints" / "step-00000004"
    assert (
        run_checkpoints.find_resume(str(three / "checkpoints"), new)
        == three / "checkpoints" / "step-00000004"
    )
    exact = three / "checkpoints" / "step-00000002"
    assert run_checkpoints.find_resume(str(exact), new) == exact
    assert run_checkpoints.find_resume("auto", tmp_path / "elsewhere" / f"{DAY}06") is None
    # A folder that a person has named, next to other experiments.
    assert run_checkpoints.find_resume("auto", tmp_path / "lr-0.1") is None
    damage(three / "checkpoints" / "step-00000004")
    warned: list[str] = []
    assert run_checkpoints.find_resume("auto", new, warned.append) == exact
    assert "step-00000004" in warned[0]


def test_auto_says_why_it_begins_anew_or_with_an_earlier_run(events: Seen, tmp_path: Path) -> None:
    """Where all checkpoints of a run were cut off it did so without a word."""
    cut: dict[str, list[Path]] = {}
    for run in (f"{DAY}01", f"{DAY}02"):
        stand(tmp_path / run, events)
        cut[run] = [put(1), put(2)]
    older, newer = cut.values()
    warned: list[str] = []
    for path in newer:
        truncate(path)
    found = run_checkpoints.find_resume("auto", tmp_path / f"{DAY}02", warned.append)
    assert found == older[1]
    for path in older:
        truncate(path)
    assert run_checkpoints.find_resume("auto", tmp_path / f"{DAY}02", warned.append) is None
    named = [text.partition(" is skipped: ")[0] for text in warned]
    wanted = [*reversed(newer), *reversed(newer), *reversed(older)]
    assert named == [f"checkpoint {path}" for path in wanted]


def test_auto_begins_anew_after_a_finished_run_unless_a_later_training_was_killed(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, warnings = tmp_path / "run", list[str]()
    saved = put(5)
    Result(status="stopped", dir=run, world_size=1, checkpoint=saved).save()
    assert run_checkpoints.find_resume("auto", run, warnings.append) == saved
    Result(status="finished", dir=run, world_size=1, checkpoint=saved).save()
    assert run_checkpoints.find_resume("auto", run, warnings.append) is None
    (text,) = warnings
    assert f"{run} has finished" in text
    assert run_checkpoints.find_resume(str(run), tmp_path / "later") == saved
    second = run_checkpoints.folder_for(run, None)
    assert second == run / "training-2" / "checkpoints"
    monkeypatch.setenv("RAYDIST_CHECKPOINTS", str(second))
    killed = put(2)
    assert run_checkpoints.find_resume("auto", run) == killed
    assert run_checkpoints.folder_for(run, killed) == second
    assert run_checkpoints.folder_for(run, saved) == run / "training-3" / "checkpoints"


def test_a_relative_path_is_from_where_one_stands(
    events: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(1)
    monkeypatch.chdir(tmp_path)
    assert run_checkpoints.find_resume("run", tmp_path / "new") == path


def test_a_path_without_a_checkpoint_is_refused(events: Seen, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"resume=/no/where: no complete checkpoint is there \(there is no such folder\)",
    ):
        run_checkpoints.find_resume("/no/where", tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"it holds notes\.txt"):
        run_checkpoints.find_resume(str(tmp_path / "other"), tmp_path)
    put(1)
    broken = put(2)
    truncate(broken)
    with pytest.raises(
        ConfigError, match=r"not complete: state\.pt has .* set resume=.*step-00000001"
    ):
        run_checkpoints.find_resume(str(broken), tmp_path)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        truncate(path)
    with pytest.raises(ConfigError, match="it holds step-00000001, step-00000002"):
        run_checkpoints.find_resume(str(tmp_path / "run"), tmp_path)


def test_finding_needs_no_torch(tmp_path: Path) -> None:
    source = (
        "import sys; from pathlib import Path; from raydist.state import run_checkpoints;"
        f"run_checkpoints.find_resume('auto', Path({str(tmp_path / 'run')!r})); assert 'torch' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_meta_is_for_a_person_too(events: Seen) -> None:
    meta = json.loads((put(3, {"loss": 0.25}) / "meta.json").read_text())
    assert (meta["step"], meta["world_size"], meta["metrics"]) == (3, 2, {"loss": 0.25})
    assert set(meta["files"]) == {"state.pt"}


SAVER = """
    import itertools, sys
    from pathlib import Path
    import torch
    from raydist import checkpoint
    from raydist.state import checkpoint_files
    from raydist.worker import context
    from raydist.settings.config import Checkpoint
    me = context.Rank(run_dir=Path(sys.argv[1]))
    context.enter(context.Context(rank=me, emit=lambda event: None, beat=lambda step, phase: None))
    first = checkpoint.latest()
    for step in itertools.count(first.step if first else 1):  # the same step again, and then on
        checkpoint.save(step, {"weights": torch.full((200_000,), float(step))}, settings=Checkpoint(keep=2))
        print(step, flush=True)
"""


def look(folder: Path) -> None:
    """Read all that can be seen, as it is written: gone is fine, half is not."""
    for path in folder.glob("step-*"):
        try:
            checkpoint_files.verify(path)
        except checkpoint_files.Flaw:
            assert not path.exists(), "half a checkpoint could be seen"


def test_a_saver_killed_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    folder, last = tmp_path / "checkpoints", 0
    for round in range(3):
        saver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVER), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert saver.stdout is not None
        assert saver.stdout.readline(), "the saver failed"
        for _ in range(30 if round == 0 else 0):
            look(folder)
        time.sleep(0.003 * round)
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        newest = checkpoint_files.newest(folder)
        assert newest is not None
        assert torch.equal(newest.state["weights"], torch.full((200_000,), float(newest.step)))
        assert newest.step >= last
        last = newest.step


REPLACER = """
    import itertools, os, sys
    from pathlib import Path
    import torch
    from raydist.state import write as writing
    how, folder = sys.argv[1], Path(sys.argv[2])
    if how != "exchange":
        writing.exchanged = lambda one, other: False  # as on NFS
    plain = Path.rename
    def rename(path, to):
        done = plain(path, to)
        if how == "killed" and Path(to).name.startswith(".replaced-"):
            os._exit(9)
        return done
    Path.rename = rename
    for time in itertools.count(1):
        state = {"weights": torch.ones(time % 7 * 1000 + 1)}
        writing.write(writing.SaveRequest(1, state, {}, 1, str(folder), "runs", 3, None))
        print(time, flush=True)
"""


def replacer(how: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process that replaces one checkpoint again and again; return it once the first is
    written."""
    command = [sys.executable, "-c", textwrap.dedent(REPLACER), how, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline(), "the writer failed"
    return process


@pytest.mark.parametrize("how", ["exchange", "two renames"])
def test_a_reader_beside_a_writer_always_finds_a_whole_one(tmp_path: Path, how: str) -> None:
    with replacer(how, tmp_path) as writer:
        try:
            for _ in range(300):
                newest = checkpoint_files.newest(tmp_path)
                assert newest is not None
                assert newest.step == 1
        finally:
            writer.kill()


def test_a_writer_killed_between_two_renames_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    with replacer("killed", tmp_path) as writer:
        writer.wait(60)
    assert not (tmp_path / "step-00000001").exists()
    newest = checkpoint_files.newest(tmp_path)
    assert newest is not None
    assert newest.path == tmp_path / "step-00000001"
    assert newest.state["weights"].shape == (1001,)
    checkpoint_files.prune(tmp_path, Checkpoint(keep=1), 2)
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_that_nobody_has_told_of_is_told_at_the_end(tmp_path: Path) -> None:
    """The server of a node that hears no more from the run leaves one; one that was told of is told
    once."""
    job = Job(dir=str(tmp_path))
    with Events(tmp_path / "events.jsonl") as stream:
        run_storage.RunCheckpoints(job).report_saved(stream)
        assert list(stream.all(kinds.Saved)) == []
        for step in (8, 16):
            request = write.SaveRequest(
                step, {"a": torch.ones(1)}, {}, 1, f"{tmp_path}/checkpoints", str(tmp_path), 3, None
            )
            write.write(request)
        stream.add(kinds.Saved(rank=0, step=8, path="…", s=0.1))
        for _ in range(2):
            run_storage.RunCheckpoints(job).report_saved(stream)
        assert [saved.step for saved in stream.all(kinds.Saved)] == [8, 16]
        assert [*stream.all(kinds.Saved)][-1].path == str(
            tmp_path / "checkpoints" / "step-00000016"
        )


def test_a_state_saved_before_a_damaged_one_is_reported_at_the_end(tmp_path: Path) -> None:
    """A training that went on from before it, and lost the agent that would have told."""
    job, folder = Job(dir=str(tmp_path)), tmp_path / "checkpoints"

    def save(step: int) -> str:
        write.write(
            write.SaveRequest(
                step, {"a": torch.ones(99)}, {}, 1, str(folder), str(tmp_path), 3, None
            )
        )
        return str(folder / f"step-{step:08d}")

    with Events(tmp_path / "events.jsonl") as stream:
        for step in (8, 16):
            stream.add(kinds.Saved(rank=0, step=step, path=save(step), s=0.1))
        checkpoints = run_storage.RunCheckpoints(job)
        assert checkpoints.report_saved(stream, step=12), "step 16 is whole, and later"
        damage(folder / "step-00000016")
        assert not checkpoints.report_saved(stream, step=12)
        assert not checkpoints.report_saved(stream)
        assert checkpoints.report_saved(stream, step=-1), "nothing is to be saved"
        assert [saved.step for saved in stream.all(kinds.Saved)] == [8, 16]
        path = save(12)
        for _ in range(2):
            assert checkpoints.report_saved(stream, step=12)
        assert [saved.step for saved in stream.all(kinds.Saved)] == [8, 16, 12]
        assert [*stream.all(kinds.Saved)][-1].path == path


def paths_given_to(
    module: ModuleType, function: str, monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Replace a function by one that also notes its paths; return the list of these."""
    real, paths = getattr(module, function), list[Path]()

    def noted(path: Path) -> Any:
        paths.append(path)
        return real(path)

    monkeypatch.setattr(module, function, noted)
    return paths


def test_the_ranks_of_a_node_hash_a_checkpoint_once_in_each_attempt(
    tmp_path: Path, events: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = paths_given_to(object_store, "checksum_of", monkeypatch)
    monkeypatch.setenv("RAYDIST_SCRATCH", str(tmp_path / "node"))
    put(1)
    newest = put(2)
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        loaded = [checkpoint.latest() for _ in range(2)]
        assert [each and each.step for each in loaded] == [2, 2]
    assert read == [newest / "state.pt"] * 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    damage(newest)
    loaded = [checkpoint.latest() for _ in range(2)]
    assert [each and each.step for each in loaded] == [1, 1]


@pytest.mark.parametrize("room", [0, 7])
def test_a_full_temporary_folder_damages_no_checkpoint(
    tmp_path: Path, events: Seen, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The note of a checksum found no room there, all checkpoints were skipped, and a restart began
    anew."""
    monkeypatch.setenv("RAYDIST_SCRATCH", str(tmp_path / "node"))
    put(1)
    newest = put(2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        loaded = [checkpoint.latest() for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [each and each.step for each in loaded] == [2, 2]

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(object_store, "checksum_of", broken)
    with pytest.raises(checkpoint_files.Flaw, match="can't be read"):
        checkpoint_files.verify(newest)


def test_a_restart_reads_no_checkpoint_unless_ranks_need_it(
    tmp_path: Path, events: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver read and hashed all of the newest one before each restart, even where memory had a
    newer state."""
    hashed = paths_given_to(checkpoint_files, "_hashed", monkeypatch)
    training = run_storage.RunCheckpoints(Job(dir=str(tmp_path / "run")))
    assert [each.value for each in training.variables(lambda text: None)] == [""]
    paths = [put(step) for step in (8, 16, 24)]
    damage(paths[1])
    (chosen,) = training.variables(lambda text: None)
    assert (chosen.value, hashed) == (str(paths[2].absolute()), [])
    monkeypatch.setenv("RAYDIST_RESUME", str(paths[1].absolute()))
    first = checkpoint.latest()
    assert first is not None
    assert first.step == 16  # in the first attempt the driver has read it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.chdir(tmp_path)
    stand(tmp_path / "run", events)
    latest = checkpoint.latest()
    assert latest is not None
    assert latest.step == 8  # neither the damaged one nor one that the driver did not choose
    assert [event["kind"] for event in events if "is skipped" in event.get("text", "")] == [
        "warning"
    ]
