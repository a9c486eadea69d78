"""The user's folder for compiled code, on the node's disk, kept across runs and boots. (actor)"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from raydist.network.names import CACHE_FOLDER
from raydist.shared import home
from raydist.shared.own_path import own_folder


def fill_in(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the folder substituted for CACHE_FOLDER.

    Without a folder, the variables that contain CACHE_FOLDER are left out.
    """
    if not any(CACHE_FOLDER in value for value in variables.values()):
        return dict(variables)
    folder = next((path for path in candidates() if usable(path)), None)
    return {
        name: value.replace(CACHE_FOLDER, str(folder))
        for name, value in variables.items()
        if folder is not None or CACHE_FOLDER not in value
    }


def candidates() -> list[Path]:
    """Return the folders to try: one on the node's disk, then one in the home.

    The first fails if another user has made it, or code must not run from it.
    """
    folders = [Path(f"/var/tmp/raydist-{os.getuid()}-compiled")]
    if cache := home.user_cache():
        folders.append(cache / "raydist" / f"compiled-{socket.gethostname()}")
    return folders


def usable(path: Path) -> bool:
    """Return whether this is the user's own folder and code may run from it.

    The folder is created if it is missing.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return own_folder(path) and not os.statvfs(path).f_flag & os.ST_NOEXEC
    return False
