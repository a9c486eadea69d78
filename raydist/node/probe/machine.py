"""Limits, kernel, container, cloud, mounts and NCCL plug-ins of this machine. (actor)"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from raydist.network.facts import Limits, Machine
from raydist.node.probe.hca import library_folders
from raydist.shared import sysfs

CAP_IPC_LOCK = 14
PLUGINS = (
    "opt/amazon/ofi-nccl/lib",
    "opt/aws-ofi-nccl/lib",
    "usr/local/nvidia/lib64",
    "var/lib/tcpx/lib64",
    "usr/local/gib/lib64",
    "opt/hpcx/nccl_rdma_sharp_plugin/lib",
)
"""Folders of NCCL plug-ins in vendors' images."""
NETWORKS = ("AWS Libfabric",)
"""Names by which NCCL_NET selects a plug-in; they are in the plug-in's file. Every version of
aws-ofi-nccl accepts this one (nvidia_plugin_name_fixup). HPC-X's plug-in has none: its name before
it is initialised (NCCL RDMA Plugin v11) differs from the one after (IBext_v11), and NCCL compares
before each communicator."""
LARGEST = 64 << 20
"""Bytes of a plug-in that are searched; plug-ins have one to twenty million."""


def read_limits(root: Path = Path("/")) -> Limits:
    """Return the limits of this process; its ranks have the same."""
    limits_text = sysfs.read_text(root / "proc/self/limits")
    powers = re.search(
        r"^CapEff:\s*([0-9a-f]+)$", sysfs.read_text(root / "proc/self/status"), re.MULTILINE
    )
    return Limits(
        memlock=_limit(limits_text, "Max locked memory"),
        nofile=_limit(limits_text, "Max open files"),
        ipc_lock=powers is not None and bool(int(powers[1], 16) >> CAP_IPC_LOCK & 1),
        shm=_size(root / "dev/shm"),
        stack=_limit(limits_text, "Max stack size"),
    )


def _limit(limits_text: str, name: str) -> int | None:
    match = re.search(rf"^{name}\s+(\d+|unlimited)", limits_text, re.MULTILINE)
    return None if match is None else -1 if match[1] == "unlimited" else int(match[1])


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def machine(hostname: str, environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Return kernel, container, cloud, mounts and plug-ins, without using the network."""
    driver = re.search(
        r"\s(\d+\.\d+(?:\.\d+)?)\s", sysfs.read_text(root / "proc/driver/nvidia/version")
    )
    found = tuple(dict.fromkeys(plugins(environ, root)))
    return Machine(
        boot_id=sysfs.read_text(root / "proc/sys/kernel/random/boot_id"),
        kernel=sysfs.read_text(root / "proc/sys/kernel/osrelease"),
        driver=driver[1] if driver else "",
        container=any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")),
        cloud=sysfs.read_text(root / "sys/class/dmi/id/sys_vendor"),
        iommu=bool(sysfs.names(root / "sys/class/iommu")),
        own_name=tuple(own_name(sysfs.read_text(root / "etc/hosts"), hostname)),
        storage=tuple(dict.fromkeys(slow_mounts(sysfs.read_text(root / "proc/mounts")))),
        plugins=found,
        networks=tuple(
            dict.fromkeys(name for own in found for name in networks(root / own.lstrip("/")))
        ),
    )


def own_name(hosts: str, hostname: str) -> Iterator[str]:
    """Yield the addresses of a name in /etc/hosts.

    Only the file is read, because a name server may take seconds to answer.
    """
    for line in hosts.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if hostname in names:
            yield address


def slow_mounts(mounts: str) -> Iterator[str]:
    """Yield the addresses of the file servers in /proc/mounts.

    They are in Lustre's `10.1.0.5@o2ib:/fs` and NFS's addr= option.
    """
    for line in mounts.splitlines():
        source, _, kind, options, *_ = (*line.split(), "", "", "", "")
        if kind == "lustre":
            yield from re.findall(r"([\d.]+)@o2ib", source)
        elif kind.startswith("nfs"):
            yield from re.findall(r"(?:^|,)addr=([^,]+)", options)


def plugins(environ: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield NCCL's network plug-ins on the loader's path and in the folders of vendors' images."""
    for folder in (*library_folders(environ, root), *(root / one for one in PLUGINS)):
        yield from sorted(f"/{path.relative_to(root)}" for path in folder.glob("libnccl-net*.so*"))


def networks(plugin: Path) -> Iterator[str]:
    """Yield the networks in a plug-in's file that NCCL_NET can select."""
    try:
        with plugin.open("rb") as file:
            found = file.read(LARGEST)
    except OSError:
        return
    yield from (name for name in NETWORKS if name.encode() in found)
