"""Start and end of a rank process: become the rank, run the job, report the end. (rank side)"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import signal
import socket
import sys
import termios
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TextIO

from raydist.messages.server import CommandSpec, ProgramSpec, RankSpec
from raydist.messages.wire import decode
from raydist.settings import config, profiled
from raydist.settings import in_place as in_place_settings
from raydist.shared import ending, kinds
from raydist.shared.whole_file import write_at_once
from raydist.worker import backends, context, garbage, program, stacks, target
from raydist.worker.channel import Channel
from raydist.worker.debugger import Debugger
from raydist.worker.in_place import InPlace

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1
"""Of Yama: see prctl(2)."""


def die_with_parent(parent: int) -> None:
    """Have Linux SIGKILL this process when the thread that forked it ends.

    `parent`: the id of that thread's process. If it has ended already, end now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)


def admit_py_spy() -> None:
    """Let any process of this user trace this one, also where Yama admits only its ancestors.

    py-spy is none: the agent starts it. The other rules of ptrace(2) stay.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_long(PR_SET_PTRACER_ANY), 0, 0, 0)


def become_rank(spec: RankSpec, log_fd: int) -> None:
    """Turn a fresh child into the rank: session, log, environment, folder and import path."""
    os.setsid()  # a separate process group, so that its children can be ended with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    redirect(log_fd)
    sys.stdout, sys.stderr = output_stream(1), output_stream(2)
    faulthandler.enable()
    stacks.answer_signal(f"{spec.value}.stacks")
    admit_py_spy()
    os.environ.clear()
    os.environ.update(spec.env)
    with contextlib.suppress(OSError):
        os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    sys.argv = list(spec.argv)
    # libgomp read the variable when the fork server loaded it. It may be a list, of a number for
    # each level of nesting.
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if "torch" in sys.modules and threads.isdecimal() and int(threads):
        sys.modules["torch"].set_num_threads(int(threads))


def output_stream(fd: int) -> TextIO:
    """Return a stream that writes to a descriptor, and leaves it open when the program closes it.

    As Python's own; otherwise the program's next file would get the descriptor, and C's output.
    """
    # Line by line, so that the output of a rank that dies is complete.
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class RankFiles(NamedTuple):
    """The open files that a rank's process begins with."""

    log: int
    channel: int
    beat: int
    own: int
    lead: int
    """`own`, `lead`: the snapshot memories, as in context.Context."""
    pmi: int = -1
    """The connection to MPICH's process manager, if mpirun passed one."""


def run_rank(spec: RankSpec, files: RankFiles) -> NoReturn:
    """Run a rank in a new process, from its beginning to its end."""
    # First, because memory lies on the NUMA node of the CPU that first touches it.
    not_bound = bind(spec.cpus)
    become_rank(spec, files.log)
    if files.pmi >= 0:
        os.set_inheritable(files.pmi, True)
        os.environ["PMI_FD"] = str(files.pmi)
    channel = Channel(socket.socket(fileno=files.channel), files.beat)
    rank = context.Rank.from_env(os.environ)
    context.enter(
        context.Context(
            rank,
            emit=channel.emit,
            beat=channel.beat,
            flush=channel.flush,
            memory=(files.own, files.lead),
        )
    )
    channel.debugger = Debugger(rank.rank, channel)
    channel.debugger.install()
    if "torch" in sys.modules:
        from raydist.worker import profiling

        channel.profiler = profiling.install(spec.value.removesuffix(".value"))
    if not_bound:
        context.warn(not_bound)
    code = run_in_rank(spec, channel)
    channel.flush()
    end_process(code, whole=bool(spec.script))


def bind(cpus: Sequence[int] | None) -> str:
    """Bind this process to these CPUs (None: do not bind); return why that failed, or ""."""
    try:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
    # A kubelet or a batch system has removed the CPUs since the node was probed.
    except OSError as error:
        listed = ",".join(map(str, cpus or ()))
        return (
            f"the rank is not bound to the CPUs {listed}, which it may no longer use "
            f"({error.strerror})"
        )
    return ""


