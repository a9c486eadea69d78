"""A program that somebody has already, run in a rank's process as if typed there. (rank side)"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import io
import os
import random
import runpy
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NoReturn

FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
NOT_THERE = 127
"""The exit code that a shell has for a program that is not there."""
ADVICE = "say working_dir=. to send this folder, or put it where all nodes see it"


class Missing(FileNotFoundError):
    """The program itself is not there, on this host."""


def run(script: str, args: Sequence[str]) -> None:
    """Run a Python file or `-m module` here, as Python itself would; become any other command, and never come back."""
    if not script.startswith("-m ") and not script.endswith(".py"):
        execute([script, *args])
    become_fresh()
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}  # noqa: RUF063 - it is made, not asked for
    if script.startswith("-m "):
        run_module(script[3:].strip(), args)
    else:
        run_file(script, args, main)


def become_fresh() -> None:
    """What a fork has of the server, and a fresh interpreter has not."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # both took a seed when the server imported them: all forks would draw the same
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # the launcher was begun with -m, which puts its folder there; `python file.py` does not
    sys.path[:] = [path for path in sys.path if path in named or path not in ("", os.getcwd())]


def run_file(script: str, args: Sequence[str], main: ModuleType) -> None:
    """`python script args`: with its own folder first on sys.path, and no spec, so that multiprocessing finds it."""
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise Missing(f"there is no {path} on {socket.gethostname()}: {ADVICE}")
    sys.argv = [script, *args]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    facts = {"__file__": path, "__cached__": None, "__spec__": None, "__loader__": SourceFileLoader("__main__", path)}
    main.__dict__.update(facts)
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str, args: Sequence[str]) -> None:
    """`python -m name args`."""
    sys.argv = ["-m", *args]
    sys.orig_argv = [sys.executable, "-m", name, *args]
    sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def execute(argv: Sequence[str]) -> NoReturn:
    """Become the command, as a shell would find it."""
    if shutil.which(argv[0]) is None:
        there = os.path.exists(argv[0])
        why = f"{os.path.abspath(argv[0])} is no program (chmod +x?)" if there else f"there is no program {argv[0]}"
        raise Missing(f"{why} on {socket.gethostname()}" + ("" if there else f": {ADVICE}"))
    sys.stdout.flush()
    os.execvp(argv[0], list(argv))


def finish(code: int) -> None:
    """What an interpreter does last, whatever its exit code: end threads, call what wants to be called, write files."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        # a file that was never closed would lose what it has not written: this process has no tear-down
        if issubclass(type(each), FILES):  # isinstance would ask objects that only pretend, and may warn
            with contextlib.suppress(Exception):
                each.flush()
    ctypes.CDLL(None).fflush(None)  # those of C
    if code == 0:  # after a failure the other ranks are not there to leave together
        leave_mpi()


def leave_mpi() -> None:
    """Leave MPI and end well: what mpi4py does when an interpreter is torn down, which a forked rank's never is."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    # MPICH takes leave of its process manager in a handler of C's exit, and is held for killed without it
    ctypes.CDLL(None).exit(0)
