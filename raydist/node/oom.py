"""Whether a process was ended for want of memory: the kernel's counters of such kills, and its own log. (actor)"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from raydist.node.sysfs import text

KILLED = re.compile(r"ut of memory: Killed process (\d+) .*?anon-rss:(\d+)kB(?:.*?shmem-rss:(\d+)kB)?")
"""What the kernel logs (mm/oom_kill.c, `__oom_kill_process`), for a cgroup and for the whole machine alike."""
NO_LIMIT = 1 << 60
"""cgroup v1 has a number near 2^63 where there is no limit."""


@dataclass(frozen=True)
class Count:
    """The kills for want of memory, as counted at one moment."""

    group: Path | None
    """The folder of the process's memory cgroup."""
    kills: int | None
    """In that group; None where nobody counts."""
    machine: int | None
    """On the whole machine."""
    at: float
    """Seconds since boot."""


def count(pid: int | str, root: Path = Path("/")) -> Count:
    """The kills so far, in the group of a process that lives."""
    group = group_of(pid, root)
    return Count(group, kills_in(group), number(text(root / "proc/vmstat"), "oom_kill"), time.monotonic())


def verdict(pid: int, before: Count, root: Path = Path("/")) -> str:
    """Why a process that was SIGKILLed since `before` got that signal; empty where nobody can tell.

    A text that begins with "out of memory" says that the kernel did it.
    """
    said = logged(pid, before.at, root)
    kills = kills_in(before.group)
    here = None if kills is None or before.kills is None else kills - before.kills
    if said is None and not here:
        machine = number(text(root / "proc/vmstat"), "oom_kill")
        if machine is None or before.machine is None:
            return "" if here is None else "somebody's kill -9; the out-of-memory killer ended nobody in its cgroup"
        if machine == before.machine:
            return "somebody's kill -9; the kernel's out-of-memory killer ended nobody meanwhile"
        return "" if here is None else "somebody's kill -9; the out-of-memory killer struck, but not in its cgroup"
    held = f", it held {size(said)}" if said else ""
    limit = limit_of(before.group)
    room = f"; its cgroup may have {size(limit)}" if limit and here else "; the machine had no more"
    return f"out of memory: the kernel's out-of-memory killer chose it{held}{room}"


def beside(before: Count) -> str:
    """What may be behind a failure that was no SIGKILL: a process of the group that was killed since `before`."""
    kills = kills_in(before.group)
    killed = 0 if kills is None or before.kills is None else kills - before.kills
    return f"the kernel's out-of-memory killer ended {killed} of its cgroup's processes meanwhile" if killed > 0 else ""


def group_of(pid: int | str, root: Path) -> Path | None:
    """The memory cgroup of a process: of the old kind (v1) where that controller is mounted, else of the new one."""
    folder = root / "sys/fs/cgroup"
    told = [line.split(":", 2) for line in text(root / f"proc/{pid}/cgroup").splitlines()]
    for _, controllers, path in (each for each in told if len(each) == 3):
        base = folder / "memory" if "memory" in controllers.split(",") else folder
        if (base != folder or not controllers) and (found := nearest(base, path)) is not None:
            return found
    return None


def nearest(base: Path, path: str) -> Path | None:
    """The folder of a group; in a container, whose path is told as the host sees it, that of the container."""
    for folder in (base / path.lstrip("/"), base):
        if any((folder / name).exists() for name in ("memory.events", "memory.oom_control")):
            return folder
    return None


def kills_in(group: Path | None) -> int | None:
    """The kills that a group has counted."""
    if group is None:
        return None
    found = number(text(group / "memory.events"), "oom_kill")
    return number(text(group / "memory.oom_control"), "oom_kill") if found is None else found


def limit_of(group: Path | None) -> int | None:
    """The bytes that the processes of a group may have; None without a limit."""
    told = "" if group is None else text(group / "memory.max") or text(group / "memory.limit_in_bytes")
    return int(told) if told.isdigit() and int(told) < NO_LIMIT else None


def logged(pid: int, since: float, root: Path) -> int | None:
    """The bytes that a process held when the kernel killed it, by the kernel's log; None if that has no word of it."""
    found = None
    for line in kernel_log(root / "dev/kmsg"):
        head, _, said = line.partition(";")
        at = head.split(",")[2:3]
        if (match := KILLED.search(said)) and int(match[1]) == pid and at and int(at[0]) / 1e6 >= since - 1:
            found = (int(match[2]) + int(match[3] or 0)) * 1024
    return found


def kernel_log(path: Path) -> list[str]:
    """The records of the kernel's log; none where it may not be read."""
    records = []
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := os.read(descriptor, 8192):  # one record a time, until there is none: BlockingIOError
                records += record.decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)
    return records


def number(told: str, name: str) -> int | None:
    """The number after a name at the beginning of a line."""
    found = re.search(rf"^{name} (\d+)$", told, re.MULTILINE)
    return int(found[1]) if found else None


def size(number: int) -> str:
    """Bytes for a person."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
