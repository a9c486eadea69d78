"""Hosts of the rig with fake GPUs: where ranks are, what they see, and a host that is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
    "scale=1..2x2", "train.steps=300", "data.global_batch=16", "optim=adamw", "optim.lr=0.01",
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

    def places(self) -> dict[int, list[list[str]]]:
        """Return what each rank has printed of its place, each time that it was started."""
        found: dict[int, list[list[str]]] = {}
        for path in sorted((self.folder / "logs").glob("rank-*.log")):
            lines = path.read_text().splitlines()
            places = [line.partition(" ")[2] for line in lines if line.startswith("place ")]
            found[int(path.stem.partition("-")[2])] = [json.loads(place) for place in places]
        return found


def test_ranks_have_gpus_on_two_hosts_and_go_on_with_those_of_one_and_with_all_again(
    rig: Rig, tmp_path: Path
) -> None:
    first, second = rig.hosts
    go, screen, run = tmp_path / "go", tmp_path / "screen", Run(tmp_path / "run")
    command = ["python", "-m", "raydist.train", JOB, *WORDS]
    words = [f"job.args.go={go}", f"hydra.run.dir={run.folder}"]
    with screen.open("w") as log:
        driver = first.popen([*command, *words], cwd=tmp_path, stdout=log, stderr=log)

    def wait_for(condition: Callable[[], bool]) -> None:
        def reached() -> bool:
            assert driver.poll() is None, screen.read_text()
            return condition()

        wait_until(reached, screen.read_text, LIMIT_S)

    wait_for(lambda: bool(run.events("report")) and check_places(run.places(), [1, 1, 1, 1]))
    (plan,) = run.events("plan")
    assert (plan["backend"], plan["world_size"]) == ("nccl", 4)
    second.kill()
    wait_for(lambda: len(run.events("restarted")) == 1)
    second.boot()
    rig.ray_join(second, cpus=2, env=QUICK_DEATH)
    wait_for(lambda: len(run.events("restarted")) == 2)
    wait_for(lambda: check_places(run.places(), [3, 3, 2, 2]))
    go.touch()
    assert driver.wait(LIMIT_S) == 0, screen.read_text()
    assert [event["world_size"] for event in run.events("resize")] == [2, 4]
    lost, grown = run.events("restarted")
    assert lost["repeated"] <= 1
    assert (grown["resized"], grown["repeated"]) == (True, 0)


def check_places(places: dict[int, list[list[str]]], starts: list[int]) -> bool:
    """Return whether the ranks have been started so often; two have the two GPUs of each host."""
    if [len(places.get(rank, [])) for rank in range(4)] != starts:
        return False
    newest = [places[rank][-1] for rank in range(4)]
    hosts_of = [host for host, *_ in newest]
    assert hosts_of[0] == hosts_of[1] != hosts_of[2] == hosts_of[3]
    for rank, (_, uuid, visible, interface) in enumerate(newest):
        assert visible == "0,1"
        assert uuid.endswith(str(rank % 2))
        assert interface == "=eth0"
    return True
