"""Children of the fork server: forks, or a rank in a new interpreter if that is unsafe. (actor)"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from raydist.messages.server import RankSpec
from raydist.messages.wire import encode
from raydist.shared.errors import NO_MORE_PROCESSES
from raydist.worker.main import die_with_parent, redirect


def fork_child(close: Callable[[], None], become: Callable[[], NoReturn]) -> int:
    """Fork a child that ends with this process, calls `close`, then `become`; return its pid.

    It ignores SIGTERM, as the server does.
    """
    server = os.getpid()
    try:
        pid = os.fork()
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, NO_MORE_PROCESSES) from None
    if pid == 0:
        try:
            die_with_parent(server)
            close()
            become()
        except BaseException:
            traceback.print_exc()
        finally:  # an exception must not unwind into the server's own cleanup
            os._exit(1)
    return pid


def fork_rank(close: Callable[[], None], become: Callable[[], NoReturn]) -> int:
    """Fork a child as `fork_child` does, but one that SIGTERM ends from its first moment."""

    def with_sigterm() -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        become()

    # The server ignores SIGTERM. While blocked, a SIGTERM for the new rank waits until
    # the rank has its default handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return fork_child(close, with_sigterm)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def write_spec(spec: RankSpec) -> Path:
    """Write the spec where the new interpreter reads it."""
    path = Path(f"{spec.value}.spec")
    # The spec holds the environment.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encode(spec))
    return path


def execute_rank(spec: RankSpec, path: Path, fds: list[int], server: int) -> NoReturn:
    """Become a new interpreter that reads the spec at `path`, in a child of the fork server.

    The server forks this child as any other: it reaps the child itself, and the child ends with the
    server from its first moment. `subprocess` would reap it behind the server's back. `server`: the
    server's process id.
    """
    redirect(fds[0])
    for fd in fds:
        if fd >= 0:
            os.set_inheritable(fd, True)
    arguments = [str(path), str(server), *map(str, fds)]
    env = {**spec.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    os.execve(sys.executable, [sys.executable, "-m", "raydist.worker.main", *arguments], env)
