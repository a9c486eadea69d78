"""Signals, awaits and ends processes and their children; reads their state and error. (actor)

It reads /proc itself: importing psutil takes 0.03 s in each actor and each fork server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from raydist.messages.agent import ProcessId, RecordedError
from raydist.worker.heartbeat import STACKS_SIGNAL

SIGNAL_S = 0.2
"""Seconds that a rank's signal handler has to write its stack."""


def kill(pid: int, number: int, group: bool = False) -> bool:
    """Send a signal to a child; return False if it belongs to another user, as `sudo` does.

    SIGKILL, or with `group` any signal, goes to the child's process group, or to the child alone if
    it has not made one yet.
    """
    try:
        if (group or number == signal.SIGKILL) and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def wait_one() -> tuple[int, int] | None:
    """Return (pid, wait status) of a child that has ended; None if there is none."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return pid, status
    return None


def end_session(session: int) -> None:
    """SIGKILL the processes that a dead rank left, such as DataLoader workers.

    This process, a subreaper, is now their parent. Those of another user stay.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in children_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                # Its group is of the same session: the job of a shell has its own children in it.
                os.killpg(os.getpgid(pid), signal.SIGKILL)


def end_children(within: float) -> bool:
    """SIGKILL all children, also those that a killed child leaves; return whether all have ended.

    Orphans become children of this subreaper. Those of another user do not count. `within`:
    seconds. The kernel may be unable to end a child that waits for a dead file server or a lost GPU
    (state D).
    """
    until = time.monotonic() + within
    while kill_children():
        if wait_one() is None:
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
    return True


def kill_children() -> bool:
    """SIGKILL all children; return whether any got it that had not been waited for."""
    signalled = False
    for pid in children_of(os.getpid()):
        signalled |= kill(pid, signal.SIGKILL)
    return signalled


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listed:
            return [int(child) for child in listed.read().split()]
    # Not Linux, or a kernel without the file: only groups and sessions can be ended.
    except FileNotFoundError:
        return []


def recorded_error(file: Path | None) -> RecordedError | None:
    """Return the error that torch.distributed.elastic's @record wrote to a file; None if none."""
    try:
        record = json.loads(file.read_text(errors="replace"))["message"] if file else {}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(record, str):  # torchrun's agent writes a text for a signal
        return RecordedError("", record, "")
    if not isinstance(record, dict):  # a program may write anything there
        return None
    kind, _, message = str(record.get("message", "")).partition(": ")
    extra = record.get("extraInfo")
    frames = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return RecordedError(kind, message, str(frames)) if record else None


def process_state(pid: int) -> tuple[str, float]:
    """Return the state letter of a process (proc(5)), and the CPU seconds that it has used.

    Returns ("", 0.0) if they are unknown.
    """
    return _read_state(Path(f"/proc/{pid}/stat"))


def main_thread_cpu(pid: int) -> float:
    """Return the CPU seconds that the main thread of a process has used; 0.0: unknown."""
    return _read_state(Path(f"/proc/{pid}/task/{pid}/stat"))[1]


def wants_cpu(pid: int) -> bool:
    """Return whether a thread of a process runs, or waits for a CPU."""
    with contextlib.suppress(OSError):  # it has just ended
        threads = Path(f"/proc/{pid}/task").iterdir()
        return any(_read_state(thread / "stat")[0] == "R" for thread in threads)
    return False


def identify(pid: int) -> ProcessId:
    """Return the identity of the process that has this pid now."""
    fields = _stat_fields(Path(f"/proc/{pid}/stat"))
    return ProcessId(pid, int(fields[19]) if fields else 0)


def signal_process(process: ProcessId, number: int) -> bool:
    """Send a signal, as `kill` does, to a process that need not be a child; return whether it can.

    A process that has been reaped gets none, and neither does a later one with its pid.
    """
    if process.since and process == identify(process.pid):
        return kill(process.pid, number)
    return False


def holds_something(process: ProcessId) -> bool:
    """Return whether a process may have memory and devices: a zombie has them in other threads."""
    fields = _stat_fields(Path(f"/proc/{process.pid}/stat"))
    if not fields or process.since != int(fields[19]):
        return False
    state, threads = fields[0], int(fields[17])
    return threads > 1 or state not in "ZX"


def session_members(rank: ProcessId) -> list[ProcessId]:
    """Return a rank and the processes that it or they started, except in sessions of their own.

    The kernel gives its pid to no other process while they live; if another one has it, there are
    none.
    """
    if not rank.since or identify(rank.pid).since not in (0, rank.since):
        return []
    members = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(name)) == rank.pid:
                members.append(identify(int(name)))
    return members


async def end_all_of(processes: Iterable[ProcessId], within_s: float) -> ProcessId | None:
    """SIGKILL processes, which need not be children, and wait until they hold nothing any more.

    Returns one that still does after `within_s` seconds, or None. Those of another user, such as
    what `sudo` has started, are left alone.
    """
    until = time.monotonic() + within_s
    for each in [each for each in processes if signal_process(each, signal.SIGKILL)]:
        while holds_something(each):
            if time.monotonic() > until:
                return each
            await asyncio.sleep(0.01)
    return None


def _read_state(file: Path) -> tuple[str, float]:
    fields = _stat_fields(file)
    if not fields:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat_fields(file: Path) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state on; empty if the process has ended."""
    try:
        return file.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_of(peer: socket.socket) -> int:
    """Return the id of the process connected to a Unix socket.

    Source: SO_PEERCRED of unix(7): pid, uid, gid.
    """
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def take_oom_score(other: int) -> None:
    """Raise this process's OOM score adjustment to that of another (proc_pid_oom_score_adj(5))."""
    with contextlib.suppress(OSError, ValueError):  # it has ended
        score = int(Path(f"/proc/{other}/oom_score_adj").read_text())
        # Lowering it takes CAP_SYS_RESOURCE.
        if score > int(Path("/proc/self/oom_score_adj").read_text()):
            Path("/proc/self/oom_score_adj").write_text(str(score))


def work_done(pid: int) -> tuple[float, int]:
    """Return the CPU seconds that a process has used and the bytes that it has written.

    While neither grows, the process waits.
    """
    written = 0
    with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not count
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        written = next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))
    return process_state(pid)[1], written


async def main_stack(pid: int, file: Path, send_signal: Callable[[], object]) -> str:
    """Return the stack of a rank's main thread; empty if the rank writes none.

    The rank's handler of STACKS_SIGNAL writes it to a file.
    """
    # The signal would end the rank, or be answered too late.
    if not catches(pid, STACKS_SIGNAL) or process_state(pid)[0] in "Tt":
        return ""
    with contextlib.suppress(OSError):  # it has just ended
        os.truncate(file, 0)
        send_signal()
        await asyncio.sleep(SIGNAL_S)
        return file.read_text(errors="replace")
    return ""


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(mask, 16) >> (number - 1) & 1)
