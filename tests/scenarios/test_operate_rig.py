"""Commands about a run, typed on other hosts than that of its driver: over Ray, with its token."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.scenarios.test_exec_typed import PROMPT, SHELL
from tests.terminals import Terminal
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
]
PATIENCE_S = 600.0
COMMAND = ["python", "-m", "raydist.cli"]
PROGRAM = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(1000000):
        weight.grad = torch.ones(1)
        dist.all_reduce(weight.grad)
        optimizer.step()
        time.sleep(0.05)
        if os.path.exists("hold") and dist.get_rank() == 1:
            breakpoint()
"""
ODD = """
    import ctypes, os, signal, time
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Stuck(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            time.sleep(3600)

    def load():
        for batch in DataLoader(Stuck(), num_workers=1):
            print(batch)

    def wait_for_all():
        dist.all_reduce(torch.ones(3))

    def loop():
        while True: time.time()

    def hold_the_gil():
        while True: ctypes.PyDLL(None).sleep(3600)

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    wait_for_all()
    print("rank", rank, "has met the others", flush=True)
    odd = {2: loop, 3: hold_the_gil, 4: load, 5: lambda: os.kill(os.getpid(), signal.SIGSTOP)}
    odd.get(rank, wait_for_all)()
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Three hosts. The driver is on the first, which has room for one rank."""
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)
        rig.ray_up(cpus=3, head_cpus=1)
        yield rig


