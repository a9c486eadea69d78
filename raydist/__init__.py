"""raydist runs a training program on every GPU of a Ray cluster. (either side)

Importing it is free: none of ray, torch, omegaconf is imported until a name that needs it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from raydist.shared.version import __version__ as __version__

if TYPE_CHECKING:
    from raydist.run import run as run
    from raydist.settings.config import Job as Job
    from raydist.shared.errors import ConfigError as ConfigError
    from raydist.shared.errors import LaunchError as LaunchError
    from raydist.shared.errors import RaydistError as RaydistError
    from raydist.shared.errors import RunFailed as RunFailed
    from raydist.shared.errors import Stopped as Stopped
    from raydist.sweeps.flow import sweep as sweep
    from raydist.watch.result import Result as Result
    from raydist.worker import checkpoint as checkpoint
    from raydist.worker import sharded as sharded
    from raydist.worker.backends import process_set as process_set
    from raydist.worker.context import rank as rank
    from raydist.worker.context import report as report
    from raydist.worker.loop import data as data
    from raydist.worker.loop import models as models
    from raydist.worker.loop.evaluation import accuracy as accuracy
    from raydist.worker.loop.fit import fit as fit
    from raydist.worker.standalone import main as main

_HOME = {
    "ConfigError": "shared.errors",
    "Job": "settings.config",
    "LaunchError": "shared.errors",
    "RaydistError": "shared.errors",
    "Result": "watch.result",
    "RunFailed": "shared.errors",
    "Stopped": "shared.errors",
    "accuracy": "worker.loop.evaluation",
    "checkpoint": "worker.checkpoint",
    "data": "worker.loop.data",
    "fit": "worker.loop.fit",
    "main": "worker.standalone",
    "models": "worker.loop.models",
    "process_set": "worker.backends",
    "rank": "worker.context",
    "report": "worker.context",
    "run": "run",
    "sharded": "worker.sharded",
    "sweep": "sweeps.flow",
}
"""Where each public name is defined."""
_MODULES = frozenset({"checkpoint", "data", "models", "sharded"})
"""The public names that are modules."""
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raydist' has no attribute {name!r} (it has: {', '.join(__all__)})")
    module = import_module(f"raydist.{_HOME[name]}")
    value = globals()[name] = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Keeps `raydist.run` the function: importing the file run.py would put the module under the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "run" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle knows plain modules only, and a job's function from a notebook refers to this one.
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
