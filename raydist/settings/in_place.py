"""Which jobs can replace a killed rank alone, while the other ranks keep their processes. (pure)"""

from __future__ import annotations

from raydist.settings.config import Job
from raydist.shared.errors import ConfigError


def why_not(job: Job) -> str:
    """Return why the ranks of this job are all started anew, for a person; empty if they are not.

    `backend=auto` counts as gloo.
    """
    if job.restart.in_place == "off":
        return "restart.in_place=off"
    if job.script:
        return "a program (script=) has a loop of its own"
    if job.backend.name not in ("auto", "gloo"):
        return f"backend={job.backend.name} cannot connect a new rank to others that stay"
    if job.init_method != "env":
        return f"init_method={job.init_method} has a new meeting point for each attempt"
    if job.snapshot.every == 0:
        return "snapshot.every=0 keeps no state in memory"
    if job.restart.max == 0:
        return "restart.max=0 replaces no rank"
    return ""


def check(job: Job) -> None:
    """Raise ConfigError for `restart.in_place=on` if this job cannot do that."""
    if job.restart.in_place == "on" and (cause := why_not(job)):
        raise ConfigError.of("restart.in_place", "on", cause, "restart.in_place=auto")
