"""Trials that a person adds to a sweep: while it runs, after its driver was killed, after its
end."""

from __future__ import annotations

import csv
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program
from tests.records import read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
JOB = """
import os, time
import raydist

def job(config, factor: float = 0.0, shift: float = 0.0):
    while not os.path.exists(f"THERE/go-{factor:g}"):
        time.sleep(0.05)
    raydist.report(step=1, loss=factor + shift)
"""


def sweep(folder: Path, ray_address: str, *words: str) -> Program:
    return Program(folder, *words, address=ray_address, module="raydist.tools.sweep")


def add(folder: Path, ray_address: str, *settings: str) -> tuple[int, str]:
    """Type `raydist sweep add`; return its exit code and what it printed."""
    (elsewhere := folder / "add").mkdir(exist_ok=True)
    (elsewhere / "job.py").write_text((folder / "job.py").read_text())
    program = sweep(elsewhere, ray_address, "add", f"{folder}/one_sweep", *settings)
    return program.wait(300), program.screen


def trials(folder: Path) -> list[dict[str, Any]]:
    path = folder / "one_sweep" / "sweep.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["trials"] if path.exists() else []
    return found


def states(folder: Path) -> dict[int, str]:
    return {each["number"]: each["state"] for each in trials(folder)}


def begins(folder: Path, number: int) -> list[float]:
    """Return when a trial was started, each time."""
    runs = read_events(folder / "one_sweep" / str(number) / "events.jsonl", "run")
    return [each["t"] for each in runs]


def test_trials_are_added_while_a_sweep_runs_and_after_its_end(
    tmp_path: Path, ray_address: str
) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("THERE", str(tmp_path)))
    first = sweep(
        tmp_path, ray_address, "job=job.py", "job.args.factor=2,3", "scale=1x1", "backend=gloo",
        "restart=none", "sweep.parallel=1", "sweep.objective=min:loss", "env.API_KEY=hush",
        f"hydra.sweep.dir={tmp_path}/one_sweep",
    )  # fmt: skip
    first.wait_until(lambda: states(tmp_path).get(0) == "running", "trial 0", 300)

    code, screen = add(tmp_path, ray_address, "job.args.factor=1", "optim.lrr=1")
    assert code == 2
    assert "optim.lrr=1: there is no setting optim.lrr; did you mean optim.lr=1?" in screen
    assert not (tmp_path / "one_sweep/added").exists()

    code, screen = add(tmp_path, ray_address, "job.args.factor=1,0.5")
    assert code == 0, screen
    assert [line for line in screen.splitlines() if "added" in line] == [
        "added  trial 2: job.args.factor=1",
        "added  trial 3: job.args.factor=0.5",
    ]
    for factor in ("2", "1", "0.5"):
        (tmp_path / f"go-{factor}").touch()
    first.wait_until(lambda: states(tmp_path).get(1) == "running", "trial 1", 300)
    assert states(tmp_path) == {0: "finished", 1: "running", 2: "finished", 3: "finished"}
    assert [each["values"].get("loss") for each in trials(tmp_path)] == [2, None, 1, 0.5]
    assert "trial 3 (added by hand): finished (best)  job.args.factor=0.5" in first.screen

    code, screen = add(tmp_path, ray_address, "job.args.factor=0.1", "job.args.shift=0.2")
    assert code == 0, screen
    assert "added  trial 4: job.args.factor=0.1 job.args.shift=0.2" in screen
    first.signal(signal.SIGKILL)
    first.wait()
    assert states(tmp_path)[4] == "waiting"
    code, screen = add(tmp_path, ray_address, "job.args.factor=0.7")
    assert code == 0, screen
    resume = f"sweep.resume={tmp_path}/one_sweep"
    assert f"the sweep has ended; to run them, type\n  raydist sweep {resume}" in screen
    assert 5 not in states(tmp_path)

    for factor in ("3", "0.1", "0.7"):
        (tmp_path / f"go-{factor}").touch()
    second = sweep(tmp_path, ray_address, resume, "env.API_KEY=hush")
    assert second.wait(300) == 0, second.screen
    assert states(tmp_path) == dict.fromkeys(range(6), "finished")
    assert [len(begins(tmp_path, number)) for number in range(6)] == [1, 2, 1, 1, 1, 1]
    assert begins(tmp_path, 5) < begins(tmp_path, 1)[1:]  # the added ones were first in line

    code, screen = add(tmp_path, ray_address, "job.args.factor=0.25")
    assert code == 0, screen
    assert resume in screen
    (tmp_path / "go-0.25").touch()
    third = sweep(tmp_path, ray_address, resume, "env.API_KEY=hush")
    assert third.wait(300) == 0, third.screen
    assert states(tmp_path) == dict.fromkeys(range(7), "finished")
    assert re.search("best +trial 6", third.screen)
    with (tmp_path / "one_sweep" / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["added"] for row in table] == ["", "", *["by hand"] * 5]
    assert [row["job.args.shift"] for row in table] == ["", "", "", "", "0.2", "", ""]
    assert [float(row["loss"]) for row in table] == [2, 3, 1, 0.5, pytest.approx(0.3), 0.7, 0.25]
    assert len({each["added"] for each in trials(tmp_path)[2:]}) == 4
