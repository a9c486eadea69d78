"""A submitted job: commands about it, typed on a laptop that reaches nothing but the dashboard's port,
and what another user of the driver's host gets of it, who has no token of the cluster or a wrong one:
nothing, neither by the dashboard's port, nor from sockets, files and processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.conftest import ROOT
from tests.dap import Editor
from tests.other_user import CONNECT, PATIENCE_S, SEEN, other_user
from tests.rig import Host, Rig, hosts, requires_root
from tests.rig.namespaces import CAPTURED, NET, Space, enter, finish
from tests.scenarios.test_exec_typed import PROMPT, SHELL
from tests.scenarios.test_operate_rig import PROGRAM
from tests.scenarios.test_watch_rig import forwarded
from tests.terminals import Terminal
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
]
JOB = "operated"
Made = TypeVar("Made")


class Laptop:
    """A machine without any network but its own loopback."""

    def __init__(self, space: Space, folder: Path, token: str) -> None:
        self._space = space
        self._folder = folder
        own = {name: text for name, text in os.environ.items() if not name.startswith("RAY")}
        self._env = {**own, "PYTHONPATH": str(ROOT), "HOME": str(folder), **auth(token)}
        self.port = 0

    def listen(self) -> socket.socket:
        """Return a socket that listens on the loopback."""
        return self.inside(lambda: socket.create_server(("127.0.0.1", 0)))

    def inside(self, make: Callable[[], Made]) -> Made:
        """Return what has its socket on the laptop."""
        made: list[Made] = []

        def open_inside() -> None:
            enter(os.pidfd_open(self._space.pid), NET)
            made.append(make())

        thread = threading.Thread(target=open_inside)  # only this thread moves
        thread.start()
        thread.join()
        return made[0]

    def start(self, argv: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        return self._space.spawn(argv, cwd=self._folder, env=self._env, **streams)

    def command(self, *words: str) -> list[str]:
        """`raydist WORDS` about the job."""
        here = words.index("--") if "--" in words else len(words)
        where = ["--job", JOB, "--address", f"http://127.0.0.1:{self.port}"]
        return [sys.executable, "-m", "raydist.cli", *words[:here], *where, *words[here:]]

    def type(
        self, *words: str, typed: str = "", token: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Type `raydist WORDS`; `typed`: what its input has."""
        keys = self._folder / "typed.txt"
        keys.write_text(typed)
        env = {**self._env, **(auth(token) if token else {})}
        with keys.open() as stdin:
            pipes = {**CAPTURED, "stdin": stdin}
            program = self._space.spawn(self.command(*words), cwd=self._folder, env=env, **pipes)
            return finish(program, check=False, timeout=PATIENCE_S)


