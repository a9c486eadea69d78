"""deploy/slurm/train.sbatch under a real Slurm on hosts of the rig, typed as in docs/slurm.md."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.records import read_events
from tests.rig import hosts, requires_root
from tests.rig.slurm import ENDED, Slurm, requires_slurm
from tests.rig.ssh import write
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
    requires_slurm,
]
JOB = """
import os
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist

def job(config, dropout=0.2, pause=0.0, go=""):
    calls = 0
    inputs, targets = torch.arange(2560.0).sin().reshape(256, 10), torch.arange(256) % 3
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(dropout), nn.ReLU(), nn.Linear(32, 3))

    def loss(output, target):
        nonlocal calls
        calls += 1
        time.sleep(2 if go and calls > 30 and not os.path.exists(go) else float(pause))
        return nn.functional.cross_entropy(output, target)

    return raydist.fit(config, train=TensorDataset(inputs, targets), loss=loss, model=model)
"""
"""After 30 steps it takes its time until there is the file `go`: what a test does meanwhile must
find it under way."""
STEPS = 60
SBATCH = "sbatch --requeue --gpus-per-node=0"
WORDS = (
    f"job=mine.py optim=sgd data.batch_size=8 train.steps={STEPS} "
    "snapshot.every=1 checkpoint.every=1000000 resume=auto scale.cpus=1"
)
SCRIPT = f"deploy/slurm/train.sbatch {WORDS}"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with hosts(4, nics=("eth0",)) as rig:
        cluster = Slurm(rig)
        cluster.up()
        (cluster.project / "mine.py").write_text(JOB)
        yield cluster


@pytest.fixture(scope="module")
def array(slurm: Slurm) -> str:
    """Two tasks on one node: the second, whose steps take 4 s, reaches its time limit. The shortest
    limit of Slurm is minutes: the tests on the other nodes do not wait for it."""
    where = "--nodes=1 --nodelist=host3 --oversubscribe --time=3 --signal=B:TERM@30"
    task = "${oc.env:SLURM_ARRAY_TASK_ID}"
    return slurm.submit(
        f"{SBATCH} {where} --array=0,4 {SCRIPT} 'seed={task}' 'job.args.pause={task}'"
    )


def losses(runs: Path) -> dict[int, float]:
    """Return the loss of each step in all run folders; those of a repeated step must agree."""
    result: dict[int, float] = {}
    for file in runs.glob("*/events.jsonl"):
        for report in read_events(file, "report"):
            if report["rank"] == 0 and "loss" in report["values"]:
                loss = report["values"]["loss"]
                assert result.setdefault(report["step"], loss) == loss
    return result


def weights(runs: Path) -> dict[str, Any]:
    """Return the weights after the last step."""
    (file,) = runs.glob(f"*/checkpoints/step-{STEPS:08}/state.pt")
    model: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["model"]
    return {name: value.tolist() for name, value in model.items()}


def assert_same_training(runs: Path, undisturbed: Path) -> None:
    """The bits agree. A driver that loses its Ray lacks the reports of the last half second."""
    seen, expected = losses(runs), losses(undisturbed)
    assert set(expected) == set(range(1, STEPS + 1))
    assert seen == {step: expected[step] for step in seen}
    assert weights(runs) == weights(undisturbed)


def results(runs: Path) -> list[dict[str, Any]]:
    """Return the results of the runs, in their order."""
    return [json.loads(file.read_text()) for file in sorted(runs.glob("*/result.json"))]


def assert_tidy(slurm: Slurm, *hosts: str) -> None:
    """Nothing is left on these hosts."""

    def left() -> dict[str, list[str]]:
        return {name: each for name, each in slurm.left().items() if name in hosts}

    wait_until(lambda: not left(), lambda: str(left()))


def wait_for_step(slurm: Slurm, job: str, runs: Path, step: int) -> None:
    def reached() -> bool:
        if max(losses(runs), default=0) >= step:
            return True
        time.sleep(1)
        assert slurm.show(job)["JobState"] not in ENDED, slurm.output(job)
        return False

    wait_until(reached, lambda: f"step {step}: {slurm.output(job)}", 300)


@pytest.mark.usefixtures("array")
def test_two_nodes_train_and_a_lost_node_costs_no_step(slurm: Slurm) -> None:
    # The random numbers of a lost node's ranks, for dropout, are lost with it.
    words = f"{WORDS} job.args.dropout=0"
    train = "python -m raydist.train group=inline scale=1x2"
    slurm.type(f". $RAYDIST_SETUP; {train} {words} name=undisturbed")

    # as a site with SBATCH_EXPORT, or a person, limits what a job gets: the steps need more
    where = "--export=HOME,PATH,RAYDIST_SETUP --nodes=2 --nodelist=host1,host2"
    go = slurm.home / "go-lost"
    script = f"deploy/slurm/train.sbatch {words} name=lost job.args.pause=0.2 job.args.go={go}"
    lost, runs = slurm.submit(f"{SBATCH} {where} {script}"), slurm.project / "runs"
    wait_for_step(slurm, lost, runs / "lost", 20)
    nodes = slurm.nodes[:2]
    own = [folder for node in nodes for folder in (node.root / "tmp").glob("ray-*")]
    # Ray's own folders in them are open to every account
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in own] == [0o700] * 2
    victim = nodes[1]
    victim.kill()
    slurm.wait_for(lost, "PENDING")
    before = max(losses(runs / "lost"))
    assert before < STEPS
    go.touch()
    victim.boot()
    slurm.join(victim)
    slurm.wait_for(lost, "COMPLETED")
    shown = slurm.show(lost)
    assert (shown["Restarts"], shown["ExitCode"]) == ("1", "0:0")
    result = results(runs / "lost")[-1]
    assert (result["status"], result["world_size"]) == ("finished", 2)
    (plan,) = read_events(Path(result["dir"], "events.jsonl"), "plan")
    assert [slot["host"] for slot in plan["slots"]] == [node.name for node in nodes]
    assert_same_training(runs / "lost", runs / "undisturbed")
    assert_tidy(slurm, "host1", "host2")


def test_a_preempted_training_continues_where_it_was(slurm: Slurm, array: str) -> None:
    words = f"--nodes=1 --nodelist=host2 {SCRIPT} name=preempted seed=0 job.args.pause=0.2"
    go, runs = slurm.home / "go-preempted", slurm.project / "runs"
    preempted = slurm.submit(f"{SBATCH} {words} job.args.go={go}")
    folder = runs / "preempted"
    wait_for_step(slurm, preempted, folder, 10)
    urgent = slurm.submit("sbatch --partition=urgent --nodelist=host2 --wrap 'sleep 1'")
    slurm.wait_for(urgent, "COMPLETED")
    assert max(losses(folder)) < STEPS
    go.touch()
    slurm.wait_for(preempted, "COMPLETED")
    assert slurm.show(preempted)["Restarts"] == "1"
    last = Path(results(folder)[-1]["dir"], "events.jsonl")
    assert min(report["step"] for report in read_events(last, "report")) >= 10
    slurm.wait_for(f"{array}_0", "COMPLETED")
    assert_same_training(folder, runs / "task-0/mine")
    assert_tidy(slurm, "host2")


def test_a_time_limit_leaves_the_last_state(slurm: Slurm, array: str) -> None:
    """Of one of two tasks on a node; the other one has ended before."""
    slurm.wait_for(f"{array}_0", "COMPLETED")
    slurm.wait_for(f"{array}_4", "FAILED")
    assert slurm.show(f"{array}_4")["ExitCode"] == "143:0"
    runs = slurm.project / "runs"
    seen = losses(runs / "task-4/mine")
    assert seen[1] != losses(runs / "task-0/mine")[1]
    (stopped,) = results(runs / "task-4/mine")
    assert (stopped["status"], stopped["signal"]) == ("stopped", 15)
    assert Path(stopped["checkpoint"]).is_dir()
    saved = int(Path(stopped["checkpoint"]).name.removeprefix("step-"))
    assert saved >= max(seen) - 1
    assert_tidy(slurm, "host3")


LISTENER = (
    "import os, socket; os.setuid(65534); door = socket.create_server(('', 20001)); "
    "print(door.getsockname()[1], flush=True); os.read(0, 1)"
)


SLOW = f"""#!{sys.executable}
import os, socket, time
door = socket.create_server((os.environ["HEAD"], int(os.environ["PORT"])))
time.sleep(5)
raise SystemExit("The current node timed out during startup.")
"""


def test_what_is_not_started(slurm: Slurm) -> None:
    """A run whose Ray does not start or lacks a node; one at a port whose owner, another user, would
    get Ray's token."""
    first, second, _ = slurm.nodes
    # Ray listens, and gives up after 30 s, as on a node that is too slow for it.
    (slurm.home / "bin").mkdir()
    write(slurm.home / "bin/ray", SLOW)
    (slurm.home / "bin/ray").chmod(0o755)
    write(slurm.home / "slow.sh", f". ~/setup.sh\nexport PATH={slurm.home}/bin:$PATH\n")
    slow = f"RAYDIST_SETUP={slurm.home}/slow.sh RAYDIST_JOIN_S=1000"
    job = slurm.submit(f"{slow} {SBATCH} --nodes=1 --nodelist=host1 {SCRIPT} name=never")
    slurm.wait_for(job, "FAILED")
    assert "The current node timed out" in slurm.output(job)

    second.run(["mount", "-o", "remount,ro", "/tmp"])
    for join_s in (30, 200):  # the other two may need longer than 30 s on a busy machine
        job = slurm.submit(f"RAYDIST_JOIN_S={join_s} {SBATCH} --nodes=3 {SCRIPT} name=never")
        slurm.wait_for(job, "FAILED", timeout=400)
        if "ray: 2 of 3 nodes have joined" in slurm.output(job):
            break
    assert slurm.show(job)["ExitCode"] == "1:0"
    assert "ray: 2 of 3 nodes have joined" in slurm.output(job)
    assert "to train on those that have joined: scale.nodes=1..3" in slurm.output(job)
    second.run(["mount", "-o", "remount,rw", "/tmp"])

    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with first.popen(["python", "-c", LISTENER], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "20001\n"
        job = slurm.submit(f"PORT=20001 {SBATCH} --nodelist=host1,host2 {SCRIPT} name=never")
        slurm.wait_for(job, "FAILED")
        other.communicate("x")
    assert f"port 20001 of {first.address()} is another user's" in slurm.output(job)
    assert not (slurm.project / "runs/never").exists()
    assert_tidy(slurm, "host1", "host2", "host3")


def test_a_command_in_an_allocation_is_one_run_on_a_node_or_refused(slurm: Slurm) -> None:
    train = "python -m raydist.train job=mine.py scale=1x1 train.steps=2 group=inline"
    lines = (
        ". $RAYDIST_SETUP",
        f"srun {train} name=three; echo code $?",
        f"srun python {ROOT}/jobs/digits.py; echo code $?",
        f"{train} name=login; echo code $?",
        f"srun --nodes=1 --ntasks=1 {train} name=one; echo code $?",
    )
    screen = slurm.type(f"salloc --nodes=2 bash -c '{'; '.join(lines)}'")
    assert [line for line in screen.splitlines() if line.startswith("code ")] == [
        "code 2",
        "code 2",
        "code 2",
        "code 0",
    ], screen
    assert screen.count("each of srun's 2 tasks would be a separate run") == 2, screen
    assert screen.count("this shell of salloc is on none of the allocation's nodes") == 1, screen
    assert screen.count("sbatch --nodes=2 deploy/slurm/train.sbatch") == 3, screen
    runs = slurm.project / "runs"
    assert [
        folder.name for folder in runs.glob("*") if folder.name in ("three", "login", "one")
    ] == ["one"]
