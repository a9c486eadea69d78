"""What must not be left behind: of a run its processes, of a whole session of tests nothing at all.

All that a test starts has the session's folder in its environment, as TMPDIR and as HOME. That
tells it from what others do on the same machine at the same time, another session of tests
included.
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
_Found = TypeVar("_Found", list[str], dict[str, str])
# What pytest, Ray, Python and torch keep in the session's folder, and rustc in a home when pip asks
# for its version.
_KEPT = re.compile(r"cwd|home|nodes\.json|ray|t|pymp-.*|torch(inductor|elastic)_.*|\.rustup")
# In a folder that torch 2.8 makes in each process as it is imported, and leaves where a loader's
# worker ends at once.
_TORCHS = "_remote_module_non_scriptable.py"
# Python's own processes, which end with this one.
_HELPERS = re.compile(r"from multiprocessing\.(forkserver|resource_tracker) import main")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended(pid: int, within: float = 15.0) -> bool:
    """Whether a process has ended, or does within so many seconds."""
    until = time.monotonic() + within
    while (there := alive(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    return not there


def processes_of(mark: str) -> list[str]:
    """Ids and command lines of living processes that were started with `mark` somewhere in their
    environment."""
    return [f"{pid} {line}" for pid, line in marked(mark).items()]


def gone(mark: str, within: float = 60.0) -> list[str]:
    """What is still there after at most so many seconds: nothing, if all is well.

    Ray's own processes look only now and then whether their raylet is gone, and late on a busy
    machine.
    """
    return after(lambda: processes_of(mark), within)


def groups(within: float = 60.0) -> list[str]:
    """Placement groups of this process's cluster that still hold a place after so many seconds: Ray
    lets go later."""
    from ray.util.placement_group import placement_group_table

    def held() -> list[str]:
        return [
            str(name)
            for name, each in placement_group_table().items()
            if each["state"] != "REMOVED"
        ]

    return after(held, within)


def after(found: Callable[[], _Found], within: float) -> _Found:
    """What is found; as soon as it is nothing, and at most so many seconds from now."""
    until = time.monotonic() + within
    while (left := found()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def folders_of(tmp: Path) -> list[str]:
    """Fork servers' folders that are still there."""
    return sorted(str(path) for path in tmp.glob("raydist-*"))


def waiting_servers(tmp: Path) -> set[int]:
    """Process ids of the fork servers that are kept in this TMPDIR, and that nobody uses."""
    found = set()
    for note in tmp.glob("raydist-*-warm/*/server.json"):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            pid = json.loads(note.read_text())["pid"]
            found |= {pid} if kept_server.ask(note.parent, Claim()) == Claimed(True) else set()
    return found


class Session:
    """The folder of a session of tests, and what its tests leave.

    All tests have the folder as TMPDIR, with `cwd` and `home` in it. It lies in /tmp whatever
    TMPDIR was: Ray's sockets are in there too, and the path of a socket ends at 107 characters.
    """

    def __init__(self) -> None:
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        self._lock = _lock(self.folder)  # tells other sessions that this one lives
        for name in ("cwd", "home"):
            (self.folder / name).mkdir()
        self._shm = [Path("/dev/shm")] if _own_shm() else []
        self._seen: dict[str, str] = {}
        Finalize(
            None, self.end, exitpriority=-200
        )  # after Python's own: multiprocessing's folder is in there
        self.keep = False
        """Whether the folders of the tests stay, for a person to look into."""

    def note(self, test: str) -> None:
        """A test has ended: what was not seen before is its."""
        for what in self._there():
            self._seen.setdefault(what, test)

    def left(self, within: float) -> list[str]:
        """What is still there after at most so many seconds, each with the test after which it was
        first seen."""
        return [
            f"{what}{detail}, first seen after {self._seen.get(what, 'the last test')}"
            for what, detail in sorted(after(self._there, within).items())
        ]

    def end(self) -> None:
        """End and remove all that is left; when this process ends."""
        _clear(self.folder, self._processes(), {"t"} if self.keep else set())
        if self._lock is not None:
            os.close(self._lock)

    def _there(self) -> dict[str, str]:
        """What names this session's folder, or lies in a place of its own; with what else is known
        of it."""
        found = {
            f"process {pid}": f" {line}{_apart(pid)}" for pid, line in self._processes().items()
        }
        found |= {f"mount {path}": "" for path in _mounts(self.folder)}
        for folder in (self.folder, self.folder / "cwd", self.folder / "home", *self._shm):
            others = (path for path in folder.iterdir() if not _KEPT.fullmatch(path.name))
            found |= {f"file {path}": "" for path in others if not (path / _TORCHS).exists()}
        return found

    def _processes(self) -> dict[int, str]:
        children = {child.pid for child in psutil.Process().children()}
        found = marked(str(self.folder))
        return {
            pid: line
            for pid, line in found.items()
            if not (pid in children and _HELPERS.search(line))
        }


def sweep() -> None:
    """End and remove what killed sessions have left, and the folders of failed tests."""
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another session has just removed it
            old = (
                time.time() - folder.lstat().st_mtime > 60
            )  # a younger one may not have its lock yet
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
    with contextlib.suppress(OSError):  # it has something to keep
        folder.rmdir()


def _lock(folder: Path) -> int | None:
    """The lock of a session's folder, held until it is closed; None where a living session holds
    it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _own_shm() -> bool:
    """Give this process and all it starts a /dev/shm of their own: nothing tells whose a file in
    the common one is.

    It takes root. An ordinary user's is not looked at.
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
    """Command lines by id of the living processes that were started with `mark` somewhere in their
    environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if mark.encode() in (entry / "environ").read_bytes():
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found[int(entry.name)] = " ".join(line.split())[:120]
    return found


def _mounts(folder: Path) -> list[str]:
    """The mount points below a folder."""
    places = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [place for place in places if place.startswith(f"{folder}/")]


def _apart(pid: int) -> str:
    """A word on a process that has namespaces of its own, as a host of the rig has."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            return ", in namespaces of its own"
    return ""
