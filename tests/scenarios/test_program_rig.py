"""Programs that somebody has already (of torchrun, Horovod, MPI) on three hosts, each with its own
address and name."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.horovod_ranks import requires_horovod
from tests.leftovers import poll_until_empty
from tests.mpi_programs import (
    HYDRA,
    KILLED,
    SUM,
    requires_daemons,
    requires_mpich,
    requires_openmpi,
)
from tests.rig import hosts, requires_root
from tests.rig.network import Rig
from tests.waiting import wait_until

# All of them: otherwise `make test` would start the hosts for the few quick ones.
pytestmark = [pytest.mark.root, requires_root, pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPTS = ROOT / "tests" / "scripts"
LAUNCH = ["python", "-m", "raydist.tools.launch"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)  # what is tested, whatever is installed
        rig.ray_up(cpus=2)
        yield rig


@pytest.fixture
def home(rig: Rig) -> Path:
    """A folder that is new for each test."""
    folder = rig.hosts[0].folder / "home" / "project"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in (("sum.py", SUM), ("killed.py", KILLED)):
        (folder / name).write_text(text)
    return folder


def launch(rig: Rig, home: Path, *words: str, code: int = 0) -> tuple[list[str], dict[str, Any]]:
    """Type it on the first host; the lines of the ranks and the result."""
    done = rig.hosts[0].run([*LAUNCH, *words], cwd=home, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    (result,) = home.glob("runs/*/*/result.json")
    return sorted(line for line in done.stdout.splitlines() if line.startswith("[")), json.loads(
        result.read_text()
    )


def test_a_program_of_torchruns_on_as_many_hosts_as_there_are(rig: Rig, home: Path) -> None:
    lines, _ = launch(
        rig,
        home,
        "--nnodes",
        "2:8",
        "--nproc-per-node",
        "2",
        str(SCRIPTS / "env_ddp.py"),
        "--epochs",
        "2",
    )
    assert lines == [
        f"[{rank}] rank {rank} local {rank % 2} of 6: same weights True" for rank in range(6)
    ]


def test_the_host_of_the_rank_that_failed_is_named(rig: Rig, home: Path) -> None:
    program = [str(SCRIPTS / "env_ddp.py"), "--fail", "kill"]
    _, result = launch(rig, home, "--nnodes", "3", "--nproc-per-node", "1", *program, code=1)
    cause = result["cause"]
    assert (cause["rank"], cause["host"], cause["how"]) == (1, "host1", "killed")


@pytest.mark.parametrize("init_method", ["tcp", "file"])
def test_a_rank_on_the_command_line(rig: Rig, home: Path, init_method: str) -> None:
    args = "--rank {rank} --world-size {world_size} --local_rank {local_rank} --backend {backend}"
    words = [f"script={SCRIPTS / 'by_flags.py'}", f"args={args} --init-method {{init_method}}"]
    done = rig.hosts[0].run(
        ["python", "-m", "raydist.train", *words, "scale=3x1", f"init_method={init_method}"],
        cwd=home,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(
        line
        for line in done.stdout.splitlines()
        if line.startswith("[") and "[Gloo] " not in line  # torch 2.8's gloo prints some
    )
    store = "FileStore" if init_method == "file" else "TCPStore"
    assert lines == [f"[{rank}] {store} {init_method} gloo 0 3.0 {{}}" for rank in range(3)]


@requires_horovod
@pytest.mark.parametrize(("fail", "how"), [("", ""), ("raise", "raised")])
def test_a_program_of_horovodruns_on_three_hosts(rig: Rig, home: Path, fail: str, how: str) -> None:
    words = [
        "backend=horovod",
        "scale=3x1",
        f"script={SCRIPTS / 'horovod_mnist.py'}",
        f"args='--fail={fail}'",
    ]
    done = rig.hosts[0].run(["python", "-m", "raydist.train", *words], cwd=home, check=False)
    assert done.returncode == bool(fail), done.stdout + done.stderr
    if fail:
        (result,) = home.glob("runs/*/*/result.json")
        cause = json.loads(result.read_text())["cause"]
        assert (cause["rank"], cause["host"], cause["how"]) == (1, "host1", how)
    else:
        lines = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
        assert lines == [f"[{rank}] rank {rank} of 3, local 0: same True" for rank in range(3)]


ADD_UP = """
import horovod.torch as hvd, torch

