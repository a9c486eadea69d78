"""Hosts of a rig with a container engine: the command `docker`, which podman answers. (driver)

Each host has its own containers and volumes. Images are in one folder that all hosts read.
"""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from tests.rig.host import Host

# Without the two flags podman is kinder than Docker: it adds an unknown user to /etc/passwd, and
# writable folders to a read-only container.
_DOCKER = """#!/bin/bash
case "$1" in
compose) shift; exec podman-compose "$@" ;;
run) set -- run --passwd=false --read-only-tmpfs=false "${@:2}" ;;
esac
exec podman "$@"
"""

# podman-compose 1.0.3, Debian 12's, adds its network also to what has the host's.
_PODMAN = """#!/bin/bash
words=()
while [ $# -gt 0 ]; do
    case "$1" in
    --net | --network-alias) shift 2 ;;
    *) words+=("$1"); shift ;;
    esac
done
exec {podman} "${{words[@]}}"
"""

_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{storage}"
runroot = "{storage}-run"
[storage.options]
additionalimagestores = [{images}]
"""

# No systemd, which would make cgroups. crun does not start on a machine with cgroups of both
# versions. Nobody can raise a limit above the machine's own.
_ENGINE = """
[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
"""

LACKING = [
    name
    for name in ("podman", "runc", "iptables", "catatonit", "podman-compose", "debootstrap")
    if not shutil.which(name)
]
"""The Debian packages that these hosts need and this machine lacks."""


def engine(folder: Path, images: Path | None = None) -> dict[str, str]:
    """Write the settings of an engine whose containers are in a folder, and return its
    environment. `images`: another engine's folder, for its images."""
    folder.mkdir(parents=True, exist_ok=True)
    others = f'"{images}/storage"' if images else ""
    (folder / "storage.conf").write_text(_STORAGE.format(storage=folder / "storage", images=others))
    limits = {
        name: min(resource.getrlimit(number)[1], 32768)
        for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
    }
    (folder / "engine.conf").write_text(_ENGINE.format(**limits))
    (folder / "bin").mkdir(exist_ok=True)
    scripts = {"docker": _DOCKER, "podman": _PODMAN.format(podman=shutil.which("podman"))}
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "engine.conf"),
    }


def install_docker(host: Host, images: Path) -> None:
    """Give a host the command `docker`, with the images of another engine's folder."""
    host.environment |= engine(host.folder / "docker", images)
    # its /sys is new, so the machine's cgroups are not in it
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    script = ["set -e"]
    for _, place, kind, options, *_ in mounts:
        if place == "/sys/fs/cgroup" and kind == "tmpfs":
            script.append(f"mount -t tmpfs tmpfs {place}")
        elif kind in ("cgroup", "cgroup2"):
            own = set(options.split(",")) - {"rw", "ro", "nosuid", "nodev", "noexec", "relatime"}
            script.append(f"mkdir -p {place}")
            script.append(f"mount -t {kind} -o {','.join(sorted(own)) or 'rw'} {kind} {place}")
    # All containers together would weigh as much as one of the machine's processes: on a busy
    # machine Ray does not start within its limits.
    group = "/sys/fs/cgroup/cpu/libpod_parent"
    script.append(f"! mkdir -p {group} || echo 16384 >{group}/cpu.shares")
    host.run(["sh", "-c", "\n".join(script)])
