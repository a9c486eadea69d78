"""The job's function: found by its name, called with what it asks for. (rank side)"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist.config import Job


def load(target: str) -> Callable[..., Any]:
    """The function of `/path/file.py:function` or `package.module:function`."""
    where, _, name = target.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    function = getattr(module, name)
    assert callable(function), f"{target} is a {type(function).__name__}, not a function"
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    """Import a file by its path, as `python file.py` would see it: with its folder on sys.path."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    # Loader workers and pickle look the module up by its name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def call(function: Callable[..., Any], job: Job, *args: Any, **kwargs: Any) -> Any:
    """Call the job's function with `config` if it has such a parameter, and with job.args as keyword arguments."""
    wants = inspect.signature(function).parameters
    config = {"config": job} if "config" in wants and "config" not in kwargs else {}
    return function(*args, **config, **job.job.args, **kwargs)
