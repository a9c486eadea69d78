"""Find the function of `job=` by name and check its arguments, without importing it. (driver)

digits                     jobs/digits.py, in this folder or in raydist's; its function `job`
path/to/file.py[:function]
package.module:function
"""

from __future__ import annotations

import ast
import os
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from raydist.settings.lookup import find_module, missing_path, python_file
from raydist.settings.secrets import masked
from raydist.shared.errors import ConfigError, nearest
from raydist.shared.home import expand_home

HERE = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def shipped(name: str) -> Path:
    """Return a folder that is part of raydist.

    It is in the installed package, or next to the package in a source checkout.
    """
    inside = HERE / name
    return inside if inside.is_dir() else HERE.parent / name


def job_files() -> dict[str, Path]:
    """Return the file of each job that has a name; ./jobs takes precedence over raydist's own."""
    folders = (shipped("jobs"), Path("jobs").absolute())
    return {
        file.stem: file
        for folder in folders
        for file in sorted(folder.glob("*.py"))
        if file.stem[0] not in "._"
    }


def is_name(target: str) -> bool:
    """Report whether this is the bare name of a job, neither a path nor a module."""
    return not any(mark in target for mark in "/:.")


def target_stem(target: str) -> str:
    """Return the short name of a target: that of its file, or the last part of its module."""
    where = target.rpartition(":")[0] or target
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def resolve_target(target: str, args: Mapping[str, object]) -> str:
    """Return `/abs/file.py:function` or `module:function`.

    ConfigError: it does not exist, or does not take `args`.
    """
    where, name = split_target(target)
    if where.endswith(".py"):
        where = os.path.abspath(expand_home("job", where))
        file: Path | None = Path(where)
        if not Path(where).is_file():
            raise missing_path("job", target, Path(where))
    else:
        file = python_file(find_module("job", target, where))
    if file is not None:
        check_function(target, file, name, args)
    return f"{where}:{name}"


def split_target(target: str) -> tuple[str, str]:
    """Split a target into the file or module, and the function's name."""
    if is_name(target):
        if target not in (files := job_files()):
            raise ConfigError.unknown("job", target, files, "there is no such job")
        return str(files[target]), "job"
    where, colon, name = (target, ":", "job") if target.endswith(".py") else target.rpartition(":")
    if not where.endswith(".py") and "/" in target:
        right = f"job={where or name}.py" + (f":{name}" if colon else "")
        raise ConfigError.of("job", target, "a path must end in .py", right)
    if not where or not name:
        example = (where or name).rstrip(":") or "path/to/file.py"
        raise ConfigError.of("job", target, "it names no function", f"job={example}:job")
    return where, name


def check_function(target: str, file: Path, name: str, args: Mapping[str, object]) -> None:
    """Raise ConfigError if the file has no such function, or the function does not take `args`."""
    names = defined(parse_source(target, file))
    if name not in names and "*" not in names:
        functions = [each for each, node in names.items() if isinstance(node, Function)]
        guess = nearest(name, functions, f"job={target.removesuffix(f':{name}')}:")
        raise ConfigError.of(
            "job", target, f"{file} has no function {name}", guess=guess, known=functions
        )
    node = names.get(name)
    # A decorator may change the arguments; the arguments of an assigned or imported function are
    # unknown here.
    if isinstance(node, Function) and not node.decorator_list:
        check_args(target, node.args, args)


def parse_source(target: str, file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    try:
        with tokenize.open(file) as source:
            return ast.parse(source.read(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        cause = f"{file}{f', line {line}' if line else ''} is not Python: {error}"
        raise ConfigError.of("job", target, cause) from error


def defined(tree: ast.AST) -> dict[str, ast.AST | None]:
    """Return the names that a file's top level defines.

    Each has the node of its function or class; `*` stands for a star import.
    """
    names: dict[str, ast.AST | None] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(
                (alias.asname or alias.name.partition(".")[0], None) for alias in node.names
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update((each, None) for each in _assigned(node))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            names.update(defined(node))
    return names


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def check_args(target: str, signature: ast.arguments, args: Mapping[str, object]) -> None:
    """Raise ConfigError for an unknown keyword of the function, or a missing required one."""
    known = [arg.arg for arg in (*signature.args, *signature.kwonlyargs) if arg.arg != "config"]
    for name, value in args.items():
        if name not in known and signature.kwarg is None:
            guess = nearest(name, known, "job.args.")
            cause = f"job={target} has no argument {name}"
            key = f"job.args.{name}"
            shown = masked(value, key)
            raise ConfigError.of(key, shown, cause, guess=guess and f"{guess}={shown}", known=known)
    optional = {arg.arg for arg in signature.args[len(signature.args) - len(signature.defaults) :]}
    optional |= {
        arg.arg
        for arg, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        if default
    }
    if missing := [name for name in known if name not in optional and name not in args]:
        overrides = " ".join(f"job.args.{name}=VALUE" for name in missing)
        raise ConfigError.of("job", target, f"it needs {', '.join(missing)}", overrides)
