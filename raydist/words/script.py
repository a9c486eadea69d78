"""The program of `script=`: found before anything starts. (driver)"""

from __future__ import annotations

import os
from pathlib import Path

from raydist.errors import ConfigError, nearest


def settle(script: str) -> str:
    """A file's absolute path; a bare name stays, each host finds it on its own PATH."""
    path = Path(os.path.abspath(Path(script).expanduser()))
    if path.is_file():
        return str(path)
    if "/" not in script and not script.endswith(".py"):
        return script
    there = [each.name for each in path.parent.iterdir() if each.is_file()] if path.parent.is_dir() else []
    close = nearest(path.name, there)
    offer = f"; did you mean script={script.removesuffix(path.name)}{close}?" if close else ""
    raise ConfigError(f"script={script}: there is no file {path}{offer}")
