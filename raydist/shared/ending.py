"""The end of a process without the interpreter's tear-down: of a command, of a fork. (either
side)"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
WAIT_S = 10.0
"""Longest time that a command waits at its end for what tidies up: ray.shutdown takes 0.3 s, on a
busy machine seconds, and only at its end it sends what was counted for Prometheus since the last
report, such as that the run has failed."""

COLLECT_AT = 50_000
"""New objects after which a command's garbage is collected, instead of 700: it imports much, and
makes few cycles."""

_command = False
"""This process runs a command, and ends with it."""
_beside: list[threading.Thread] = []


def finalize() -> None:
    """Finalize as an interpreter does before its tear-down: join threads, call atexit functions,
    flush files."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(flush_files)  # once, and after all others
    atexit._run_exitfuncs()
    flush_files()
    ctypes.CDLL(None).fflush(None)  # C's own streams


def flush_files() -> None:
    """Flush all open files, as the interpreter's tear-down does where gc.freeze() was not
    called."""
    for each in (
        sys.stdout,
        sys.stderr,
        *gc.get_objects(),
    ):  # which has none from before gc.freeze()
        if issubclass(
            type(each), FILES
        ):  # isinstance would call __class__ of proxies, which may warn
            try:
                each.flush()
            except ValueError:
                continue  # it is closed already
            except OSError as error:
                print(f"{each.name} could not be written: {error}", file=sys.stderr)


def tidy_up(work: Callable[[], None]) -> None:
    """Call `work`, which only tidies up; where the process ends with a command, beside what the
    command still does."""
    if not _command:
        work()
        return
    atexit.unregister(work)  # ray.shutdown would be called a second time
    _beside.append(threading.Thread(target=work, name="raydist-tidy-up", daemon=True))
    _beside[-1].start()


def tidied() -> None:
    """Wait until all that tidies up is done: the process goes on."""
    while _beside:
        _beside.pop().join()


def is_command() -> bool:
    """Whether this process runs a command, and nothing else."""
    return _command


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Call main(), and end the process with the exit code that it returns."""
    global _command
    _command = True
    gc.set_threshold(COLLECT_AT)
    code = main()
    if _beside:
        finalize()
        _beside.pop().join(WAIT_S)
        os._exit(code)
    sys.exit(code)
