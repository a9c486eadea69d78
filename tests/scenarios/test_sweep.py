"""Sweeps on real Ray: many runs at a time, some paused, struck, stopped, killed; what is left, and
what it equals."""

from __future__ import annotations

import csv
import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import raydist
from bench import gangs
from raydist.shared.errors import ConfigError, RunFailed
from raydist.shared.kinds import EventJson
from raydist.sweeps.flow import SweepResult
from tests import faults
from tests.faults import Fault, kill, training
from tests.programs import Program
from tests.records import read_events
from tests.scenarios.test_restart_run import small_disk  # noqa: F401

with suppress(ImportError):
    import optuna  # noqa: F401 - it keeps the frames of what imports it first, and all that they hold

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
RATES = "optim.lr=0.001,0.3,0.03,0.003,0.1,0.01"
WORDS = ("scale=1x2", "backend=gloo", "train.epochs=3", "train.steps=48", "watch.progress=none")
PROGRAM = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist

def job(config):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))

    def loss(output, target):
        time.sleep(0.01)
        return nn.functional.mse_loss(output, target)

    raydist.fit(config, train=TensorDataset(x, x.sum(1, keepdim=True)), loss=loss, model=model)
"""
HELD = (
    PROGRAM.replace("import time", "import os, time")
    .replace("import raydist\n", "import raydist\nfrom raydist.worker import context\n")
    .replace(
        "time.sleep(0.01)",
        "held = os.path.exists(f'THERE/hold-{raydist.rank().run_dir.name}')\n"
        "        time.sleep(0.5 if held and context.current().step >= 20 else 0.01)",
    )
)
"""The same, whose steps after the 20th take long while there is a file for the trial."""


def events(folder: Path, *kinds: str) -> list[EventJson]:
    return [each for each in read_events(folder / "events.jsonl") if each["kind"] in kinds]


def losses(folder: Path) -> dict[int, float]:
    """By step; of a step that was repeated the last one."""
    reports = [
        each for each in events(folder, "report") if each["rank"] == 0 and "loss" in each["values"]
    ]
    return {each["step"]: each["values"]["loss"] for each in reports}


def most_at_a_time(done: SweepResult) -> int:
    """Return the largest number of trials that had ranks at the same time."""
    marks, gone = [], 0.0
    for trial in done.trials:
        for each in events(done.dir / trial.dir, "plan", "ended", "result"):
            if each["kind"] == "ended":
                gone = each["t"]
            else:  # the next trial may have the slots before the result is written
                marks.append((each["t"], 1) if each["kind"] == "plan" else (gone, -1))
    return max(sum(step for _, step in sorted(marks)[: n + 1]) for n in range(len(marks)))


def assert_nothing_held() -> None:
    import ray
    from ray.util import placement_group_table

    assert {each["state"] for each in placement_group_table().values()} <= {"REMOVED"}
    assert ray.cluster_resources()["CPU"] == 4


def states(done: SweepResult | Path) -> dict[int, str]:
    folder = done if isinstance(done, Path) else done.dir
    summary = json.loads((folder / "sweep.json").read_text())
    assert all(
        json.loads((folder / str(each["number"]) / "trial.json").read_text()) == each
        for each in summary["trials"]
    )
    return {each["number"]: each["state"] for each in summary["trials"]}


def test_asha_pauses_and_promotes_and_the_best_equals_the_same_run_alone(on_ray: Path) -> None:
    def judged(config: Any) -> dict[str, Any]:
        """Train; steps after the first milestone take long until the sweep lets the trial go on."""
        record = raydist.rank().run_dir / "trial.json"

        def strike(step: int) -> None:
            if step > 16 and not json.loads(record.read_text())["passed"]:
                time.sleep(0.1)

        with mock.patch.object(faults, "strike", strike):
            return training(config)

    done = raydist.sweep(
        judged,
        RATES,
        "sweep.objective=min:test_loss",
        "sweep.prune=asha",
        "sweep.min_steps=16",
        *WORDS,
    )
    assert most_at_a_time(done) == 2  # two of two ranks on four CPUs
    assert_nothing_held()
    [best] = done.best
    finished = [trial for trial in done.trials if trial.state == "finished"]
    paused = [trial for trial in done.trials if trial.state == "paused"]
    assert len(finished) + len(paused) == 6
    assert len(paused) >= 2
    assert all(len(trial.curve) < 3 for trial in paused)
    assert best.values["test_loss"] == min(trial.values["test_loss"] for trial in finished)
    assert done.results[best.number].metrics["test_loss"] == best.values["test_loss"]

    alone = raydist.run(training, f"optim.lr={best.settings['optim.lr']}", *WORDS)
    assert losses(done.dir / best.dir) == losses(alone.dir)
    assert len(losses(alone.dir)) == 48
    ends: list[tuple[Any, ...]] = [done.results[best.number].values, alone.values]
    weights, same = ([each["weights"] for each in values] for values in ends)
    assert weights == same

    assert states(done) == {trial.number: trial.state for trial in done.trials}
    with (done.dir / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["optim.lr"] for row in table] == RATES.partition("=")[2].split(",")
    assert float(table[best.number]["test_loss"]) == best.values["test_loss"]

    more = raydist.sweep(
        judged, f"sweep.resume={done.dir}", "sweep.prune=none", "watch.progress=none"
    )
    assert {trial.state for trial in more.trials} == {
        "finished",
        "paused",
    }  # paused ones belong to asha
    assert more.best == done.best
    assert more.results == {}


def test_a_sweep_that_is_stopped_and_killed_and_gone_on_with_equals_an_unbroken_one(
    tmp_path: Path, ray_address: str, on_ray: Path
) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "slow.py").write_text(HELD.replace("THERE", str(tmp_path)))
    space = ("optim.lr=tag(log,interval(0.001,0.3))", "sweep.sampler=tpe", "sweep.trials=4")
    common = (*space, "sweep.objective=min:loss", *WORDS)
    unbroken = raydist.sweep("slow.py", *common)
    folder = tmp_path / "sweep"
    secrets = ("model.hub={token: hush}", "env.DATABASE_URL=pg://me:hush@h/x", "env.API_KEY=hush")
    words = (
        "job=slow.py",
        f"hydra.sweep.dir={folder}",
        *common,
        *secrets,
        "env.HF_TOKEN=${oc.env:HOME}",
    )

    def started(*overrides: str) -> Program:
        return Program(tmp_path, *overrides, address=ray_address, module="raydist.tools.sweep")

    def at(number: int, step: int) -> bool:
        path = folder / str(number) / "events.jsonl"
        return path.exists() and any(
            each.get("step", 0) >= step for each in events(path.parent, "report")
        )

    for number in (0, 1):
        (tmp_path / f"hold-{number}").touch()
    first = started(*words)
    first.wait_until(lambda: at(1, 20), "step 20 of trial 1", 300)
    first.signal(signal.SIGINT)
    assert first.wait() == 130, first.screen
    for number in (0, 1):
        (tmp_path / f"hold-{number}").rename(tmp_path / f"hold-{number + 2}")
    assert "stopped" in states(folder).values()
    assert list((folder / "1").glob("checkpoints/step-*/meta.json"))

    forgotten = started(f"sweep.resume={folder}", *secrets[1:])
    assert forgotten.wait() == 2
    assert (
        "model.hub: it has a secret, which is not saved; type it again; set model.hub=VALUE"
        in forgotten.screen
    )
    second = started(f"sweep.resume={folder}", "watch.progress=none", *secrets)
    second.wait_until(lambda: at(3, 20), "step 20 of trial 3", 300)
    second.signal(signal.SIGKILL)
    second.wait()
    for number in (2, 3):
        (tmp_path / f"hold-{number}").unlink()
    assert "running" in {
        json.loads(path.read_text())["state"] for path in folder.glob("*/trial.json")
    }

    third = started(f"sweep.resume={folder}", "watch.progress=none", *secrets)
    assert third.wait(300) == 0, third.screen
    assert set(states(folder).values()) == {"finished"}
    records = [
        json.loads((folder / trial.dir / "trial.json").read_text()) for trial in unbroken.trials
    ]
    assert [each["settings"] for each in records] == [trial.settings for trial in unbroken.trials]
    assert [(each["step"], each["values"]) for each in records] == [
        (48, trial.values) for trial in unbroken.trials
    ]
    for trial in unbroken.trials:
        resumed, whole = losses(folder / trial.dir), losses(unbroken.dir / trial.dir)
        assert resumed.items() <= whole.items(), (
            trial.number
        )  # the driver had not received all steps when it was killed
    assert len(events(folder / "1", "run")) == 2  # it was stopped, and had finished before the kill
    assert [
        file for file in folder.rglob("*") if file.is_file() and b"hush" in file.read_bytes()
    ] == []
    summary = json.loads((folder / "sweep.json").read_text())
    assert summary["best"] == [trial.number for trial in unbroken.best]


def moody(config: Any) -> float:
    """Raises with some settings, and reports no loss."""
    raydist.report(step=1, test_loss=config.optim.lr)
    if config.optim.lr > 0.2:
        raise ValueError("too fast")
    return float(config.optim.lr)


ONE = ("scale=1x1", "backend=gloo", "restart=none", "watch.progress=none", "optim.lr=0.1,0.3,0.01")


def test_a_trial_that_fails_is_skipped_retried_or_the_end(on_ray: Path) -> None:
    skipped = raydist.sweep(moody, *ONE, "sweep.objective=min:test_loss")
    assert list(states(skipped).values()) == ["finished", "failed", "finished"]
    assert "too fast" in skipped.trials[1].why
    assert skipped.best[0].settings == {"optim.lr": "0.01"}
    assert skipped.results[2].values == (0.01,)
    retried = raydist.sweep(moody, *ONE, "sweep.on_failure=retry", "sweep.retries=2")
    assert [(each.state, each.failures) for each in retried.trials] == [
        ("finished", 0),
        ("failed", 3),
        ("finished", 0),
    ]
    assert len(events(retried.dir / "1", "run")) == 3
    assert retried.best == ()
    with pytest.raises(RunFailed, match="too fast"):
        raydist.sweep(moody, *ONE, "sweep.on_failure=end", "sweep.parallel=1")
    with pytest.raises(ConfigError) as wrong:
        raydist.sweep(moody, *ONE, "sweep.objective=min:loss")
    assert (wrong.value.key, wrong.value.value) == ("sweep.objective", "min:loss")
    assert "test_loss" in str(wrong.value)
    assert_nothing_held()


def test_a_trial_that_is_struck_costs_itself_only(on_ray: Path) -> None:
    """Rank 1 of each trial is killed; then nothing may be written any more."""
    done = raydist.sweep(
        training,
        "optim.lr=0.1,0.03",
        "sweep.objective=min:test_loss",
        *WORDS,
        struck=(kill(1, 21),),
    )
    assert [trial.state for trial in done.trials] == ["finished", "finished"]
    assert all(len(done.results[number].restarts) == 1 for number in (0, 1))
    whole = raydist.run(training, "optim.lr=0.03", *WORDS)
    assert losses(done.dir / "1") == losses(whole.dir)


@pytest.mark.root
def test_a_full_disk_does_not_stop_a_sweep(on_ray: Path, small_disk: Path) -> None:  # noqa: F811
    done = raydist.sweep(
        training, "optim.lr=0.1,0.03", *WORDS, "sweep.parallel=1", f"hydra.sweep.dir={small_disk}/sweep",
        struck=(Fault("fill", 0, 20),),
    )  # fmt: skip
    assert [trial.state for trial in done.trials] == ["finished", "finished"]
    assert json.loads((small_disk / "sweep" / "0" / "trial.json").read_text())["state"] in (
        "running",
        "finished",
    )
    assert not list((small_disk / "sweep").rglob(".*.part"))


def test_room_for_one_gang_and_eight_asked_for(on_ray: Path) -> None:
    """One rank of two trials is killed; `python -m bench gangs --rounds 50` runs more rounds."""
    for number in range(2):
        done = gangs.sweep_round(number, cpus=4)
        assert most_at_a_time(done) == 1
        assert_nothing_held()


def test_trials_of_two_sizes_share_the_cluster(on_ray: Path) -> None:
    def size() -> int:
        return raydist.rank().world_size

    done = raydist.sweep(size, "scale=1x3,1x1", "seed=1,2", "backend=gloo", "watch.progress=none")
    assert [len(done.results[number].values) for number in range(4)] == [3, 3, 1, 1]
    assert_nothing_held()


def test_what_the_cluster_can_never_hold_starts_no_trial(on_ray: Path) -> None:
    with pytest.raises(ConfigError, match="can never hold"):
        raydist.sweep(moody, "scale=1x1,1x64", "backend=gloo", "watch.progress=none")
    assert not list(on_ray.glob("runs/*/*/*/events.jsonl"))
