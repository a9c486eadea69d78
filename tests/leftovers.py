"""Leftovers: processes that outlive their run, and anything at all that outlives a session of tests.

Everything that a test starts has the session's folder in its environment, as TMPDIR and as HOME. This
distinguishes it from other work on the same machine, such as another session of tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar

import psutil

from raydist.messages.server import Claim, Claimed
from raydist.node import kept_server
from tests.rig.namespaces import MOUNT, enter

PREFIX = "rdtest-"
_Names = TypeVar("_Names", list[str], dict[str, str])
# What pytest, Ray, Python and torch keep in the session's folder, and rustc in a home when pip asks
# for its version.
_KEPT = re.compile(r"cwd|home|nodes\.json|ray|t|pymp-.*|torch(inductor|elastic)_.*|\.rustup")
# In a folder that torch 2.8 makes in each process as it is imported, and leaves where a loader's
# worker ends at once.
_TORCHS = "_remote_module_non_scriptable.py"
# Python's own processes, which end with this one.
_HELPERS = re.compile(r"from multiprocessing\.(forkserver|resource_tracker) import main")


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended(pid: int, within: float = 60.0) -> bool:
    """Return whether a process has ended or ends within so many seconds."""
    deadline = time.monotonic() + within
    while (running := alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running


def processes_of(mark: str) -> list[str]:
    """Return ids and command lines of the processes that run with `mark` in their environment."""
    return [f"{pid} {line}" for pid, line in marked(mark).items()]


def remaining_processes(mark: str, within: float = 120.0) -> list[str]:
    """Return the processes with that mark that still run after so many seconds.

    Ray's processes check only now and then whether their raylet has exited, and late on a busy
    machine.
    """
    return poll_until_empty(lambda: processes_of(mark), within)


def remaining_placement_groups(within: float = 120.0) -> list[str]:
    """Return the placement groups of this process's cluster that still exist after so many seconds:
    Ray removes them with a delay."""
    from ray.util.placement_group import placement_group_table

    def held() -> list[str]:
        return [
            str(name)
            for name, each in placement_group_table().items()
            if each["state"] != "REMOVED"
        ]

    return poll_until_empty(held, within)


def poll_until_empty(find: Callable[[], _Names], within: float) -> _Names:
    """Call `find` until it finds nothing, for at most so many seconds; return its last result."""
    deadline = time.monotonic() + within
    while (names := find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return names


def server_folders(tmp: Path) -> list[str]:
    """Return the folders of fork servers below a TMPDIR."""
    return sorted(str(path) for path in tmp.glob("raydist-*"))


def idle_servers(tmp: Path) -> set[int]:
    """Return the process ids of the fork servers that are kept in a TMPDIR and that nobody uses."""
    pids: set[int] = set()
    for note in tmp.glob("raydist-*-warm/*/server.json"):
        with contextlib.suppress(FileNotFoundError):  # race: it has just ended
            pid = json.loads(note.read_text())["pid"]
            pids |= {pid} if kept_server.ask(note.parent, Claim()) == Claimed(True) else set()
    return pids


class Session:
    """The folder of a session of tests, and the leftovers of its tests.

    The folder is the TMPDIR of all tests, with `cwd` and `home` in it. It is in /tmp whatever TMPDIR
    was: Ray's sockets are in it too, and the path of a socket has at most 107 characters.
    """

    def __init__(self) -> None:
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        self._lock = _lock(self.folder)  # other sessions see by it that this one runs
        for name in ("cwd", "home"):
            (self.folder / name).mkdir()
        self._shm = [Path("/dev/shm")] if _own_shm() else []
        self._seen: dict[str, str] = {}
        Finalize(
            None, self.end, exitpriority=-200
        )  # after Python's own: multiprocessing's folder is in there
        self.keep = False
        """Whether the folders of the tests are kept for inspection."""

    def note(self, test: str) -> None:
        """Attribute what was not seen before to the test that has just ended."""
        for what in self._find():
            self._seen.setdefault(what, test)

    def leftovers(self, within: float) -> list[str]:
        """Return what still exists after so many seconds, each with the test after which it was
        first seen."""
        return [
            f"{what}{detail}, first seen after {self._seen.get(what, 'the last test')}"
            for what, detail in sorted(poll_until_empty(self._find, within).items())
        ]

    def end(self) -> None:
        """End all processes and remove all files of the session; called when this process exits."""
        _clear(self.folder, self._processes(), {"t"} if self.keep else set())
        if self._lock is not None:
            os.close(self._lock)

    def _find(self) -> dict[str, str]:
        """Return processes, mounts and files of this session, each with a detail."""
        result = {
            f"process {pid}": f" {line}{_namespace_note(pid)}"
            for pid, line in self._processes().items()
        }
        result |= {f"mount {path}": "" for path in _mounts(self.folder)}
        for folder in (self.folder, self.folder / "cwd", self.folder / "home", *self._shm):
            others = (path for path in folder.iterdir() if not _KEPT.fullmatch(path.name))
            result |= {f"file {path}": "" for path in others if not (path / _TORCHS).exists()}
        return result

    def _processes(self) -> dict[int, str]:
        children = {child.pid for child in psutil.Process().children()}
        return {
            pid: line
            for pid, line in marked(str(self.folder)).items()
            if not (pid in children and _HELPERS.search(line))
        }


def sweep() -> None:
    """Remove the leftovers of killed sessions, and the folders of failed tests."""
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # race: another session has just removed it
            old = (
                time.time() - folder.lstat().st_mtime > 60
            )  # race: a younger one may not have locked its folder yet
            if (
                old
                and folder.lstat().st_uid == os.geteuid()
                and (lock := _lock(folder)) is not None
            ):
                _clear(folder, marked(str(folder)))
                os.close(lock)


def _clear(folder: Path, processes: Iterable[int], keep: Collection[str] = ()) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for mount in reversed(_mounts(folder)):
        subprocess.run(["umount", "--lazy", mount], check=False)
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: something is kept
        folder.rmdir()


def _lock(folder: Path) -> int | None:
    """Lock a session's folder until the descriptor is closed; return None if a running session holds
    the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _own_shm() -> bool:
    """Mount a separate /dev/shm for this process and its children: in the shared one the owner of a
    file cannot be determined. Without root return False; /dev/shm is then not checked.
    """
    try:
        size = os.statvfs("/dev/shm")
        own = [
            "-t",
            "tmpfs",
            "-o",
            f"mode=1777,size={size.f_blocks * size.f_frsize}",
            "tmpfs",
            "/dev/shm",
        ]
        enter(None, MOUNT)
        for words in (["--make-rslave", "/"], own):
            subprocess.run(["mount", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def marked(mark: str) -> dict[int, str]:
    """Return the command lines, by process id, of the processes with `mark` in their environment."""
    lines = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # race: it has just ended; or another user's
            if mark.encode() in (entry / "environ").read_bytes():
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                lines[int(entry.name)] = " ".join(line.split())[:120]
    return lines


def ray_workers(name: str) -> list[int]:
    """Return the Ray workers of this session of tests that run this class or function."""
    found = marked(os.environ["TMPDIR"]).items()
    return [pid for pid, line in found if line.startswith(f"ray::{name}")]


def _mounts(folder: Path) -> list[str]:
    """Return the mount points below a folder."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.startswith(f"{folder}/")]


def _namespace_note(pid: int) -> str:
    """Return a note if a process is in other namespaces than this one, as a host of the rig is."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            return ", in separate namespaces"
    return ""
