"""A page on a laptop of a job on a cluster: its events, and the log of a rank on another node, by
one port."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(1800), requires_root]
PATIENCE_S = 300.0
JOB = """
import time
import torch.distributed as dist
import raydist

def job(config, steps=100000):
    me = raydist.rank()
    for step in range(1, steps + 1):
        print(f"rank {me.rank} says {step}", flush=True)
        dist.barrier()
        raydist.report(step=step, loss=1 / step)
        time.sleep(0.05)
"""


@contextmanager
def forwarded(host: str, port: int, at: socket.socket | None = None) -> Iterator[int]:
    """A port of this machine, or `at`, that leads to that one, as `ray dashboard` makes one; the
    number of the port."""
    server = at or socket.create_server(("127.0.0.1", 0))

    def pump(a: socket.socket, b: socket.socket) -> None:
        try:
            while block := a.recv(1 << 16):
                b.sendall(block)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            a.close()
            b.close()

    def accept() -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            far = socket.create_connection((host, port))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@contextmanager
def watching(folder: Path, token: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m raydist.tools.watch WORD…` on this machine, which is in no cluster; the program
    and its link."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    argv = [sys.executable, "-m", "raydist.tools.watch", *words]
    program = subprocess.Popen(
        argv, cwd=folder, env={**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert program.stdout is not None
        line = program.stdout.readline()
        yield program, line.removeprefix("page").strip()
    finally:
        program.terminate()
        program.wait(PATIENCE_S)
        assert program.stdout is not None
        program.stdout.close()


def first_event(link: str, enough: Callable[[str, Any], bool]) -> tuple[str, Any]:
    """Return the first event of a stream that satisfies `enough`."""
    reply: http.client.HTTPResponse
    with urllib.request.urlopen(link, timeout=PATIENCE_S) as reply:
        name, end = "", time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            line = reply.readline().decode().rstrip("\n")
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: ") and enough(name, value := json.loads(line[6:])):
                return name, value
    raise AssertionError(f"{link} did not tell it")


def test_the_log_of_a_rank_on_another_node_by_the_dashboards_port(tmp_path: Path) -> None:
    with hosts(2, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2, dashboard=True, env={"PYTHONPATH": str(ROOT)})
        token = submitted(rig)
        with forwarded(rig.hosts[0].address(), 8265) as port:
            words = ("--job", "watched", "--address", f"http://127.0.0.1:{port}")
            with watching(tmp_path, token, *words) as (_, output):  # while the job starts
                assert output.startswith("http") or "no run folder" in output
            wait_for_folder(rig)
            with watching(tmp_path, token, *words) as (program, link):
                _, state = first_event(
                    f"{link}stream",
                    lambda name, value: name == "state" and (value["step"] or 0) >= 5,
                )
                assert (state["status"], state["world_size"]) == ("running", 2)
                assert state["job"] == ["watched", f"{rig.hosts[0].address()}:8265"]
                _, ranks = first_event(f"{link}stream", lambda name, value: name == "ranks")
                assert {row[1] for row in ranks["ranks"].values()} == {"host0", "host1"}
                _, log = first_event(
                    f"{link}log?rank=1", lambda name, value: "rank 1 says" in value["text"]
                )
                last = max(int(number) for number in re.findall(r"rank 1 says (\d+)", log["text"]))
                first_event(
                    f"{link}log?rank=1",
                    lambda name, value: f"rank 1 says {last + 20}\n" in value["text"],
                )
                connections = psutil.Process(program.pid).net_connections("tcp")
                requests = {
                    each.raddr
                    for each in connections
                    if each.raddr and f":{each.laddr.port}/" not in link
                }
                assert requests == {("127.0.0.1", port)}
            with watching(tmp_path, "0" * 64, *words) as (program, output):
                assert program.wait(PATIENCE_S) == 2
                assert "is not this cluster's" in output


def test_a_sweep_and_its_trials_by_the_dashboards_port(tmp_path: Path) -> None:
    with hosts(1, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2, dashboard=True, env={"PYTHONPATH": str(ROOT)})
        (host,) = rig.hosts
        project = host.folder / "home/project"
        project.mkdir()
        (project / "talks.py").write_text(JOB)
        sweep = (
            "python -m raydist.tools.sweep job=talks.py job.args.steps=3,100000 scale=1x1 "
            "sweep.parallel=1"
        )
        argv = [
            "python",
            "-m",
            "ray.scripts.scripts",
            "job",
            "submit",
            "--no-wait",
            "--submission-id",
            "watched",
        ]
        host.run(
            [*argv, "--working-dir", ".", "--", *sweep.split()],
            env={"PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"http://{host.address()}:8265"},
            cwd=project,
        )
        token = (host.folder / "home/.ray/auth_token").read_text().strip()
        wait_until(
            lambda: list(host.folder.glob("tmp/ray/session_*/logs/raydist/watched.swee[p]")),
            "the folder of the sweep",
            PATIENCE_S,
        )
        with forwarded(host.address(), 8265) as port:
            words = ("--job", "watched", "--address", f"http://127.0.0.1:{port}")
            with watching(tmp_path, token, *words) as (_, link):
                first_event(
                    f"{link}trials",
                    lambda name, value: name == "sweep" and under_way(value["trials"]),
                )
                _, state = first_event(
                    f"{link}stream?run=1",
                    lambda name, value: name == "state" and (value["step"] or 0) >= 5,
                )
                assert state["status"] == "running"
                first_event(
                    f"{link}log?run=0", lambda name, value: "rank 0 says 3\n" in value["text"]
                )


def under_way(trials: Any) -> bool:
    """Return whether the first trial has ended, and the second has done some steps."""
    return [(one["state"], one["step"] >= 3) for one in trials] == [
        ("finished", True),
        ("running", True),
    ]


def submitted(rig: Rig) -> str:
    """Submit a job whose second rank is on the second host; the cluster's token."""
    (host, _) = rig.hosts
    project = host.folder / "home/project"
    project.mkdir()
    (project / "talks.py").write_text(JOB)
    words = ["scale=2x1", "scale.cpus=2", "job=talks.py"]
    argv = [
        "python",
        "-m",
        "raydist.tools.submit",
        "--no-wait",
        "--submission-id",
        "watched",
        *words,
    ]
    host.run(
        argv,
        env={"PYTHONPATH": str(ROOT), "RAY_API_SERVER_ADDRESS": f"http://{host.address()}:8265"},
        cwd=project,
    )
    return (host.folder / "home/.ray/auth_token").read_text().strip()


def wait_for_folder(rig: Rig) -> None:
    """Return once the driver of the job has linked its run folder into Ray's logs, which the page
    reads."""
    link = "tmp/ray/session_*/logs/raydist/watche[d]"  # a pattern: the link dangles here
    wait_until(lambda: list(rig.hosts[0].folder.glob(link)), "a run folder of the job", PATIENCE_S)
