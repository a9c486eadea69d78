"""What this node lets a child of the agent trace: Yama, seccomp, capabilities, users. (actor)"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from raydist.shared import sysfs
from raydist.shared.stack_ways import Tracing

CAP_SYS_PTRACE = 19
FILTER = "2"
"""The mode of a process with a seccomp filter, in /proc/PID/status."""
TRIAL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for call in (libc.ptrace, 0x4206, 2**31 - 1), (libc.process_vm_readv, 2**31 - 1, 0, 0):
    ctypes.set_errno(0)
    call[0](*map(ctypes.c_long, (*call[1:], 0, 0, 0)))
    assert ctypes.get_errno() in (0, errno.ESRCH)
"""
"""Ask for a process that can't exist (PTRACE_SEIZE): only a filter gives another error than that,
or kills the caller."""


def read_tracing(pid: int = 0, root: Path = Path("/")) -> Tracing:
    """Return what decides whether py-spy may trace a rank.

    `pid`: the rank; 0: one that runs as this process's user.
    """
    own = sysfs.read_text(root / "proc/self/status")
    user = os.geteuid()
    rank = sysfs.read_text(root / f"proc/{pid}/status") if pid else ""
    capabilities = int(_field(own, "CapEff") or "0", 16)
    return Tracing(
        py_spy=find_py_spy() is not None,
        yama=sysfs.read_number(root / "proc/sys/kernel/yama/ptrace_scope", 0),
        capable=bool(capabilities >> CAP_SYS_PTRACE & 1),
        filtered=_field(own, "Seccomp") == FILTER and _refused(),
        agent_user=user,
        rank_user=int(_field(rank, "Uid") or user),
    )


def find_py_spy() -> str | None:
    """Return the path of py-spy: the one next to this Python, or the one on PATH."""
    folders = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.defpath}"
    return shutil.which("py-spy", path=folders) or shutil.which("py-spy")


def _refused() -> bool:
    """Return whether the filter refuses what py-spy does; in a child, which it may kill."""
    command = [sys.executable, "-S", "-c", TRIAL]
    # -c imports from the current folder first, which may be /tmp.
    done = subprocess.run(command, cwd="/", stderr=subprocess.DEVNULL, check=False)
    return done.returncode != 0


def _field(status: str, name: str) -> str:
    """Return the first value of a field of /proc/PID/status; empty if there is none."""
    match = re.search(rf"^{name}:\s*(\S+)", status, re.MULTILINE)
    return match[1] if match else ""