def job():
    total = float(hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum))
    return total, hvd.cross_rank(), hvd.cross_size(), hvd.local_size()
"""
GO = """
import sys, raydist
done = raydist.run(sys.argv[1], "backend=horovod", "scale=3x2", "watch.progress=none")
print("VALUES", done.values)
"""


@requires_horovod
def test_ranks_of_horovods_know_their_hosts(rig: Rig, home: Path) -> None:
    (home / "add_up.py").write_text(ADD_UP)
    (home / "go.py").write_text(GO)
    done = rig.hosts[0].run(["python", "go.py", str(home / "add_up.py")], cwd=home)
    values = next(line for line in done.stdout.splitlines() if line.startswith("VALUES"))
    assert values == "VALUES " + str(
        tuple((15.0, node, 3, 2) for node in range(3) for _ in range(2))
    )


def test_a_folder_is_sent_and_without_that_the_host_that_lacks_it_is_named(
    rig: Rig, home: Path
) -> None:
    (home / "mine.py").write_text(
        "import beside, os, socket\nprint(beside.WORD, socket.gethostname(), os.getcwd())\n"
    )
    (home / "beside.py").write_text("WORD = 'sent'\n")
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "mode=755",
        "none",
        str(home),
    ]  # not every user may write there
    rig.hosts[2].run(mount)  # there nobody sees the folder
    try:
        words = ["--nnodes", "3", "--nproc-per-node", "1"]
        _, result = launch(rig, home, *words, "mine.py", code=1)
        cause = result["cause"]
        assert (cause["rank"], cause["host"], cause["type"]) == (2, "host2", "ProgramNotFound")
        assert "working_dir=." in result["failure"]
        shutil.rmtree(home / "runs")
        lines, _ = launch(rig, home, *words, "working_dir=.", "mine.py")
        assert [line.split()[1:3] for line in lines] == [
            ["sent", f"host{number}"] for number in range(3)
        ]
        assert not any(str(home) in line for line in lines)
    finally:
        rig.hosts[2].run(["umount", str(home)])


# MPI's

TRAIN = ["python", "-m", "raydist.train", "backend=mpi", "scale=3x2", "watch.progress=none"]
# one kernel: Open MPI's shared memory and UCX see through the walls between these hosts
APART = ["env.OMPI_MCA_btl=self,tcp", "env.OMPI_MCA_pml=ob1"]
LIBFABRIC = [*HYDRA, "env.MPIR_CVAR_CH4_NETMOD=ofi"]
DEBIANS = next(Path("/usr/lib").glob("*/libmpich.so.12"), Path("/-"))
"""The library of Debian's MPICH, built for Debian's UCX."""
DEBIAN = ["backend.mpi.mpirun=mpiexec.hydra", *HYDRA[2:], "env.LD_LIBRARY_PATH={home}/lib"]
requires_debian = pytest.mark.skipif(
    not DEBIANS.exists() or shutil.which("mpiexec.hydra") is None,
    reason="no MPICH of Debian: apt install mpich",
)


def requires_mpi(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = requires_openmpi(requires_daemons(test))
    return marked


def run_mpi(rig: Rig, home: Path, *words: str, code: int = 0) -> tuple[str, Path, dict[str, Any]]:
    """Run it on the first host; what was on the screen, the run folder, and its result."""
    shutil.rmtree(home / "runs", ignore_errors=True)
    done = rig.hosts[0].run([*TRAIN, *words], cwd=home, check=False)
    screen = done.stdout + done.stderr
    assert done.returncode == code, screen + "".join(
        p.read_text() for p in home.glob("runs/*/*/logs/*")
    )
    (folder,) = home.glob("runs/*/*")
    return screen, folder, json.loads((folder / "result.json").read_text())


def remaining(rig: Rig) -> list[str]:
    """Return the processes of MPI or of ranks that still run on any host after a minute."""
    words = ("mpirun", "prte", "hydra", "mpi_child", "forkserver", ".py")

    def find() -> list[str]:
        return [
            line
            for host in rig.hosts
            for line in host.processes().values()
            if any(word in line for word in words)
            and "ray" not in line.replace("raydist", "").replace(str(host.folder), "")
        ]

    return poll_until_empty(find, 60)


@requires_mpi
def test_ranks_of_three_hosts_add_up(rig: Rig, home: Path) -> None:
    before = [host.bytes("ib0")[1] for host in rig.hosts]
    _, folder, _ = run_mpi(rig, home, "script=sum.py", *APART)
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text().split() for rank in range(6)]
    assert logs == [[str(rank), "6", "15", f"host{rank // 2}", str(rank % 2)] for rank in range(6)]
    assert [
        host.bytes("ib0")[1] - sent < 1000 for host, sent in zip(rig.hosts, before, strict=True)
    ] == [True] * 3
    assert remaining(rig) == []


@requires_mpi
@pytest.mark.parametrize(
    "mpi_words",
    [
        pytest.param(APART, id="openmpi"),
        pytest.param(HYDRA, id="mpich", marks=requires_mpich),
        pytest.param(LIBFABRIC, id="mpich-libfabric", marks=requires_mpich),
        pytest.param(DEBIAN, id="mpich-debian", marks=requires_debian),
    ],
)
def test_its_traffic_goes_where_fabric_interface_says(
    rig: Rig, home: Path, mpi_words: list[str]
) -> None:
    """4 MB of each rank; Ray's own words go over eth0, and so do MPI's without the setting. Open
    MPI's own TCP, MPICH's UCX over TCP, and libfabric's tcp provider."""
    (home / "lib").mkdir()
    (home / "lib/libmpi.so.12").symlink_to(DEBIANS)  # mpi4py's name for it
    before = [(host.bytes("ib0")[1], host.bytes("eth0")[1]) for host in rig.hosts]
    run_mpi(
        rig,
        home,
        "script=sum.py",
        "args=[500000]",
        "env.OMPI_MCA_mpi_yield_when_idle=true",  # three hosts on the cores of one machine
        "fabric.interface=ib0",
        *(word.replace("{home}", str(home)) for word in mpi_words),
    )
    for host, (own, others) in zip(rig.hosts, before, strict=True):
        assert host.bytes("ib0")[1] - own > 4_000_000
        assert host.bytes("eth0")[1] - others < 4_000_000


