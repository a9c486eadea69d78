"""The CPUs that this process may use: NUMA nodes, sockets, cores, caches, cgroup quota. (actor)

Source: Documentation/ABI/stable/sysfs-devices-system-cpu, sysfs-devices-node,
Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from raydist.network.facts import NumaNode
from raydist.shared import cgroup, sysfs


def allowed_cpus(root: Path = Path("/")) -> set[int]:
    """Return the CPUs of this process's affinity."""
    allowed = re.search(
        r"^Cpus_allowed_list:\s*(\S+)$", sysfs.read_text(root / "proc/self/status"), re.MULTILINE
    )
    return set(sysfs.cpu_list(allowed[1])) if allowed else set(range(os.cpu_count() or 1))


def count_cpus(allowed: AbstractSet[int], root: Path = Path("/")) -> int:
    """Return the number of these CPUs, or a smaller quota of a cgroup of this process.

    A container has its limit at the root of the mount; a service or a batch job has it in a cgroup
    below.
    """
    mount = root / "sys/fs/cgroup"
    groups = {mount, mount / "cpu", *cgroup.lineage("self", root, "cpu")}
    return min([len(allowed), *filter(None, map(cpu_quota, groups))])


def cpu_quota(group: Path) -> int | None:
    """Return the quota of a cgroup in whole CPUs, at least 1; None without one."""
    quota, period, *_ = (sysfs.read_text(group / "cpu.max") or "max 1").split()
    if quota == "max":  # or cgroup v1, where -1 means no quota
        quota = sysfs.read_text(group / "cpu.cfs_quota_us") or "-1"
        period = sysfs.read_text(group / "cpu.cfs_period_us") or "1"
    return max(1, int(quota) // int(period)) if int(quota) > 0 else None


def read_numa(allowed: AbstractSet[int], root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have some of these CPUs.

    Returns one node 0 with all of them if the kernel names none.
    """
    system = root / "sys/devices/system"
    found = [
        (int(name[4:]), sysfs.cpu_list(sysfs.read_text(system / "node" / name / "cpulist")))
        for name in sysfs.names(system / "node")
        if name.startswith("node") and name[4:].isdigit()
    ]
    own = [(number, allowed & set(listed)) for number, listed in found]
    return tuple(
        _node(number, cpus, system / "cpu") for number, cpus in own or [(0, allowed)] if cpus
    )


def _node(number: int, cpus: AbstractSet[int], folder: Path) -> NumaNode:
    cores = _groups(cpus, lambda cpu: folder / f"cpu{cpu}/topology/thread_siblings_list")
    caches = _groups(cpus, lambda cpu: _last_cache(folder / f"cpu{cpu}/cache") / "shared_cpu_list")
    return NumaNode(
        number,
        sysfs.read_number(folder / f"cpu{min(cpus)}/topology/physical_package_id", 0),
        cores,
        caches,
    )


def _groups(cpus: AbstractSet[int], list_of: Callable[[int], Path]) -> tuple[tuple[int, ...], ...]:
    """Return these CPUs in groups, each given by the list of its first CPU."""
    groups, left = [], set(cpus)
    while left:
        first = min(left)
        group = left.intersection(sysfs.cpu_list(sysfs.read_text(list_of(first)))) | {first}
        groups.append(tuple(sorted(group)))
        left -= group
    return tuple(groups)


def _last_cache(folder: Path) -> Path:
    """Return the folder of a CPU's highest cache level for data."""
    caches = [folder / name for name in sysfs.names(folder) if name.startswith("index")]
    data = [each for each in caches if sysfs.read_text(each / "type") in ("Unified", "Data")]
    return max(data, key=lambda each: sysfs.read_number(each / "level", 0), default=folder)
