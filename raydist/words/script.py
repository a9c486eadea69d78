"""The program of `script=`: found before anything starts. (driver)"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from raydist import script
from raydist.config import Job
from raydist.errors import ConfigError, nearest


def settle(job: Job) -> str:
    """A file's absolute path; `-m module` and a bare name stay, each host finds them on its own."""
    script.check(job.args, job.init_method)
    if job.script.startswith("-m"):
        return find_module(job.script)
    path = Path(os.path.abspath(Path(job.script).expanduser()))
    if path.is_file():
        return str(path)
    if "/" not in job.script and not job.script.endswith(".py"):
        return job.script
    there = [each.name for each in path.parent.iterdir() if each.is_file()] if path.parent.is_dir() else []
    close = nearest(path.name, there)
    offer = f"; did you mean script={job.script.removesuffix(path.name)}{close}?" if close else ""
    raise ConfigError(f"script={job.script}: there is no file {path}{offer}")


def find_module(words: str) -> str:
    """`-m package.module`, which must be there as `python -m` would find it; nothing is imported."""
    name = words.removeprefix("-m").strip()
    if not name or " " in name:
        raise ConfigError(f'script="{words}": say script="-m package.module", and args= for what follows it')
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if locate(parts[:count]) is None:
            missing = ".".join(parts[:count])
            raise ConfigError(f'script="{words}": there is no module {missing}, as seen from {os.getcwd()}')
    if file_of(f"-m {name}") is None:
        raise ConfigError(f'script="{words}": {name} is a package without a __main__; say script="-m {name}.MODULE"')
    return f"-m {name}"


def locate(parts: Sequence[str]) -> ModuleSpec | None:
    """The spec of a module. importlib.util.find_spec would import the packages that it is in."""
    spec, path = None, [os.getcwd(), *sys.path]
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def file_of(settled: str) -> Path | None:
    """The Python file that a script begins with; None where it is none."""
    if not settled.startswith("-m "):
        return Path(settled) if settled.endswith(".py") else None
    parts = settled.removeprefix("-m ").split(".")
    spec = locate(parts)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = locate([*parts, "__main__"])
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def stem(settled: str) -> str:
    """The short name of a script."""
    return settled.rpartition(".")[2] if settled.startswith("-m ") else Path(settled).stem
