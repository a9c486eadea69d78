"""The cgroups of a process, and the memory that is left in them. (either side)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raydist.shared.sysfs import counter, read_text

NO_LIMIT = 1 << 60
"""cgroup v1 reports a number near 2^63 if there is no limit."""


def lineage(pid: int | str, root: Path = Path("/"), controller: str = "memory") -> Iterator[Path]:
    """Yield the cgroup of a process, then the cgroups that contain it.

    They are cgroups of v1 if that controller is mounted, otherwise of v2. In a container /proc may
    name the host's path; then only the mount itself is found, which is the container's.
    """
    mount = root / "sys/fs/cgroup"
    entries = [line.split(":", 2) for line in read_text(root / f"proc/{pid}/cgroup").splitlines()]
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        base = mount / controller if controller in controllers.split(",") else mount
        if base != mount or not controllers:
            own = base / path.lstrip("/")
            yield from (
                each for each in (own, *own.parents) if each.is_relative_to(base) and each.exists()
            )


def memory_limit(group: Path | None) -> int | None:
    """Return the memory limit of a cgroup in bytes; None without a limit."""
    text = (
        ""
        if group is None
        else read_text(group / "memory.max") or read_text(group / "memory.limit_in_bytes")
    )
    return int(text) if text.isdigit() and int(text) < NO_LIMIT else None


def left_in(group: Path) -> int | None:
    """Return the bytes that a cgroup's processes may still allocate; None without a limit.

    Cached files count as free, as in MemAvailable.
    """
    limit = memory_limit(group)
    used = read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")
    if limit is None or not used.isdigit():
        return None
    stat = read_text(group / "memory.stat")
    names = ("inactive_file", "active_file")  # in v1 total_ includes the nested groups
    cached = sum(counter(stat, f"total_{name}") or counter(stat, name) or 0 for name in names)
    return limit - max(0, int(used) - cached)


def memory_left(root: Path = Path("/")) -> int:
    """Return the free bytes of this machine or of its container, the smaller of both.

    2**62: neither can be read.
    """
    available = counter((read_text(root / "proc/meminfo")).replace(" kB", ""), r"MemAvailable:\s*")
    groups = (*lineage("self", root), root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory")
    limits = [left for group in groups if (left := left_in(group)) is not None]
    return max(0, min([1 << 62, *limits, *([] if available is None else [1024 * available])]))
