"""Ray's runtime_env of a job: the folder and the packages that its nodes get. (driver)"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from raydist.cluster import ray_private
from raydist.settings.config import Job
from raydist.shared import env_names
from raydist.shared.errors import LaunchError
from raydist.shared.home import expand_home

INSTALL_S = 1800.0
"""Limit on the wait for packages: Ray tries three times, ten minutes each (setup_timeout_seconds of
runtime_env)."""

SECRET_FILES = (".env", "*.env", "!example.env")
"""Files with tokens and passwords, which must not be in Ray's store. env_file= sends their
contents."""


def root(job: Job) -> str:
    """Return the folder that is copied to the ranks; empty if they run in the driver's own."""
    if not job.working_dir or job.group == "inline":
        return ""
    return os.path.abspath(expand_home("working_dir", job.working_dir))


RUN_FOLDERS = ("/runs", "/multirun", "/outputs")
"""Folders in which runs, of Hydra and of raydist, have their logs and checkpoints."""


class RuntimeEnv(TypedDict, total=False):
    """The fields of Ray's runtime_env that raydist uses."""

    pip: list[str]
    working_dir: str
    """The URI of the uploaded folder."""


class ActorOptions(TypedDict, total=False):
    """Ray's options of an actor; without a runtime_env Ray takes a worker that already runs."""

    runtime_env: RuntimeEnv


def actor_options(job: Job) -> ActorOptions:
    """Return the options of the actors of a job."""
    env: RuntimeEnv = {}
    if job.pip:
        env["pip"] = [
            line
            for each in job.pip
            for line in (read_requirements(each) if each.endswith(".txt") else [each])
        ]
    if folder := root(job):
        env["working_dir"] = upload(folder, left_out(job, folder))
    if env and " " in sys.executable:
        raise LaunchError(
            f"Ray can't start a worker for {'pip=' if job.pip else 'working_dir='} from a path "
            "with a space: "
            f"{sys.executable}; use an environment in another folder"
        )
    return {"runtime_env": env} if env else {}


def read_requirements(file: str) -> list[str]:
    """Return the lines of a requirements file, without comments."""
    lines = (
        line.partition(" #")[0].strip()
        for line in Path(file).read_text(encoding="utf-8").splitlines()
    )
    return [line for line in lines if line and not line.startswith("#")]


def left_out(job: Job, folder: str) -> list[str]:
    """Return what of a job's folder is not copied, as .gitignore would say it.

    A run that is placed again would send its own checkpoints.
    """
    runs = [os.environ.get(env_names.RUNS, ""), job.sweep.dir, "" if job.sweep.dir else job.dir]
    inside = [os.path.relpath(expand_home("working_dir", each), folder) for each in runs if each]
    own = [f"/{path}" for path in inside if path.partition(os.sep)[0] not in (".", "..")]
    return [*SECRET_FILES, *RUN_FOLDERS, *own]  # the last pattern wins


def upload(folder: str, excludes: Sequence[str]) -> str:
    """Upload a folder to Ray without what these patterns name, and return its URI.

    Does what `ray job submit --working-dir` does, without the files that .gitignore names.
    """
    try:
        gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
        return ray_private.upload_folder(folder, gitignore, excludes)
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"working_dir={folder} could not be sent to the nodes: {error}"
        ) from error
