"""backend=mpi on three hosts: no ssh, the network that was planned, who is to blame, and nothing left."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.mpi_programs import KILLED, MPICH, SUM, requires_daemons, requires_mpich, requires_openmpi
from tests.rig import hosts, requires_root
from tests.rig.network import Rig

pytestmark = [pytest.mark.root, requires_root, requires_openmpi, requires_daemons]
TRAIN = ["python", "-m", "raydist.train", "backend=mpi", "scale=3x2", "watch.progress=none"]
# one kernel: Open MPI's shared memory and UCX see through the walls between these hosts
APART = ["env.OMPI_MCA_btl=self,tcp", "env.OMPI_MCA_pml=ob1"]

HYDRA = [f"backend.mpi.mpirun={MPICH}/bin/mpiexec", f"env.LD_LIBRARY_PATH={MPICH}/lib", "env.MPI4PY_MPIABI=mpich"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)  # what is tested, whatever is installed
        rig.ray_up(cpus=2)
        for name, text in (("sum.py", SUM), ("killed.py", KILLED)):
            (home(rig) / name).write_text(text)
        yield rig
        rig.ray_down()


def home(rig: Rig) -> Path:
    return rig.hosts[0].folder / "home"


def finish(rig: Rig, *words: str, code: int = 0) -> tuple[str, Path, dict[str, Any]]:
    """Run it on the first host; what was on the screen, the run folder, and its result."""
    shutil.rmtree(home(rig) / "runs", ignore_errors=True)
    done = rig.hosts[0].run([*TRAIN, *words], cwd=home(rig), check=False)
    screen = done.stdout + done.stderr
    assert done.returncode == code, screen + "".join(p.read_text() for p in home(rig).glob("runs/*/*/logs/*"))
    (folder,) = home(rig).glob("runs/*/*")
    return screen, folder, json.loads((folder / "result.json").read_text())


def nothing_left(rig: Rig) -> list[str]:
    """Processes of MPI or of ranks on any host; ten seconds for them to go."""
    until, left = time.monotonic() + 10, ["?"]
    while left and time.monotonic() < until:
        time.sleep(0.1)
        words = ("mpirun", "prte", "hydra", "mpi_child", "forkserver", ".py")
        left = [
            line
            for host in rig.hosts
            for line in host.processes().values()
            if any(word in line for word in words)
            and "ray" not in line.replace("raydist", "").replace(str(host.folder), "")
        ]
    return left


def test_ranks_of_three_hosts_add_up(rig: Rig) -> None:
    before = [host.bytes("ib0")[1] for host in rig.hosts]
    _, folder, _ = finish(rig, "script=sum.py", *APART)
    told = [(folder / "logs" / f"rank-{rank}.log").read_text().split() for rank in range(6)]
    assert told == [[str(rank), "6", "15", f"host{rank // 2}", str(rank % 2)] for rank in range(6)]
    assert [host.bytes("ib0")[1] - sent < 1000 for host, sent in zip(rig.hosts, before, strict=True)] == [True] * 3
    assert nothing_left(rig) == []


@pytest.mark.parametrize(
    "mpi_words", [pytest.param(APART, id="openmpi"), pytest.param(HYDRA, id="mpich", marks=requires_mpich)]
)
@pytest.mark.parametrize(("interface", "other"), [("ib0", "eth0"), ("eth0", "ib0")])
def test_its_traffic_goes_where_fabric_interface_says(
    rig: Rig, mpi_words: list[str], interface: str, other: str
) -> None:
    """8 MB of each rank; Ray's own words go over eth0."""
    before = [(host.bytes(interface)[1], host.bytes(other)[1]) for host in rig.hosts]
    finish(rig, "script=sum.py", "args=[1000000]", f"fabric.interface={interface}", *mpi_words)
    for host, (own, others) in zip(rig.hosts, before, strict=True):
        assert host.bytes(interface)[1] - own > 8_000_000
        assert host.bytes(other)[1] - others < 2_000_000


def test_a_killed_rank_of_another_host_is_the_culprit(rig: Rig) -> None:
    screen, _, result = finish(rig, "script=killed.py", *APART, code=1)
    assert (result["cause"]["rank"], result["cause"]["host"], result["cause"]["signal"]) == (3, "host1", signal.SIGKILL)
    assert "rank 3 on host1" in screen
    _, _, result = finish(rig, "script=killed.py", "args=[abort]", *APART, code=1)
    assert (result["cause"]["rank"], result["cause"]["host"], result["cause"]["code"]) == (3, "host1", 9)
    assert nothing_left(rig) == []


@requires_mpich
def test_mpich_too(rig: Rig) -> None:
    _, folder, _ = finish(rig, "script=sum.py", *HYDRA)
    told = [(folder / "logs" / f"rank-{rank}.log").read_text().split() for rank in range(6)]
    assert told == [[str(rank), "6", "15", f"host{rank // 2}", str(rank % 2)] for rank in range(6)]
    _, _, result = finish(rig, "script=killed.py", *HYDRA, code=1)
    assert (result["cause"]["rank"], result["cause"]["signal"]) == (3, signal.SIGKILL)
    assert nothing_left(rig) == []


def test_a_host_without_the_program_is_named(rig: Rig) -> None:
    only = home(rig) / "only_here"
    only.write_text("#!/bin/sh\necho here\n")
    only.chmod(0o755)
    rig.hosts[2].run(["mount", "--bind", "/dev/null", str(only)])
    screen, _, result = finish(rig, f"script={only}", code=1)
    assert result["cause"]["host"] == "host2"
    assert f"{only} on host2 is not executable" in screen


def test_ctrl_c_ends_it_on_all_hosts(rig: Rig) -> None:
    shutil.rmtree(home(rig) / "runs", ignore_errors=True)
    words = [*TRAIN, "script=sum.py", "args=[0,wait]", *APART]
    driver = rig.hosts[0].popen(words, cwd=home(rig), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    logs = [f"runs/sum/*/logs/rank-{rank}.log" for rank in range(6)]
    until = time.monotonic() + 60
    while not all(any(path.read_text() for path in home(rig).glob(log)) for log in logs):
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(20) == 130
    assert nothing_left(rig) == []
