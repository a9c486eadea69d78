"""A Ray that this program has started ends with the program, even if the program is killed. (driver)"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterable
from pathlib import Path


def reaper(leaders: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start a process that waits for the end of this one, and then kills the process groups of `leaders`."""
    groups = [f"-{pid}" for pid in leaders]
    command = ["sh", "-c", 'read -r _; kill -s KILL -- "$@"', "reaper", *groups]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def protect_token(home: Path) -> None:
    """Make Ray's token in this home readable by its owner only: Ray would make it so that others may read it.

    Who reads it can run programs as this user. Nothing is done where the environment has a token or names its file.
    """
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() or os.environ.get("RAY_AUTH_MODE") == "disabled":
        return
    file = home / ".ray" / "auth_token"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)
        return
    with open(descriptor, "w") as made:
        made.write(secrets.token_hex(32))