@requires_mpi
def test_a_killed_rank_of_another_host_is_the_culprit(rig: Rig, home: Path) -> None:
    screen, _, result = run_mpi(rig, home, "script=killed.py", *APART, code=1)
    assert (result["cause"]["rank"], result["cause"]["host"], result["cause"]["signal"]) == (
        3,
        "host1",
        signal.SIGKILL,
    )
    assert "rank 3 on host1" in screen
    assert remaining(rig) == []


@requires_mpi
@requires_mpich
def test_mpich_too(rig: Rig, home: Path) -> None:
    _, folder, _ = run_mpi(rig, home, "script=sum.py", *HYDRA)
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text().split() for rank in range(6)]
    assert logs == [[str(rank), "6", "15", f"host{rank // 2}", str(rank % 2)] for rank in range(6)]
    _, _, result = run_mpi(rig, home, "script=killed.py", *HYDRA, code=1)
    assert (result["cause"]["rank"], result["cause"]["signal"]) == (3, signal.SIGKILL)
    assert remaining(rig) == []


@requires_mpi
def test_a_host_without_the_program_is_named(rig: Rig, home: Path) -> None:
    only = home / "only_here"
    only.write_text("#!/bin/sh\necho here\n")
    only.chmod(0o755)
    rig.hosts[2].run(["mount", "--bind", "/dev/null", str(only)])
    screen, _, result = run_mpi(rig, home, f"script={only}", code=1)
    assert result["cause"]["host"] == "host2"
    assert f"{only} on host2 is not executable" in screen


@requires_mpi
def test_ctrl_c_ends_it_on_all_hosts(rig: Rig, home: Path) -> None:
    words = [*TRAIN, "script=sum.py", "args=[0,wait]", *APART]
    driver = rig.hosts[0].popen(words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    logs = [f"runs/sum/*/logs/rank-{rank}.log" for rank in range(6)]

    def begun() -> bool:
        assert driver.poll() is None, driver.communicate()
        return all(any(path.read_text() for path in home.glob(log)) for log in logs)

    wait_until(begun, "the ranks", 300)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(120) == 130
    assert remaining(rig) == []
