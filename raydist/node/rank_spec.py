"""The driver's request for a rank -> the whole description of its process, on its node. (actor)"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from raydist.network.names import RANK_FOLDER
from raydist.node import cache_folder
from raydist.node.fork_launcher import rank_search_path
from raydist.shared import env_names
from raydist.worker.protocol import RankSpec, StartRank

CALL = "call"
"""The file of the pickled function, in the folder of the node."""


def complete_spec(
    request: StartRank,
    folder: Path,
    error_file: Path | None,
    mpi_env: Mapping[str, str],
    mpi_cpus: tuple[int, ...] | None,
) -> RankSpec:
    """The driver's request, completed with the paths and variables of this node.

    `folder`: the run's on this node. `error_file`: where a program writes its exception, if it is one. `mpi_env`,
    `mpi_cpus`: the variables that mpirun sets for the rank, and the CPUs to which it binds it.
    """
    planned = cache_folder.fill_in(
        {name: value.replace(RANK_FOLDER, str(folder)) for name, value in request.env.items()}
    )
    env = {**os.environ, env_names.SCRATCH: str(folder), **mpi_env, **planned}
    if error_file is not None:
        env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    return RankSpec(
        rank=request.rank, env=env, job=request.job, argv=request.argv, script=request.script,
        cwd=request.cwd if os.path.isdir(request.cwd) else os.getcwd(),
        sys_path=rank_search_path(request.sys_path),
        value=str(folder / f"rank-{request.rank}.value"), call=str(folder / CALL) if request.call else None,
        cpus=mpi_cpus or request.cpus,
    )  # fmt: skip
