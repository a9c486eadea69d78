"""End a process without the interpreter's teardown: a command, or a fork. (either side)"""

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
"""The longest time that a command waits at its end for cleanup.

ray.shutdown takes 0.3 s, and seconds on a busy machine. Only at its end does it send what was
counted for Prometheus since the last report, such as that the run failed.
"""

COLLECT_AT = 50_000
"""New objects between garbage collections in a command, instead of 700.

A command imports much and makes few cycles.
"""

_command = False
"""Whether this process runs a command, and ends with it."""
_beside: list[threading.Thread] = []


def finalize() -> None:
    """Do what an interpreter does before its teardown.

    Join threads, call atexit functions, flush files.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(flush_files)  # once, and after all others
    atexit._run_exitfuncs()
    flush_files()
    ctypes.CDLL(None).fflush(None)  # C's own streams


def flush_files() -> None:
    """Flush all open files, as the interpreter's teardown does if gc.freeze() was not called."""
    # gc.get_objects() has no object from before gc.freeze().
    for each in (
        sys.stdout,
        sys.stderr,
        *gc.get_objects(),
    ):
        # isinstance would call __class__ of proxies, which may warn.
        if issubclass(type(each), FILES):
            try:
                each.flush()
            except ValueError:
                continue  # it is already closed
            except OSError as error:
                print(f"{each.name} could not be written: {error}", file=sys.stderr)


def tidy_up(work: Callable[[], None]) -> None:
    """Call `work`, which only cleans up.

    If the process ends with a command, `work` runs in a thread while the command continues.
    """
    if not _command:
        work()
        return
    atexit.unregister(work)  # ray.shutdown would be called a second time
    _beside.append(threading.Thread(target=work, name="raydist-tidy-up", daemon=True))
    _beside[-1].start()


def tidied() -> None:
    """Wait until all cleanup is done, because the process continues."""
    while _beside:
        _beside.pop().join()


def is_command() -> bool:
    """Report whether this process only runs a command."""
    return _command


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Call main(), then end the process with the exit code that it returns."""
    global _command
    _command = True
    gc.set_threshold(COLLECT_AT)
    code = main()
    if _beside:
        finalize()
        _beside.pop().join(WAIT_S)
        os._exit(code)
    sys.exit(code)
