"""The driver's request for a rank -> the complete spec of its process, on its node. (actor)"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raydist.messages.agent import StartRank
from raydist.messages.server import RankSpec
from raydist.network.names import RANK_FOLDER
from raydist.node import cache_folder
from raydist.node.fork_launcher import names_folder, rank_search_path
from raydist.shared import env_names
from raydist.shared.errors import ConfigError
from raydist.shared.own_path import machine_id, of_others, others_may_add

CALL = "call"
"""The file of the pickled function, in the folder of the node."""

PUT_ELSEWHERE = "set working_dir=. to send this folder, or put it where only you can write"


@dataclass(frozen=True)
class FromMpirun:
    """What a rank gets from mpirun; without mpirun, nothing."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables; those that the driver planned override them."""
    cpus: tuple[int, ...] | None = None
    """The CPUs to which mpirun binds the rank."""
    descriptors: tuple[int, ...] = ()
    """Descriptors besides those of the log, the channel and the heartbeat."""


def complete_spec(request: StartRank, folder: Path, given: FromMpirun) -> RankSpec:
    """Return the driver's request, completed with the paths and variables of this node.

    `folder`: the run's on this node. Raises ConfigError if another user of this node may have put
    the job's folder or its code there.
    """
    cwd = request.cwd if os.path.isdir(request.cwd) else os.getcwd()
    own = request.driver == machine_id()
    if not own:
        refuse_code_of_others(request, cwd)
    planned = cache_folder.fill_in(
        {name: value.replace(RANK_FOLDER, str(folder)) for name, value in request.env.items()}
    )
    env = {**os.environ, env_names.SCRATCH: str(folder), **given.env, **planned}
    env.pop(env_names.NOTIFY_WEBHOOK, None)  # a secret of the driver, and no use to a rank
    if request.script:
        env["TORCHELASTIC_ERROR_FILE"] = str(folder / f"rank-{request.rank}.error.json")
    sys_path = rank_search_path(request.sys_path, cwd, own)
    named = request.imports_cwd or names_folder(env.get("PYTHONPATH", ""), cwd, cwd)
    if request.script and not named:
        # The launcher was started with -m, which adds this folder; `python file.py` does not.
        sys_path = tuple(each for each in sys_path if each not in ("", cwd))
    return RankSpec(
        rank=request.rank,
        env=env,
        job=request.job,
        argv=request.argv,
        script=request.script,
        cwd=cwd,
        sys_path=sys_path,
        value=str(folder / f"rank-{request.rank}.value"),
        call=str(folder / CALL) if request.call else None,
        cpus=given.cpus or request.cpus,
        saving=request.saving,
    )


def refuse_code_of_others(request: StartRank, cwd: str) -> None:
    """Raise ConfigError if another user of this node may have made code that the rank would run.

    That is `cwd` or the job's file, such as /tmp/project of the driver's machine, if this node has
    a different one, or none yet; or a module beside that file, in a folder that is open to all.
    """
    host = socket.gethostname()
    for path in (cwd, code_file(request, cwd)):
        if path and (found := of_others(Path(path))):
            whose = (
                f"belongs to uid {found.lstat().st_uid}"
                if os.path.lexists(found)
                else "does not exist"
            )
            raise ConfigError(
                f"{found} on {host} {whose}, and every user of {host} may write to "
                f"{found.parent}: anyone could have put code there; {PUT_ELSEWHERE}"
            )
    for folder in import_folders(request, cwd):
        if others_may_add(Path(folder)):
            raise ConfigError(
                f"every user of {host} may write to {folder}, from which the job imports modules: "
                f"anyone could have put code there; {PUT_ELSEWHERE}"
            )


def import_folders(request: StartRank, cwd: str) -> list[str]:
    """Return the folders that come first on the search path because the job's code is there."""
    if request.script.startswith("-m "):
        return [cwd]
    file = code_file(request, cwd)
    # Python takes the folder of a script behind its links.
    both = (file, os.path.realpath(file)) if file.endswith(".py") else ()
    return [os.path.dirname(each) for each in both]


def code_file(request: StartRank, cwd: str) -> str:
    """Return the path of the job's file.

    Empty for a module, a command on PATH, and a pickled function.
    """
    file = request.script
    if not file and not request.call:
        file = json.loads(request.job)["job"]["target"].rpartition(":")[0]
    is_path = file.endswith(".py") or os.sep in file
    return os.path.join(cwd, file) if is_path and not file.startswith("-m ") else ""
