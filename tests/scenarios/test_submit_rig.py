"""Jobs on a running cluster, by `ray job submit` and tools.submit: folder, log, result, exit code,
an end in order."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.waiting import wait_until

# All of them: otherwise `make test` would start the hosts for the few quick ones.
pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    requires_root,
]
# What deploy/node/environment.sh sets: without it Ray kills a job three seconds after the word to
# stop.
WAITS = {"RAY_JOB_STOP_WAIT_TIME_S": "300", "PYTHONPATH": str(ROOT)}
JOB = (
    "from tests import faults\n\n\ndef job(config, pause=0.0):\n    return "
    "faults.training(config, pause=pause)\n"
)
CONF = (
    "# @package _global_\njob: {target: mine}\ndata: {batch_size: 8}\noptim: {lr: "
    "0.0125}\nsnapshot: {every: 1}\n"
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(1, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2, dashboard=True, env=WAITS)
        project = rig.hosts[0].folder / "home/project"
        for path, text in (("jobs/mine.py", JOB), ("conf/job/mine.yaml", CONF)):
            (project / path).parent.mkdir(parents=True)
            (project / path).write_text(text)
        yield rig


def server(rig: Rig) -> str:
    return f"http://{rig.hosts[0].address()}:8265"


def ray_job(rig: Rig, *words: str) -> str:
    """`ray job WORD…` in the folder of the project; what it says."""
    (host,) = rig.hosts
    argv = ["python", "-m", "ray.scripts.scripts", "job", *words]
    env = {"RAY_API_SERVER_ADDRESS": server(rig)}
    done = host.run(argv, env=env, cwd=host.folder / "home/project", stderr=subprocess.STDOUT)
    return done.stdout


def tool(rig: Rig, *words: str, token: str | None = None) -> subprocess.Popen[str]:
    """`python -m raydist.tools.submit WORD…` in the folder of the project, with nothing in its
    environment of a Ray."""
    (host,) = rig.hosts
    bare = [
        "env",
        "-u",
        "RAY_ADDRESS",
        "-u",
        "RAY_AUTH_MODE",
        *([f"RAY_AUTH_TOKEN={token}"] if token else []),
    ]
    argv = [*bare, "python", "-m", "raydist.tools.submit", "--address", server(rig), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return host.popen(
        argv, env={"PYTHONPATH": str(ROOT)}, cwd=host.folder / "home/project", **pipes
    )


def ask_server(rig: Rig, name: str) -> Any:
    """Return what Ray's job server knows of a job, or of all jobs without a name."""
    key = (rig.hosts[0].folder / "home/.ray/auth_token").read_text().strip()
    request = urllib.request.Request(
        f"{server(rig)}/api/jobs/{name}", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def metadata(rig: Rig, name: str) -> dict[str, str]:
    """Return raydist's metadata of a job in Ray's job server, without the prefix."""
    result: dict[str, str] = ask_server(rig, name)["metadata"]
    return {name.removeprefix("raydist."): text for name, text in result.items()}


def run_of(rig: Rig, output: str) -> tuple[Path, dict[str, Any]]:
    """Return the run's folder, which its log names, and its result."""
    folder = Path(re.findall(r"^run   .*, in (\S+)", output, re.MULTILINE)[-1])
    assert folder.is_relative_to(
        rig.hosts[0].folder / "home/raydist/runs"
    )  # not in Ray's copy, which is deleted
    return folder, json.loads((folder / "result.json").read_text())


def test_the_tool_ends_as_the_job_did_and_the_metadata_names_the_culprit(rig: Rig) -> None:
    words = [
        "job=mine",
        "job.args.pause=no",
        "restart=none",
        "env.MY_TOKEN=abc",
        "watch.job_metadata=true",
    ]
    sent = tool(rig, "--submission-id", "broken", "--", "scale=1x2", *words)
    output, _ = sent.communicate(timeout=400)
    assert sent.returncode == 1, output
    assert "FAILED after" in output
    facts = metadata(rig, "broken")
    assert facts["result"] == "failed"
    assert re.match(r"rank \d on host0, step 0, .*: TypeError: ", facts["culprit"])
    assert (
        facts["words"]
        == f"scale=1x2 {' '.join(words[:3])} 'env.MY_TOKEN=***' watch.job_metadata=true"
    )


@pytest.mark.parametrize(
    ("words", "token", "refused"),
    [
        (["job=jobs/mien.py"], None, "did you mean job=jobs/mine.py"),
        (["job=mine"], "0" * 64, "the token in RAY_AUTH_TOKEN is not this cluster's"),
    ],
)
def test_what_can_not_be_is_refused_before_it_is_sent(
    rig: Rig, words: list[str], token: str | None, refused: str
) -> None:
    sent = tool(rig, "--submission-id", "never", *words, token=token)
    output, _ = sent.communicate(timeout=400)
    assert sent.returncode == 2, output
    assert refused in output
    assert "never" not in {each["submission_id"] for each in ask_server(rig, "")}


def test_a_job_of_the_folder_is_stopped_saves_first_and_goes_on_from_there(rig: Rig) -> None:
    words = ("scale=1x2", "job=mine", "train.epochs=2000", "job.args.pause=0.02", "checkpoint.every=1000000",
             "watch.job_metadata=true")  # fmt: skip
    sent = tool(rig, "--submission-id", "long", *words)
    assert sent.stdout is not None
    assert any(re.search(r"step ([2-9]\d|\d{3,})/", line) for line in sent.stdout), (
        "its log ends before step 20"
    )
    sent.send_signal(signal.SIGINT)  # Ctrl-C ends the watching, not the job
    output, _ = sent.communicate(timeout=300)
    assert sent.returncode == 128 + signal.SIGINT, output
    folder = Path(metadata(rig, "long")["run_dir"])  # it runs still
    assert "result" not in metadata(rig, "long")
    (stop,) = re.findall(r"^  ray (job stop .*)", output, re.MULTILINE)
    ray_job(rig, *shlex.split(stop)[1:])
    wait_until(lambda: ask_server(rig, "long")["status"] == "STOPPED", "the end", 300)
    result = json.loads((folder / "result.json").read_text())
    assert result["signal"] == signal.SIGTERM
    saved = Path(result["checkpoint"])
    step = int(saved.name.rpartition("-")[2])
    assert saved.parent == folder / "checkpoints"
    assert step >= 20
    facts = metadata(rig, "long")
    assert (facts["result"], facts["signal"], facts["checkpoint"]) == (
        "stopped",
        str(int(signal.SIGTERM)),
        str(saved),
    )
    entrypoint = ("python", "-m", "raydist.train", *words, "resume=auto", f"train.steps={step + 2}")
    output = ray_job(
        rig, "submit", "--working-dir", ".", "--submission-id", "again", "--", *entrypoint
    )
    assert "succeeded" in output
    log = ray_job(rig, "logs", "again")
    ours = log.partition("Running entrypoint")[2]  # before it come lines of Ray's own
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", ours), repr(log)
    assert re.search(r"^\[\d+:\d\d\] epoch \d+/\d+, step \d+/\d+, loss", log, re.MULTILINE), log
    assert f"step {step + 2}" in log, log
    assert re.search(r"^finished in ", log, re.MULTILINE), log
    rest, result = run_of(rig, log)
    assert result["metrics"]["test_loss"] > 0
    assert "lr: 0.0125" in (rest / ".hydra/config.yaml").read_text()
    facts = metadata(rig, "again")
    assert (facts["result"], facts["run_dir"], facts["attempts"]) == ("finished", str(rest), "1")
    assert float(facts["metrics.test_loss"]) == pytest.approx(
        result["metrics"]["test_loss"], rel=1e-4
    )
