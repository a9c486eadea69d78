"""A host's cable is pulled, and the run continues before Ray gives the host up: real hosts in
namespaces.

Ray looks for lost nodes as it does by default: it would need a minute.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raydist.shared.kinds import EventJson
from tests.records import read_events
from tests.rig import Host, Rig, hosts, requires_root
from tests.scenarios.test_restart_nodes import ROOT, events, left, reached, result, start
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    requires_root,
]
WARM_S = 10
"""Until a spare is warm: no event tells."""
ENV = {"PYTHONPATH": str(ROOT)}
LONG = "train.epochs=100000"
UNREACHABLE = "its node accepts no connections: not from the driver's machine, nor from "


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        rig.ray_up(cpus=1, env=ENV)
        yield rig


@contextmanager
def cut_off(rig: Rig, host: Host) -> Iterator[None]:
    """Pull the cable of a host. It is plugged in again before Ray takes the host for dead."""
    rig.cut(host)
    try:
        yield
    finally:
        rig.restore(host)


@contextmanager
def running(rig: Rig, folder: Path, *words: str) -> Iterator[None]:
    """A run that has trained for a while; afterwards nothing of it is left on any host."""
    run = start(rig, folder, LONG, *words)
    try:
        wait_until(lambda: reached(folder, 20), lambda: (folder / "screen.txt").read_text(), 240)
        yield
        run.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, (folder / "screen.txt").read_text()
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not left(rig), lambda: str(left(rig)), 120)


def latest_step(folder: Path) -> int:
    return max((event.get("step", 0) for event in events(folder, "report")), default=0)


def wait_for_steps(folder: Path, more: int) -> None:
    """Wait until the run has made so many more steps."""
    target = latest_step(folder) + more
    wait_until(lambda: reached(folder, target), f"step {target}", 240)


def causes(folder: Path) -> list[EventJson]:
    """Return the first cause of each failure of the run so far."""
    return [event["cause"] for event in events(folder, "failure")]


def slots(folder: Path) -> list[EventJson]:
    """Return which rank is where now."""
    lines = read_events(folder / "run" / "events.jsonl")
    newest: list[EventJson] = [event["slots"] for event in lines if event.get("slots")][-1]
    return newest


def other_host(rig: Rig, folder: Path) -> Host:
    """Return a host with a rank that is not the driver's."""
    names = {slot["host"] for slot in slots(folder)}
    return next(host for host in rig.hosts[1:] if host.name in names)


def pids_on(folder: Path, host: Host) -> set[int]:
    """Return the processes of ranks that were started on a host so far and still run."""
    began = {event["pid"] for event in events(folder, "began") if event["host"] == host.name}
    return began & host.processes().keys()


def test_a_spare_takes_over_before_ray_gives_up_the_host(rig: Rig, tmp_path: Path) -> None:
    """All ranks begin anew; in test_restart_nodes some stay."""
    folder = tmp_path / "spare"
    words = ("scale=2x1", "scale.spares=1", "backend=gloo", "restart.in_place=off")
    with running(rig, folder, *words):
        time.sleep(WARM_S)
        victim = other_host(rig, folder)
        with cut_off(rig, victim):
            wait_until(lambda: events(folder, "restarted"), "the next step", 120)
        (end,) = causes(folder)
        assert (end["how"], end["host"]) == ("lost", victim.name)
        assert end["why"].startswith(UNREACHABLE)  # Ray would have said something else
        (back,) = events(folder, "restarted")
        assert back["repeated"] <= 1
        assert "kept" not in back
        wait_for_steps(folder, 20)
        assert victim.name not in {slot["host"] for slot in slots(folder)}
    assert len(result(folder)["restarts"]) == 1


def test_an_elastic_run_shrinks_before_ray_gives_up_the_host_and_grows_again(
    rig: Rig, tmp_path: Path
) -> None:
    folder = tmp_path / "elastic"
    with running(rig, folder, "scale=2..3x1"):
        wait_until(lambda: len(slots(folder)) == 3, "three ranks", 180)
        wait_for_steps(folder, 20)
        victim = other_host(rig, folder)
        old = pids_on(folder, victim)
        assert len(old) == 1
        with cut_off(rig, victim):
            wait_until(lambda: len(slots(folder)) == 2, "two ranks", 120)
        (end,) = causes(folder)
        assert (end["how"], end["host"]) == ("lost", victim.name)
        assert end["why"].startswith(UNREACHABLE)
        wait_until(lambda: not old & victim.processes().keys(), "end of the old rank", 120)
        wait_until(lambda: len(slots(folder)) == 3, "three ranks again", 240)
        wait_for_steps(folder, 20)
    assert len(result(folder)["restarts"]) == 1


SILENT_S = 6
"""Longer than raydist needs to take a host for lost that accepts no connections."""


def test_a_host_whose_processes_are_stopped_is_not_taken_for_lost(rig: Rig, tmp_path: Path) -> None:
    """The agent's process and the rank's; the kernel accepts connections for the raylet."""
    folder = tmp_path / "stopped"
    with running(rig, folder, "scale=2x1", "scale.spares=1"):
        victim = other_host(rig, folder)
        actors = [pid for pid, line in victim.processes().items() if "NodeActor" in line]
        pids = [*actors, *pids_on(folder, victim)]
        assert len(pids) == 2
        for pid in pids:
            victim.run(["kill", "-STOP", str(pid)])
        time.sleep(SILENT_S)
        for pid in pids:
            victim.run(["kill", "-CONT", str(pid)])
        wait_for_steps(folder, 20)
        assert events(folder, "failure") == []


def test_a_host_that_only_the_driver_does_not_reach_is_not_taken_for_lost(
    rig: Rig, tmp_path: Path
) -> None:
    folder = tmp_path / "one-link"
    with running(rig, folder, "scale=2x1", "scale.spares=1"):
        victim = other_host(rig, folder)
        nic, address = next(iter(victim.addresses.items()))
        entry = f"{address} dev {nic}"
        # The packets of the driver's host go to a hardware address that nobody has.
        rig.hosts[0].space.ip(f"neigh replace {entry} lladdr 02:00:00:00:00:99 nud permanent")
        time.sleep(SILENT_S)
        rig.hosts[0].space.ip(f"neigh del {entry}")
        wait_for_steps(folder, 20)
        assert events(folder, "failure") == []
