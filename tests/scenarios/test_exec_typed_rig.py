"""`raydist exec -it` typed on another host than that of the rank, and of the driver."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rig import hosts, requires_root
from tests.scenarios.test_exec_typed import PROGRAM, PROMPT, SHELL
from tests.terminals import Terminal
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.slow, requires_root]
COMMAND = ["python", "-m", "raydist.cli"]


def test_a_person_types_on_a_third_host(tmp_path: Path) -> None:
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)
        rig.ray_up(cpus=1)
        first, *others = rig.hosts
        (tmp_path / "reduces.py").write_text(textwrap.dedent(PROGRAM))
        words = ["script=reduces.py", "scale=2x1", f"hydra.run.dir={tmp_path}/run"]
        with (tmp_path / "screen.txt").open("w") as log:
            driver = first.popen([*COMMAND, "train", *words], cwd=tmp_path, stdout=log, stderr=log)
        screen = (tmp_path / "screen.txt").read_text
        wait_until((tmp_path / "run/driver.json").exists, screen, 120)
        try:
            rows = first.run([*COMMAND, "ranks", "run"], cwd=tmp_path).stdout.splitlines()
            (there,) = [host for host in rig.hosts if host.name == rows[2].split()[1]]
            last = next(host for host in others if host is not there)
            shell = " ".join(SHELL[1:])

            def processes() -> set[str]:
                return set(there.processes().values())

            typed = [*COMMAND, "exec", "run", "rank=1", "-it", *SHELL]
            with Terminal(typed, last.popen, cwd=tmp_path) as terminal:
                terminal.wait_for(PROMPT)
                terminal.enter("echo rank=$RANK= on $(hostname); stty size\n")
                terminal.wait_for(rf"rank=1= on {there.name}\r\n24 80\r\n")
                terminal.resize(30, 99)
                terminal.enter("stty size\n")
                terminal.wait_for(r"\r30 99\r\n")
                terminal.enter("sleep 36005\n")
                wait_until(lambda: "sleep 36005" in processes(), "the sleep", 60)
                terminal.enter("\x03")
                terminal.enter("exit 5\n")
                assert terminal.wait() == 5
                assert terminal.modes == terminal.modes_before

            pipe = " ".join([*COMMAND, "exec", "run", "rank=0", "-i", "--", "cat"])
            whole = f"head -c 1000000 /dev/urandom > data && {pipe} < data | cmp - data"
            last.run(["sh", "-c", whole], cwd=tmp_path)

            with Terminal(typed, last.popen, cwd=tmp_path) as terminal:
                terminal.wait_for(PROMPT)
                terminal.enter("sleep 36007\n")
                wait_until(lambda: {"sleep 36007", shell} <= processes(), "the sleep", 60)
                terminal.close()
                wait_until(lambda: not {"sleep 36007", shell} & processes(), "their end", 60)
            assert driver.poll() is None, screen()
        finally:
            driver.kill()
            driver.wait()
