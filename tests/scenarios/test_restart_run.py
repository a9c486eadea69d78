"""Runs that faults strike: what the user sees of them is what an unbroken run shows."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist
from raydist.reporting.result import Result
from raydist.shared.errors import RunFailed
from raydist.shared.events import read_events as read_log
from raydist.shared.kinds import EventJson
from raydist.state import checkpoint_files
from raydist.watch.web.model import Model
from raydist.worker import checkpoint
from tests import faults
from tests.faults import Fault, kill
from tests.horovod_ranks import requires_horovod
from tests.leftovers import alive, remaining_placement_groups
from tests.programs import Program
from tests.records import read_events

pytestmark = pytest.mark.ray
WORDS = (
    "watch.progress=none",
    "train.epochs=3",
    "data.batch_size=8",
    "optim=sgd",
    "snapshot.every=1",
    "seed=5",
)
REPEATED = """
import os, signal, time
import torch
import raydist
from raydist import checkpoint, events
from raydist.shared.events import read_kind

def job():
    me, found = raydist.rank(), checkpoint.latest()
    for step in range((found.step if found else 0) + 1, 8):
        torch.distributed.barrier()
        raydist.report(step=step, loss=1 / step, lr=0.5)
        if step == 4:
            checkpoint.save(step, {"step": step}, wait=True)
        if step == 5 and me.rank == 1 and not found:
            while not any(
                one.rank == 0 and one.step == 5
                for one in read_kind(events.Report, me.run_dir / "events.jsonl")
            ):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""A loop that saves step 4 and is killed once the driver has recorded step 5."""
BACKENDS = ["gloo", pytest.param("horovod", marks=requires_horovod)]


def train(*words: str, struck: tuple[Fault, ...] = (), group: str = "inline") -> Result[Any]:
    size = () if any(word.startswith("scale=") for word in words) else ("scale=1x2",)
    return raydist.run(faults.training, *size, f"group={group}", *WORDS, *words, struck=struck)


@cache
def unbroken(backend: str, *words: str) -> tuple[Any, list[float]]:
    """Return the result of a run without a fault, and the loss of each of its steps."""
    done = train(f"backend={backend}", *words)
    return done.values, losses(done)


def events(done: Result[Any], kind: str) -> list[EventJson]:
    return [
        happened for happened in read_events(done.dir / "events.jsonl") if happened["kind"] == kind
    ]


def losses(done: Result[Any]) -> list[float]:
    """Return the loss of each step on rank 0; the losses of a repeated step must agree."""
    result: dict[int, float] = {}
    for report in events(done, "report"):
        if report["rank"] == 0 and "loss" in report["values"]:
            assert (
                result.setdefault(report["step"], report["values"]["loss"])
                == report["values"]["loss"]
            )
    return [loss for _, loss in sorted(result.items())]


OF_HOROVOD = partial(pytest.param, "horovod", marks=requires_horovod)


@pytest.mark.parametrize(
    ("backend", "struck", "how"),
    [
        # the last step of an epoch: evaluation and checkpoint come after the restart
        ("gloo", kill(0, 16), "killed"),
        ("gloo", Fault("exit", 0, 33), "exited"),
        ("gloo", Fault("abort", 1, 1), "killed"),
        ("gloo", Fault("stop", 1, 20), "hung"),
        ("gloo", Fault("skip", 0, 12), "hung"),
        OF_HOROVOD(kill(0, 16), "killed"),
        OF_HOROVOD(Fault("raise", 1, 20), "raised"),
        OF_HOROVOD(Fault("skip", 0, 12), "hung"),
    ],
    ids=lambda value: f"{value.act}{value.step}" if isinstance(value, Fault) else None,
)
def test_a_run_that_is_struck_ends_as_if_it_had_not_been(
    on_ray: Path, backend: str, struck: Fault, how: str
) -> None:
    # a stopped rank is named by its state; one that keeps away from the collectives is given up
    # after the limit
    limits = {"stop": ("hang.after_s=1",), "skip": ("hang.after_s=1", "hang.limit_s=8")}
    done = train(f"backend={backend}", *limits.get(struck.act, ()), struck=(struck,))
    assert done.status == "finished"
    assert (done.values, losses(done)) == unbroken(backend)
    (end,) = done.restarts
    assert (end.rank, end.how, end.step) == (struck.rank, how, struck.step)
    (back,) = events(done, "restarted")
    # the other rank may be stopped while it still takes or keeps the step that the struck one has
    # kept
    assert (back["number"], back["step"]) == (1, struck.step + 1 - back["repeated"])
    assert back["repeated"] <= 1
    assert not done.failure
    assert len(events(done, "began")) == 4
    assert not [event["pid"] for event in events(done, "began") if alive(event["pid"])]


@pytest.mark.parametrize(
    ("group", "backend"),
    [("inline", "gloo"), pytest.param("ray", "horovod", marks=requires_horovod)],
)
def test_two_faults_and_a_snapshot_now_and_then(on_ray: Path, group: str, backend: str) -> None:
    done = train(
        f"backend={backend}", "snapshot.every=4", struck=(kill(1, 10), kill(0, 30, 1)), group=group
    )
    assert (done.values, losses(done)) == unbroken(backend)
    # A restart costs no placement and no new actor.
    phases = [event["name"] for event in events(done, "phase")]
    placing = ["connect", "place"] if group == "ray" else []
    assert phases == [*placing, "actors", "warm-up", "rendezvous", "first step"]
    assert len(events(done, "plan")) == 1
    assert done.launch.keys() == set(phases)
    assert [event["repeated"] for event in events(done, "restarted")] == [2, 2]
    assert [event["number"] for event in events(done, "restart")] == [1, 2]
    assert [end.rank for end in done.restarts] == [1, 0]
    assert 0 < done.goodput < 1
    assert done.spent["failures"] > 0 < done.spent["repeated steps"]
    assert sum(done.spent.values()) == pytest.approx(done.wall_s, rel=0.02)
    assert done.recovery.keys() == {
        "detect",
        "kill",
        "place",
        "fork",
        "rendezvous",
        "restore",
        "first step",
    }
    for number in (1, 2):
        assert (done.dir / f"blame-{number}.txt").exists()
    assert group == "inline" or remaining_placement_groups() == []
    # Without train.check_resume nothing is compared.
    assert events(done, "checked") == []
    assert not any("samples_hash" in report for report in events(done, "report"))


def test_a_model_in_shards_goes_on_from_memory_and_after_the_run_from_the_disk(
    on_ray: Path,
) -> None:
    done = train("parallel=fsdp", struck=(kill(1, 10), kill(0, 30, 1)))
    assert (done.values, losses(done)) == unbroken("gloo", "parallel=fsdp")
    assert [(event["step"], event["repeated"]) for event in events(done, "restarted")] == [
        (11, 0),
        (31, 0),
    ]
    alone, _ = unbroken("gloo")[0]
    assert (done.values[0] or {})["figures"] == pytest.approx(alone["figures"], abs=1e-5)

    with pytest.raises(RunFailed) as failed:
        train("parallel=fsdp", "restart=none", struck=(kill(1, 10),))
    saved = failed.value.result.checkpoint
    assert saved is not None
    assert str(saved).endswith(("step-00000009", "step-00000010"))
    more = raydist.run(
        faults.training, "scale=1x1", "group=inline", *WORDS, "parallel=fsdp", f"resume={saved}"
    )
    assert more.metrics["steps"] == 96 - int(
        str(saved)[-8:]
    )  # half the ranks take half the samples in a step


def test_the_ranks_are_told_how_often_they_were_restarted(on_ray: Path) -> None:
    def job() -> tuple[str, str]:
        # a rank that finishes while another still connects makes that one fail
        torch.distributed.barrier()
        raydist.report(step=1)
        faults.add_faults(kill(0, 1))
        faults.strike(1)
        return os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]

    done = raydist.run(job, "scale=1x2", "group=inline", "restart.max=5", "watch.progress=none")
    assert done.values == (("1", "5"), ("1", "5"))


@pytest.mark.parametrize("init_method", ["tcp", "file"])
def test_ranks_meet_anew_by_every_method(on_ray: Path, init_method: str) -> None:
    done = train(f"init_method={init_method}", struck=(kill(0, 5),))
    assert done.values == unbroken("gloo")[0]


def test_ranks_that_are_not_forked_are_restarted_too(on_ray: Path) -> None:
    done = train("start=spawn", struck=(kill(1, 10),))
    assert (done.values, losses(done)) == unbroken("gloo")


def test_a_loop_of_ones_own_goes_on_from_its_newest_checkpoint(on_ray: Path) -> None:
    words = ("scale=1x2", "group=inline", "watch.progress=none")
    whole = raydist.run(faults.custom_loop, *words)
    done = raydist.run(faults.custom_loop, *words, struck=(kill(1, 25),))
    assert whole.values[0] == (0, 1640.0)  # 2 x (1 + 2 + ... + 40)
    assert done.values == ((20, 1640.0), (20, 1640.0))
    (back,) = events(done, "restarted")
    assert (back["step"], back["repeated"]) == (21, 5)


def test_a_repeated_last_step_is_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REPEATED)
    program = Program(tmp_path, "job=mine.py", "scale=1x2", "group=inline")
    assert program.wait() == 0, program.screen
    reports = [each["step"] for each in program.events("report") if each["rank"] == 0]
    assert reports == [1, 2, 3, 4, 5, 5, 6, 7]
    model = Model()
    for happened in read_log(program.run_dir / "events.jsonl"):
        model.add(happened)
    state: Any = model.sections()["state"]
    assert (state["health"][:1], state["evaluation"]) == (["loss 0.1429"], [])
    assert "lr 0.5" not in program.screen  # only an evaluation shows all values on the screen


def test_a_loop_of_ones_own_does_not_wait_for_the_disk(on_ray: Path) -> None:
    def job() -> list[int]:
        def nobody(*_: object) -> None:
            raise AssertionError("this is not for the rank to do")

        checkpoint_files.write_and_prune, written, weight = nobody, [], torch.zeros(1000)  # type: ignore[assignment]
        for step in range(1, 4):
            weight += step
            checkpoint.save(step, {"weight": weight, "names": ["a", ("b", 3)]}, {"loss": step})
            weight += 10  # what was saved is what it was then
            checkpoint.settle()
            written.append(checkpoint_files.newest_step(raydist.rank().run_dir / "checkpoints"))
        return written

    done = raydist.run(job, "scale=1x2", "group=inline", "watch.progress=none", "checkpoint.keep=2")
    assert done.values[0] == [1, 2, 3]
    kept = sorted((Path(done.dir) / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000002", "step-00000003"]
    state = checkpoint.load(kept[1])
    assert state["weight"].tolist() == [26.0] * 1000
    assert state["names"] == ["a", ("b", 3)]
    assert checkpoint_files.verify(kept[1]).meta.world_size == 2
    assert checkpoint_files.verify(kept[1]).metrics == {"loss": 3}


def test_a_checkpoint_that_is_damaged_is_passed_over_by_a_restart(on_ray: Path) -> None:
    def struck() -> int:
        from raydist.worker import context

        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        begin, _ = faults.custom_loop(24 if first else 40)
        if first and context.rank().rank == 0:
            checkpoint.settle()
            (context.rank().run_dir / "checkpoints" / "step-00000020" / "state.pt").write_bytes(
                b"cut off"
            )
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
        return begin

    done = raydist.run(struck, "scale=1x2", "group=inline", "watch.progress=none")
    assert done.values == (10, 10)
    assert any("step-00000020 is skipped" in text for text in done.warnings)


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(on_ray: Path) -> None:
    words = ("backend=gloo", "snapshot.every=0", "checkpoint.every=16")
    done = train(*words, struck=(Fault("damage", 0, 40),))
    assert (done.values, losses(done)) == unbroken("gloo")
    (back,) = events(done, "restarted")
    assert (back["step"], back["repeated"]) == (17, 24)
    assert any("step-00000032 is skipped" in text for text in done.warnings)


def test_a_damaged_checkpoint_does_not_stand_for_the_last_state(on_ray: Path) -> None:
    """The state of its step is still in memory."""
    words = ("snapshot.every=15", "checkpoint.every=16", "restart.max=1")
    with pytest.raises(RunFailed) as caught:
        train(*words, struck=(Fault("damage", 0, 40), kill(1, 33, 1)))
    result = caught.value.result
    assert begun(result) == [0, 32]
    assert result.checkpoint == result.dir / "checkpoints" / "step-00000032"
    assert checkpoint_files.verify(result.checkpoint).step == 32


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk with little room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("root mounts a small disk, where it may")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_a_full_disk_does_not_stop_the_training(
    on_ray: Path, small_disk: Path, division: str
) -> None:
    words = (
        "backend=gloo",
        f"parallel={division}",
        "checkpoint.every=16",
        f"hydra.run.dir={small_disk}/run",
    )
    done = train(*words, struck=(Fault("fill", 0, 20),))
    assert done.status == "finished"
    assert done.values == unbroken("gloo", f"parallel={division}")[0]
    for word in (
        "cannot be written (No space left on device)",
        "a checkpoint could not be written: OSError",
    ):
        assert any(word in text for text in done.warnings), done.warnings
    newest = checkpoint_files.newest(done.dir / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.path) == (16, done.checkpoint)
    assert not list((done.dir / "checkpoints").glob(".*"))


def test_restart_none_ends_with_the_first_failure_and_its_state_is_on_the_disk(
    on_ray: Path,
) -> None:
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        train("restart=none", struck=(kill(1, 21),))
    result = caught.value.result
    assert (result.restarts, result.cause.step) == ((), 21)
    assert result.checkpoint.name == "step-00000021"
    resumed = train(f"resume={result.dir}")
    assert (resumed.values, losses(resumed)[-27:]) == (
        unbroken("gloo")[0],
        unbroken("gloo")[1][21:],
    )


def begun(done: Result[Any]) -> list[int]:
    """Return the step from which each attempt began, those of earlier runs in the same folder
    first."""
    return [event["resumed"] for event in events(done, "begin") if event["rank"] == 0]


def saved_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder."""
    steps = sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/meta.json"))
    return [step for step in steps if checkpoint_files.verify(folder / f"step-{step:08d}")]


