"""Programs that somebody has already, on three hosts: each with an address, a name and a folder of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.horovod_ranks import requires_horovod
from tests.rig import hosts, requires_root
from tests.rig.network import Rig

pytestmark = [pytest.mark.root, requires_root]
SCRIPTS = ROOT / "tests" / "scripts"
LAUNCH = ["python", "-m", "raydist.tools.launch"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)  # what is tested, whatever is installed
        rig.ray_up(cpus=2)
        yield rig
        rig.ray_down()


@pytest.fixture
def home(rig: Rig) -> Path:
    """A folder that is new for each test."""
    folder = rig.hosts[0].folder / "home" / "project"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def launch(rig: Rig, home: Path, *words: str, code: int = 0) -> tuple[list[str], dict[str, Any]]:
    """Type it on the first host; the lines of the ranks and the result."""
    done = rig.hosts[0].run([*LAUNCH, *words], cwd=home, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    (result,) = home.glob("runs/*/*/result.json")
    return sorted(line for line in done.stdout.splitlines() if line.startswith("[")), json.loads(result.read_text())


def test_a_program_of_torchruns_on_three_hosts(rig: Rig, home: Path) -> None:
    lines, _ = launch(rig, home, "--nnodes", "3", "--nproc-per-node", "2", str(SCRIPTS / "env_ddp.py"), "--epochs", "2")
    assert lines == [f"[{rank}] rank {rank} local {rank % 2} of 6: same weights True" for rank in range(6)]


def test_as_many_nodes_as_there_are_between_two_numbers(rig: Rig, home: Path) -> None:
    lines, _ = launch(rig, home, "--nnodes", "2:8", "--nproc-per-node", "1", str(SCRIPTS / "env_ddp.py"))
    assert len(lines) == 3


@pytest.mark.parametrize(("how", "says"), [("raise", "raised"), ("kill", "killed"), ("6", "exited")])
def test_the_host_of_the_rank_that_failed_is_named(rig: Rig, home: Path, how: str, says: str) -> None:
    words = ["--nnodes", "3", "--nproc-per-node", "1", str(SCRIPTS / "env_ddp.py"), "--fail", how]
    _, result = launch(rig, home, *words, code=1)
    assert (result["cause"]["rank"], result["cause"]["host"], result["cause"]["how"]) == (1, "host1", says)


@pytest.mark.parametrize("init_method", ["tcp", "file"])
def test_a_rank_on_the_command_line(rig: Rig, home: Path, init_method: str) -> None:
    args = "--rank {rank} --world-size {world_size} --local_rank {local_rank} --backend {backend}"
    words = [f"script={SCRIPTS / 'by_flags.py'}", f"args={args} --init-method {{init_method}}"]
    done = rig.hosts[0].run(
        ["python", "-m", "raydist.train", *words, "scale=3x1", f"init_method={init_method}"], cwd=home, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    store = "FileStore" if init_method == "file" else "TCPStore"
    assert lines == [f"[{rank}] {store} {init_method} gloo 0 3.0 {{}}" for rank in range(3)]


@requires_horovod
@pytest.mark.parametrize(("fail", "how"), [("", ""), ("raise", "raised"), ("kill", "killed"), ("exit", "exited")])
def test_a_program_of_horovodruns_on_three_hosts(rig: Rig, home: Path, fail: str, how: str) -> None:
    words = ["backend=horovod", "scale=3x1", f"script={SCRIPTS / 'horovod_mnist.py'}", f"args='--fail={fail}'"]
    done = rig.hosts[0].run(["python", "-m", "raydist.train", *words], cwd=home, check=False)
    assert done.returncode == bool(fail), done.stdout + done.stderr
    if fail:
        (result,) = home.glob("runs/*/*/result.json")
        cause = json.loads(result.read_text())["cause"]
        assert (cause["rank"], cause["host"], cause["how"]) == (1, "host1", how)
    else:
        lines = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
        assert lines == [f"[{rank}] rank {rank} of 3, local 0: same True" for rank in range(3)]


def test_a_folder_is_sent_and_without_that_the_host_that_lacks_it_is_named(rig: Rig, home: Path) -> None:
    (home / "mine.py").write_text("import beside, os, socket\nprint(beside.WORD, socket.gethostname(), os.getcwd())\n")
    (home / "beside.py").write_text("WORD = 'sent'\n")
    rig.hosts[2].run(["mount", "-t", "tmpfs", "none", str(home)])  # there nobody sees the folder
    try:
        words = ["--nnodes", "3", "--nproc-per-node", "1"]
        _, result = launch(rig, home, *words, "mine.py", code=1)
        cause = result["cause"]
        assert (cause["rank"], cause["host"], cause["type"]) == (2, "host2", "ProgramNotFound")
        assert "working_dir=." in result["failure"]
        shutil.rmtree(home / "runs")
        lines, _ = launch(rig, home, *words, "working_dir=.", "mine.py")
        assert [line.split()[1:3] for line in lines] == [["sent", f"host{number}"] for number in range(3)]
        assert not any(str(home) in line for line in lines)
    finally:
        rig.hosts[2].run(["umount", str(home)])
