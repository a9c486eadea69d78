"""What goes to the nodes with the ranks: a folder, packages; in Ray's runtime_env. (driver)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raydist.config import Job
from raydist.errors import ConfigError, LaunchError, nearest

INSTALL_S = 1800.0
"""Longest wait for packages: Ray gives each of its three tries ten minutes (runtime_env's setup_timeout_seconds)."""


def check(job: Job) -> None:
    """Refuse a folder, or a requirements file, that is not there."""
    folder = Path(job.working_dir).expanduser()
    if job.working_dir and not folder.is_dir():
        there = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
        close = nearest(folder.name, there)
        offer = f"; did you mean working_dir={folder.with_name(close)}?" if close else "; say working_dir=."
        raise ConfigError(f"working_dir={job.working_dir}: there is no such folder{offer}")
    for line in job.pip:
        if line.endswith(".txt") and not Path(line).is_file():
            raise ConfigError(f"pip=[{line}]: there is no such file; say pip=[PACKAGE,PACKAGE] or pip=[FILE.txt]")


def root(job: Job) -> str:
    """The folder that the ranks have a copy of; empty where they run in this very one, or where Ray sees to it."""
    return os.path.abspath(Path(job.working_dir).expanduser()) if job.working_dir and job.group == "ray" else ""


def runtime_env(job: Job) -> dict[str, Any]:
    """Ray's options for the actors of this job; empty where nothing is to be sent, so that any warm worker will do."""
    found: dict[str, Any] = {}
    if job.pip:
        lines = [line for each in job.pip for line in (read(each) if each.endswith(".txt") else [each])]
        found["pip"] = lines
    if folder := root(job):
        found["working_dir"] = upload(folder)
    return {"runtime_env": found} if found else {}


def read(file: str) -> list[str]:
    """The requirements of a file."""
    lines = (line.partition(" #")[0].strip() for line in Path(file).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def upload(folder: str) -> str:
    """Give a folder to Ray, as `ray job submit --working-dir` does, less what .gitignore names; where it is kept."""
    import ray
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    try:
        sent = upload_working_dir_if_needed(
            {"working_dir": folder},
            include_gitignore=os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1",
            scratch_dir=ray._private.worker.global_worker.node.get_runtime_env_dir_path(),
        )
    except Exception as error:
        raise LaunchError(f"working_dir={folder} could not be sent to the nodes: {error}") from error
    uri: str = sent["working_dir"]
    return uri
