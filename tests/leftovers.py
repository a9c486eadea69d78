"""What a run must not leave behind: its processes, found by the folder that their environment names."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_of(mark: str) -> list[str]:
    """Command lines of living processes that were started with `mark` somewhere in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in value for value in process.environ().values()):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def gone(mark: str, within: float = 15.0) -> list[str]:
    """What is still there after at most so many seconds: nothing, if all is well."""
    until = time.monotonic() + within
    while (left := processes_of(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def groups() -> list[str]:
    """Placement groups of this process's cluster that still hold a place."""
    from ray.util.placement_group import placement_group_table

    held = [name for name, each in placement_group_table().items() if each["state"] != "REMOVED"]
    return sorted(str(name) for name in held)


def folders_of(tmp: Path) -> list[str]:
    """Fork servers' folders that are still there."""
    return sorted(str(path) for path in tmp.glob("raydist-*"))
