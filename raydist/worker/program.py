"""Runs an existing program (script=) in a rank's process, as a shell would. (rank side)"""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import io
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import NoReturn

from raydist.shared.ending import finalize
from raydist.worker import context, target

NOT_FOUND = 127
"""A shell's exit code for a program that it does not find."""
ADVICE = "set working_dir=. to send this folder, or put the file where all nodes see it"


class ProgramNotFound(FileNotFoundError):
    """The program does not exist on this host, or is not executable."""


def run_script(script: str, args: Sequence[str]) -> None:
    """Run a Python file or `-m module` in this process as Python would; exec any other command."""
    if not script.startswith("-m ") and not script.endswith(".py"):
        execute([script, *args])
    reset_interpreter()
    sys.modules["__main__"] = main = ModuleType("__main__")
    if "__mp_main__" in sys.modules:
        # multiprocessing's name of the main module, by which it unpickles results of spawned
        # processes
        sys.modules["__mp_main__"] = main
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}  # noqa: RUF063 - it is set here, not read
    if script.startswith("-m "):
        run_module(script[3:].strip(), args, main)
    else:
        run_file(script, args, main)


def reset_interpreter() -> None:
    """Replace the state that a fork has from the fork server by that of a new interpreter."""
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        # both took a seed when the server imported them, so all forks would draw the same numbers
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)


def run_file(script: str, args: Sequence[str], main: ModuleType) -> None:
    """Run `python script args`.

    The script's folder is first on sys.path, and `__spec__` is None, so that multiprocessing finds
    it.
    """
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise ProgramNotFound(f"there is no {path} on {socket.gethostname()}: {ADVICE}")
    sys.argv = [script, *args]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    target.forget_namesakes(sys.path[0])
    facts = {
        "__file__": path,
        "__cached__": None,
        "__spec__": None,
        "__loader__": SourceFileLoader("__main__", path),
    }
    main.__dict__.update(facts)
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str, args: Sequence[str], main: ModuleType) -> None:
    """Run `python -m name args`."""
    sys.argv = ["-m", *args]
    sys.orig_argv = [sys.executable, "-m", name, *args]
    sys.path.insert(0, os.getcwd())
    target.forget_namesakes(sys.path[0])
    spec = find_program(name)
    get_code = getattr(spec.loader, "get_code", None)
    if get_code is None or (code := get_code(spec.name)) is None:  # an extension module
        raise ProgramNotFound(f"{name} on {socket.gethostname()} is no module of Python code")
    sys.argv[0] = str(spec.origin)
    facts = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__spec__": spec,
        "__loader__": spec.loader,
        "__package__": spec.parent,
    }
    # Not runpy.run_module: it forgets `main` at the end of the code, when threads and exit
    # functions of the program still pickle its classes.
    main.__dict__.update(facts)
    exec(code, main.__dict__)


def find_program(name: str) -> ModuleSpec:
    """Return the module that `python -m name` runs: of a package, that is its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a package lacks something else
            raise
        spec = None
    if spec is None:
        raise ProgramNotFound(f"there is no module {name} on {socket.gethostname()}: {ADVICE}")
    return spec


def execute(argv: Sequence[str]) -> NoReturn:
    """Exec a command, looked up as a shell would."""
    if shutil.which(argv[0]) is None:
        host = socket.gethostname()
        if os.path.exists(argv[0]):
            raise ProgramNotFound(
                f"{os.path.abspath(argv[0])} on {host} is not executable: chmod +x {argv[0]}"
            )
        raise ProgramNotFound(f"there is no program {argv[0]} on {host}: {ADVICE}")
    sys.stdout.flush()
    # A Python below a shell script would write its lines only when it ends.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    restore_signals()
    os.execvp(argv[0], list(argv))


def restore_signals() -> None:
    """Restore the default action of signals that Python ignores, because exec does not.

    For example, `yes | head` ends by SIGPIPE.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def finish(code: int) -> None:
    """Finalize as an interpreter does. `code`: the exit code."""
    finalize(code)
    if code == 0:  # after a failure the other ranks do not call MPI_Finalize
        leave_mpi()


def leave_mpi() -> None:
    """Call MPI_Finalize and exit, as mpi4py does when an interpreter shuts down.

    A fork has no such shutdown.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        context.phase("finalize")
        mpi.Finalize()
    # MPICH signs off from its process manager in an exit handler of C; without it the rank counts
    # as killed
    ctypes.CDLL(None).exit(0)
