"""A node is lost, and the run continues on another: real hosts in namespaces."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raydist.shared.kinds import EventJson
from raydist.worker.torch_private import connects_anew
from tests.horovod_ranks import requires_horovod
from tests.leftovers import idle_servers
from tests.programs import Program
from tests.records import read_events
from tests.rig import QUICK_DEATH, Host, Rig, hosts, requires_root
from tests.scenarios.test_restart_run import LATE, LATE_WORDS, WORDS
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(900), requires_root]
ROOT = Path(__file__).parents[2]
ENV = {**QUICK_DEATH, "PYTHONPATH": str(ROOT)}
PROGRAM = (
    "import raydist\nfrom tests import faults\n\ndef job(config):\n    return "
    "faults.training(config, pause=0.02)\n"
)
HELD = PROGRAM.replace("=0.02", "=0.02, struck=(faults.Fault('wait', 0, 60, ()),)")
"""The same, which does not end before there is a file `go`."""


ROOM = 8 << 30
"""Bytes that a host has, as its memory cgroup tells: Ray's memory monitor reads it there, as in a
container."""


def write_files(host: Host) -> None:
    """A memory cgroup that a test may fill."""
    host.run(["mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"])
    (host.root / "sys/fs/cgroup/memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    (host.root / "sys/fs/cgroup/memory.max").write_text(f"{ROOM}\n")
    use(host, 0.1)


def use(host: Host, share: float) -> None:
    """So much of its memory is in use."""
    (host.root / "sys/fs/cgroup/memory.current").write_text(f"{int(share * ROOM)}\n")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A head without ranks, and three hosts."""
    with hosts(4) as rig:
        for host in rig.hosts:
            write_files(host)
        rig.ray_up(cpus=2, head_cpus=0, env=ENV)
        yield rig


def start(rig: Rig, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a run on two of the hosts, from the first."""
    return train(rig, folder, ("slow.py", PROGRAM), *WORDS, *words)


def train(rig: Rig, folder: Path, job: tuple[str, str], *words: str) -> subprocess.Popen[str]:
    """Start a run of this file and text on the first host."""
    folder.mkdir()
    name, text = job
    (folder / name).write_text(text)
    where = f"hydra.run.dir={folder}/run"
    command = ["python", "-m", "raydist.train", f"job={name}", where, *words]
    env = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"{rig.hosts[0].address()}:6379"}
    log = (folder / "screen.txt").open("w")
    return rig.hosts[0].popen(command, env=env, cwd=folder, stdout=log, stderr=log)


def events(folder: Path, kind: str) -> list[EventJson]:
    path = folder / "run" / "events.jsonl"
    return (
        [happened for happened in read_events(path) if happened["kind"] == kind]
        if path.exists()
        else []
    )


def result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return result


def reached(folder: Path, step: int) -> bool:
    return any(event.get("step", 0) >= step for event in events(folder, "report"))


def host_of(rig: Rig, folder: Path, rank: int) -> Host:
    name = events(folder, "plan")[0]["slots"][rank]["host"]
    return next(host for host in rig.hosts if host.name == name)


def left(rig: Rig) -> list[str]:
    """Return the ranks on the hosts, and fork servers that do not wait for another run."""
    running = []
    for host in rig.hosts:
        kept = idle_servers(host.folder / "tmp")
        lines = [line for pid, line in host.processes().items() if pid not in kept]
        running += [line for line in lines if "raydist.node.fork_server" in line]
    return running


def test_an_actor_that_rays_memory_monitor_ends_is_reported_as_that(
    rig: Rig, tmp_path: Path
) -> None:
    """Ray ends it, because the memory of its host is all but full. The first test: no host was down
    before."""
    struck = tmp_path / "struck"
    run = start(rig, struck, "scale=2x1", "train.epochs=1000", "restart=none")
    wait_until(lambda: reached(struck, 20), "step 20", 200)
    victim = host_of(rig, struck, 1)
    use(victim, 0.99)
    try:
        assert run.wait(200) == 1, (struck / "screen.txt").read_text()
    finally:
        use(victim, 0.1)
    cause = result(struck)["cause"]
    assert (cause["rank"], cause["how"], cause["host"]) == (1, "lost", victim.name)
    saved = int(Path(result(struck)["checkpoint"]).name.removeprefix("step-"))
    assert saved >= 20
    page = (struck / "run" / "blame-1.txt").read_text()
    for words in (
        f"rank 1 on {victim.name}, last heartbeat at step",
        "lost: out of memory: Ray's memory monitor ended its actor, because the node had no more "
        "(7.92GB used / 8.00GB",
        "Ray's limit is RAY_memory_usage_threshold",
        f"step {saved} is saved",
    ):
        assert words in page
    wait_until(lambda: not left(rig), "end of all ranks", 120)


def losses_of(reports: Sequence[EventJson]) -> dict[int, float]:
    """Return the loss of each step on rank 0."""
    return {report["step"]: report["values"]["loss"] for report in reports if report["rank"] == 0}


def test_a_run_stopped_between_the_states_of_two_hosts_draws_the_same_dropout(
    rig: Rig, tmp_path: Path
) -> None:
    """Rank 1 is on another host, and has not kept the newest step of rank 0 yet."""
    stopped, resumed = tmp_path / "stopped", tmp_path / "resumed"

    def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
        return train(rig, folder, ("late.py", LATE), *LATE_WORDS, "scale=2x1", *words)

    def ended(run: subprocess.Popen[str], folder: Path, code: int) -> None:
        assert run.wait(200) == code, (folder / "screen.txt").read_text()

    run = begin(stopped)
    (stopped / "hold").touch()
    wait_until(lambda: reached(stopped, 5), lambda: (stopped / "screen.txt").read_text(), 200)
    run.send_signal(signal.SIGINT)
    ended(run, stopped, 130)
    ended(begin(resumed, f"resume={stopped}/run"), resumed, 0)
    (tmp_path / "late.py").write_text(LATE)
    whole = Program(tmp_path, "job=late.py", *LATE_WORDS, "scale=1x2", "group=inline")
    assert whole.wait() == 0, whole.screen
    assert host_of(rig, resumed, 0) is not host_of(rig, resumed, 1)
    assert not events(stopped, "warning")
    steps = losses_of(events(resumed, "report"))
    assert 1 < len(steps) < 12
    assert steps.items() <= losses_of(whole.events("report")).items()


IN_PLACE = """
import os
import time

import torch
from torch.utils.data import TensorDataset

import raydist


def slow(step, values):
    time.sleep(0.05)
    while step == 60 and not os.path.exists("go"):  # it must not end before its host is lost
        time.sleep(0.05)


def job(config):
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(512, 16, generator=draw), torch.randint(4, (512,), generator=draw)
    )
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    loss = torch.nn.functional.cross_entropy
    raydist.fit(config, train=data, loss=loss, model=model, on_step=slow)
    return [float(each.sum()) for each in model.parameters()]
