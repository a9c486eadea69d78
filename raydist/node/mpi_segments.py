"""Shared memory that MPI's killed ranks left in /dev/shm, where it stays until the machine restarts. (actor)"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

NAMES = re.compile(r"mpich_shm_\w+|sm_segment\..+|vader_segment\..+|psm2_shm\..+|Intel_MPI_\w+")
"""Files of MPICH, of Open MPI (5 and 4) and of Intel MPI."""


def sweep(since: float, folder: Path = Path("/dev/shm"), proc: Path = Path("/proc")) -> None:
    """Remove those that are ours, younger than `since`, and that no process maps any more."""
    left = []
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if NAMES.fullmatch(path.name) and found.st_uid == os.getuid() and found.st_ctime >= since:
                left.append(path)
    mapped = in_use(folder, proc) if left else set()
    for path in left:
        if path.name not in mapped:
            path.unlink(missing_ok=True)


def in_use(folder: Path, proc: Path = Path("/proc")) -> set[str]:
    """The files of `folder` that any process maps, as far as this user may see."""
    mapped: set[str] = set()
    pattern = re.compile(rf" {re.escape(str(folder))}/(\S+)$", re.MULTILINE)
    for maps in proc.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped.update(pattern.findall(maps.read_text(errors="replace")))
    return mapped
