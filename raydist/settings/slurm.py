"""Refuse a run that Slurm would start several times, or outside of its nodes. (pure)"""

from __future__ import annotations

from collections.abc import Mapping

from raydist.shared.errors import ConfigError


def may_refuse(environ: Mapping[str, str]) -> bool:
    """Report whether this process is in an allocation, without a Ray, and not a torchrun's rank."""
    return "SLURM_JOB_ID" in environ and not environ.keys() & {"RAY_ADDRESS", "RANK"}


def check_task(environ: Mapping[str, str]) -> None:
    """Raise ConfigError in each of several tasks of srun, and in a shell of salloc on no node.

    Not if Ray is running already (RAY_ADDRESS), nor in a rank of torchrun (RANK). The tasks after
    the first raise SystemExit, so that there is one message. Called once for each run, before its
    folder is created.
    """
    if not may_refuse(environ):
        return
    tasks, task = environ.get("SLURM_STEP_NUM_TASKS", "1"), environ.get("SLURM_PROCID")
    if tasks == "1" and task is not None:
        return
    if task not in (None, "0"):
        raise SystemExit(ConfigError.exit_code)
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    cause = (
        f"each of srun's {tasks} tasks would be a separate run"
        if task
        else "this shell of salloc is on none of the allocation's nodes"
    )
    batch = f"sbatch --nodes={nodes} deploy/slurm/train.sbatch"
    raise ConfigError(
        f"Slurm: {cause}; for one run on all nodes type `{batch} SETTING=VALUE …` (docs/slurm.md), "
        "for a run on one node `srun --nodes=1 --ntasks=1 COMMAND`",
        "srun",
        tasks,
        batch,
    )
