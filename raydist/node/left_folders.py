"""Removes the folders of fork servers killed with their agents, e.g. by a power cut. (either side)

A server holds a lock on its folder and on those of its runs, and writes its machine's boot id into
them. systemd-tmpfiles leaves such folders alone, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

from raydist.shared.own_path import boot_id, own_folder

AGE_S = 3600.0
"""Minimum age, by its time stamp, of a folder that may have been left behind: a new server has no
lock yet."""


BOOT = "boot"
"""The file with the boot id, in each such folder."""
LOCAL = re.compile("bcachefs|btrfs|ext[234]|f2fs|jfs|overlay|ramfs|reiserfs|tmpfs|xfs|zfs")
"""The file systems that no other machine shares."""


def lock_folder(folder: str) -> list[int]:
    """Return a shared lock on a folder, held until the descriptor is closed.

    Returns an empty list if the folder's file system has no locks. Writes the boot id into it.
    """
    with contextlib.suppress(OSError):  # the disk is full
        Path(folder, BOOT).write_text(boot_id())
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return []
    return [descriptor]


def remove_left_folders() -> None:
    """Remove the folders of this user's dead servers, and of their runs."""
    for folder in Path(tempfile.gettempdir()).glob(f"raydist-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it has just gone
            if not folder.name.endswith("-warm"):
                remove_left(folder)
            elif own_folder(folder, make=False):  # no link of another user to other folders
                for server in folder.iterdir():
                    remove_left(server)
                if is_old(folder):
                    folder.rmdir()  # fails if it contains servers


def remove_left(folder: Path) -> None:
    """Remove the folder of a server or a run if its server has died."""
    with contextlib.suppress(OSError):  # it has just gone, or belongs to another user
        if is_left(folder):
            shutil.rmtree(folder)


def is_left(folder: Path) -> bool:
    """Return whether this is an old folder of a server or a run, and its server has died.

    A folder on a file system without locks (NFS, for folders) is kept: other machines may share it,
    and the server may live there. So is that of another machine, or boot, on one that may be
    shared: its locks may be each machine's own (Lustre's localflock, NFS's local_lock).
    """
    if not os.path.lexists(folder / "server.log") or not is_old(folder):
        return False
    if not since_boot(folder) and not LOCAL.fullmatch(file_system(folder)):
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


def since_boot(folder: Path) -> bool:
    """Return whether the server of a folder was on this machine, since its boot."""
    with contextlib.suppress(OSError):
        return (folder / BOOT).read_text() == boot_id()
    return False


def file_system(path: Path) -> str:
    """Return the type of a path's file system, such as `ext4`; empty if it is unknown."""
    real, found = os.path.realpath(path), ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            # proc_pid_mountinfo(5): a space in a path is \040.
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            below = os.path.commonpath((point, real)) == point
            if below and len(point) >= len(found[0]):  # a later mount hides an earlier one
                found = point, kind.split()[0]
    return found[1]


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