@pytest.fixture(scope="module")
def steps(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The folder and the driver of a run of two ranks; the last test with it stops it."""
    folder = tmp_path_factory.mktemp("steps")
    with running(rig, folder, "steps.py", PROGRAM, "scale=2x1") as driver:
        yield folder, driver


@contextmanager
def running(
    rig: Rig, folder: Path, name: str, program: str, *words: str
) -> Iterator[subprocess.Popen[str]]:
    """A run of this program, called `name`, with its driver on the first host; killed at the end.

    The run folder is `run` in the folder, the screen is in screen.txt.
    """
    (folder / name).write_text(textwrap.dedent(program))
    command = [*COMMAND, "train", f"script={name}", *words, f"hydra.run.dir={folder}/run"]
    with (folder / "screen.txt").open("w") as log:
        driver = rig.hosts[0].popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        wait_until(
            (folder / "run/driver.json").exists, (folder / "screen.txt").read_text, PATIENCE_S
        )
        yield driver
    finally:
        driver.kill()
        driver.wait()


def test_a_person_types_on_a_third_host(
    rig: Rig, steps: tuple[Path, subprocess.Popen[str]]
) -> None:
    first, *others = rig.hosts
    folder, driver = steps
    rows: list[str] = []

    def begun() -> bool:
        """Return whether the table has its headings and two ranks."""
        done = first.run([*COMMAND, "ranks", "run"], cwd=folder, check=False)
        rows[:] = done.stdout.splitlines()
        return len(rows) == 3

    wait_until(begun, "two ranks", PATIENCE_S)
    (there,) = [host for host in rig.hosts if host.name == rows[2].split()[1]]
    last = next(host for host in others if host is not there)
    shell = " ".join(SHELL[1:])

    def processes() -> set[str]:
        return set(there.processes().values())

    typed = [*COMMAND, "exec", "run", "rank=1", "-it", *SHELL]
    with Terminal(typed, last.popen, cwd=folder) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("echo rank=$RANK= on $(hostname); stty size\n")
        terminal.wait_for(rf"rank=1= on {there.name}\r\n24 80\r\n")
        terminal.resize(30, 99)
        terminal.enter("stty size\n")
        terminal.wait_for(r"\r30 99\r\n")
        terminal.enter("sleep 36005\n")
        wait_until(lambda: "sleep 36005" in processes(), "the sleep", PATIENCE_S)
        terminal.enter("\x03")
        terminal.enter("exit 5\n")
        assert terminal.wait() == 5
        assert terminal.modes == terminal.modes_before

    pipe = " ".join([*COMMAND, "exec", "run", "rank=0", "-i", "--", "cat"])
    whole = f"head -c 1000000 /dev/urandom > data && {pipe} < data | cmp - data"
    last.run(["sh", "-c", whole], cwd=folder)

    with Terminal(typed, last.popen, cwd=folder) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("sleep 36007\n")
        wait_until(lambda: {"sleep 36007", shell} <= processes(), "the sleep", PATIENCE_S)
        terminal.close()
        wait_until(lambda: not {"sleep 36007", shell} & processes(), "their end", PATIENCE_S)
    assert driver.poll() is None, (folder / "screen.txt").read_text()


def test_another_host_reaches_the_run_with_rays_token_only(
    rig: Rig, steps: tuple[Path, subprocess.Popen[str]]
) -> None:
    """It stops the run at its end."""
    second = rig.hosts[1]
    folder, driver = steps

    def operate(*words: str, typed: str = "", token: str = "") -> subprocess.CompletedProcess[str]:
        env = {"RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"} if token else {}
        shell = " ".join([*COMMAND, *words])
        line = f"printf '{typed}' | {shell}" if typed else shell
        return second.run(["sh", "-c", line], cwd=folder, env=env, check=False, timeout=PATIENCE_S)

    rows: list[dict[str, Any]] = []

    def begun() -> bool:
        rows[:] = map(json.loads, operate("ranks", "run", "--json").stdout.splitlines())
        return len(rows) == 2

    wait_until(begun, "two ranks", PATIENCE_S)
    names = [row["host"] for row in rows]
    assert len({*names} & {host.name for host in rig.hosts}) == 2
    refused = operate("ranks", "run", token="0" * 64)
    assert refused.returncode != 0
    assert str(rows[0]["pid"]) not in refused.stdout

    wait_until(lambda: "steps.py" in operate("stacks", "run").stdout, "the program", PATIENCE_S)
    both = operate("exec", "run", "--all", "--", "hostname")
    assert sorted(both.stdout.split()) == sorted(["[0]", names[0], "[1]", names[1]]), both.stderr
    profiled = operate("profile", "run", "steps=2")
    assert profiled.returncode == 0, profiled.stderr
    (file,) = (folder / "run/operate").glob("profile-*.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {f"rank 0 · {names[0]}", f"rank 1 · {names[1]}"}
    reduced = [event["pid"] for event in events if event["name"] == "gloo:all_reduce"]
    assert sorted(reduced) == [1, 1, 1001, 1001]
    (folder / "hold").touch()
    held = "waits in the debugger"
    wait_until(lambda: held in operate("ranks", "run").stdout, "the breakpoint", PATIENCE_S)
    (folder / "hold").unlink()
    said = operate("debug", "run", typed="p 40 + 2\\nq\\n")
    assert "42" in said.stdout, said.stderr
    wait_until(lambda: held not in operate("ranks", "run").stdout, "its end", PATIENCE_S)
    stopped = operate("stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    assert driver.wait(PATIENCE_S) == 143


def test_stacks_of_odd_ranks_on_other_hosts(rig: Rig, tmp_path: Path) -> None:
    first, *others = rig.hosts
    screen = tmp_path / "screen.txt"

    def operate(*words: str) -> subprocess.CompletedProcess[str]:
        return first.run([*COMMAND, *words], cwd=tmp_path, check=False, timeout=PATIENCE_S)

    with running(rig, tmp_path, "odd.py", ODD, "scale=2x3", "hang.end=false"):
        met = "has met the others"
        wait_until(lambda: screen.read_text().count(met) == 6, screen.read_text, PATIENCE_S)
        wait_until(
            lambda: "stopped by a signal" in operate("ranks", "run").stdout, "SIGSTOP", PATIENCE_S
        )
        wait_until(
            lambda: "data loader" in operate("stacks", "run", "rank=4").stdout, "it", PATIENCE_S
        )
        rows = map(json.loads, operate("ranks", "run", "--json").stdout.splitlines())
        assert [row["host"] for row in rows] == [host.name for host in others for _ in range(3)]
        said: dict[str, str] = {}

        def answered() -> bool:
            """Ask again where a rank that lacked the CPU has not answered by its thread in time."""
            text = operate("stacks", "run").stdout
            said.clear()
            said.update((of.partition(":")[0], of) for of in re.split(r"\n(?=ranks? )", text))
            by_thread = ("ranks 0-1", "rank 2", "rank 4")
            return all("by a thread" in said.get(ranks, "") for ranks in by_thread)

        wait_until(answered, lambda: str(said), PATIENCE_S)
        assert next(iter(said)) == "rank 5"  # the one that is stopped
        assert said.keys() == {"ranks 0-1", *(f"rank {n}" for n in range(2, 6))}
        line = {text.strip(): n for n, text in enumerate(textwrap.dedent(ODD).splitlines(), 1)}
        for ranks, place, way in (
            (
                "ranks 0-1",
                f"all_reduce at odd.py:{line['dist.all_reduce(torch.ones(3))']}",
                "thread",
            ),
            ("rank 2", f"odd.py:{line['while True: time.time()']}", "by a thread"),
            ("rank 3", f"odd.py:{line['while True: ctypes.PyDLL(None).sleep(3600)']}", "in C"),
            ("rank 4", "waits for its data loader at odd.py", "by a thread"),
            ("rank 5", "stopped by a signal (SIGSTOP); kill -CONT", ""),
        ):
            head, _, rest = said[ranks].partition("\n")
            assert place in head
            assert way in rest
        assert f"on {others[0].name}, pid" in said["rank 2"]
        assert f"on {others[1].name}, pid" in said["rank 4"]
        assert "waits in all_reduce of [[3]]" in said["ranks 0-1"]
