"""Reports whether the kernel's OOM killer ended a process, by its counters and its log. (actor)"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from raydist.shared.cgroup import lineage, memory_limit
from raydist.shared.sysfs import counter, read_text

KILLED = re.compile(
    r"ut of memory: Killed process (\d+) .*?anon-rss:(\d+)kB(?:.*?shmem-rss:(\d+)kB)?"
)
"""The kernel's log line (mm/oom_kill.c, `__oom_kill_process`), for a cgroup and for the whole
machine."""
NOT_KERNEL, ANOTHER = "SIGKILL was not sent by the kernel's OOM killer", "another process sent it"


@dataclass(frozen=True)
class Count:
    """The counters of OOM kills at one moment."""

    group: Path | None
    """The folder of the process's memory cgroup."""
    kills: int | None
    """The kills in that cgroup; None if unknown."""
    machine: int | None
    """The kills on the whole machine."""
    at: float
    """Seconds since boot."""


def read_count(pid: int | str, root: Path = Path("/")) -> Count:
    """Return the counters now, for the cgroup of a living process."""
    group = memory_cgroup(pid, root)
    return Count(
        group,
        cgroup_kills(group),
        counter(read_text(root / "proc/vmstat"), "oom_kill"),
        time.monotonic(),
    )


def oom_verdict(pid: int, before: Count, root: Path = Path("/")) -> tuple[str, bool]:
    """Return why a process got SIGKILL after `before`, and whether the kernel's OOM killer sent it.

    The reason is empty if it is unknown.
    """
    held_bytes = logged_bytes(pid, before.at, root)
    kills = new_kills(before)
    if held_bytes is None and not kills:
        machine = counter(read_text(root / "proc/vmstat"), "oom_kill")
        if machine is None or before.machine is None:
            text = f"{NOT_KERNEL} (none of its cgroup's processes was ended): {ANOTHER}"
            return "" if kills is None else text, False
        if machine == before.machine:
            return f"{NOT_KERNEL} (its counter did not change): {ANOTHER}", False
        text = f"{NOT_KERNEL} (it ended processes of other cgroups only): {ANOTHER}"
        return "" if kills is None else text, False
    held = f", it held {bytes_text(held_bytes)}" if held_bytes else ""
    limit = memory_limit(before.group)
    room = (
        f"; its cgroup may have {bytes_text(limit)}"
        if limit and kills
        else "; the machine had no more"
    )
    return f"out of memory: the kernel's out-of-memory killer chose it{held}{room}", True


def new_kills(before: Count) -> int | None:
    """Return the OOM kills in the cgroup since `before`; None if unknown."""
    kills = cgroup_kills(before.group)
    return None if kills is None or before.kills is None else kills - before.kills


def other_victims(before: Count) -> str:
    """Return a possible cause of a failure other than SIGKILL: OOM kills in the cgroup.

    They are those since `before`. Empty if there were none.
    """
    killed = new_kills(before) or 0
    return (
        f"the kernel's out-of-memory killer ended {killed} of its cgroup's processes meanwhile"
        if killed > 0
        else ""
    )


def memory_cgroup(pid: int | str, root: Path) -> Path | None:
    """Return the innermost memory cgroup of a process that counts OOM kills; None if unknown."""
    files = ("memory.events", "memory.oom_control")
    return next(
        (group for group in lineage(pid, root) if any((group / name).exists() for name in files)),
        None,
    )


def cgroup_kills(group: Path | None) -> int | None:
    """Return the OOM kills that a cgroup has counted; None if unknown."""
    if group is None:
        return None
    kills = counter(read_text(group / "memory.events"), "oom_kill")
    return counter(read_text(group / "memory.oom_control"), "oom_kill") if kills is None else kills


def logged_bytes(pid: int, since: float, root: Path) -> int | None:
    """Return the bytes that a process held when the kernel killed it after `since`.

    None if the kernel's log has no line about it.
    """
    held = None
    for line in kernel_log(root / "dev/kmsg"):
        prefix, _, text = line.partition(";")
        at = prefix.split(",")[2:3]
        if (
            (match := KILLED.search(text))
            and int(match[1]) == pid
            and at
            and int(at[0]) / 1e6 >= since - 1
        ):
            held = (int(match[2]) + int(match[3] or 0)) * 1024
    return held


def kernel_log(path: Path) -> list[str]:
    """Return the records of the kernel's log; none if this user may not read it."""
    records = []
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Each read returns one record; BlockingIOError follows the last.
            while record := os.read(descriptor, 8192):
                records += record.decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)
    return records


def bytes_text(number: int) -> str:
    """Return bytes as text, in GiB or MiB."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
