"""Another user of the driver's host, who has no token of the cluster or a wrong one: gets nothing of a
submitted job's run, neither by the dashboard's port, nor from sockets, files and processes."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rig import Host, Rig, hosts, requires_root
from tests.rig.namespaces import CAPTURED
from tests.scenarios.test_operate_job_rig import JOB, auth, jobs
from tests.scenarios.test_operate_rig import PROGRAM
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
]
PATIENCE_S = 600.0
UID = "12345"
SEEN = "/run/seen"
"""Where the other user sees what has other paths for root, whose home is closed to all."""
PLACES = {
    "python": sys.base_prefix,
    "packages": sysconfig.get_path("purelib"),
    "raydist": str(ROOT),
}
SEARCH = """
import os, sys

secrets = [each.encode() for each in sys.argv[2:]]
opened = 0


def look(path):
    global opened
    try:
        with open(path, "rb") as file:
            text = file.read(1 << 26)
    except OSError:
        return
    opened += 1
    if any(secret in text for secret in secrets):
        print(path)


for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        if os.path.isfile(path := os.path.join(folder, name)):
            look(path)
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != os.getpid():
        look(f"/proc/{pid}/cmdline")
        look(f"/proc/{pid}/environ")
print("files:", opened)
"""
CONNECT = """
import socket

tried = 0
for line in open("/proc/net/unix").readlines()[1:]:
    name = line.split()[7] if len(line.split()) > 7 else ""
    if not name.startswith("@raydist"):
        continue
    tried += 1
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect("\\0" + name[1:])
    try:
        sock.sendall(b'{"protocol": "ListRanks"}\\n')
        print("answer:", sock.recv(1 << 16) or "none")
    except OSError:
        print("answer: none")
print("sockets:", tried)
"""


@dataclass(frozen=True)
class OtherUser:
    """A shell of another user on a host."""

    host: Host

    def python(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these words to its end."""
        argv = ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups", "env", "-i"]
        own = {
            "HOME": "/nonexistent",
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{SEEN}/packages:{SEEN}/raydist",
            "LD_LIBRARY_PATH": f"{SEEN}/python/lib",
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
        }
        program = f"{SEEN}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        argv += [*(f"{name}={value}" for name, value in own.items()), program, *words]
        return self.host.run(argv, check=False, timeout=PATIENCE_S, cwd="/")

    def type(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Type `raydist WORDS`."""
        return self.python("-m", "raydist.cli", *words, **env)

    def found(self, *secrets: str) -> list[str]:
        """Return the files and processes of the host in which a secret can be read."""
        done = self.python("-c", SEARCH, f"{SEEN}/disk", *secrets)
        *paths, last = done.stdout.splitlines()
        assert int(last.split()[1]) > 50, done.stderr  # it does look
        return paths


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Two hosts on which a job runs."""
    with hosts(2, nics=("eth0",)) as rig:
        rig.ray_up(cpus=2, dashboard=True, env={"PYTHONPATH": str(ROOT)})
        first = rig.hosts[0]
        project = first.folder / "home/project"
        project.mkdir()
        (project / "steps.py").write_text(textwrap.dedent(PROGRAM))
        argv = ["python", "-m", "raydist.tools.submit", "--no-wait", "--submission-id", JOB]
        env = {"PYTHONPATH": str(ROOT), "RAY_API_SERVER_ADDRESS": dashboard(rig)}
        words = ["scale=2x1", "script=steps.py"]
        first.run([*argv, *words], env=env, cwd=project, timeout=PATIENCE_S)
        yield rig


def dashboard(rig: Rig) -> str:
    return f"http://{rig.hosts[0].address()}:8265"


def other_user(rig: Rig) -> OtherUser:
    host = rig.hosts[0]
    for name, path in {**PLACES, "disk": str(host.folder)}.items():
        host.run(["mkdir", "-p", f"{SEEN}/{name}"])
        host.run(["mount", "--bind", path, f"{SEEN}/{name}"])
    return OtherUser(host)


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
        return [json.loads(line)["rank"] for line in done.stdout.splitlines()]

    wait_until(lambda: listed() == [0, 1], "the ranks", PATIENCE_S)
    other, token = other_user(rig), (first.folder / "home/.ray/auth_token").read_text().strip()

    none: dict[str, str] = {}
    for variables in (none, {"RAY_AUTH_MODE": "disabled"}, auth(""), auth("0" * 64)):
        for words in (["ranks"], ["stacks"]):
            refused = other.type(*words, *where, **variables)
            assert (refused.returncode, refused.stdout) == (2, ""), (variables, refused.stderr)
            assert "token" in refused.stderr
    for words in (["stop"], ["save"], ["exec", "rank=0"]):
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
    words = ["exec", "rank=1", "--", "sh", "-c", "echo whi''sper; sleep 20; : murmur"]
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
