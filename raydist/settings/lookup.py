"""Find files and modules that settings name without importing them, or suggest a name. (driver)"""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from raydist.settings.config import TRACKERS, Job
from raydist.settings.secrets import masked
from raydist.shared.errors import ConfigError, RaydistError, nearest
from raydist.shared.home import expand_home
from raydist.state import object_store


def override(key: str, value: str) -> str:
    """Format `key=value` or `--flag value` as typed in a shell."""
    text = f'"{value}"' if " " in value else value
    return f"{key} {text}" if key.startswith("-") else f"{key}={text}"


def missing_path(
    key: str, value: str, path: Path, *suggestions: str, folder: bool = False
) -> ConfigError:
    """Return the error for a path that does not exist.

    It suggests the name nearest to the first part of the path that does not exist. `folder`: a
    folder is wanted, not a file. `suggestions`: what to type if no name is near.
    """
    path = Path(os.path.abspath(path))
    while not path.parent.is_dir():
        path, folder = path.parent, True
    close = nearest(
        path.name, [each.name for each in path.parent.iterdir() if each.is_dir() == folder]
    )
    guess = override(key, value.replace(path.name, close)) if close else None
    cause = f"there is no {'folder' if folder else 'file'} {path}"
    return ConfigError.of(key, value, cause, *(() if guess else suggestions), guess=guess)


def find_module(key: str, value: str, name: str) -> ModuleSpec:
    """Return the spec of module `name`, which is a part of `value`.

    ConfigError: there is no such module.
    """
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number, part in enumerate(parts):
        path = list(spec.submodule_search_locations or []) if spec else [os.getcwd(), *sys.path]
        # importlib.util.find_spec would import the packages that contain the module.
        package, spec = spec, PathFinder.find_spec(".".join(parts[: number + 1]), path)
        if spec is None:
            siblings = {each.name for each in pkgutil.iter_modules(path)}
            close = nearest(part, siblings if package else siblings | sys.stdlib_module_names)
            guess = ".".join([*parts[:number], close, *parts[number + 1 :]]) if close else None
            cause = (
                f"there is no module {'.'.join(parts[: number + 1])}, as seen from {os.getcwd()}"
            )
            raise ConfigError.of(
                key, value, cause, guess=guess and override(key, value.replace(name, guess))
            )
    assert spec is not None, name
    return spec


def python_file(spec: ModuleSpec | None) -> Path | None:
    """Return the Python file of a module; None for a compiled or built-in module."""
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def check_files(job: Job) -> None:
    """Raise ConfigError if something that the settings name does not exist.

    That is a folder, a file, a store or a checkpoint.
    """
    try:
        _check_named(job)
    except PermissionError as error:
        raise ConfigError(f"{error.filename}: it cannot be read ({error.strerror})") from error


def _check_named(job: Job) -> None:
    _check_storage(job.storage)
    _check_trackers(job)
    _check_resume(job)
    _check_command(job.notify.command)
    if job.working_dir and not (folder := expand_home("working_dir", job.working_dir)).is_dir():
        raise missing_path("working_dir", job.working_dir, folder, "working_dir=.", folder=True)
    if job.working_dir and folder.resolve() == Path("/"):
        raise ConfigError.of(
            "working_dir", job.working_dir, "it would send the whole disk", "working_dir=."
        )
    for line in job.pip:
        if line.endswith(".txt") and not Path(line).is_file():
            raise missing_path("pip", f"[{line}]", Path(line), "pip=[PACKAGE,PACKAGE]")


def _check_storage(storage: str) -> None:
    """Check what is certain before anything is created.

    Whether the storage can be written shows when the run is reserved there.
    """
    object_store.check_url("storage", storage)
    kind = object_store.scheme(storage)
    if kind in ("http", "https"):
        cause = "a web server cannot be written to"
        raise ConfigError.of(
            "storage", storage, cause, "storage=FOLDER", "storage=s3://BUCKET/FOLDER"
        )
    path = expand_home("storage", storage)
    if storage and not kind and path.exists() and not path.is_dir():
        raise ConfigError.of("storage", storage, "it is a file", "storage=FOLDER")


def _check_trackers(job: Job) -> None:
    """Refuse a tracker whose library is missing, with the command that installs it."""
    for name in job.track:
        if PathFinder.find_spec(TRACKERS[name]) is None:
            install = f"pip install 'raydist[{name}]'"
            raise ConfigError(
                f"track={name}: {TRACKERS[name]} is not installed here; run {install}",
                "track",
                name,
                install,
            )


def _check_command(command: str) -> None:
    """Refuse a command that the shell cannot read, or whose program it does not find."""
    if not command:
        return

    def wrong(cause: str) -> ConfigError:
        example = "notify.command='mail -s \"$RAYDIST_NOTIFY_TITLE\" ADDRESS'"
        return ConfigError.of("notify.command", masked(command), cause, example)

    read = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
    if read.returncode:
        raise wrong(f"the shell cannot read it ({read.stderr.strip().rpartition(': ')[2]})")
    program = re.match(r"[\w./+-]+(?=\s|$)", command)
    if program is not None:
        found = subprocess.run(
            ["sh", "-c", 'command -v -- "$1"', "sh", program[0]], stdout=subprocess.DEVNULL
        )
        if found.returncode:
            raise wrong(f"there is no program {program[0]} on this machine")


def _check_resume(job: Job) -> None:
    if job.resume in ("none", "auto"):
        return
    from raydist.state import run_checkpoints

    object_store.check_url("resume", job.resume)
    with object_store.environment(job.env):
        try:
            run_checkpoints.find_resume(job.resume, Path())
        except RaydistError:
            raise
        except Exception as error:
            cause = f"it cannot be read ({object_store.reason(error)})"
            raise ConfigError.of("resume", job.resume, cause, "resume=none") from error
