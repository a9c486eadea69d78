"""Whether other users of this machine can reach a folder, or decide what lies at a path. (either
side)"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
from pathlib import Path


def own_folder(path: Path, make: bool = True) -> bool:
    """Whether this is a folder that only this user can reach. `make`: make it, if nothing is
    there."""
    if make:
        path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def of_others(path: Path) -> Path | None:
    """The first part of this absolute path that another user may have put there; None if there is
    none.

    That is what lies in a folder in which all users can make files (/tmp, a /scratch of mode 1777),
    if it belongs to neither this user nor root, or is not there yet. Owners of other folders don't
    count: an image, a share or a project has files of many users, and only root or their owner
    could put them there. Links are followed.
    """
    return _of_others(path) or _of_others(Path(os.path.realpath(path)))


def _of_others(path: Path) -> Path | None:
    for parent, child in itertools.pairwise([*reversed(path.parents), path]):
        if not _open_to_all(parent):
            continue
        try:
            if child.lstat().st_uid not in (0, os.getuid()):
                return child
        except OSError:
            return child
    return None


def _open_to_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def machine_id() -> str:
    """The same in two processes that see the same files: the boot of the machine, and the mount
    namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/mnt')}"
    return socket.gethostname()
