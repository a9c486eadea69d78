"""Linux namespaces that exist as long as the process that made them, and programs inside them.
(driver)"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOUNT, UTS, IPC, PID, NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x20000000,
    0x40000000,
)  # CLONE_NEW*, linux/sched.h
_LIBC = ctypes.CDLL(None, use_errno=True)
CAPTURED: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
}


class Space:
    """New namespaces of the given kinds and for processes. They end, with everything inside, when
    process 1 does.

    Process 1 is a `cat` that reads a pipe whose other end only this process holds. Whatever ends
    this process, even SIGKILL, closes the pipe and so ends the cat and everything else. The cat
    adopts orphans; since it ignores SIGCHLD, the kernel reaps them (a shell's `trap '' CHLD` does
    not last through exec). With zombies `ray stop` would take 23 s instead of 1.5.
    """

    def __init__(self, kinds: int, setup: str, folder: Path | None = None) -> None:
        script = f"set -e\n{setup}\necho up\nexec env --ignore-signal=CHLD cat"
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        # A separate session: otherwise Ctrl-C would end it before the `with` blocks do.
        self._one = _spawn(
            None, kinds, ["sh", "-c", script], cwd=folder, start_new_session=True, **pipes
        )
        self._kinds = kinds
        self._inside: list[subprocess.Popen[str]] = []
        assert self._one.stdout is not None
        if self._one.stdout.readline() != "up\n":
            _, output = self._one.communicate()
            raise RuntimeError(f"the namespaces could not be set up: {output.strip()}")
        self._fd = os.pidfd_open(self._one.pid)

    @property
    def pid(self) -> int:
        """The id of process 1, as seen from outside."""
        return self._one.pid

    @property
    def alive(self) -> bool:
        return self._one.poll() is None

    def spawn(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        self._inside = [process for process in self._inside if process.poll() is None]
        self._inside.append(_spawn(self._fd, self._kinds, argv, **options))
        return self._inside[-1]

    def ip(self, *lines: str) -> None:
        """Run lines of `ip` inside. Paths in them are those of the machine, so `netns
        /proc/<pid>/ns/net` works."""
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
        }
        with _spawn(self._fd, NET, ["ip", "-batch", "-"], **pipes) as process:
            _, output = process.communicate("\n".join(lines))
        if process.returncode:
            raise RuntimeError(f"ip {'; '.join(lines)}: {output.strip()}")

    def end(self) -> None:
        """Kill everything inside and wait for its end; do nothing the second time."""
        if self._one.returncode is not None:
            return
        self._one.kill()
        for process in self._inside:
            process.wait()  # the kernel lets process 1 end only when our children inside are reaped
        self._one.communicate()
        os.close(self._fd)


class CommandFailed(subprocess.CalledProcessError):
    """A command on a host failed. The message has the end of its output."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{(self.stdout or '')[-2000:]}{(self.stderr or '')[-4000:]}"


def finish(
    process: subprocess.Popen[str], *, check: bool = True, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Wait for a program started with popen(**CAPTURED). Raises CommandFailed, and TimeoutExpired
    after killing it."""
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise CommandFailed(process.returncode, process.args, stdout, stderr)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _spawn(
    space: int | None, kinds: int, argv: Sequence[str], **options: Any
) -> subprocess.Popen[str]:
    """Start a direct child in the namespaces of a process (its pidfd), or in new ones.

    nsenter would be a process in between: signals to it would not arrive, and killing it would
    leave the program running.
    """
    folder = options.pop("cwd", None) or os.getcwd()
    own = os.pidfd_open(os.getpid())

    def go() -> None:
        enter(space, kinds)
        os.chdir(folder)  # entering a mount namespace changes the directory to its /

    enter(space, PID)  # holds for the children of this thread only
    try:
        return subprocess.Popen(argv, text=True, preexec_fn=go, **options)
    finally:
        enter(own, PID)
        os.close(own)


def enter(space: int | None, kinds: int) -> None:
    """Move this thread into the namespaces of a process (its pidfd), or into new ones. Raises
    OSError."""
    if _LIBC.unshare(kinds) if space is None else _LIBC.setns(space, kinds):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