def redirect(log_fd: int) -> None:
    """Make /dev/null the standard input of this process, and the log its output."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target_fd in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target_fd)


def run_program(spec: ProgramSpec | CommandSpec, log_fd: int, *others: int) -> NoReturn:
    """Run a program in a new child, with its own session, log and environment.

    `others`: where its errors go, if not to the log, and where it reads from, if it does. `log_fd`
    of a command with a terminal is that terminal.
    """
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        redirect(log_fd)
        if isinstance(spec, CommandSpec) and spec.terminal:
            take_terminal(log_fd)
            others = (log_fd, log_fd)
        for other, stream in zip(others, (2, 0), strict=False):
            os.dup2(other, stream)
        for fd in (log_fd, *others):  # a copy would keep the end of its input from it
            os.set_inheritable(fd, fd <= 2)
        os.chdir(spec.cwd)
        program.restore_signals()
        os.execvpe(spec.argv[0], spec.argv, spec.env)
    except BaseException as error:  # an exception must not unwind into the fork server's code
        os.write(2, f"{spec.argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def take_terminal(fd: int) -> None:
    """Make a terminal that of this process's session, whose leader it is.

    The signals by which terminals act may be ignored here: a run under nohup ignores SIGHUP.
    """
    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
    for number in (
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGWINCH,
    ):
        signal.signal(number, signal.SIG_DFL)


def run_in_rank(spec: RankSpec, channel: Channel) -> int:
    """Join, call the job, leave; return the exit code.

    It is 0, the code of the job's sys.exit, or 1 for an exception. A script joins by itself, or not
    at all, so it counts as joined when it begins. It has no heartbeat until it reports. `channel`:
    takes the measurements of its steps.
    """
    try:
        job = config.from_dict(json.loads(spec.job))
        if channel.debugger is not None:
            channel.debugger.post_mortem = job.watch.post_mortem
        if spec.script:
            context.current().checkpoint = job.checkpoint
            context.emit_event(kinds.Joined(rank=context.rank().rank, pid=os.getpid()))
            watch_steps(job, channel)
            arm_profile(job, channel)
            program.run_script(spec.script, list(spec.argv[1:]))
            return 0
        context.phase("start")
        me = context.rank()
        if me.world_size > 1 and not in_place_settings.why_not(job):
            context.current().in_place = InPlace(me.rank, channel.emit, channel.reply)
        with backends.join(job.backend.name, job, os.environ):
            context.emit_event(kinds.Joined(rank=context.rank().rank, pid=os.getpid()))
            watch_steps(job, channel)
            arm_profile(job, channel)
            write_pickle(spec.value, call_job(spec, job))
        return 0
    except SystemExit as exit_:
        if (event := context.exit_event(exit_)) is None:
            return 0
        if not event.code:
            print(exit_.code, file=sys.stderr)
        # Now: what runs while the interpreter exits closes connections, and the errors of the
        # other ranks may arrive before the end of this process.
        context.emit_event(event)
        return event.code or 1
    except BaseException as error:
        error.__traceback__ = frames_of_job(error.__traceback__)
        if spec.script:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            traceback.print_exception(error)
        if channel.debugger is not None and isinstance(error, Exception):
            channel.debugger.examine(error)  # first: the others are ended once it is known
        context.emit_event(kinds.Raised(rank=context.rank().rank, **context.exception_facts(error)))
        if not spec.script:  # a script has no caller that could catch the exception
            error.__traceback__ = None  # frames can't be pickled
            write_pickle(f"{spec.value}.error", error)
        return (
            program.NOT_FOUND if spec.script and isinstance(error, program.ProgramNotFound) else 1
        )


def watch_steps(job: config.Job, channel: Channel) -> None:
    """Time the rank's computation and garbage collection, if other ranks may wait for it."""
    if context.rank().world_size == 1:
        return
    if job.watch.slow and "torch" in sys.modules:
        from raydist.worker import step_timer

        lacks = step_timer.time_steps_of_process(channel.note_compute_time)
        if lacks and context.rank().rank == 0:
            context.warn(f"{lacks[0]}: slow ranks are not named")
        garbage.measure_pauses(channel.note_pauses)
    if job.train.gc:
        garbage.collect_together(job.train.gc)


def arm_profile(job: config.Job, channel: Channel) -> None:
    """Profile the steps of watch.profile."""
    steps = profiled.steps_to_profile(job.watch.profile)
    if steps is None:
        return
    if channel.profiler is not None:
        channel.profiler.arm(*steps)
    elif context.rank().rank == 0:
        context.warn("watch.profile has no effect: torch is not installed where the ranks run")


def frames_of_job(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without raydist's frames before the job's own."""
    own_files = (__file__, target.__file__, program.__file__)
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_code.co_filename in own_files
    ):
        frames = frames.tb_next
    return frames


def call_job(spec: RankSpec, job: config.Job) -> Any:
    """Call the job: a function by its name, or a pickled one with its arguments."""
    if spec.call is None:
        path = job.job.target.rpartition(":")[0]
        if path.endswith(".py"):
            target.forget_namesakes(os.path.dirname(path))
        return target.call_function(target.load_target(job.job.target), job)
    import cloudpickle

    function, args, kwargs = cloudpickle.loads(Path(spec.call).read_bytes())
    return target.call_function(function, job, *args, **kwargs)


def write_pickle(path: str, value: Any) -> None:
    """Write a pickled value to a file for the agent, whole or not at all; warn if it can't be."""
    import cloudpickle

    if value is None:
        return
    try:
        packed = cloudpickle.dumps(value)
    except Exception as error:
        context.warn(f"a {type(value).__name__} can't be pickled for the driver: {error}")
        return
    try:
        write_at_once(Path(path), packed)
    except OSError as error:  # the disk is full
        context.warn(f"a {type(value).__name__} can't be written for the driver: {error}")


def end_process(code: int, whole: bool = False) -> NoReturn:
    """End as a Python program does, without returning into the code of the fork server.

    `whole`: run all of an interpreter's finalization, also after a failure (for scripts). A failed
    job just exits.
    """
    try:
        try:
            if whole:
                program.finish(code)
            elif code == 0:
                ending.run_exit_functions(code)
        except BaseException:  # in the rank's log, where a person looks for output that is missing
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a full disk; the job has closed it
                stream.flush()
    finally:
        os._exit(code & 0xFF)


def main() -> NoReturn:
    """Run a spawned, not forked, rank: its spec is a file, its descriptors are inherited."""
    path, server, *fds = sys.argv[1:]
    # Again, because the kernel clears the setting if the interpreter has file capabilities.
    die_with_parent(int(server))
    spec = decode(Path(path).read_bytes())
    assert isinstance(spec, RankSpec), spec
    run_rank(spec, RankFiles(*map(int, fds)))


if __name__ == "__main__":
    main()
