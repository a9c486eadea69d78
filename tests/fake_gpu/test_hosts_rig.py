"""Hosts of the rig with fake GPUs: where ranks are, what they see, and a host that is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.shared.kinds import EventJson
from tests.fake_gpu import FakeGpus, requires_fake_gpus
from tests.records import read_events
from tests.rig import QUICK_DEATH, Rig, hosts, requires_root
from tests.waiting import wait_until

pytestmark = [
    requires_fake_gpus,
    requires_root,
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
LIMIT_S = 600
JOB = f"job={Path(__file__).with_name('trainings.py')}:on_hosts"
WORDS = (
    "scale=1..2x2", "train.steps=100", "data.global_batch=16", "optim=adamw", "optim.lr=0.01",
    "checkpoint.every=100000", "snapshot.every=1", "watch.progress=none",
)  # fmt: skip


@pytest.fixture
def rig(libraries: Path, tmp_path: Path) -> Iterator[Rig]:
    """A Ray on two hosts, each of which has two GPUs.

    The hosts read one folder: fake NCCL connects ranks by files there, and tells hosts by name.
    """
    machine = FakeGpus(tmp_path, libraries, 2)
    with hosts(2) as rig:
        for host in rig.hosts:
            host.environment |= machine.env()
        rig.ray_up(cpus=2, env=QUICK_DEATH)
        yield rig


class Run:
    """A run in a folder, as its events tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def events(self, kind: str) -> list[EventJson]:
        path = self.folder / "events.jsonl"
        found = read_events(path) if path.exists() else []
        return [event for event in found if event["kind"] == kind]

    def places(self) -> dict[int, list[str]]:
        """Return what each rank has printed of its place."""
        found = {}
        for path in (self.folder / "logs").glob("rank-*.log"):
            for line in path.read_text().splitlines():
                if line.startswith("place "):
                    found[int(path.stem.partition("-")[2])] = json.loads(line.partition(" ")[2])
        return found


def test_ranks_have_gpus_on_two_hosts_and_go_on_with_those_of_one(rig: Rig, tmp_path: Path) -> None:
    first, second = rig.hosts
    go, screen, run = tmp_path / "go", tmp_path / "screen", Run(tmp_path / "run")
    command = ["python", "-m", "raydist.train", JOB, *WORDS]
    words = [f"job.args.go={go}", f"hydra.run.dir={run.folder}"]
    with screen.open("w") as log:
        driver = first.popen([*command, *words], cwd=tmp_path, stdout=log, stderr=log)

    def has(kind: str) -> bool:
        assert driver.poll() is None, screen.read_text()
        return bool(run.events(kind))

    wait_until(lambda: has("report"), screen.read_text, LIMIT_S)
    (plan,) = run.events("plan")
    assert (plan["backend"], plan["world_size"]) == ("nccl", 4)
    places = run.places()
    hosts_of = [places[rank][0] for rank in range(4)]
    assert hosts_of[0] == hosts_of[1] != hosts_of[2] == hosts_of[3]
    for rank, (_, uuid, visible, interface) in places.items():
        assert visible == "0,1"
        assert uuid.endswith(str(rank % 2))
        assert interface == "=eth0"
    second.kill()
    wait_until(lambda: has("restarted"), screen.read_text, LIMIT_S)
    go.touch()
    assert driver.wait(LIMIT_S) == 0, screen.read_text()
    assert [event["world_size"] for event in run.events("resize")] == [2]
    (back,) = run.events("restarted")
    assert back["repeated"] <= 1
