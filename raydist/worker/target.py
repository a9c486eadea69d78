"""Loads the job's function by its name, and calls it with its arguments. (rank side)"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist.settings.config import Job


def load_target(target: str) -> Callable[..., Any]:
    """Return the function of `/path/file.py:function` or `package.module:function`."""
    path, _, name = target.rpartition(":")
    module = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    function = getattr(module, name)
    assert callable(function), f"{target} is a {type(function).__name__}, not a function"
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    """Import a file by its path, with its folder on sys.path, as for `python file.py`."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    # DataLoader workers and pickle find the module by its name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def forget_namesakes(folder: str) -> None:
    """Forget the installed packages whose names modules of a folder have, such as `datasets.py`.

    The folder is first on sys.path, so that its modules win; but the fork server may have imported
    the packages, for this program or for an earlier one.
    """
    try:
        entries = os.listdir(folder)
    except OSError:
        return
    known = {name for name in sys.modules if "." not in name and not name.startswith("__")}
    known -= sys.stdlib_module_names | {"raydist"}
    names = {name.removesuffix(".py") for name in entries if name.endswith(".py")} & known
    names |= {
        name
        for name in known.intersection(entries)
        if os.path.isfile(os.path.join(folder, name, "__init__.py"))
    }
    inside = os.path.realpath(folder) + os.sep
    for name in names:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if not os.path.realpath(file).startswith(inside):
            for module in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                del sys.modules[module]


def call_function(function: Callable[..., Any], job: Job, *args: Any, **kwargs: Any) -> Any:
    """Call the job's function with job.args as keyword arguments, and `config` if it takes it.

    `args` are the parameters beside `config`, which is the first one in many jobs.
    """
    parameters = inspect.signature(function).parameters
    if "config" not in parameters or "config" in kwargs:
        return function(*args, **job.job.args, **kwargs)
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = [each.name for each in parameters.values() if each.kind in places]
    at = by_place.index("config") if "config" in by_place else len(args) + 1
    if at > len(args):
        return function(*args, config=job, **job.job.args, **kwargs)
    return function(*args[:at], job, *args[at:], **job.job.args, **kwargs)
