"""notify.…: the driver's host is lost, and another one tells it: real hosts in namespaces."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from raydist.node.deputy_process import MODULE
from raydist.shared import env_names
from tests.conftest import ROOT
from tests.leftovers import poll_until_empty
from tests.records import read_events
from tests.rig import Host, Rig, hosts, requires_root
from tests.scenarios.test_notify import SECRET, Webhook
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
]
JOB = """
import os
import time
import torch
import torch.distributed as dist
import raydist

def job(config, go=""):
    step, done = 0, torch.zeros(1)
    while not done:
        step += 1
        done.fill_(os.path.exists(go))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        raydist.report(step=step, loss=1 / step)
        time.sleep(0.05)
"""
"""It makes steps until there is the file `go`."""


@contextmanager
def hosts_and_webhook() -> Iterator[tuple[Rig, Webhook]]:
    """Three hosts with Ray, and a webhook on a machine that is none of them."""
    with hosts(3, nics=("eth0",)) as rig:
        webhook = Webhook(rig.gateway)
        try:
            rig.ray_up(cpus=2, env={"PYTHONPATH": str(ROOT)})
            yield rig, webhook
        finally:
            webhook.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Rig, Webhook]]:
    """Hosts for the tests that lose none, and for the last one."""
    with hosts_and_webhook() as both:
        yield both


def start(rig: Rig, webhook: Webhook, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a run on all three hosts from a shell on the first."""
    webhook.heard.clear()
    folder.mkdir(exist_ok=True)
    (folder / "talks.py").write_text(JOB)
    calm = "hang.after_s=60"  # a busy machine is nothing to tell of
    command = ["python", "-m", "raydist.train", "job=talks.py", "scale=3x1", calm, *words]
    env = {"PYTHONPATH": str(ROOT), env_names.NOTIFY_WEBHOOK: webhook.url}
    screen = (folder / "screen.txt").open("w")
    return rig.hosts[0].popen(command, env=env, cwd=folder, stdout=screen, stderr=screen)


def wait_for_step(run: Path, folder: Path, step: int) -> None:
    """Return once the run in this folder has come to a step."""

    def reached() -> bool:
        path = run / "events.jsonl"
        return path.exists() and any(each.get("step", 0) >= step for each in read_events(path))

    wait_until(reached, (folder / "screen.txt").read_text, 200)


def wait_for_more(run: Path, folder: Path) -> None:
    """Return once the run in this folder has done 60 steps more, so that each node has seen some."""
    steps = [each.get("step", 0) for each in read_events(run / "events.jsonl")]
    wait_for_step(run, folder, max(steps) + 60)


def deputies(rig: Rig) -> list[str]:
    """Return the hosts that have a deputy, each once for each of its deputies."""
    return [
        host.name
        for host in rig.hosts
        if host.space.alive
        for line in host.processes().values()
        if MODULE in line
    ]


def assert_hidden(others: list[Host]) -> None:
    """The webhook is in no command line, no environment and no log of these hosts."""
    for host in others:
        for pid in host.processes():
            for name in ("cmdline", "environ"):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    assert SECRET.encode() not in (host.root / f"proc/{pid}/{name}").read_bytes()
        logs = [path for path in host.folder.glob("tmp/ray/session_*/logs/**/*") if path.is_file()]
        assert logs
        assert [path for path in logs if SECRET.encode() in path.read_bytes()] == []


def lose_driver(rig: Rig, webhook: Webhook, folder: Path, run: Path, power: bool) -> None:
    """Lose the first host, its cable or its power: another host tells it, once. It has the driver of
    a run with this run folder, and Ray's head."""
    lost, *others = rig.hosts
    start(rig, webhook, folder, f"hydra.run.dir={run}")
    here = lost.root / run.relative_to("/") if power else run
    wait_for_step(here, folder, 1)
    wait_until(lambda: deputies(rig) == ["host1", "host2"], lambda: str(deputies(rig)), 200)
    wait_for_more(here, folder)
    assert_hidden(others)
    if power:
        lost.kill()
    else:
        rig.cut(lost)
    wait_until(lambda: webhook.heard, "a message", 300)
    wait_until(lambda: not deputies(rig), lambda: str(deputies(rig)), 120)
    (told,) = webhook.heard
    assert (told["event"], told["host"], told["dir"]) == ("failed", "host0", str(run))
    assert f"host0 ({lost.address()}), has not answered host" in told["cause"]
    assert int(told["cause"].rpartition("the last known step is ")[2]) > 0
    assert f"resume={run}" in told["todo"]
    assert_hidden(others)


def test_the_loss_of_the_drivers_host_is_told_once_by_another(tmp_path: Path) -> None:
    """The cable is pulled, and a file in the run folder decides who tells."""
    with hosts_and_webhook() as (rig, webhook):
        lose_driver(rig, webhook, tmp_path, tmp_path / "run", power=False)


def test_a_run_that_ends_tells_that_only_and_leaves_no_process(
    shared: tuple[Rig, Webhook], tmp_path: Path
) -> None:
    rig, webhook = shared
    go = tmp_path / "go"
    run = start(rig, webhook, tmp_path, f"hydra.run.dir={tmp_path}/run", f"job.args.go={go}")
    wait_for_step(tmp_path / "run", tmp_path, 40)
    wait_until(lambda: deputies(rig) == ["host1", "host2"], lambda: str(deputies(rig)), 200)
    go.touch()
    assert run.wait(200) == 0, (tmp_path / "screen.txt").read_text()
    assert poll_until_empty(lambda: deputies(rig), 60) == []
    assert [told["event"] for told in webhook.heard] == ["finished"]


def test_the_death_of_the_driver_alone_is_told_by_its_own_host(
    shared: tuple[Rig, Webhook], tmp_path: Path
) -> None:
    rig, webhook = shared
    run = start(rig, webhook, tmp_path, f"hydra.run.dir={tmp_path}/run")
    wait_for_step(tmp_path / "run", tmp_path, 40)
    wait_until(lambda: deputies(rig) == ["host1", "host2"], lambda: str(deputies(rig)), 200)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: webhook.heard, "a message", 300)
    assert poll_until_empty(lambda: deputies(rig), 200) == []
    (told,) = webhook.heard
    assert told["cause"].startswith("the driver ended without a result")


def test_it_is_told_without_the_run_folder_too(shared: tuple[Rig, Webhook], tmp_path: Path) -> None:
    """The power is cut, and the run folder was on the disk of this host. The last test: Ray's head
    is lost, too."""
    lose_driver(*shared, tmp_path, Path("/run/mine"), power=True)  # a tmpfs of each host
