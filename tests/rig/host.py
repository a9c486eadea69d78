"""One host of the rig: its files, its NICs, and the programs on it. (driver)"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.namespaces import CAPTURED, IPC, MOUNT, NET, UTS, Space, finish

# Hosts of one kernel share its boot id, so UCX and MPICH take them for one host and use shared
# memory. Each host gets another boot id.
_MOUNTS = """
mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
cp -a /etc /run/etc
cp -a --remove-destination etc/. /run/etc
mount --bind /run/etc /etc
mount --bind boot_id /proc/sys/kernel/random/boot_id
cat /etc/hostname >/proc/sys/kernel/hostname
ip link set lo up
"""

# A trap on every machine with Docker: a bridge that is up, with the same address on each host. The
# veth pair stands for a container; without one the bridge would have no carrier.
_DOCKER0 = [
    "link add docker0 up type bridge",
    "addr add 172.17.0.1/16 brd + dev docker0",
    "link add veth0 up master docker0 type veth peer name container0",
    "link set container0 up",
]


@dataclass
class Host:
    """A host. Ray, the default route and the other hosts' /etc/hosts use its first NIC.

    Its disk is `folder`: home, tmp, and the files in /etc that differ from this machine's; the rest
    of /etc is a copy.
    """

    name: str
    addresses: Mapping[str, str]
    folder: Path
    switch: Space
    environment: dict[str, str]
    space: Space = field(init=False)

    def boot(self) -> None:
        """Start the host with the contents of its disk; also after kill()."""
        self.space = Space(MOUNT | UTS | IPC | NET, _MOUNTS, folder=self.folder)
        try:
            for nic, address in self.addresses.items():
                # The same hardware address after each boot: otherwise the other hosts send to the
                # old one for a minute.
                far_end = (
                    f"peer name {nic} address {_mac(address)} netns /proc/{self.space.pid}/ns/net"
                )
                self.switch.ip(f"link add {self.port(nic)} up master {nic} type veth {far_end}")
                self.space.ip(f"addr add {address}/24 brd + dev {nic}", f"link set {nic} up")
            self.space.ip(f"route add default via {_gateway(self.address())}", *_DOCKER0)
        except BaseException:
            self.end()
            raise

    def kill(self) -> None:
        """Cut the power: first the network, so that no connection is closed properly, then all
        processes at once."""
        self.switch.ip(*(f"link del {self.port(nic)}" for nic in self.addresses))
        self.end()

    def end(self) -> None:
        """Kill every process of the host and wait for their end; do nothing if it is down."""
        self.space.end()

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a program on this host as a direct child, so that it gets signals and gives its
        exit status. `env` is added to the host's environment."""
        return self.space.spawn(argv, env={**self.environment, **(env or {})}, **options)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 300,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host to its end, with its output captured. Raises CommandFailed,
        TimeoutExpired."""
        return finish(
            self.popen(argv, env=env, **{**CAPTURED, **options}), check=check, timeout=timeout
        )

    def address(self, nic: str | None = None) -> str:
        return self.addresses[nic or next(iter(self.addresses))]

    def port(self, nic: str) -> str:
        """Return the NIC at the switch's end of the cable."""
        return f"{self.name}-{nic}"

    @property
    def root(self) -> Path:
        """The root folder of the host, to read and write; /etc, /sys, /proc, /dev/shm and /run
        differ from this machine's."""
        return Path(f"/proc/{self.space.pid}/root")

    def bytes(self, nic: str) -> tuple[int, int]:
        """Return the bytes (received, sent) by one NIC since boot."""
        counters = self.root / "sys/class/net" / nic / "statistics"
        return int((counters / "rx_bytes").read_text()), int((counters / "tx_bytes").read_text())

    def processes(self) -> dict[int, str]:
        """Return command lines by process id, both as seen on the host, without process 1, which
        only keeps the namespaces."""
        lines = {}
        for entry in (self.root / "proc").glob("[0-9]*"):
            try:
                lines[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # race: it has just ended
        return {pid: line for pid, line in lines.items() if pid != 1}


def write_disk(folder: Path, hosts: str, token: str) -> dict[str, str]:
    """Write the disk of a host, and return the environment that its programs get."""
    # Debian and Ubuntu install 127.0.1.1 for a host's own name: a lookup of that name gives a
    # useless address.
    files = {
        "etc/hostname": f"{folder.name}\n",
        "etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {folder.name}\n{hosts}",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "etc/resolv.conf": "",
        "etc/machine-id": f"{uuid.uuid4().hex}\n",
        "boot_id": f"{uuid.uuid4()}\n",
        "home/.ray/auth_token": token,
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "home/.ray/auth_token").chmod(0o600)
    (folder / "tmp").mkdir()
    own = {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "RAY_TMPDIR": str(folder / "tmp"),
        "RAY_worker_niceness": "0",  # as deploy/node/environment.sh has it
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **own,
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "TERM": os.environ.get("TERM", "dumb"),
        "LANG": "C.UTF-8",
    }


def _mac(address: str) -> str:
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _gateway(address: str) -> str:
    return f"{address.rpartition('.')[0]}.254"
