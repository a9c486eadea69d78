"""The modules that a fork server imports before it forks: torch and the job's imports. (driver)"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

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
ENVIRONMENT = ("os.environ", "environ")
MOST_FILES = 200
"""Files of a program that are read before it starts: half a second."""
READ_LATE = (
    "CUBLAS_",
    "CUDA_",
    "GLOO_",
    "LOCAL_RANK",
    "MASTER_",
    "NCCL_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TOKENIZERS_PARALLELISM",
    "TORCH_NCCL_",
    "UCX_",
    "WANDB_",
    "WORLD_SIZE",
)
"""Prefixes of variables that nobody reads before training starts, long after the imports."""


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
    folder = source.parent if source and target.partition(":")[0].endswith(".py") else Path()
    text = source.read_text(encoding="utf-8", errors="replace") if source else ""
    imports = imported_modules(text)
    imports = [name for name in imports if not is_namesake(name, folder)]
    further = installed_imports(source, folder, target.rpartition(":")[0]) if source else []
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
    if first is None:
        return []
    # As program.run_script has it first on sys.path.
    folder = Path() if script.startswith("-m ") else first.resolve().parent
    return installed_imports(first, folder, script.removeprefix("-m "))


def installed_imports(first: Path, folder: Path, module: str) -> list[str]:
    """Return the installed modules that a Python file and its own files import.

    Its own files are those next to it or in the current folder. They are left to the ranks: at
    import they may read variables that only a rank has, such as LOCAL_RANK. `folder`: the first on
    the ranks' sys.path. `module`: as of sources.
    """
    names: list[str] = []
    for source in sources(first, module).values():
        names += [name for name in imported_modules(source) if not is_namesake(name, folder)]
        # torch's optimizers import torch._dynamo in their first step.
        if "torch.optim" in source or "optim." in source:
            names.append("torch._dynamo")
        if "torch.compile" in source:
            names.append(COMPILER)
    return [*lasting_modules(dict.fromkeys(names))]


def sources(first: Path, module: str) -> dict[Path, str]:
    """Return the text of a Python file, and of its own files that it imports, by path.

    `module`: how the file is named: by its path, or as a module, for which Python first imports the
    packages that contain it.
    """
    found: dict[Path, str] = {}
    unread = [first]
    if not module.endswith(".py") and not is_installed(module.partition(".")[0]):
        packages = (folder / "__init__.py" for folder in first.parents)
        unread += itertools.takewhile(Path.is_file, packages)
    while unread and len(found) < MOST_FILES:
        file = unread.pop()
        if file in found or not file.is_file():
            continue
        found[file] = source = file.read_text(encoding="utf-8", errors="replace")
        unread += [
            folder / path
            for folder in (file.parent, Path())
            for name in imported_modules(source)
            if ":" not in name
            for path in files_of(name)
        ]
    return found


def files_of(module: str) -> Iterator[str]:
    """Yield the files that the import of a module runs, if it is in a folder."""
    parts = module.split(".")
    yield f"{'/'.join(parts)}.py"
    for count in range(1, len(parts) + 1):
        yield f"{'/'.join(parts[:count])}/__init__.py"


def is_namesake(name: str, folder: Path) -> bool:
    """Return whether a folder has a module or package with the name of an installed one."""
    top = re.split("[.:]", name)[0]
    own = (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()
    return own and is_installed(top)


def variable_set_early(job: Job) -> str:
    """Return a variable that the job's file or program sets before it imports a package, or "".

    A package that reads it as it is imported would not see it in a rank that is forked: the fork
    server has imported the package.
    """
    first = file_of(job.script) if job.script else source_of(job.job.target)
    module = job.script.removeprefix("-m ") or job.job.target.rpartition(":")[0]
    for path, source in sources(first, module).items() if first else ():
        if not re.search("environ|putenv|dotenv", source):
            continue
        found = ""
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError):  # the rank's own traceback is better
            continue
        for node in body:
            if found and any(map(_is_package, imports_of([node]))):
                return found
            found = found or _variable_set(node)
        if found and path != first:
            return found
    return ""


def _is_package(name: str) -> bool:
    """Return whether an imported name is of an installed package that is not Python's own."""
    top = re.split("[.:]", name)[0]
    return top not in sys.stdlib_module_names and is_installed(top)


def _variable_set(node: ast.stmt) -> str:
    """Return an environment variable that a top-level statement sets, or "".

    `variables` if it sets some whose names are not in the statement.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return ""
    keys: list[ast.expr | None] = []
    for part in ast.walk(node):
        match part:
            case ast.Assign(targets=targets):
                keys += [each.slice for each in targets if _is_entry(each)]
            case ast.AugAssign(target=ast.Subscript(slice=key) as entry) if _is_entry(entry):
                keys.append(key)
            case ast.AugAssign(target=mapping, value=value) if _is_environment(mapping):
                keys += value.keys if isinstance(value, ast.Dict) else [None]
            case ast.Call(func=function, args=args, keywords=named):
                keys += _keys_of_call(ast.unparse(function), args, named)
    known = [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    early = [name for name in known if not name.startswith(READ_LATE)]
    return early[0] if early else "variables" if len(known) < len(keys) else ""


def _keys_of_call(
    function: str, args: list[ast.expr], named: list[ast.keyword]
) -> list[ast.expr | None]:
    """Return the names of the variables that a call sets; None for one that is not known."""
    if function in ("load_dotenv", "dotenv.load_dotenv"):
        return [None]
    owner, _, method = function.rpartition(".")
    if function == "os.putenv" or (owner in ENVIRONMENT and method == "setdefault"):
        return list(args[:1])
    if owner in ENVIRONMENT and method == "update":
        keys: list[ast.expr | None] = [ast.Constant(each.arg) for each in named if each.arg]
        for arg in args:
            keys += arg.keys if isinstance(arg, ast.Dict) else [None]
        return keys
    return []


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ENVIRONMENT


def _is_entry(node: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and _is_environment(node.value)


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


@functools.lru_cache(MOST_FILES)  # several questions are about the same files
def imported_modules(source: str) -> Sequence[str]:
    """Return the modules that a file imports at its top level, and MODULE:NAME for their names.

    Some packages, such as transformers, import what has a name only when it is asked for. Imports
    in functions or conditions are left to the rank.
    """
    try:
        return imports_of(ast.parse(source).body)
    except (SyntaxError, ValueError):
        return []  # the rank's own traceback is better than an error here


def imports_of(body: Iterable[ast.stmt]) -> list[str]:
    """Return what these statements import, as `imported_modules` names it."""
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names += [f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*"]
    # Importing mpi4py.MPI calls MPI_Init, which each rank must do for itself.
    return [name for name in names if not name.startswith(("__", "mpi4py.", "mpi4py:"))]
