"""Commands about a run, as a person types them beside an unmodified program whose ranks are odd: one
in a collective, one in a Python loop, one in C code that holds the GIL, one stopped by a signal."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.watch.operate.connection import read_address
from tests.conftest import ROOT
from tests.programs import Program
from tests.rig import requires_root
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
ODD = """
    import ctypes, os, signal, time
    import torch
    import torch.distributed as dist

    def wait_for_all():
        dist.all_reduce(torch.ones(3))

    def loop():
        while True:
            time.time()

    def hold_the_gil():
        ctypes.PyDLL(None).sleep(3600)

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    wait_for_all()
    print("rank", rank, "has met the others", flush=True)
    if rank == 0:
        wait_for_all()
    if rank == 1:
        loop()
    if rank == 2:
        hold_the_gil()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def operate(folder: Path, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Type `raydist WORDS` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "raydist.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def rows(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What `raydist ranks --json` prints; empty while no rank runs."""
    done = operate(folder, "ranks", "--json", *words)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A program of four ranks, each of which has come to where it stays."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd.py").write_text(textwrap.dedent(ODD))
    words = ("script=odd.py", "scale=1x4", "hang.end=false", "group=inline")
    program = Program(folder, *words, alone=True)
    program.wait_until(lambda: program.screen.count("has met the others") == 4, "the ranks")
    program.wait_until(lambda: rows(folder)[3]["state"].startswith("stopped"), "the stopped rank")
    yield program
    program.process.kill()
    program.process.wait()
    assert program.leftovers() == []


def test_ranks_says_where_each_rank_is_and_what_it_does(odd: Program) -> None:
    found = rows(odd.folder)
    began = {each["rank"]: each["pid"] for each in odd.events("began")}
    assert {row["rank"]: row["pid"] for row in found} == began
    assert [row["host"] for row in found] == [socket.gethostname()] * 4
    assert [row["state"] for row in found][:3] == ["runs"] * 3
    assert "SIGSTOP" in found[3]["state"]
    table = operate(odd.folder, "ranks", str(odd.run_dir)).stdout
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        [str(row["rank"]), row["host"], str(row["pid"])] for row in found
    ]


def test_stacks_says_where_each_odd_rank_is_and_how_it_knows(odd: Program) -> None:
    done = operate(odd.folder, "stacks")
    assert done.returncode == 0, done.stderr
    groups = {
        lines[0].partition(":")[0]: lines
        for lines in map(str.splitlines, re.split(r"\n(?=ranks? |all )", done.stdout))
    }
    assert groups.keys() == {"rank 0", "rank 1", "rank 2", "rank 3", "all threads"}
    assert next(iter(groups)) == "rank 3"  # the one that is stopped
    pid = odd.events("began")[3]["pid"]
    assert f"kill -CONT {pid}" in groups["rank 3"][0]
    line = {text.strip(): n for n, text in enumerate(textwrap.dedent(ODD).splitlines(), 1)}
    assert (
        groups["rank 0"][0]
        == f"rank 0: all_reduce at odd.py:{line['dist.all_reduce(torch.ones(3))']}"
    )
    assert groups["rank 1"][0].endswith(
        (f"odd.py:{line['time.time()']}", f":{line['while True:']}")
    )
    assert groups["rank 2"][0].endswith(f"odd.py:{line['ctypes.PyDLL(None).sleep(3600)']}")
    said = {rank: "\n".join(lines) for rank, lines in groups.items()}
    assert "by a thread" in said["rank 0"]
    assert "by a thread" in said["rank 1"]
    assert "by a signal's handler" in said["rank 2"]
    assert "stack written" not in said["rank 3"]
    assert "waits in all_reduce of [[3]]" in said["rank 0"]
    (event,) = odd.events("operated")
    assert event["command"] == "stacks"
    whole = (odd.run_dir / event["file"]).read_text()
    assert "in hold_the_gil" in whole
    assert "in loop" in whole


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_native_stacks_have_the_frames_of_c_code(odd: Program) -> None:
    done = operate(odd.folder, "stacks", "rank=2", "--native")
    assert done.returncode == 0, done.stderr
    assert "hold_the_gil (odd.py:" in done.stdout
    assert re.search(r"nanosleep|sleep \(", done.stdout)


def test_ranks_that_the_run_does_not_have_are_refused(odd: Program) -> None:
    for word, instead in {"rank=4": "rank=3", "rank=x": "rank=3", "rnk=3": "rank=3"}.items():
        done = operate(odd.folder, "stacks", word)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {word}: ")
        assert instead in done.stderr


@pytest.mark.root
@requires_root
def test_another_user_gets_nothing(odd: Program) -> None:
    address = read_address(odd.run_dir)
    assert address is not None
    code = f"""
import os, socket
os.setgid(65534)
os.setuid({{uid}})
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0{address.socket}")
try:
    sock.sendall(b'{{{{"protocol": "ListRanks"}}}}\\n')
    answer = sock.recv(1 << 16)
except OSError:
    answer = b""
print(len(answer))
"""
    said = {
        uid: int(subprocess.check_output([sys.executable, "-c", code.format(uid=uid)], text=True))
        for uid in (0, 65534)
    }
    assert said[0] > 0
    assert said[65534] == 0


def test_what_does_not_run_is_refused(odd: Program, tmp_path: Path) -> None:
    wrong = operate(tmp_path, "ranks", "runs/nothing")
    none = operate(tmp_path, "ranks")
    flag = operate(odd.folder, "ranks", "--jsn")
    two = operate(odd.folder, "ranks", "newest", "newest")
    for done in (wrong, none, flag, two):
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
    assert "there is no such folder" in wrong.stderr
    assert "did you mean --json" in flag.stderr


def test_the_ranks_of_a_killed_driver_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    program = Program(tmp_path, "script=sleeps.py", "scale=1x1", "group=inline")
    program.wait_until(lambda: len(rows(tmp_path)) == 1, "the rank")
    folder = program.run_dir
    program.process.kill()
    program.process.wait()
    done = operate(tmp_path, "ranks", str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"pid {program.process.pid}" in done.stderr
    wait_until(lambda: program.leftovers(0) == [], "its processes", 60)


def test_follow_ends_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text("import time\ntime.sleep(8)\n")
    program = Program(tmp_path, "script=brief.py", "scale=1x2", "group=inline")
    program.wait_until(lambda: len(rows(tmp_path)) == 2, "the ranks")
    followed = operate(tmp_path, "ranks", "--follow")
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout.count("own work") >= 1
    assert program.wait() == 0
    assert not (program.run_dir / "driver.json").exists()
