"""What a node's fork server imports before it forks: torch, and what the job's file names. (driver)"""

from __future__ import annotations

import ast
import importlib.util
import os
import sysconfig
from pathlib import Path

from raydist.backends import BACKENDS
from raydist.config import Job
from raydist.storage import DRIVERS, scheme
from raydist.words.script import file_of

ALWAYS = ("torch", "torch.distributed", "cloudpickle")
LOOP = ("raydist.loop.fit", "torch._dynamo", "hydra.utils")
"""What raydist.fit needs; torch's optimizers import torch._dynamo at their first step, `_target_` needs hydra."""


def of(job: Job) -> list[str]:
    """The modules to import for a job, in order."""
    return modules(job.job.target, job.backend.name, job.script, job.storage)


def modules(target: str, backend: str, script: str = "", store: str = "") -> list[str]:
    """The modules to import for a target (`/path/file.py:function` or `package.module:function`), in order.

    `backend`: as in BACKENDS; `auto` becomes one of torch.distributed's own, which are one file. `script`: the program
    that runs instead; nothing but its own imports then. `store`: the URL that checkpoints go to.
    """
    if script:
        return of_script(script)
    source = source_of(target)
    named = imports(source.read_text(encoding="utf-8")) if source else []
    loop = LOOP if "raydist" in named else ()
    joins = BACKENDS["gloo" if backend == "auto" else backend]
    driver = [DRIVERS[scheme(store)]] if scheme(store) in DRIVERS else []
    found = [*ALWAYS, joins, *loop, *driver, *(name for name in named if name != "raydist")]
    return list(dict.fromkeys(found))


def of_script(script: str) -> list[str]:
    """What a Python script imports, itself or by files of its own, as far as it is installed.

    Those own files are left to the ranks: at import they may read what only a rank has, as LOCAL_RANK.
    """
    first = file_of(script)
    named: list[str] = []
    seen, left = set[Path](), [first] if first else []
    while left:
        seen.add(file := left.pop())
        if not file.is_file():
            continue
        source = file.read_text(encoding="utf-8", errors="replace")
        found = imports(source)
        beside = [place / f"{name.replace('.', '/')}.py" for place in (file.parent, Path()) for name in found]
        left += [path for path in beside if path.is_file() and path not in seen]
        # torch's optimizers import it at their first step
        named += [*found, *(["torch._dynamo"] if "torch.optim" in source or "optim." in source else [])]
    return [name for name in dict.fromkeys(named) if is_installed(name.partition(".")[0])]


def is_installed(name: str) -> bool:
    """Whether a top-level module comes with Python or from its site-packages; raydist itself counts as well."""
    if name == "raydist":
        return True
    spec = importlib.util.find_spec(name)
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    if spec is None or spec.origin in ("built-in", "frozen"):
        return spec is not None
    return any((spec.origin or "").startswith(place + os.sep) for place in places)


def source_of(target: str) -> Path | None:
    """The file that holds a target's function, found without importing it."""
    where = target.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    try:
        spec = importlib.util.find_spec(where) if where else None
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def imports(source: str) -> list[str]:
    """The modules that a file's own top level imports; those inside functions or conditions are left to the rank."""
    named: list[str] = []
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []  # each rank will say so in its own words
    for node in body:
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.append(node.module)
    # mpi4py.MPI joins MPI when it is imported: that is for each rank, not for the server that they are forked from
    return [name for name in named if not name.startswith(("__", "mpi4py."))]
