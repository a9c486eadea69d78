"""The modules that a fork server imports before it forks: torch and the job's imports. (driver)"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from raydist.node.fork_launcher import ALWAYS
from raydist.settings.config import Job, Parallel
from raydist.settings.mesh import divides
from raydist.settings.script import file_of
from raydist.state.object_store import DRIVERS, scheme
from raydist.worker.backends import module_of

LOOP = ("raydist.training.fit", "torch._dynamo", "hydra.utils")
"""Modules of raydist.fit. torch's optimizers import torch._dynamo in their first step; `_target_`
needs hydra."""
SHARDS = ("torch.distributed.checkpoint.state_dict",)
"""What fit imports in addition if the model is in shards."""
COMPILER = "raydist.worker.compiler"
"""Has torch.compile ready in each rank."""
DDP = Parallel()


def of(job: Job) -> list[str]:
    """Return the modules to import for a job, in order."""
    found = modules(job.job.target, job.backend.name, job.script, job.storage, job.parallel)
    return list(dict.fromkeys([*found, COMPILER])) if job.train.compile else found


def modules(
    target: str, backend: str, script: str = "", store: str = "", parallel: Parallel = DDP
) -> list[str]:
    """Return the modules to import for a target, in order, as `imported_modules` names them.

    The target is `/path/file.py:function` or `package.module:function`. `backend`: a key of
    BACKENDS, or `auto`, which becomes a backend of torch.distributed. `script`: the program that
    runs instead of a target; the result is then its own imports. `store`: the URL of the
    checkpoints.
    """
    if script:
        return script_modules(script)
    source = source_of(target)
    imports = imported_modules(source.read_text(encoding="utf-8")) if source else []
    further = installed_imports(source) if source else []
    fits = "raydist" in (*imports, *further)
    loop = (*LOOP, *(SHARDS if divides(parallel) else ())) if fits else ()
    backend_module = module_of("gloo" if backend == "auto" else backend, parallel)
    driver = [DRIVERS[scheme(store)]] if scheme(store) in DRIVERS else []
    names = [
        *ALWAYS,
        backend_module,
        *loop,
        *driver,
        *(name for name in (*imports, *further) if name.partition(":")[0] != "raydist"),
    ]
    return list(dict.fromkeys(names))


def script_modules(script: str) -> list[str]:
    """Return the installed modules that a Python script and its own files import."""
    first = file_of(script)
    return installed_imports(first) if first else []


def installed_imports(first: Path) -> list[str]:
    """Return the installed modules that a Python file and its own files import.

    Its own files are those next to it or in the current folder. They are left to the ranks: at
    import they may read variables that only a rank has, such as LOCAL_RANK.
    """
    names: list[str] = []
    seen, unread = set[Path](), [first]
    while unread:
        seen.add(file := unread.pop())
        if not file.is_file():
            continue
        source = file.read_text(encoding="utf-8", errors="replace")
        imports = imported_modules(source)
        own = [
            folder / f"{name.replace('.', '/')}.py"
            for folder in (file.parent, Path())
            for name in imports
            if ":" not in name
        ]
        unread += [path for path in own if path.is_file() and path not in seen]
        names += imports
        # torch's optimizers import torch._dynamo in their first step.
        if "torch.optim" in source or "optim." in source:
            names.append("torch._dynamo")
        if "torch.compile" in source:
            names.append(COMPILER)
    return [*lasting_modules(dict.fromkeys(names))]


def lasting_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """Return those modules that a kept server may import.

    They exclude the user's own files, which change from run to run, and which the ranks import.
    """
    return tuple(name for name in modules if is_installed(re.split("[.:]", name)[0]))


def is_installed(name: str) -> bool:
    """Return whether a top-level module is raydist, or part of Python or its site-packages."""
    if name == "raydist":
        return True
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin in ("built-in", "frozen"):
        return spec is not None
    return any((spec.origin or "").startswith(folder + os.sep) for folder in _python_folders())


@functools.cache  # finding them takes longer than everything else here
def _python_folders() -> set[str]:
    return {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}


def source_of(target: str) -> Path | None:
    """Return the file that holds a target's function, without importing it."""
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def imported_modules(source: str) -> list[str]:
    """Return the modules that a file imports at its top level, and MODULE:NAME for their names.

    Some packages, such as transformers, import what has a name only when it is asked for. Imports
    in functions or conditions are left to the rank.
    """
    names: list[str] = []
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []  # the rank's own traceback is better than an error here
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names += [f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*"]
    # Importing mpi4py.MPI calls MPI_Init, which each rank must do for itself.
    return [name for name in names if not name.startswith(("__", "mpi4py.", "mpi4py:"))]
