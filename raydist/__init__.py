"""raydist runs a training program on every GPU of a Ray cluster. (either side)

Importing it is free: none of ray, torch, omegaconf is imported until a name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raydist.shared.version import __version__ as __version__

if TYPE_CHECKING:
    from raydist.background import Run as Run
    from raydist.background import submit as submit
    from raydist.flow import run as run
    from raydist.reporting.result import Result as Result
    from raydist.settings.config import Job as Job
    from raydist.shared import kinds
    from raydist.shared.errors import ConfigError as ConfigError
    from raydist.shared.errors import LaunchError as LaunchError
    from raydist.shared.errors import NonFiniteError as NonFiniteError
    from raydist.shared.errors import RaydistError as RaydistError
    from raydist.shared.errors import RunFailed as RunFailed
    from raydist.shared.errors import Stopped as Stopped
    from raydist.sweeps.flow import sweep as sweep
    from raydist.training import data as data
    from raydist.training import models as models
    from raydist.training import sharded as sharded
    from raydist.training.evaluation import accuracy as accuracy
    from raydist.training.evaluation import sum_over_ranks as sum_over_ranks
    from raydist.training.fit import fit as fit
    from raydist.training.recoverable import Recoverable as Recoverable
    from raydist.worker import checkpoint as checkpoint
    from raydist.worker.backends import process_set as process_set
    from raydist.worker.context import mesh as mesh
    from raydist.worker.context import rank as rank
    from raydist.worker.context import report as report
    from raydist.worker.standalone import main as main

    events = kinds

_HOME = {
    "ConfigError": "shared.errors",
    "Job": "settings.config",
    "LaunchError": "shared.errors",
    "NonFiniteError": "shared.errors",
    "RaydistError": "shared.errors",
    "Recoverable": "training.recoverable",
    "Result": "reporting.result",
    "Run": "background",
    "RunFailed": "shared.errors",
    "Stopped": "shared.errors",
    "accuracy": "training.evaluation",
    "checkpoint": "worker.checkpoint",
    "data": "training.data",
    "events": "shared.kinds",
    "fit": "training.fit",
    "main": "worker.standalone",
    "mesh": "worker.context",
    "models": "training.models",
    "process_set": "worker.backends",
    "rank": "worker.context",
    "report": "worker.context",
    "run": "flow",
    "sharded": "training.sharded",
    "submit": "background",
    "sum_over_ranks": "training.evaluation",
    "sweep": "sweeps.flow",
}
"""Where each public name is defined."""
_MODULES = frozenset({"checkpoint", "data", "events", "models", "sharded"})
"""The public names that are modules."""
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'raydist' has no attribute {name!r} (it has: {', '.join(__all__)})"
        )
    module = import_module(f"raydist.{_HOME[name]}")
    value = globals()[name] = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