def test_a_second_training_in_a_run_folder_leaves_the_first_ones_checkpoints_alone(
    on_ray: Path,
) -> None:
    """They are of later steps: its own were deleted as they were saved, and a restart went on from
    the other's."""
    words = ("checkpoint.every=8", "snapshot.every=0", "hydra.run.dir=again")
    first = train(*words)
    second = train(*words, "train.steps=24", struck=(kill(1, 20),))
    assert begun(second) == [0, 0, 16]
    assert second.checkpoint == first.dir / "training-2" / "checkpoints" / "step-00000024"
    assert saved_in(first.dir / "training-2" / "checkpoints") == [8, 16, 24]
    assert saved_in(first.dir / "checkpoints") == [32, 40, 48]
    third = train(*words, "resume=again")
    assert begun(third)[3:] == [24]
    assert third.checkpoint == first.dir / "training-2" / "checkpoints" / "step-00000048"
    back = train(*words, "resume=again/checkpoints/step-00000032")
    assert begun(back)[4:] == [32]
    assert back.checkpoint == first.dir / "training-3" / "checkpoints" / "step-00000048"
    assert saved_in(first.dir / "checkpoints") == [32, 40, 48]


@pytest.mark.parametrize(
    "words",
    [("snapshot.every=1",), ("snapshot.every=0",), ("snapshot.every=1", "parallel=fsdp")],
    ids=["memory", "disk", "shards"],
)
def test_a_second_fit_of_a_job_is_restarted_at_its_own_step(
    on_ray: Path, words: tuple[str, ...]
) -> None:
    """It found the last checkpoint of the first, made no step, and the run ended as finished."""
    settings = (
        "scale=1x2",
        "group=inline",
        "watch.progress=none",
        "data.batch_size=8",
        "checkpoint.every=4",
    )

    def run(*struck: Fault) -> Result[Any]:
        return raydist.run(faults.two_trainings, *settings, *words, "seed=5", struck=struck)

    done = run(kill(1, 7))
    (end,) = done.restarts
    assert (end.how, end.step) == ("killed", 7)
    *before, step = begun(done)
    assert before == [0, 0, 20]
    assert (step == 4) if "snapshot.every=0" in words else (5 <= step <= 7)
    assert done.values == run().values
    assert saved_in(done.dir / "checkpoints")[-1] == 20
    assert done.checkpoint == done.dir / "checkpoints" / "fit-2" / "step-00000010"


