"""The user's folder for compiled code on this node: on its own disk, kept over runs and boots.
(actor)"""

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
    """The variables with the folder in place of CACHE_FOLDER; without those variables, if there is
    no such folder."""
    if not any(CACHE_FOLDER in value for value in variables.values()):
        return dict(variables)
    folder = next((path for path in candidates() if usable(path)), None)
    return {
        name: value.replace(CACHE_FOLDER, str(folder))
        for name, value in variables.items()
        if folder is not None or CACHE_FOLDER not in value
    }


def candidates() -> list[Path]:
    """A folder on the node's disk; if another user has made it, or code must not run from it, one
    in the home."""
    folders = [Path(f"/var/tmp/raydist-{os.getuid()}-compiled")]
    if cache := home.user_cache():
        folders.append(cache / "raydist" / f"compiled-{socket.gethostname()}")
    return folders


def usable(path: Path) -> bool:
    """Whether it is, perhaps from now on, the user's own folder, and code may run from it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return own_folder(path) and not os.statvfs(path).f_flag & os.ST_NOEXEC
    return False
