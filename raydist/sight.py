"""(Job, what each node can't see) -> the refusal, or the warning, before a rank starts. (pure)"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from raydist.config import Job
from raydist.errors import ConfigError, LaunchError
from raydist.storage import CLAIM, run_folder

SAVES = re.compile(r"\b(?:raydist\.)?fit\(|\bcheckpoint\.save\(")
"""What a job's file says that keeps checkpoints."""
Blind = Mapping[str, str]
"""What a node can't see, by its key in `files`, with the reason."""


def files(job: Job, meeting: str) -> dict[str, str]:
    """What the nodes are to look for. `meeting`: the folder of the file in which ranks meet, or empty."""
    wanted = {
        "meeting": meeting,
        "storage": str(run_folder(job) / CLAIM) if job.storage else "",
        "run": str(Path(job.dir) / "events.jsonl") if job.dir and not job.storage else "",
    }
    return {key: file for key, file in wanted.items() if file}


def check(job: Job, hosts: Sequence[str], seen: Sequence[Blind], source: str, wanted: Mapping[str, str]) -> str:
    """Refuse what would lose checkpoints or never meet. What is only a pity is given back, as a warning.

    `hosts`, `seen`: of each node, rank 0's first. `source`: the text of the job's file, empty where nobody knows it.
    """
    blind = {key: [host for host, own in zip(hosts, seen, strict=True) if key in own] for key in wanted}
    if blind.get("meeting"):
        raise LaunchError(
            f"init_method=file needs a folder that all nodes see, and {', '.join(blind['meeting'])} can't see "
            f"{wanted['meeting']}: say hydra.run.dir=<a shared folder>, or init_method=env"
        )
    if blind.get("storage"):
        why = next(own["storage"] for own in seen if "storage" in own)
        raise ConfigError(
            f"storage={job.storage}: {', '.join(blind['storage'])} can't see it ({why}): say storage=<a folder that "
            "all nodes see>, or a URL whose driver and credentials every node has"
        )
    if "run" not in seen[0] or job.script:
        return ""
    text = (
        f"rank 0 runs on {hosts[0]}, which can't see the run folder {job.dir} of this machine: its checkpoints would "
        "be lost there; say storage=s3://BUCKET/FOLDER, or storage=<a folder that all nodes see>"
    )
    if SAVES.search(source):
        raise ConfigError(text)
    return text


def refuse_blind(word: str, hosts: Sequence[str], seen: Sequence[Blind], why: str) -> None:
    """Refuse a word that names what some nodes can't see."""
    if blind := [host for host, own in zip(hosts, seen, strict=True) if own]:
        raise ConfigError(
            f"{word}: {', '.join(blind)} can't see it, and {why}; say a path that all nodes see, or a URL"
        )