def test_a_fit_that_an_earlier_run_has_finished_stays_finished(on_ray: Path) -> None:
    """The run that resumed saved nothing of it: its restart, and the run after it, trained it
    again from the beginning."""

    def run(*words: str, struck: tuple[Fault, ...]) -> Result[Any]:
        settings = ("scale=1x2", "group=inline", "watch.progress=none", "data.batch_size=8")
        own = ("seed=5", "checkpoint.every=2", "snapshot.every=0")
        # the first batch of a fit comes before its steps count: no fault is due then
        return raydist.run(faults.two_trainings, *settings, *own, *words, struck=struck, first=3)

    with pytest.raises(RunFailed):
        run("restart=none", struck=(kill(1, 4),))
    with pytest.raises(RunFailed) as caught:
        run("resume=auto", "restart.max=1", struck=(kill(1, 6), kill(1, 9, 1)))
    assert begun(caught.value.result) == [3, 4, 3, 6]
    assert begun(run("resume=auto", struck=())) == [3, 8]


def test_resume_auto_continues_what_was_stopped_and_not_what_has_finished(on_ray: Path) -> None:
    """The command of another training found all steps of the one before done: it made none, and
    reported success."""
    with pytest.raises(RunFailed):
        train("restart=none", struck=(kill(1, 21),))
    rest = train("resume=auto")
    assert begun(rest) == [21]
    new = train("resume=auto", "optim.lr=0.01")
    assert begun(new) == [0]
    (text,) = new.warnings
    assert f"{rest.dir} has finished" in text
    longer = train(f"resume={rest.dir}", "train.epochs=4")
    assert begun(longer) == [48]