"""
IN_PLACE_WORDS = (
    *("scale=2x2", "backend=gloo", "parallel=fsdp", "watch.progress=none", "snapshot.every=1"),
    *("train.steps=100", "data.batch_size=8", "optim=adamw", "checkpoint.every=100000"),
)


@pytest.mark.skipif(not connects_anew(), reason="this torch cannot connect ranks anew")
def test_ranks_on_the_other_host_keep_their_processes(rig: Rig, tmp_path: Path) -> None:
    """Rank 0's host is lost, which also has the store."""
    (tmp_path / "slow.py").write_text(IN_PLACE)
    (tmp_path / "go").touch()
    words = [word for word in IN_PLACE_WORDS if not word.startswith("scale=")]
    whole = Program(tmp_path, "job=slow.py", *words, "scale=1x4", "group=inline")
    assert whole.wait() == 0, whole.screen
    struck = tmp_path / "struck"
    more = ("restart.in_place=on", "scale.spares=1")
    run = train(rig, struck, ("slow.py", IN_PLACE), *IN_PLACE_WORDS, *more)
    wait_until(lambda: reached(struck, 30), "step 30", 200)
    victim = host_of(rig, struck, 0)
    victim.kill()
    (struck / "go").touch()
    try:
        assert run.wait(300) == 0, (struck / "screen.txt").read_text()
        wait_until(lambda: not left(rig), "end of all ranks", 120)
    finally:  # the next test needs it
        victim.boot()
        rig.ray_join(victim, 2, ENV)
    (back,) = events(struck, "restarted")
    assert (back.get("kept"), back.get("why_not_kept")) == ([2, 3], None)
    before, after = events(struck, "began")[:4], events(struck, "began")[4:]
    assert [after[each]["pid"] for each in (2, 3)] == [before[each]["pid"] for each in (2, 3)]
    (end,) = result(struck)["restarts"]
    assert (end["rank"], end["how"]) == (0, "lost")
    # the last reports that rank 0 had not sent are lost with its host
    found = losses_of(events(struck, "report"))
    assert found.items() <= losses_of(whole.events("report")).items()
    unsent = {*range(1, 101)} - found.keys()
    assert unsent == {*range(back["step"] - len(unsent), back["step"])}
    assert len(found) > 60


@requires_horovod
def test_a_lost_host_is_replaced_by_another_and_no_step_is_lost(rig: Rig, tmp_path: Path) -> None:
    """The last test: the host stays lost."""
    struck = tmp_path / "struck"
    words = ("scale=2x1", "train.epochs=6", "backend=horovod")
    run = train(rig, struck, ("slow.py", HELD), *WORDS, *words)
    wait_until(lambda: reached(struck, 20), "step 20", 200)
    victim = host_of(rig, struck, 1)
    victim.kill()
    (struck / "go").touch()
    assert run.wait(300) == 0, (struck / "screen.txt").read_text()
    (back,) = events(struck, "restarted")
    assert back["repeated"] <= 1
    (end,) = result(struck)["restarts"]
    assert (end["rank"], end["how"]) == (1, "lost")
    assert "another node for rank 1: host" in (struck / "run" / "blame-1.txt").read_text()
    # Ray asks several times before it gives a node up: that is part of what the failure has cost
    cost = json.loads((struck / "run" / "blame-1.json").read_text())["parts"]
    assert cost["detect"] > 2
    # the generators of the lost rank are lost with it, and are seeded anew: not to the last
    # bit, but the same training
    reports = [event["step"] for event in events(struck, "report") if event["rank"] == 0]
    assert {*reports} == {*range(1, 97)}
    assert result(struck)["metrics"]["test_loss"] > 0
    ledger = json.loads(
        (rig.hosts[0].folder / "home" / ".cache" / "raydist" / "nodes.json").read_text()
    )
    # a busy machine may find a host slow as well
    assert [(noted["host"], noted["run"]) for noted in ledger if noted["what"] == "lost"].count(
        (victim.name, f"{struck}/run")
    ) == 1
    wait_until(lambda: not left(rig), "end of all ranks", 120)
