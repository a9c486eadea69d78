"""Whether other users can reach a folder, or decide what lies at a path. (either side)"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
from pathlib import Path


def own_folder(path: Path, make: bool = True) -> bool:
    """Report whether only this user can reach this folder.

    `make`: create the folder if nothing is there.
    """
    if make:
        path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def of_others(path: Path) -> Path | None:
    """Return the first part of this absolute path that another user may have created, or None.

    Such a part lies in a folder in which all users can create files (/tmp, a /scratch of mode
    1777), and it either belongs to neither this user nor root or does not exist yet. Owners of
    other folders don't count: an image, a share or a project has files of many users, and only root
    or their owner could put them there. Links are followed.
    """
    return _of_others(path) or _of_others(Path(os.path.realpath(path)))


def others_may_add(folder: Path) -> bool:
    """Report whether another user may have put files into this folder, such as a module.

    They may if they made it, or if it is open to all, as /tmp is, and they can reach it.
    """
    folder = folder.absolute()
    real = Path(os.path.realpath(folder))
    reachable = all(map(_passable, real.parents))
    return of_others(folder) is not None or (_open_to_all(real) and reachable)


def _passable(folder: Path) -> bool:
    """Return whether others than its owner may pass through this folder."""
    try:
        return bool(folder.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP))
    except OSError:
        return True


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


def boot_id() -> str:
    """Return an id of this machine from its boot to its shutdown.

    It is the host's name if the kernel has no boot id.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def machine_id() -> str:
    """Return an id that is equal in two processes that see the same files.

    It consists of the machine's boot id and the mount namespace.
    """
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/mnt')}"
    return socket.gethostname()
