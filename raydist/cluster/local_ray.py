"""Make a Ray that this program started end with the program, even if it is killed. (driver)"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from raydist.shared.errors import LaunchError
from raydist.shared.own_path import of_others, own_folder

LONGEST = 107 - len("/ray/session_2026-11-24_23-53-23_123456_1234567/sockets/plasma_store")
"""Maximum length in bytes of the path of Ray's folder.

Linux allows 107 bytes for the path of a socket (unix(7)).
"""
WRITTEN_S = 60.0
"""Seconds after which nobody writes a new token's file any more."""


def reaper(leaders: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start a process that waits for the end of this one, then kills these process groups.

    `leaders`: the leaders of the groups.
    """
    groups = [f"-{pid}" for pid in leaders]
    command = ["sh", "-c", 'read -r _; kill -s KILL -- "$@"', "reaper", *groups]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def protect_token(home: Path | None) -> None:
    """Make Ray's token in this home readable only by its owner.

    Ray would create it so that others may read it, and whoever reads it can run programs as this
    user. Nothing is done if the environment has a token or names its file. Without a home, or in
    one that can't be written (/ of a container), the token is in this program's environment.
    """
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() or os.environ.get(
        "RAY_AUTH_MODE"
    ) == "disabled":
        return
    token = secrets.token_hex(32)
    if home is None or not os.access(home, os.W_OK):
        os.environ["RAY_AUTH_TOKEN"] = token
        return
    file = home / ".ray" / "auth_token"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = file.stat()
        if not found.st_size and time.time() - found.st_mtime > WRITTEN_S:
            file.unlink()  # a full disk has left it: no Ray accepts an empty token
            protect_token(home)
        elif found.st_mode & 0o077:
            file.chmod(0o600)
        return
    try:
        with open(descriptor, "w") as made:
            made.write(token)
    except OSError:  # a full disk: an empty file would be taken for a token by every later run
        file.unlink()
        raise


def temp_folder() -> Path:
    """Create and return the folder for the files of a Ray that is started here.

    No other user can enter it. Ray gives its own folders mode 0777, including those with its
    sockets and with the code of jobs. LaunchError: another user has created it, or it can't be
    created.
    """
    folder = outer_folder()
    with contextlib.suppress(OSError):
        if own_folder(folder, make=False) and len(os.fsencode(folder)) <= LONGEST:
            return folder
    own = folder_of_user(folder)
    if len(os.fsencode(own)) > LONGEST and "RAY_TMPDIR" not in os.environ:
        own = folder_of_user(Path("/tmp"))
    advice = "set RAY_TMPDIR to a folder that only you can enter (mkdir -m 700)"
    try:
        if own_folder(own):
            return own
    except OSError as error:
        raise LaunchError(f"Ray has no folder for its files: {error}; {advice}") from error
    raise LaunchError(
        f"{own}, for Ray's files, is not a folder of uid {os.getuid()} with mode 700; {advice}"
    )


def outer_folder() -> Path:
    """Return the folder in which Ray creates its own folder `ray`."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")))


def folder_of_user(folder: Path) -> Path:
    """Return this user's folder for Ray below a folder that others can enter.

    deploy/node/environment.sh uses the same name.
    """
    return folder / f"ray-{os.getuid()}"


def noted_address() -> str | None:
    """Return the address of the last Ray that this user or root started here by `ray start`.

    None without one. Everybody can write into Ray's default folder. The address of another user's
    Ray would receive this user's token and code.
    """
    for folder in dict.fromkeys(
        (outer_folder(), folder_of_user(outer_folder()), folder_of_user(Path("/tmp")))
    ):
        with contextlib.suppress(OSError):
            if address := written_address(folder / "ray" / "ray_current_cluster"):
                return address
    return None


def written_address(path: Path) -> str:
    """Return the address in a file of this user or root, or "" if another user may have made it.

    A link could lead to a file of root with a text of another user, such as /proc/PID/comm, and
    reading a FIFO would block. OSError: there is no such file.
    """
    if of_others(path):
        return ""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor) as file:
        found = os.fstat(descriptor)
        own = stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.getuid())
        return file.read().strip() if own else ""