@pytest.mark.parametrize(
    ("struck", "attempts", "reason"),
    [
        (Fault("raise", 1, 12, ()), 2, "the same failure came twice at step 12"),
        (kill(1, 12, 0, 1, 2, 3), 3, "3 failures in a row without a step beyond step 12"),
    ],
)
def test_what_comes_again_and_again_ends_with_the_reason(
    on_ray: Path, struck: Fault, attempts: int, reason: str
) -> None:
    with pytest.raises(RunFailed) as caught:
        train(struck=(struck,))
    result = caught.value.result
    assert len(result.restarts) == attempts - 1
    assert result.why_last == reason
    assert reason in str(caught.value)
    assert result.checkpoint.name == "step-00000012"


def test_more_failures_than_are_forgiven(on_ray: Path) -> None:
    struck = tuple(kill(attempt % 2, 10 + attempt, attempt) for attempt in range(5))
    with pytest.raises(RunFailed, match=r"3 failures within 3600 s, restart\.max=2"):
        train("restart.max=2", struck=struck)


def test_a_word_that_is_wrong_for_the_ranks_is_not_tried_again(on_ray: Path) -> None:
    with pytest.raises(RunFailed, match=r"checkpoint\.best=max:accurracy") as caught:
        train("checkpoint.best=max:accurracy")
    assert caught.value.result.restarts == ()


