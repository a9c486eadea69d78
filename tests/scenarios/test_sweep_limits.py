"""What ends a sweep early: too many failed trials, its hours. And what it says before: the
importance of its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program
from tests.records import read_events
from tests.scenarios.test_sweep import PROGRAM

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
JOB = """
import os, time
import raydist

def job(config, factor: float = 0.0, shift: float = 0.0):
    raydist.report(step=1, loss=factor + shift / 10)
    while factor == 3 and not os.path.exists("go"):
        time.sleep(0.05)
    if factor >= 3:
        raise ValueError(f"factor {factor:g} is too great")
"""
SLOW = PROGRAM.replace(
    "time.sleep(0.01)", "os.path.exists(f'go{config.optim.lr}') or time.sleep(0.5)"
).replace("import time", "import os, time")
HOURS = 0.025
"""Long enough for a trial on a busy machine. Meanwhile the other sweep runs."""
COMMON = ("backend=gloo", "restart=none", "sweep.parallel=1", "sweep.objective=min:loss")


def sweep(folder: Path, ray_address: str, *words: str) -> Program:
    return Program(folder, *words, address=ray_address, module="raydist.tools.sweep")


def summary(folder: Path) -> Any:
    path = folder / "one_sweep" / "sweep.json"
    return json.loads(path.read_text()) if path.exists() else {"state": "", "trials": []}


def states(folder: Path) -> list[str]:
    return [each["state"] for each in summary(folder)["trials"]]


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> Program:
    """Start a sweep of two trials: the second one takes longer than the sweep may."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / "job.py").write_text(SLOW.replace("go{", f"{folder}/go{{"))
    (folder / "go0.1").touch()
    return sweep(
        folder, ray_address, "job=job.py", "optim.lr=0.1,0.2", "scale=1x1", "train.epochs=30",
        "train.steps=240", f"sweep.hours={HOURS}", *COMMON, f"hydra.sweep.dir={folder}/one_sweep",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def beside(timed: Program) -> None:
    """Have that sweep run beside the other tests."""


def test_failed_trials_end_a_sweep_and_importance_comes_before(
    tmp_path: Path, ray_address: str
) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "job.py").write_text(JOB.replace('"go"', f'"{tmp_path}/go"'))
    done = sweep(
        tmp_path, ray_address, "job=job.py", "job.args.factor=1,2,3,4", "job.args.shift=0,1",
        "scale=1x1", "sweep.max_failures=2", *COMMON, f"hydra.sweep.dir={tmp_path}/one_sweep",
    )  # fmt: skip
    done.wait_until(
        lambda: bool(summary(tmp_path).get("importance")) and states(tmp_path)[4:] == ["running"],
        "importance of the settings, and trial 4",
        300,
    )
    now = summary(tmp_path)
    assert now["state"] == "running"
    assert states(tmp_path) == [*["finished"] * 4, "running"]
    assert now["importance"]["job.args.factor"] > 0.5
    (tmp_path / "go").touch()
    assert done.wait(300) == 1, done.screen
    assert states(tmp_path) == [*["finished"] * 4, "failed", "failed"]
    assert summary(tmp_path)["importance"] == now["importance"]
    (line,) = [each for each in done.screen.splitlines() if "trials have failed" in each]
    assert "sweep.max_failures=2 trials have failed; the first was trial 4: " in line
    assert "factor 3 is too great" in line

    assert f"sweep.resume={tmp_path}/one_sweep sweep.max_failures=4" in done.screen

    again = sweep(tmp_path, ray_address, f"sweep.resume={tmp_path}/one_sweep")
    assert again.wait() == 2
    assert (
        "sweep.max_failures=2: 2 trials of the sweep failed before; "
        "set sweep.max_failures=4 or sweep.on_failure=retry" in again.screen
    )
    assert len(states(tmp_path)) == 6
    more = sweep(
        tmp_path, ray_address, f"sweep.resume={tmp_path}/one_sweep", "sweep.max_failures=9"
    )
    assert more.wait(300) == 0, more.screen
    assert states(tmp_path) == [*["finished"] * 4, *["failed"] * 4]


def test_a_sweep_ends_after_its_hours_and_continues_with_more(
    timed: Program, ray_address: str
) -> None:
    folder = timed.folder
    assert timed.wait(300) == 0, timed.screen
    assert states(folder) == ["finished", "stopped"]
    assert summary(folder)["state"] == "stopped"
    assert f"stop  sweep.hours={HOURS} are over" in timed.screen
    assert f"sweep.resume={folder}/one_sweep sweep.hours={2 * HOURS}" in timed.screen
    stopped = summary(folder)["trials"][1]
    assert 0 < stopped["step"] < 240
    assert list((folder / "one_sweep/1/checkpoints").glob("step-*/meta.json"))

    again = sweep(folder, ray_address, f"sweep.resume={folder}/one_sweep")
    assert again.wait() == 2
    assert f"hours before; set sweep.hours={2 * HOURS}" in again.screen
    (folder / "go0.2").touch()
    more = sweep(folder, ray_address, f"sweep.resume={folder}/one_sweep", "sweep.hours=2")
    assert more.wait(300) == 0, more.screen
    assert states(folder) == ["finished", "finished"]
    assert len([*read_events(folder / "one_sweep/1/events.jsonl", "run")]) == 2
    assert summary(folder)["wall_s"] > HOURS * 3600
