"""The fork server of the driver's own machine: shared by the runs of one program, and gone with
it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import raydist
from raydist.launch import preload, warm_server
from raydist.messages.server import ImportModules, Warm
from raydist.messages.wire import decode, encode
from raydist.node import fork_launcher, kept_server
from raydist.settings.config import Job, Target
from tests.leftovers import alive, ended, remaining_processes, server_folders
from tests.records import read_events
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
WORDS = ("scale=1x2", "watch.progress=none")


def parent() -> int:
    return os.getppid()


def servers(*words: str) -> set[int]:
    """Return the fork servers that the ranks of a run came from."""
    return {pid for pid in raydist.run(parent, *WORDS, *words).values if pid}


def assert_one_server(group: str) -> set[int]:
    """Return the fork server that two runs of this program have."""
    first = servers(group)
    assert len(first) == 1
    assert servers(group) == first
    assert alive(*first)  # it stays
    return first


def test_runs_have_one_server_unless_threads_or_limits_differ(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home = assert_one_server("group=ray")
    assert servers("scale.cpus=2") != at_home
    monkeypatch.setattr(
        warm_server, "heritage", lambda: [*fork_launcher.heritage(), "another limit of memlock"]
    )
    elsewhere = servers("scale.keep_warm_s=0")
    assert elsewhere != at_home
    assert ended(elsewhere.pop())  # with the run


def test_processes_and_files_of_ranks_are_gone_after_the_run(on_ray: Path) -> None:
    def job() -> int:
        return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

    left = raydist.run(job, *WORDS).values
    assert not [pid for pid in left if pid and alive(pid)]
    kept = [
        path.name
        for one in warm_server._servers.values()
        if one.alive()
        for path in one.folder.iterdir()
    ]
    assert set(kept) == {"boot", "fork", "server.log"}


def test_without_ray_runs_have_one_server_and_a_dead_one_is_replaced(on_ray: Path) -> None:
    first = assert_one_server("group=inline")
    for one in warm_server._servers.values():
        one.end()
    assert servers("group=inline") != first


def test_the_end_of_a_program_waits_for_no_server_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fork_launcher, "END_S", 0.2)
    monkeypatch.setattr(warm_server, "ALWAYS", ())
    monkeypatch.setattr(warm_server, "_servers", {})
    server = warm_server.acquire(Job(job=Target(target="json:dumps")))
    assert server is not None
    while (warm := kept_server.ask(Path(server.folder), ImportModules(()))) is None:
        pass  # it starts
    assert isinstance(warm, Warm)
    os.kill(warm.pid, signal.SIGSTOP)
    warm_server.end_all()
    assert f"({server.folder}/server.log)" in capsys.readouterr().err
    os.kill(warm.pid, signal.SIGCONT)
    assert ended(warm.pid)


def test_an_idle_server_ends(tmp_path: Path) -> None:
    one = fork_launcher.ForkServer.launch(tmp_path / "f", "fork", 1, idle_s=0.2)
    wait_until(lambda: not one.alive(), "the server has ended")
    assert not one.folder.exists()


def test_a_server_with_an_agent_is_not_idle(tmp_path: Path) -> None:
    import socket

    one = fork_launcher.ForkServer.launch(tmp_path / "f", "fork", 1, idle_s=1.0)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(str(one.folder / "fork"))
    line.settimeout(60)
    line.send(encode(ImportModules(("json",))))
    assert isinstance(decode(line.recv(1 << 16)), Warm)
    line.settimeout(2)
    with pytest.raises(TimeoutError):
        line.recv(1)
    assert one.alive()
    one.end()


def test_a_server_imports_what_the_job_needs_while_the_driver_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("curses")
    (tmp_path / "train.py").write_text("import curses\ndef job(): ...")
    warm_server.prepare(job := Job(job=Target(target=f"{tmp_path}/train.py:job")))
    server = warm_server.acquire(job)
    assert server
    while (answer := kept_server.ask(Path(server.folder), ImportModules(()))) is None:
        pass  # it imports torch; it answers after it has done what it was told before
    assert isinstance(answer, Warm)
    assert "/_curses." in Path(f"/proc/{answer.pid}/maps").read_text()


def test_spawned_ranks_need_no_server() -> None:
    assert warm_server.acquire(Job(start="spawn", job=Target(target="json:dumps"))) is None


@pytest.mark.parametrize(
    ("name", "installed"),
    [("torch", True), ("json", True), ("sys", True), ("raydist", True), ("mine", False)],
)
def test_only_installed_modules_are_preloaded(
    name: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preload.is_installed(name) is installed


PROGRAM = """
    import json, raydist
    from pathlib import Path

    def job(path):
        import os, mine
        return os.getppid(), mine.VALUE

    Path("mine.py").write_text("VALUE = 1")
    found = [raydist.run("train.py:job", {words}, "scale=1x2").values]
    Path("mine.py").write_text("VALUE = 22")
    for scale in {others}:
        found += [raydist.run("train.py:job", {words}, scale).values]
    print("FOUND", json.dumps(found))
"""
TRAIN = """
    import os
    import mine

    def job():
        return os.getppid(), mine.VALUE
"""


@pytest.mark.parametrize(
    ("group", "others", "rays"),
    [
        ("group=ray", ["scale=1x2", "scale=1x5"], [True, False, True]),
        ("group=inline", ["scale=1x2"], []),
    ],
)
def test_runs_in_one_program_see_edited_files_and_leave_nothing(
    tmp_path: Path, group: str, others: list[str], rays: list[bool]
) -> None:
    """With Ray: the one that the first run has started serves the second too, unless that needs a
    larger one."""
    import json
    import tempfile

    words = f"'{group}', 'backend=gloo', 'watch.progress=none'"
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    program = textwrap.dedent(PROGRAM).format(words=words, others=others)
    (tmp_path / "program.py").write_text(program)
    with tempfile.TemporaryDirectory(prefix="p-") as tmp:
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        env |= {"TMPDIR": tmp, "PYTHONPATH": str(Path(raydist.__file__).parent.parent)}
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        first, *later = json.loads(re.findall(r"FOUND (.*)", done.stdout)[0])
        assert [value for _, value in first] == [1] * 2
        for run, scale in zip(later, others, strict=True):
            assert [value for _, value in run] == [22] * int(scale[-1])
            assert {pid for pid, _ in run} == {pid for pid, _ in first}
        assert (
            remaining_processes(tmp, within=90) == []
        )  # a Ray worker that is still starting notices late that its raylet is gone
        assert server_folders(Path(tmp)) == []
    started = [event["started"] for path in sorted(tmp_path.glob("runs/*/*/events.jsonl"))
               for event in read_events(path) if event["kind"] == "cluster" and event["address"]]  # fmt: skip
    assert started == rays
