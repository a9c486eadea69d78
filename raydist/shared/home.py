"""The user's home and cache folder; a uid without a password entry may have neither. (either side)"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_folder() -> Path | None:
    """The user's home: HOME, else that of the password database; None without either.

    A container may run under any uid (OpenShift, `docker run -u`), which no database knows.
    """
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's folder for files that can be made again: XDG_CACHE_HOME, else ~/.cache; None without a home."""
    if named := environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = home_folder()
    return home / ".cache" if home else None
