"""Removes the folders of fork servers killed with their agents, e.g. by a power cut. (either side)

A server holds a lock on its folder and on those of its runs. systemd-tmpfiles leaves such folders
alone, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

AGE_S = 3600.0
"""Minimum age, by its time stamp, of a folder that may have been left behind: a new server has no
lock yet."""


def lock_folder(folder: str) -> list[int]:
    """Return a shared lock on a folder, held until the descriptor is closed.

    Returns an empty list if the folder's file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return []
    return [descriptor]


def remove_left_folders() -> None:
    """Remove the folders of this user's dead servers, and of their runs."""
    place, pattern = Path(tempfile.gettempdir()), f"raydist-{os.getuid()}-*"
    for folder in (*place.glob(f"{pattern}-warm/*"), *place.glob(pattern)):
        with contextlib.suppress(OSError):  # it has just gone, or belongs to another user
            if folder.name.endswith("-warm"):
                if is_old(folder):
                    folder.rmdir()  # fails if it contains servers
            elif is_left(folder):
                shutil.rmtree(folder)


def is_left(folder: Path) -> bool:
    """Return whether this is an old folder of a server or a run, and its server has died.

    A folder on a file system without locks (NFS, for folders) is kept: other machines may share it,
    and the server may live there.
    """
    if not os.path.lexists(folder / "server.log") or not is_old(folder):
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not listens(folder)
    finally:
        os.close(descriptor)


def is_old(folder: Path) -> bool:
    """Return whether this folder is this user's, and was made long ago."""
    found = folder.lstat()
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > AGE_S


def listens(folder: Path) -> bool:
    """Return whether a server listens in a folder: one of a release without locks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(folder / "fork"))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its queue is full
            pass
    return True
