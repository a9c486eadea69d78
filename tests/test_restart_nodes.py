"""A node is lost, and the run goes on where there is another: real hosts in namespaces."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.events import Event, read
from tests.horovod_ranks import requires_horovod
from tests.rig import QUICK_DEATH, Host, Rig, hosts, requires_root
from tests.test_restart_run import WORDS
from tests.test_rig import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, requires_root]
ROOT = Path(__file__).parent.parent
ENV = {**QUICK_DEATH, "PYTHONPATH": str(ROOT)}
PROGRAM = (
    "import raydist\nfrom tests import faults\n\ndef job(config):\n    return faults.training(config, pause=0.02)\n"
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with hosts(3) as made:
        made.ray_up(cpus=2, env=ENV)
        yield made


def start(rig: Rig, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run on two of the hosts, from the first."""
    folder.mkdir()
    (folder / "slow.py").write_text(PROGRAM)
    command = ["python", "-m", "raydist.train", "job=slow.py", *WORDS, f"hydra.run.dir={folder}/run", *words]
    env = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"{rig.hosts[0].address()}:6379"}
    log = (folder / "screen.txt").open("w")
    return rig.hosts[0].popen(command, env=env, cwd=folder, stdout=log, stderr=log)


def events(folder: Path, kind: str) -> list[Event]:
    path = folder / "run" / "events.jsonl"
    return [happened for happened in read(path) if happened["kind"] == kind] if path.exists() else []


def result(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return made


def reached(folder: Path, step: int) -> bool:
    return any(event.get("step", 0) >= step for event in events(folder, "report"))


def host_of(rig: Rig, folder: Path, rank: int) -> Host:
    name = events(folder, "plan")[0]["seats"][rank]["host"]
    return next(host for host in rig.hosts if host.name == name)


def weights(folder: Path) -> Any:
    from raydist import checkpoint

    return checkpoint.load(Path(result(folder)["checkpoint"]))["model"]


def test_a_lost_host_is_replaced_by_another_and_no_step_is_lost(rig: Rig, tmp_path: Path) -> None:
    words = ("scale=2x1", "train.epochs=6")
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    assert start(rig, whole, *words).wait(120) == 0, (whole / "screen.txt").read_text()
    run = start(rig, struck, *words)
    wait_until(lambda: reached(struck, 20), "step 20", 90)
    # the head has the lowest address: if it has a rank, it is rank 0
    lost = 1
    victim = host_of(rig, struck, lost)
    victim.kill()
    assert run.wait(150) == 0, (struck / "screen.txt").read_text()
    (back,) = events(struck, "restarted")
    assert back["repeated"] <= 1
    (end,) = result(struck)["restarts"]
    assert (end["rank"], end["how"]) == (lost, "lost")
    assert result(struck)["metrics"]["test_loss"] > 0
    (noted,) = json.loads((rig.hosts[0].folder / "home" / ".cache" / "raydist" / "nodes.json").read_text())
    assert (noted["host"], noted["what"], noted["run"]) == (victim.name, "lost", str(struck / "run"))
    # the generators of the lost rank are lost with it, and are seeded anew: not to the last bit, but the same training
    assert weights(struck).keys() == weights(whole).keys()
    victim.boot()
    rig.ray_join(victim, cpus=2, env=ENV)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=requires_horovod)])
def test_a_host_that_is_cut_off_is_replaced_by_another_and_no_step_is_lost(
    rig: Rig, tmp_path: Path, backend: str
) -> None:
    """The cable is pulled: nobody hears from it, and it runs on, alone."""
    struck = tmp_path / "cut"
    run = start(rig, struck, "scale=2x1", "train.epochs=6", f"backend={backend}")
    wait_until(lambda: reached(struck, 20), "step 20", 90)
    victim = host_of(rig, struck, 1)
    rig.cut(victim)
    assert run.wait(150) == 0, (struck / "screen.txt").read_text()
    (back,) = events(struck, "restarted")
    assert back["repeated"] <= 1
    (end,) = result(struck)["restarts"]
    assert (end["rank"], end["how"]) == (1, "lost")
    page = (struck / "run" / "blame-1.txt").read_text()
    assert "another node for rank 1" in page
    rig.restore(victim)
    victim.kill()
    victim.boot()
    rig.ray_join(victim, cpus=2, env=ENV)
