"""Another user of a host of the rig, who looks into everything that he can open."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass

from tests.conftest import ROOT
from tests.rig import Host

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


def other_user(host: Host) -> OtherUser:
    """Return such a shell, for which this host shows its disk and Python."""
    for name, path in {**PLACES, "disk": str(host.folder)}.items():
        host.run(["mkdir", "-p", f"{SEEN}/{name}"])
        host.run(["mount", "--bind", path, f"{SEEN}/{name}"])
    return OtherUser(host)
