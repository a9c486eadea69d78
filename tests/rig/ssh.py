"""Hosts of a rig as bare as rented ones: ssh, a login shell, Python, and no internet access.
(driver)"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rig.host import Host

requires_ssh = pytest.mark.skipif(
    not all(map(shutil.which, ("ssh", "ssh-keygen", "rsync")))
    or not Path("/usr/sbin/sshd").exists(),
    reason="ray up logs in to hosts: apt-get install openssh-server rsync",
)

# A separate /tmp: Ray keeps ssh's connections and the cluster's state there, under names that all
# hosts share. "$@" are the folders below the old one that the host needs.
_OWN_TMP = """
mkdir -p /run/old /run/sshd
mount --bind /tmp /run/old
mount -t tmpfs tmpfs /tmp
for folder in "$@"; do
    mkdir -p "$folder"
    mount --bind "/run/old/${folder#/tmp/}" "$folder"
done
umount /run/old
"""

_SSHD = """
ListenAddress {address}
HostKey {disk}/host_key
AuthorizedKeysFile {disk}/home/.ssh/authorized_keys
PidFile none
UsePAM no
PasswordAuthentication no
StrictModes no
"""

# No internet access: everything that raydist needs is installed. `false` stops pip from fetching
# what builds a package.
_PIP = """
[global]
no-index = true
[install]
no-build-isolation = false
no-deps = true
"""


def key_pair(folder: Path, name: str) -> tuple[Path, str]:
    """Make a private key; return it, and the public one as a line of authorized_keys."""
    folder.mkdir(exist_ok=True)
    key = folder / name
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rig", "-f", str(key)], check=True
    )
    return key, key.with_suffix(".pub").read_text()


def separate_tmp(host: Host, *shared: Path) -> None:
    """Give a host a separate /tmp. What it needs of the old one stays, and these folders."""
    needed = (host.folder, ROOT, Path(sys.prefix), Path(sys.base_prefix), Path.cwd(), *shared)
    kept = [str(folder) for folder in needed if folder.is_relative_to("/tmp")]
    host.run(["sh", "-ec", _OWN_TMP, "sh", *kept])


def prepare_logins(host: Host, *profile: str) -> None:
    """Give a host a separate /tmp, and root a home and a shell. `profile` has lines for login
    shells."""
    separate_tmp(host)
    home = host.folder / "home"
    passwd = host.root / "etc/passwd"
    others = [line for line in passwd.read_text().splitlines() if not line.startswith("root:")]
    passwd.write_text("\n".join([f"root:x:0:0:root:{home}:/bin/bash", *others, ""]))
    write(home / ".profile", "\n".join([f'PATH="{sys.base_prefix}/bin:$PATH"', *profile, ""]))
    write(home / ".bashrc", "")


def start_sshd(host: Host, allowed: str) -> None:
    """Start sshd; the owner of the allowed key may log in as root."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.folder / "host_key")],
        check=True,
    )
    write(host.folder / "home/.ssh/authorized_keys", allowed)
    write(host.folder / "sshd_config", _SSHD.format(address=host.address(), disk=host.folder))
    host.popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", str(host.folder / "sshd_config")],
        stderr=subprocess.DEVNULL,
    )


def mount_packages(host: Host) -> None:
    """Mount the packages of the tests' environment for the machine's own Python, as an image with
    torch has them."""
    ask = "import json, site; print(json.dumps(site.getsitepackages()[0]))"
    own = json.loads(host.run([f"{sys.base_prefix}/bin/python3", "-c", ask]).stdout)
    there = next(path for path in sys.path if path.endswith("site-packages"))
    host.run(["mount", "--bind", "-o", "ro", there, own])
    write(host.folder / "home/.config/pip/pip.conf", _PIP)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