def auth(token: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


@contextmanager
def laptop_of(rig: Rig, folder: Path, token: str) -> Iterator[Laptop]:
    space = Space(NET, "ip link set lo up")
    try:
        laptop = Laptop(space, folder, token)
        with forwarded(rig.hosts[0].address(), 8265, laptop.listen()) as laptop.port:
            yield laptop
    finally:
        space.end()


def jobs(rig: Rig) -> str:
    """`ray job list` on the cluster."""
    host = rig.hosts[0]
    env = {"RAY_API_SERVER_ADDRESS": dashboard(rig)}
    argv = ["python", "-m", "ray.scripts.scripts", "job", "list"]
    return host.run(argv, env=env, timeout=PATIENCE_S).stdout


def assert_a_person_types(laptop: Laptop, host: Host) -> None:
    command = laptop.command("exec", "rank=1", "-it", *SHELL)
    with Terminal(command, laptop.start) as terminal:
        terminal.wait_for(PROMPT)
        terminal.enter("echo rank=$RANK= on $(hostname); stty size\n")
        terminal.wait_for(rf"rank=1= on {host.name}\r\n24 80\r\n")
        terminal.enter("sleep 36011\n")
        there = host.processes
        wait_until(lambda: "sleep 36011" in there().values(), "the sleep", PATIENCE_S)
        terminal.enter("\x03")
        terminal.enter("exit 5\n")
        assert terminal.wait() == 5
        assert terminal.modes == terminal.modes_before


def assert_an_editor_debugs(laptop: Laptop, project: Path) -> None:
    line = textwrap.dedent(PROGRAM).splitlines().index("    optimizer.step()") + 1
    argv = laptop.command("debug", "rank=1", "--vscode", "--port", "0")
    with laptop.start(argv, **CAPTURED) as command:
        assert command.stdout is not None
        text = ""
        for said in command.stdout:
            if said.startswith("waiting for VS Code"):
                break
            text += said
        launch = json.loads(text)
        editor = laptop.inside(lambda: Editor(launch, project))
        editor.attach({"steps.py": [line]})
        thread, frame = editor.stopped_at()
        assert frame["line"] == line
        step = int(editor.evaluate("step", frame))
        editor.request("continue", threadId=thread)
        _, frame = editor.stopped_at()
        assert int(editor.evaluate("step", frame)) == step + 1
        editor.request("disconnect")
        editor.close()
        ends, error = command.communicate(timeout=PATIENCE_S)
        assert (command.returncode, ends.splitlines()[-1]) == (0, "the rank continues"), error


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Two hosts on which a job runs."""
    with hosts(2, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2, dashboard=True, env={"PYTHONPATH": str(ROOT)})
        project = project_of(rig)
        project.mkdir()
        (project / "steps.py").write_text(textwrap.dedent(PROGRAM))
        argv = ["python", "-m", "raydist.tools.submit", "--no-wait", "--submission-id", JOB]
        env = {"PYTHONPATH": str(ROOT), "RAY_API_SERVER_ADDRESS": dashboard(rig)}
        words = ["scale=2x1", "script=steps.py"]
        rig.hosts[0].run([*argv, *words], env=env, cwd=project, timeout=PATIENCE_S)
        yield rig


def project_of(rig: Rig) -> Path:
    return rig.hosts[0].folder / "home/project"


def dashboard(rig: Rig) -> str:
    return f"http://{rig.hosts[0].address()}:8265"


def test_another_user_without_the_token_gets_nothing_of_a_job(rig: Rig) -> None:
    first, second = rig.hosts
    where = ["--job", JOB, "--address", dashboard(rig)]
    command = ["python", "-m", "raydist.cli"]

    def own(*words: str) -> list[str]:
        """Return the command of the cluster's user."""
        here = words.index("--") if "--" in words else len(words)
        return [*command, *words[:here], *where, *words[here:]]

    env = {"PYTHONPATH": str(ROOT)}

    def listed() -> list[int]:
        done = second.run(own("ranks", "--json"), env=env, check=False, timeout=PATIENCE_S)
        assert done.returncode in (0, 2), done.stderr  # 2: its ranks start
        return [json.loads(line)["rank"] for line in done.stdout.splitlines()]

    wait_until(lambda: listed() == [0, 1], "the ranks", PATIENCE_S)
    other, token = other_user(first), (first.folder / "home/.ray/auth_token").read_text().strip()

    none: dict[str, str] = {}
    for variables in (none, {"RAY_AUTH_MODE": "disabled"}, auth(""), auth("0" * 64)):
        refused = other.type("ranks", *where, **variables)
        assert (refused.returncode, refused.stdout) == (2, ""), (variables, refused.stderr)
        assert "token" in refused.stderr
    for words in (["stop"], ["save"], ["stacks"], ["exec", "rank=0"]):
        more = ["--", "touch", "/tmp/by-another-user"] if words[0] == "exec" else []
        refused = other.type(*words, *where, *more, **auth("0" * 64))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "token" in refused.stderr
    assert not Path("/tmp/by-another-user").exists()
    assert listed() == [0, 1]  # the run has not been stopped

    (address,) = first.folder.rglob("driver.json")
    folder = f"{SEEN}/disk/{address.parent.relative_to(first.folder)}"
    refused = other.type("ranks", folder)
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "its driver belongs to another user" in refused.stderr
    said = other.python("-c", CONNECT)
    *answers, last = said.stdout.splitlines()
    assert int(last.split()[1]) > 0, said.stderr
    assert set(answers) == {"answer: none"}

    # What the cluster's user asks for meanwhile, and what comes back, on its way through this host.
    words = ["exec", "rank=1", "--", "sh", "-c", "echo whi''sper; sleep 8; : murmur"]
    with second.popen(own(*words), env=env, **CAPTURED) as typed:
        looks = 0
        while typed.poll() is None:
            assert other.found("whisper", "murmur", token) == []
            looks += 1
        output, errors = typed.communicate()
    assert output == "whisper\n", errors
    assert looks > 1
    assert other.found("whisper", "murmur", token) == []
    assert jobs(rig).count("raydist-") == 0


def test_a_laptop_that_reaches_the_dashboards_port_operates_a_job(rig: Rig, tmp_path: Path) -> None:
    """It stops the job at its end."""
    host, second = rig.hosts
    token = (host.folder / "home/.ray/auth_token").read_text().strip()
    with laptop_of(rig, tmp_path, token) as laptop:
        wait_until(
            lambda: "steps.py" in laptop.type("stacks", "rank=1").stdout, "stacks", PATIENCE_S
        )
        rows = [json.loads(line) for line in laptop.type("ranks", "--json").stdout.splitlines()]
        assert [row["host"] for row in rows] == [host.name, second.name]
        shell = ("sh", "-c", "hostname; cat; echo no >&2; exit 7")
        done = laptop.type("exec", "rank=1", "-i", "--", *shell, typed="one\ntwo\n")
        assert (done.stdout, done.returncode) == (f"{second.name}\none\ntwo\n", 7), done.stderr
        assert "no\n" in done.stderr
        said = laptop.type("debug", "rank=1", typed="p 40 + 2\nq\n")
        assert "42" in said.stdout, said.stderr
        assert "the rank continues" in said.stdout
        assert_a_person_types(laptop, second)
        assert_an_editor_debugs(laptop, project_of(rig))
        profiled = laptop.type("profile", "steps=2")
        assert "profile: operate/profile-" in profiled.stdout, profiled.stderr
        for wrong in ("0" * 64, " "):
            refused = laptop.type("ranks", token=wrong)
            assert refused.returncode == 2
            assert not refused.stdout
            assert "token" in refused.stderr
        unfit = laptop.type("save")
        assert (unfit.returncode, unfit.stdout) == (2, "")
        assert "the program is not in raydist.fit" in unfit.stderr
        assert jobs(rig).count("raydist-") == 0  # the small jobs are deleted
        stopped = laptop.type("stop")
        assert (stopped.returncode, stopped.stdout.splitlines()[-1]) == (0, "stopped")
        wait_until(lambda: "STOPPED" in jobs(rig) or "FAILED" in jobs(rig), "end", PATIENCE_S)
        late = laptop.type("ranks")
        assert late.returncode == 2
        assert "has ended" in late.stderr
