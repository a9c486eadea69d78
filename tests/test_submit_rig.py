"""`ray job submit` on a running cluster: the folder's conf/ and jobs/, a log to read, exit codes, an end in order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.test_rig import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, requires_root]
# What deploy/node/environment.sh sets: without it Ray kills a job three seconds after the word to stop.
WAITS = {"RAY_JOB_STOP_WAIT_TIME_S": "300", "PYTHONPATH": str(ROOT)}
JOB = "from tests import faults\n\n\ndef job(config, pause=0.0):\n    return faults.training(config, pause=pause)\n"
CONF = "# @package _global_\njob: {target: mine}\ndata: {batch_size: 8}\noptim: {lr: 0.0125}\nsnapshot: {every: 1}\n"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(1, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2, dashboard=True, env=WAITS)
        project = rig.hosts[0].folder / "home/project"
        for path, text in (("jobs/mine.py", JOB), ("conf/job/mine.yaml", CONF)):
            (project / path).parent.mkdir(parents=True)
            (project / path).write_text(text)
        yield rig


def ray_job(rig: Rig, *words: str, check: bool = True) -> str:
    """`ray job WORD…` in the folder of the project; what it says."""
    (host,) = rig.hosts
    env = {"RAY_API_SERVER_ADDRESS": f"http://{host.address()}:8265"}
    argv = ["python", "-m", "ray.scripts.scripts", "job", *words]
    done = host.run(argv, env=env, cwd=host.folder / "home/project", check=check, stderr=subprocess.STDOUT)
    return done.stdout


def submit(rig: Rig, name: str, *words: str, wait: bool = True, check: bool = True) -> str:
    how = ["--working-dir", ".", "--submission-id", name, *([] if wait else ["--no-wait"])]
    return ray_job(rig, "submit", *how, "--", "python", "-m", "raydist.train", "scale=1x2", *words, check=check)


def run_of(rig: Rig, said: str) -> tuple[Path, dict[str, Any]]:
    """The run's folder, which its log names, and its result."""
    folder = Path(re.findall(r"^run   .*, in (\S+)", said, re.MULTILINE)[-1])
    assert folder.is_relative_to(rig.hosts[0].folder / "home/raydist/runs")  # not in Ray's copy, which is deleted
    return folder, json.loads((folder / "result.json").read_text())


def test_the_folders_own_conf_and_jobs_are_used_and_the_log_is_lines(rig: Rig) -> None:
    said = submit(rig, "whole", "job=mine", "train.epochs=2")
    assert "succeeded" in said
    log = ray_job(rig, "logs", "whole")
    ours = log.partition("Running entrypoint")[2]  # before it come lines of Ray's own
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", ours), repr(log)
    assert re.search(r"^\[\d+:\d\d\] epoch 1/2, step \d+/32, loss", log, re.MULTILINE), log
    assert re.search(r"^finished in ", log, re.MULTILINE), log
    folder, result = run_of(rig, log)
    assert result["metrics"]["test_loss"] > 0
    assert "lr: 0.0125" in (folder / ".hydra/config.yaml").read_text()


@pytest.mark.parametrize(("words", "code"), [(["trian.epochs=3"], 2), (["job=mine", "job.args.pause=no"], 1)])
def test_the_exit_code_is_the_jobs_status(rig: Rig, words: list[str], code: int) -> None:
    said = submit(rig, f"code-{code}", *words, check=False)
    assert f"failed with exit code {code}" in said
    assert "FAILED" in ray_job(rig, "list")


def test_stop_saves_first_and_the_run_goes_on_from_there(rig: Rig) -> None:
    words = ("job=mine", "train.epochs=200", "job.args.pause=0.02", "checkpoint.every=1000000")
    submit(rig, "long", *words, wait=False)
    wait_until(lambda: re.search(r"step [2-9]\d/", ray_job(rig, "logs", "long")) is not None, "step 20", 100)
    ray_job(rig, "stop", "long")
    wait_until(lambda: "was stopped" in ray_job(rig, "status", "long"), "the end", 100)
    folder, result = run_of(rig, ray_job(rig, "logs", "long"))
    assert result["signal"] == signal.SIGTERM
    saved = Path(result["checkpoint"])
    step = int(saved.name.rpartition("-")[2])
    assert saved.parent == folder / "checkpoints"
    assert step >= 20
    again = submit(rig, "again", *words, "resume=auto", f"train.steps={step + 2}")
    assert f"step {step + 2}" in again, again
