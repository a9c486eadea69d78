"""Processes: signalled, waited for, ended with all that they started; what one is doing, and what it left. (actor)"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path


def kill(pid: int, number: int) -> None:
    """A signal to a child of ours; SIGKILL to its whole process group, and to it alone if it has none yet."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def wait_one() -> tuple[int, int] | None:
    """(pid, status) of a child that has ended, None if there is none now."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return pid, status
    return None


def end_session(session: int) -> None:
    """SIGKILL what a dead rank started and left: loader workers, subprocesses. They are our children by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in children_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def end_children() -> None:
    """SIGKILL whatever is a child of ours, and what thereby becomes one."""
    while children := children_of(os.getpid()):
        for pid in children:
            kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listed:
            return [int(child) for child in listed.read().split()]
    except FileNotFoundError:  # not Linux, or a kernel without the file: groups and sessions are all we can end
        return []


def recorded(file: Path | None) -> dict[str, str]:
    """What torch.distributed.elastic's @record left of an error: type, message, traceback; nothing where it did not."""
    try:
        found = json.loads(file.read_text(errors="replace"))["message"] if file else {}
    except (OSError, ValueError, KeyError):
        return {}
    if isinstance(found, str):  # what torchrun's own agent writes for a signal
        return {"type": "", "message": found, "traceback": ""}
    kind, _, message = str(found.get("message", "")).partition(": ")
    frames = found.get("extraInfo", {}).get("py_callstack", "")
    return {"type": kind, "message": message, "traceback": str(frames)} if found else {}


def state_of(pid: int) -> tuple[str, float]:
    """The state of a process in Linux's letter, and the seconds of CPU that it has used; ("", 0.0) where unknown."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return after_name[0], (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        told = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in told.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)
