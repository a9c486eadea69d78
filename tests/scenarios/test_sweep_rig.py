"""A node is lost in the middle of a sweep, and comes again: real hosts in namespaces."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from raydist.shared.kinds import EventJson
from tests.records import read_events
from tests.rig import QUICK_DEATH, hosts, requires_root
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(1800), requires_root]
ROOT = Path(__file__).parents[2]
ENV = {**QUICK_DEATH, "PYTHONPATH": str(ROOT)}
PROGRAM = """
import time
from pathlib import Path
from tests import faults

def job(config, folder):
    def wait_for(name):
        while not Path(folder, name).exists():
            time.sleep(0.05)

    if config.seed >= 2:
        wait_for("used")  # their hosts are taken until the one that comes is used
    made = faults.training(config, pause=0.02)
    if config.seed < 2:
        wait_for("noticed")  # no host is free before the loss is noticed
    return made
"""


def test_a_lost_node_costs_its_trial_a_restart_and_one_that_comes_is_used(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(PROGRAM)
    sweep = tmp_path / "sweep"

    def events(trial: int, kind: str) -> list[EventJson]:
        path = sweep / str(trial) / "events.jsonl"
        return [each for each in read_events(path) if each["kind"] == kind] if path.exists() else []

    def places(trial: int) -> list[str]:
        """Return the hosts of a trial, one for each plan."""
        return [each["slots"][0]["host"] for each in events(trial, "plan")]

    def under_way() -> bool:
        return all(
            any(each.get("step", 0) >= 5 for each in events(trial, "report")) for trial in range(2)
        )

    with hosts(2) as rig:
        rig.ray_up(cpus=2, env=ENV)
        words = [
            "job=slow.py",
            "scale=1x2",
            "seed=range(0,4)",
            "backend=gloo",
            "snapshot.every=1",
            "train.epochs=6",
        ]
        words += [
            "sweep.objective=min:loss",
            f"hydra.sweep.dir={sweep}",
            f"job.args.folder={tmp_path}",
        ]
        env = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"{rig.hosts[0].address()}:6379"}
        with (tmp_path / "screen.txt").open("w") as log:
            command = ["python", "-m", "raydist.tools.sweep", *words]
            driver = rig.hosts[0].popen(
                command, env=env, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            wait_until(under_way, "two trials are under way", 300)
            lost = rig.hosts[1]
            [struck] = [trial for trial in range(2) if places(trial) == [lost.name]]
            lost.kill()
            wait_until(lambda: bool(events(struck, "wait")), "its trial waits for a place", 300)
            (tmp_path / "noticed").touch()
            wait_until(lambda: bool(events(struck, "placed")), "its trial runs elsewhere", 300)
            lost.boot()
            rig.ray_join(lost, env=ENV)
            wait_until(
                lambda: any(lost.name in places(trial) for trial in range(2, 4)),
                "the node is used",
                300,
            )
            (tmp_path / "used").touch()
            assert driver.wait(300) == 0
        finally:
            driver.kill()
            print((tmp_path / "screen.txt").read_text())

    trials = json.loads((sweep / "sweep.json").read_text())["trials"]
    assert [each["state"] for each in trials] == ["finished"] * 4
    assert [len(events(trial, "placed")) for trial in range(4)] == [
        int(trial == struck) for trial in range(4)
    ]
    for trial in range(4):
        reports = [
            each
            for each in events(trial, "report")
            if each["rank"] == 0 and "loss" in each["values"]
        ]
        losses = [(each["step"], each["values"]["loss"]) for each in reports]
        began = [each["resumed"] for each in events(trial, "begin") if each["rank"] == 0]
        assert began[0] == 0
        assert len(began) == 1 + (trial == struck)
        unheard = (
            {*range(6, began[1] + 1)} if trial == struck else set()
        )  # its last reports were lost with the node
        assert {*range(1, 25)} - unheard <= {*dict(losses)}, trial
        assert len({*losses}) == len(dict(losses)), trial  # what it repeats is the same to the bit
        assert len(losses) == 24 or trial == struck
