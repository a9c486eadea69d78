"""Find the program of `script=` before anything starts. (driver)"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from raydist.settings.lookup import find_module, missing_path, python_file
from raydist.settings.overrides import Override
from raydist.shared.errors import ConfigError
from raydist.shared.home import expand_home

FOR_JOBS = ("job", "model", "data", "optim", "train", "parallel")
FOR_PROGRAMS_TOO = ("train.gc", "train.fast")


def refuse_job_settings(script: str, overrides: Iterable[str]) -> None:
    """Raise ConfigError for a typed setting that only a job receives.

    Files of conf/ may serve both jobs and programs.
    """
    for override in map(Override.parse, overrides):
        if override.key.partition(".")[0] in FOR_JOBS and override.key not in FOR_PROGRAMS_TOO:
            name = override.key.rpartition(".")[2]
            cause = f"script={script} is a program, which does not get it"
            raise override.wrong(cause, f"args='--{name} {override.value}'")


def resolve_script(script: str) -> str:
    """Return a file as an absolute path.

    `-m module` and a bare command stay as they are: each node finds them itself.
    """
    if script.startswith("-m"):
        return _resolve_module(script)
    path = Path(os.path.abspath(expand_home("script", script)))
    if path.is_file():
        return str(path)
    first, _, args = script.partition(" ")
    if args and (shutil.which(first) or os.path.isfile(first)):
        cause = "it is a program without its arguments"
        raise ConfigError.of("script", script, cause, f"script={first} args='{args.strip()}'")
    if "/" not in script and not script.endswith(".py"):
        return script
    raise missing_path("script", script, path)


def _resolve_module(script: str) -> str:
    name = script.removeprefix("-m").strip()
    if not name or " " in name:
        example = 'script="-m package.module"'
        raise ConfigError.of(
            "script", script, "one module name follows -m; args= has its arguments", example
        )
    find_module("script", script, name)
    if file_of(f"-m {name}") is None:
        raise ConfigError.of(
            "script", script, f"{name} is a package without __main__", f'script="-m {name}.MODULE"'
        )
    return f"-m {name}"


def file_of(script: str) -> Path | None:
    """Return the Python file that a resolved script starts with; None if it is another command."""
    if not script.startswith("-m "):
        return Path(script) if script.endswith(".py") else None
    name = script.removeprefix("-m ")
    try:
        spec = find_module("script", script, name)
        if spec.submodule_search_locations is not None:
            spec = find_module("script", script, f"{name}.__main__")
    except ConfigError:
        return None
    return python_file(spec)


def script_stem(script: str) -> str:
    """Return the short name of a resolved script."""
    return script.rpartition(".")[2] if script.startswith("-m ") else Path(script).stem
