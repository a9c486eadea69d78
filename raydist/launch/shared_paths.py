"""(Job, paths that each node can't see) -> an error or a warning before a rank starts. (pure)"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from raydist.settings.config import Job
from raydist.settings.run_folder import run_folder
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.record_names import EVENTS
from raydist.state.object_store import CLAIM

SAVES = re.compile(r"\b(?:raydist\.)?fit\(|\bcheckpoint\.save\(")
"""Matches the source of a job that saves checkpoints."""
Unreachable = Mapping[str, str]
"""The paths that a node can't see: by their key in `files`, the reason."""


def files(job: Job, rendezvous: str) -> dict[str, str]:
    """Return the paths that every node must see.

    `rendezvous`: the folder of the rendezvous file, or empty.
    """
    paths = {
        "rendezvous": rendezvous,
        "storage": str(run_folder(job) / CLAIM) if job.storage else "",
        "run": str(Path(job.dir) / EVENTS) if job.dir and not job.storage else "",
    }
    return {key: file for key, file in paths.items() if file}


def check_paths(
    job: Job,
    hosts: Sequence[str],
    unreachable: Sequence[Unreachable],
    source: str,
    paths: Mapping[str, str],
) -> str:
    """Raise if checkpoints would be lost or rendezvous is impossible; return a lesser warning.

    `hosts`, `unreachable`: of each node, rank 0's first. `source`: the text of the job's file,
    empty if unknown.
    """
    without = {
        key: [host for host, each in zip(hosts, unreachable, strict=True) if key in each]
        for key in paths
    }
    if without.get("rendezvous"):
        raise LaunchError(
            f"init_method=file needs a folder that all nodes see, and "
            f"{', '.join(without['rendezvous'])} can't see "
            f"{paths['rendezvous']}: set hydra.run.dir=<a shared folder>, or init_method=env"
        )
    if without.get("storage"):
        why = next(each["storage"] for each in unreachable if "storage" in each)
        cause = (
            f"{', '.join(without['storage'])} cannot see it ({why}); use a folder that all "
            "nodes see, or a URL"
        )
        raise ConfigError.of("storage", job.storage, cause, "storage=s3://BUCKET/FOLDER")
    if "run" not in unreachable[0] or job.script:
        return ""
    text = (
        f"rank 0 runs on {hosts[0]}, which can't see the run folder {job.dir} of this machine: "
        "its checkpoints would "
        "be lost there; set storage=s3://BUCKET/FOLDER, or storage=<a folder that all nodes see>"
    )
    if SAVES.search(source):
        raise ConfigError(text, "storage", job.storage, "storage=s3://BUCKET/FOLDER")
    return text


def require_visible(
    setting: str, hosts: Sequence[str], unreachable: Sequence[Unreachable], why: str
) -> None:
    """Raise ConfigError if some nodes can't see the path of a setting. `why`: why they need it."""
    if without := [host for host, each in zip(hosts, unreachable, strict=True) if each]:
        key, _, value = setting.partition("=")
        cause = (
            f"{', '.join(without)} cannot see it, and {why}; use a path that all nodes see, "
            "or a URL"
        )
        raise ConfigError.of(key, value, cause, f"{key}=s3://BUCKET/FOLDER")
