"""Removes killed MPI ranks' shared memory from /dev/shm, where it stays until a reboot. (actor)"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

NAMES = re.compile(r"mpich_shm_\w+|sm_segment\..+|vader_segment\..+|psm2_shm\..+|Intel_MPI_\w+")
"""Files of MPICH, of Open MPI (5 and 4) and of Intel MPI."""
INITIAL = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
"""The inodes of the namespaces that a machine boots with (Linux, include/linux/proc_ns.h)."""

TICK_S = 0.01
"""Longest time that a file's time may be behind the clock: the kernel takes it from its last tick
(CONFIG_HZ is 100 or more)."""


def remove_leftovers(
    since: float, folder: Path = Path("/dev/shm"), proc: Path = Path("/proc")
) -> None:
    """Remove this user's segments that are younger than `since` and that no process uses."""
    if shares_memory_with_unseen_processes():
        return
    segments = []
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if (
                NAMES.fullmatch(path.name)
                and status.st_uid == os.getuid()
                and status.st_ctime >= since - TICK_S
            ):
                segments.append(path)
    used = used_files(folder, proc) if segments else set()
    for path in segments:
        if path.name not in used:
            path.unlink(missing_ok=True)


def shares_memory_with_unseen_processes() -> bool:
    """Return whether this container shares the host's /dev/shm, but not its processes.

    It does with --ipc=host or hostIPC. Another container's MPI job may use a segment there, and
    this /proc does not show its processes.
    """
    initial = {
        kind: os.stat(f"/proc/self/ns/{kind}").st_ino == inode for kind, inode in INITIAL.items()
    }
    return initial["ipc"] and not initial["pid"]


def used_files(folder: Path, proc: Path = Path("/proc")) -> set[str]:
    """Return the files of `folder` that processes which this user may examine have open or map.

    A process opens a segment before it maps it, and closes it afterwards: its open files are read
    first.
    """
    used: set[str] = set()
    pattern = re.compile(rf" {re.escape(str(folder))}/(\S+)$", re.MULTILINE)
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.update(open_files(process, folder))
        with contextlib.suppress(OSError):
            used.update(pattern.findall((process / "maps").read_text(errors="replace")))
    return used


def open_files(process: Path, folder: Path) -> Iterator[str]:
    """Yield the names of the files of `folder` that a process has open."""
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            path = Path(os.readlink(descriptor))
            if path.parent == folder:
                yield path.name
