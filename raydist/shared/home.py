"""The user's home and cache folder; a uid without a password entry may lack both. (either side)"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from raydist.shared import env_names
from raydist.shared.errors import ConfigError


def home_folder() -> Path | None:
    """Return the user's home: HOME, else that of the password database; None without either.

    A container may run under any uid (OpenShift, `docker run -u`), which no database knows.
    """
    try:
        return Path.home()
    except RuntimeError:
        return None


def expand_home(key: str, text: str) -> Path:
    """Return the path `text` of the setting `key`, with ~ replaced.

    ConfigError: that home folder is not known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        cause = f"the home folder {Path(text).parts[0]} is not known"
        raise ConfigError.of(key, text, cause, f"{key}=/FULL/PATH") from None


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all runs: RAYDIST_RUNS, else runs.

    ConfigError: RAYDIST_RUNS begins with a home folder that is not known.
    """
    return expand_home(env_names.RUNS, environ.get(env_names.RUNS) or "runs")


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's folder for files that can be recreated; None without a home.

    It is XDG_CACHE_HOME, else ~/.cache.
    """
    if named := environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = home_folder()
    return home / ".cache" if home else None