def program(folder: Path, *words: str, struck: tuple[Fault, ...] = ()) -> Program:
    """Start the same training, but longer, as a person does."""
    (folder / "slow.py").write_text(
        "import raydist\nfrom tests import faults\nfrom tests.faults import Fault\n\n"
        f"def job(config):\n    faults.training(config, pause=0.01, struck={struck!r})\n"
    )
    return Program(
        folder, "job=slow.py", "scale=1x2", "group=inline", *WORDS, "train.epochs=200", *words
    )


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    ("number", "backend"),
    [(signal.SIGTERM, "gloo"), pytest.param(signal.SIGINT, "horovod", marks=requires_horovod)],
)
def test_a_signal_leaves_the_last_state_on_the_disk(
    tmp_path: Path, number: signal.Signals, backend: str
) -> None:
    """Ctrl-C; SIGTERM, as `ray job stop` and batch systems send it."""
    started = program(tmp_path, "checkpoint.every=100000", f"backend={backend}")
    started.wait_for_step(20)
    started.signal(number)
    assert started.wait() == 128 + number, started.screen
    newest = checkpoint_files.newest(started.run_dir / "checkpoints")
    assert newest is not None
    assert newest.step >= 20
    assert started.result()["checkpoint"] == str(newest.path)
    assert started.leftovers() == []


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_driver_leaves_the_last_state_on_the_disk_and_nothing_else(
    tmp_path: Path, backend: str
) -> None:
    started = program(tmp_path, "checkpoint.every=100000", f"backend={backend}")
    started.wait_for_step(20)
    started.signal(signal.SIGKILL)
    started.wait()
    assert started.leftovers() == []
    newest = checkpoint_files.newest(started.run_dir / "checkpoints")
    assert newest is not None
    # The step that all ranks had made. A rank reports a step before it keeps its state.
    assert newest.step >= max(event.get("kept", 0) for event in started.events("report")) > 0


LATE = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist


class Late(torch.optim.SGD):
    \"\"\"On rank 1 a step takes a while after the weights have changed: rank 0 keeps its state first.\"\"\"

    made = 0

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        if raydist.rank().rank == 1:
            time.sleep(0.3)
            self.made += 1
            while self.made == 8 and os.path.exists("hold"):  # it is to be stopped before its end
                time.sleep(0.05)


