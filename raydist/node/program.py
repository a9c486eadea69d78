"""A program that somebody has already, run in a rank's process as if typed there. (rank side)"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def run(argv: Sequence[str]) -> None:
    """Run a Python file here, as `python file.py` would; become any other command, and never come back."""
    if not argv[0].endswith(".py"):
        execute(argv)
    atexit.register(leave_mpi)
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


def leave_mpi() -> None:
    """Leave MPI and end: what mpi4py does when an interpreter is torn down, which a forked rank's never is."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    # MPICH takes leave of its process manager in a handler of C's exit, and is held for killed without it
    ctypes.CDLL(None).exit(0)


def execute(argv: Sequence[str]) -> NoReturn:
    """Become the command, as a shell would find it; 127 if there is none, as a shell would say."""
    sys.stdout.flush()
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
