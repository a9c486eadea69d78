"""What a node's fork server imports before it forks: torch, and what the job's file names. (driver)"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from raydist.backends import BACKENDS

ALWAYS = ("torch", "torch.distributed", "cloudpickle")
LOOP = ("raydist.loop.fit", "torch._dynamo", "hydra.utils")
"""What raydist.fit needs; torch's optimizers import torch._dynamo at their first step, `_target_` needs hydra."""


def modules(target: str, backend: str, script: str = "") -> list[str]:
    """The modules to import for a target (`/path/file.py:function` or `package.module:function`), in order.

    `backend`: as in BACKENDS; `auto` becomes one of torch.distributed's own, which are one file. `script`: the program
    that runs instead; nothing but its own imports then.
    """
    if script:
        return imports(Path(script).read_text(encoding="utf-8")) if script.endswith(".py") else []
    source = source_of(target)
    named = imports(source.read_text(encoding="utf-8")) if source else []
    loop = LOOP if "raydist" in named else ()
    joins = BACKENDS["gloo" if backend == "auto" else backend]
    found = [*ALWAYS, joins, *loop, *(name for name in named if name != "raydist")]
    return list(dict.fromkeys(found))


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
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.append(node.module)
    # mpi4py.MPI joins MPI when it is imported: that is for each rank, not for the server that they are forked from
    return [name for name in named if not name.startswith(("__", "mpi4py."))]
