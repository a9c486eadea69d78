"""`optim.fused`, `train.fast` -> whether torch's fused optimizer is used, and why. (pure)"""

from __future__ import annotations

from typing import NamedTuple

from raydist.settings.config import FUSED, Job
from raydist.settings.mesh import divides
from raydist.shared.errors import ConfigError

SHARDED = ("adam", "adamw")
"""The optimizers that torch's DTensor has a rule for.

`_fused_sgd_` and `_fused_adagrad_` have none in torch 2.14.
"""
ON_GPUS = ("adam", "adamw")
"""The optimizers that are fused on GPUs by default.

Their formula has the most terms, and the next best implementation (`foreach`) reads and writes all
parameters for each of them.
"""


class Fused(NamedTuple):
    """Whether the optimizer is fused."""

    on: bool
    why: str
    exact: bool = False
    """Whether it is fused only if every bit stays the same.

    That also depends on the model, which the rank knows.
    """


def fused_choice(job: Job, gpus: bool) -> Fused:
    """Return whether a job's optimizer is fused. ConfigError: torch has no such fused optimizer.

    `gpus`: whether the job's ranks have GPUs.
    """
    optim, sharded = job.optim, divides(job.parallel)
    if optim._target_:
        cause = "a class of your choice has its own arguments"
        if optim.fused is True:
            raise ConfigError.of("optim.fused", "true", cause, "optim.args.fused=true")
        return Fused(False, f"{cause}: optim.args")
    obstacle = "torch has no fused RMSprop" if optim.name not in FUSED else ""
    if sharded and optim.name in FUSED and optim.name not in SHARDED:
        obstacle = f"torch has no fused {optim.name} for a model in shards"
    if optim.name == "sgd" and optim.args.get("momentum") and job.train.precision == "fp16":
        obstacle = (
            "torch's fused SGD takes up an unset momentum if fp16 overflows in the first step"
        )
    if optim.fused is True and obstacle:
        raise ConfigError.of("optim.fused", "true", obstacle, "optim.fused=auto", "optim=adamw")
    if optim.fused is not True and ({"foreach", "differentiable"} & optim.args.keys()):
        obstacle = obstacle or "optim.args chooses another implementation"
    if obstacle:
        return Fused(False, obstacle)
    if optim.fused != "auto":
        return Fused(bool(optim.fused), f"optim.fused={str(optim.fused).lower()}")
    if job.train.fast:
        return Fused(True, "train.fast=true")
    if gpus and optim.name in ON_GPUS:
        return Fused(True, "the default on GPUs")
    if optim.name == "sgd" and not gpus:
        bits = "weights have the same bits"
        where = (
            "for models whose parameters all fill 64 bytes or a multiple: "
            if optim.args.get("momentum")
            else ""
        )
        return Fused(True, where + bits, exact=True)
    return Fused(False, "it rounds the last bits otherwise: optim.fused=true")
