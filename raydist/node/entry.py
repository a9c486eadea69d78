"""The first and last lines of a rank process: become the rank, run the job, say how it ended. (rank side)"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from raydist import backends, config, context, target
from raydist.node import insight, program
from raydist.node.channel import Channel

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to SIGKILL this process when the thread that made it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_rank(spec: Mapping[str, Any], log_fd: int) -> None:
    """Turn a fresh child into the rank: own session, own log, the planned environment, folder and import path."""
    os.setsid()  # a group of its own, so that it ends with everything it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for there, here in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(there, here)
    # line by line: a rank that dies has said what it said
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    faulthandler.enable()
    insight.answer_signal(f"{spec['value']}.stacks")
    os.environ.clear()
    os.environ.update(spec["env"])
    with contextlib.suppress(OSError):
        os.chdir(spec["cwd"])
    sys.path[:] = spec["sys_path"]
    sys.argv = list(spec["argv"])
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        # libgomp read the variable when the server loaded it
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def run_rank(
    spec: Mapping[str, Any], log_fd: int, channel_fd: int, beat_fd: int, own: int, lead: int, pmi_fd: int = -1
) -> NoReturn:
    """A whole rank, in a process of its own.

    `own`, `lead`: the snapshot memories, as in context.Context. `pmi_fd`: its way to MPICH's process manager, where
    mpirun gave it one.
    """
    become_rank(spec, log_fd)
    if "cpus" in spec:
        os.sched_setaffinity(0, spec["cpus"])
    if pmi_fd >= 0:
        os.set_inheritable(pmi_fd, True)
        os.environ["PMI_FD"] = str(pmi_fd)
    channel = Channel(socket.socket(fileno=channel_fd), beat_fd)
    me = context.Rank.from_env(os.environ)
    here = context.Context(me, emit=channel.emit, beat=channel.beat, flush=channel.flush, memory=(own, lead))
    context.enter(here)
    code = run_job(spec, channel.own)
    channel.flush()
    leave(code, whole=bool(spec.get("script")))


def run_program(spec: Mapping[str, Any], log_fd: int) -> NoReturn:
    """No rank: a program of its own in a fresh child, with a group, a log and an environment of its own."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for there, here in ((null, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(there, here)
        os.chdir(spec["cwd"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as error:  # nothing may unwind into the server that this was forked from
        os.write(2, f"{spec['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def run_job(spec: Mapping[str, Any], own: Callable[[int, float, float], None]) -> int:
    """Join, call the job, leave. The exit code: 0, what the job gave to sys.exit, or 1 for an exception.

    A script joins by itself, if it does: it counts as joined when it begins. It has no heartbeat until it reports.
    `own`: takes what is known of the rank's own work, as apart.Tell.
    """
    try:
        job = config.from_dict(spec["job"])
        if spec.get("script"):
            context.tell("joined", pid=os.getpid())
            watch(job, own)
            program.run(spec["script"], spec["argv"][1:])
            return 0
        context.phase("start")
        with backends.join(job.backend.name, job, os.environ):
            context.tell("joined", pid=os.getpid())
            watch(job, own)
            write_pickle(spec["value"], call(spec, job))
        return 0
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            return asked.code or 0
        print(asked.code, file=sys.stderr)
        tell_raised(asked)
        return 1
    except BaseException as error:
        error.__traceback__ = beyond_this_file(error.__traceback__)
        (sys.excepthook if spec.get("script") else show)(type(error), error, error.__traceback__)
        tell_raised(error)
        if not spec.get("script"):  # nobody calls a script who could catch it
            error.__traceback__ = None  # frames don't travel
            write_pickle(spec["value"] + ".error", error)
        return program.NOT_THERE if spec.get("script") and isinstance(error, program.Missing) else 1


def watch(job: config.Job, own: Callable[[int, float, float], None]) -> None:
    """Have the rank's own work timed, if it is asked for, and if there is somebody to be slower than."""
    if job.watch.slow and "torch" in sys.modules and context.rank().world_size > 1:
        from raydist import apart

        apart.watch(own)


def beyond_this_file(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that lead from here to the job's own lines."""
    ours = (__file__, target.__file__, program.__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames


def call(spec: Mapping[str, Any], job: config.Job) -> Any:
    """Call the job: a function by its name, or one that travelled with its arguments."""
    if spec["call"] is None:
        return target.call(target.load(job.job.target), job)
    import cloudpickle

    function, args, kwargs = cloudpickle.loads(Path(spec["call"]).read_bytes())
    return target.call(function, job, *args, **kwargs)


def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """As sys.excepthook does, unless somebody has put another there."""
    traceback.print_exception(error)


def tell_raised(error: BaseException) -> None:
    """Tell the exception as text."""
    context.tell(
        "raised",
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        step=context.here().step,
    )


def write_pickle(path: str, value: Any) -> None:
    """Leave a value for the seat; one that can't travel becomes a warning."""
    import cloudpickle

    if value is None:
        return
    try:
        Path(path).write_bytes(cloudpickle.dumps(value))
    except Exception as error:
        context.tell("warning", text=f"a {type(value).__name__} can't travel to the driver: {error}")


def leave(code: int, whole: bool = False) -> NoReturn:
    """End as a Python program does, without going back into the server that this process was forked from.

    `whole`: with all that an interpreter does last, also after a failure; a job that failed only has to be gone.
    """
    with contextlib.suppress(BaseException):
        if whole:
            program.finish(code)
        elif code == 0:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def main() -> NoReturn:
    """A rank that was spawned, not forked: the spec is a file, the five descriptors are inherited."""
    import json

    die_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text())
    run_rank(spec, *(int(fd) for fd in sys.argv[2:]))


if __name__ == "__main__":
    main()
