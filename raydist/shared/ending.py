"""End a process: a command, or a fork without the interpreter's teardown. (either side)

Python's private functions that raydist calls are in this file.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
ARCHIVES = (
    ("bz2", "BZ2File"),
    ("gzip", "GzipFile"),
    ("lzma", "LZMAFile"),
    ("zipfile", "ZipFile"),
)
WAIT_S = 10.0
"""The longest time that a command waits at its end for cleanup that somebody needs.

ray.shutdown takes 0.3 s, and seconds on a busy machine. Only at its end does it send what was
counted for Prometheus since the last report, such as that the run failed.
"""
BRIEFLY_S = 0.05
"""The same for cleanup that nobody needs: it is a fifth of a short command on a Ray that is up."""

COLLECT_AT = 50_000
"""New objects between garbage collections in a command, instead of 700.

A command imports much and makes few cycles. This saves 0.1 s of the 1.3 s of CPU of a command that
imports Ray.
"""

_command = False
"""Whether this process runs a command, and ends with it."""
_threads: list[threading.Thread] = []
_needed = False
"""Whether somebody needs the cleanup."""


def run_exit_functions(code: int) -> None:
    """Join threads and call atexit functions, as an interpreter does before its teardown.

    For a fork of the fork server: a normal exit would return into the server's code. Python has no
    public function for it; multiprocessing calls these two in its own forks. In a Python without
    them this function does not return: it ends the process with `code` as an interpreter does,
    teardown included, which takes a rank 0.1 s longer.
    """
    join_threads = getattr(threading, "_shutdown", None)
    call_functions = getattr(atexit, "_run_exitfuncs", None)
    if join_threads is None or call_functions is None:
        atexit.register(flush_files)  # the frames of the server keep files from being closed
        ctypes.pythonapi.Py_Exit(code & 0xFF)
        return
    try:
        join_threads()
    except BaseException:  # from a signal handler; an interpreter prints it and continues too
        traceback.print_exc()
    call_functions()


def finalize(code: int) -> None:
    """Do what an interpreter does before its teardown, and flush all files.

    `code`: the exit code of the process.
    """
    run_exit_functions(code)
    flush_files()
    close_archives()
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


def discard(stream: int) -> None:
    """Discard what is still printed to a descriptor that nobody reads any more.

    Each write would fail, and so would the flush at Python's end, which makes its exit code 120.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream)
    os.close(null)


def close_archives() -> None:
    """Close all compressed files and archives: closing them writes their last part.

    An interpreter closes them as it deletes them.
    """
    kinds = [
        getattr(module, name)
        for module, name in ((sys.modules.get(one), two) for one, two in ARCHIVES)
        if module is not None
    ]
    found = [each for each in gc.get_objects() if issubclass(type(each), tuple(kinds))]
    for each in found:
        try:
            each.close()
        except (OSError, ValueError) as error:
            print(f"{each!r} could not be written: {error}", file=sys.stderr)
    if found:
        flush_files()


def tidy_up(work: Callable[[], None]) -> None:
    """Call `work`, which only cleans up.

    If the process ends with a command, `work` runs in a thread while the command continues.
    """
    if not _command:
        work()
        return
    atexit.unregister(work)  # ray.shutdown would be called a second time
    _threads.append(threading.Thread(target=work, name="raydist-tidy-up", daemon=True))
    _threads[-1].start()


def need_cleanup() -> None:
    """Have the command wait at its end until its cleanup is done."""
    global _needed
    _needed = True


def tidied() -> None:
    """Wait until all cleanup is done, because the process continues."""
    while _threads:
        _threads.pop().join()


def is_command() -> bool:
    """Report whether this process only runs a command."""
    return _command


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Call main(), then end the process with the exit code that it returns."""
    global _command
    _command = True
    gc.set_threshold(COLLECT_AT)
    code = main()
    for thread in _threads:
        thread.join(WAIT_S if code or _needed else BRIEFLY_S)
        if thread.is_alive():  # its threads might block the teardown
            finalize(code)
            os._exit(code)
    sys.exit(code)
