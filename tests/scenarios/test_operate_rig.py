"""Commands about a run, typed on another host than that of its driver: over Ray, with its token."""

from __future__ import annotations

import gzip
import json
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.slow, requires_root]
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


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(2) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)
        rig.ray_up(cpus=2)
        yield rig


def test_another_host_reaches_the_run_with_rays_token_only(rig: Rig, tmp_path: Path) -> None:
    first, second = rig.hosts
    (tmp_path / "steps.py").write_text(textwrap.dedent(PROGRAM))
    words = ["script=steps.py", "scale=2x1", f"hydra.run.dir={tmp_path}/run"]
    log = (tmp_path / "screen.txt").open("w")
    driver = first.popen([*COMMAND, "train", *words], cwd=tmp_path, stdout=log, stderr=log)

    def operate(*words: str, typed: str = "", token: str = "") -> subprocess.CompletedProcess[str]:
        env = {"RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"} if token else {}
        shell = " ".join([*COMMAND, *words])
        line = f"printf '{typed}' | {shell}" if typed else shell
        return second.run(["sh", "-c", line], cwd=tmp_path, env=env, check=False, timeout=180)

    try:
        wait_until((tmp_path / "run/driver.json").exists, (tmp_path / "screen.txt").read_text, 120)
        done = operate("ranks", "run", "--json")
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["host"] for row in rows] == [first.name, second.name], done.stderr
        refused = operate("ranks", "run", token="0" * 64)
        assert refused.returncode != 0
        assert str(rows[0]["pid"]) not in refused.stdout

        wait_until(lambda: "steps.py" in operate("stacks", "run").stdout, "the program", 120)
        both = operate("exec", "run", "--all", "--", "hostname")
        assert sorted(both.stdout.split()) == sorted(["[0]", first.name, "[1]", second.name]), (
            both.stderr
        )
        profiled = operate("profile", "run", "steps=2")
        assert profiled.returncode == 0, profiled.stderr
        (file,) = (tmp_path / "run/operate").glob("profile-*.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert named == {f"rank 0 · {first.name}", f"rank 1 · {second.name}"}
        reduced = [event["pid"] for event in events if event["name"] == "gloo:all_reduce"]
        assert sorted(reduced) == [1, 1, 1001, 1001]
        (tmp_path / "hold").touch()
        held = "waits in the debugger"
        wait_until(lambda: held in operate("ranks", "run").stdout, "the breakpoint", 120)
        (tmp_path / "hold").unlink()
        said = operate("debug", "run", typed="p 40 + 2\\nq\\n")
        assert "42" in said.stdout, said.stderr
        assert held not in operate("ranks", "run").stdout
        stopped = operate("stop", "run")
        assert stopped.returncode == 0, stopped.stderr
        assert driver.wait(120) == 143
    finally:
        driver.kill()
        driver.wait()