def job(config):
    torch.manual_seed(0)
    x = torch.randn(64, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return raydist.fit(config, train=data, loss=nn.functional.mse_loss, model=model)
"""


LATE_WORDS = (
    *("optim=late.Late", "optim.lr=0.01", "data.batch_size=8", "backend=gloo", "train.steps=12"),
    *("checkpoint.every=100000", "snapshot.every=1", "watch.progress=none"),
)


HELD = """
from pathlib import Path

from raydist.worker import checkpoint

hand_over = checkpoint.hand_over
hold = Path(__file__).with_name("hold")


def hand_over_late(request, slot):
    if request.step == 5 and hold.exists():
        hold.rename(hold.with_name("held"))
        time.sleep(600)
    return hand_over(request, slot)


checkpoint.hand_over = hand_over_late
"""
"""Rank 0 has kept the state of a checkpoint, and is stopped before it has requested it."""


def test_a_run_stopped_between_the_checkpoints_of_two_ranks_draws_the_same_dropout(
    tmp_path: Path,
) -> None:
    """test_restart_nodes stops one between the snapshots of two hosts."""
    settings = ("optim=sgd", "snapshot.every=1000", "checkpoint.every=1")
    words = ("job=late.py", *LATE_WORDS[1:], *settings, "scale=1x2", "group=inline")

    def started(name: str, *resume: str, hold: bool = False) -> Program:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "late.py").write_text(LATE + HELD)
        if hold:
            (folder / "hold").touch()
        return Program(folder, *words, *resume)

    def seen(done: Program) -> dict[int, float]:
        return {
            report["step"]: report["values"]["loss"]
            for report in done.events("report")
            if report["rank"] == 0
        }

    whole, stopped = started("whole"), started("stopped", hold=True)
    stopped.wait_for_step(5)
    stopped.wait_until((stopped.folder / "held").exists, "checkpoint of step 5")
    stopped.signal(signal.SIGINT)
    assert stopped.wait() == 130, stopped.screen
    resumed = started("resumed", f"resume={stopped.run_dir}")
    assert resumed.wait() == whole.wait() == 0, (resumed.screen, whole.screen)
    steps = seen(resumed)
    assert 1 < len(steps) < 12
    assert steps.items() <= seen(whole).items()


def back(started: Program, count: int) -> bool:
    """Return whether so many restarts are complete."""
    return not count or len(started.events("restarted")) == count


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_storm_changes_nothing(tmp_path: Path, on_ray: Path, backend: str) -> None:
    """A rank is killed every now and then, whichever it is and whatever it does."""
    kills = 3
    words = (
        f"backend={backend}",
        "train.epochs=7",
        "checkpoint.every=30",
        "restart.max=1000",
    )
    whole = train(*words)
    ended: Any = whole.values[0]
    (tmp_path / "storm").mkdir()
    # an attempt must not come to the end of the run before a rank of it is killed
    waits = tuple(Fault("wait", 0, 30 * count + 45, (count,)) for count in range(kills))
    started = program(tmp_path / "storm", *words, struck=waits)
    for count in range(kills):
        started.wait_until(partial(back, started, count), "restart")
        started.wait_for_step(30 * (count + 1))
        ranks = [event["pid"] for event in started.events("began")][-2:]
        os.kill(ranks[count % 2], signal.SIGKILL)
    assert started.wait() == 0, started.screen
    last = [
        event
        for event in started.events("report")
        if event["rank"] == 0 and "test_loss" in event["values"]
    ][-1]
    assert last["values"]["test_loss"] == whole.metrics["test_loss"]
    saved = checkpoint.load(Path(started.result()["checkpoint"]))
    for name, value in saved["model"].items():
        assert value.tolist() == ended["weights"][name]
    assert len(started.result()["restarts"]) == kills
    assert started.leftovers() == []


def test_checkpoints_are_those_of_a_run_without_snapshots(on_ray: Path) -> None:
    words = ("checkpoint.every=20", "checkpoint.best=min:loss", "checkpoint.keep=2")
    with_them, without = train(*words), train(*words, "snapshot.every=0")
    names = [
        sorted(path.name for path in (done.dir / "checkpoints").iterdir())
        for done in (with_them, without)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        one, other = (
            checkpoint_files.verify(done.dir / "checkpoints" / name)
            for done in (with_them, without)
        )
        differing = [
            key
            for key in {**one.state, **other.state}
            if not equal(one.state.get(key), other.state.get(key))
        ]
        assert differing == ["config"]
        assert replace(one.meta, time=0, files={}) == replace(other.meta, time=0, files={})
    assert with_them.warnings == ()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
