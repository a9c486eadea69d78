"""A job's function, found by its name and held against its arguments without importing its file. (driver)

digits                     jobs/digits.py, of the folder one stands in or of raydist; its function `job`
path/to/file.py[:function]
package.module:function
"""

from __future__ import annotations

import ast
import os
import pkgutil
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from raydist.errors import ConfigError, nearest, suggest

HERE = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def shipped(name: str) -> Path:
    """A folder that travels with raydist: inside the package once installed, beside it in a source checkout."""
    inside = HERE / name
    return inside if inside.is_dir() else HERE.parent / name


def job_folders() -> list[Path]:
    """Where a bare name of a job is looked for, in this order."""
    return [Path("jobs").absolute(), shipped("jobs")]


def job_names() -> list[str]:
    """The jobs that have a file in one of the folders."""
    return sorted({file.stem for folder in job_folders() for file in folder.glob("*.py") if file.stem[0] not in "._"})


def is_name(target: str) -> bool:
    """Whether it is the bare name of a job, not a path and not a module."""
    return not any(mark in target for mark in "/:.")


def stem(target: str) -> str:
    """The short name of a settled target: of its file, or of the last part of its module."""
    where = target.rpartition(":")[0] or target
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def settle(target: str, args: Mapping[str, Any]) -> str:
    """`/abs/file.py:function` or `module:function`; a ConfigError if there is no such thing or it won't take `args`."""
    where, name = split(target)
    file = find_file(target, where) if where.endswith(".py") else find_module(target, where)
    if file is not None:
        check_function(target, file, name, args)
    return f"{file if where.endswith('.py') else where}:{name}"


def split(target: str) -> tuple[str, str]:
    """The file or module, and the function's name."""
    if is_name(target):
        return _by_name(target), "job"
    if target.endswith(".py"):
        return target, "job"
    where, colon, name = target.rpartition(":")
    if not colon and "/" in target:
        raise ConfigError(f"job={target}: a path must end in .py; say job={target}.py")
    if not where or not name:
        raise ConfigError(
            f"job={target}: which function? Say job={(where or name).rstrip(':') or 'path/to/file.py'}:job"
        )
    if not where.endswith(".py") and "/" in where:
        raise ConfigError(f"job={target}: a path must end in .py; say job={where}.py:{name}")
    return where, name


def _by_name(name: str) -> str:
    for folder in job_folders():
        if (folder / f"{name}.py").is_file():
            return str(folder / f"{name}.py")
    raise ConfigError(f"job={name}: {suggest(name, job_names(), prefix='job=')}")


def find_file(target: str, where: str) -> Path:
    """The file, as an absolute path."""
    file = Path(os.path.abspath(Path(where).expanduser()))
    if file.is_file():
        return file
    folder = file.parent
    if not folder.is_dir():
        raise ConfigError(f"job={target}: there is no folder {folder}{_meant(folder.name, folder.parent, target)}")
    there = [each.name for each in folder.glob("*.py")]
    close = nearest(file.name, there)
    offer = f"did you mean job={target.replace(file.name, close)}? " if close else ""
    raise ConfigError(f"job={target}: there is no file {file}; {offer}(there: {', '.join(sorted(there)) or 'no .py'})")


def _meant(name: str, folder: Path, target: str) -> str:
    there = [each.name for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    close = nearest(name, there)
    return f"; did you mean job={target.replace(name, close)}?" if close else ""


def find_module(target: str, module: str) -> Path | None:
    """The source of a module; None if it has none to read (a compiled one)."""
    spec, path = None, None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:count]), path)
        if spec is None:
            inside = f" in {'.'.join(parts[: count - 1])}" if count > 1 else ""
            raise ConfigError(
                f"job={target}: there is no module {parts[count - 1]}{inside}{_module_hint(target, path)}"
            )
        path = list(spec.submodule_search_locations or [])
    source = spec.origin if spec else None
    return Path(source) if source and source.endswith(".py") else None


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    # importlib.util.find_spec would import the parent packages, with all that their __init__ does
    return PathFinder.find_spec(name, path)


def _module_hint(target: str, path: Sequence[str] | None) -> str:
    module, _, function = target.rpartition(":")
    parent, _, last = module.rpartition(".")
    there = {each.name for each in pkgutil.iter_modules(path)} | (set() if path else sys.stdlib_module_names)
    close = nearest(last if path else module.partition(".")[0], there)
    if close is None:
        return ""
    meant = f"{parent}.{close}" if path else ".".join([close, *module.split(".")[1:]])
    return f"; did you mean job={meant}:{function}?"


def check_function(target: str, file: Path, name: str, args: Mapping[str, Any]) -> None:
    """Refuse a function that the file does not have, or arguments that it does not take."""
    found = defined(parse(target, file))
    if name not in found and "*" not in found:
        functions = [each for each, node in found.items() if isinstance(node, Function)]
        raise ConfigError(
            f"job={target}: {file} has no function {name}; "
            + suggest(name, functions, prefix=f"job={target.removesuffix(f':{name}')}:")
        )
    node = found.get(name)
    # A decorator may change what is taken, and what an assignment or an import brings is not known here.
    if isinstance(node, Function) and not node.decorator_list:
        check_args(target, node.args, args)


def parse(target: str, file: Path) -> ast.Module:
    """The syntax tree of a file."""
    try:
        with tokenize.open(file) as source:
            return ast.parse(source.read(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"job={target}: {file}{f', line {line}' if line else ''} is not Python: {error}") from error


def defined(tree: ast.AST) -> dict[str, ast.AST | None]:
    """The names that a file's top level defines, and the function where it is one; `*` for a star import."""
    names: dict[str, ast.AST | None] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update((each, None) for each in _assigned(node))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            names.update(defined(node))
    return names


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def check_args(target: str, signature: ast.arguments, args: Mapping[str, Any]) -> None:
    """Refuse a keyword that a function does not take, and the lack of one that it needs."""
    known = [arg.arg for arg in (*signature.args, *signature.kwonlyargs) if arg.arg != "config"]
    for name in args:
        if name not in known and signature.kwarg is None:
            raise ConfigError(
                f"job.args.{name}: job={target} takes no {name}; " + suggest(name, known, prefix="job.args.")
            )
    optional = {arg.arg for arg in signature.args[len(signature.args) - len(signature.defaults) :]}
    optional |= {arg.arg for arg, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if default}
    if missing := [name for name in known if name not in optional and name not in args]:
        words = " ".join(f"job.args.{name}=VALUE" for name in missing)
        raise ConfigError(f"job={target} needs {', '.join(missing)}: say {words}")
