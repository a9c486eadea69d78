"""raydist runs a training program on every GPU of a Ray cluster. (either side)

Importing it is free: none of ray, torch, omegaconf is imported until a name that needs it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist import checkpoint as checkpoint
    from raydist.config import Job as Job
    from raydist.context import rank as rank
    from raydist.context import report as report
    from raydist.errors import ConfigError as ConfigError
    from raydist.errors import RaydistError as RaydistError
    from raydist.errors import RunFailed as RunFailed
    from raydist.loop.fit import fit as fit
    from raydist.result import Result as Result
    from raydist.run import run as run
    from raydist.standalone import main as main

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "errors",
    "Job": "config",
    "RaydistError": "errors",
    "Result": "result",
    "RunFailed": "errors",
    "checkpoint": "",
    "fit": "loop.fit",
    "main": "standalone",
    "rank": "context",
    "report": "context",
    "run": "run",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raydist' has no attribute {name!r} (it has: {', '.join(__all__)})")
    home = _HOME[name]
    found = import_module(f"raydist.{home or name}")
    value = globals()[name] = getattr(found, name) if home else found
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
