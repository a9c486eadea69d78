"""Starts and ends a fork server, for the first agent of a node or for the driver. (either side)"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.cluster import ray_private
from raydist.network.names import MALLOC
from raydist.node.left_folders import remove_left_folders
from raydist.shared.errors import NO_MORE_PROCESSES, LaunchError, is_refusal
from raydist.shared.own_path import boot_id, of_others, others_may_add

ALWAYS = ("torch", "torch.distributed", "cloudpickle")
"""The modules that each rank of a job needs."""
END_S = 10.0
"""Limit on the wait for a fork server that ends its processes without making progress."""
SOCKET_PATH = 107
"""Maximum bytes of the path of a Unix socket."""
STATUS = (
    "Umask",
    "Gid",
    "Groups",
    "CapEff",
    "CapBnd",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed",
    "Mems_allowed",
)
"""Lines of /proc/self/status that a child inherits."""
RAISED = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
"""The limits that a fork server raises as far as it may."""
_lifelines: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Those of this process."""


def _close_lifelines() -> None:
    """Close the lifelines in a child that the driver's program has forked.

    The child may outlive the driver, whose ranks would train on.
    """
    for lifeline in [*_lifelines]:
        lifeline.close()


os.register_at_fork(after_in_child=_close_lifelines)


@dataclass(frozen=True)
class ForkServer:
    """A fork server that this process started, and whose folder it owns.

    When the lifeline closes, all its processes end.
    """

    folder: Path
    lifeline: socket.socket

    def __post_init__(self) -> None:
        _lifelines.add(self.lifeline)

    @classmethod
    def launch(
        cls,
        folder: Path,
        start: str,
        threads: int,
        idle_s: float | None = None,
        *,
        modules: Sequence[str] = (),
        keep: str = "0",
        env: Mapping[str, str] | None = None,
    ) -> ForkServer:
        """Start a server; it listens long before it has imported `modules`.

        Agents may add further modules. `keep`: as KEEP of fork_server. `idle_s`: seconds without an
        agent after which it ends; None: never. `env`: variables of the ranks, in addition to those
        of this process, because some modules read theirs at import. Raises LaunchError if its
        Python did not start.
        """
        remove_left_folders()
        folder.mkdir(mode=0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Only a socket that listens is called `fork`: a connection that is refused shows that the
        # server has died, and its folder is removed.
        listener.bind(str(folder / "fork.new"))
        listener.listen(1024)
        os.rename(folder / "fork.new", folder / "fork")
        lifeline, server_end = socket.socketpair()
        descriptors = (listener.fileno(), server_end.fileno())
        args = [*map(str, descriptors), start, f"{idle_s or 0:g}", keep]
        command = [sys.executable, "-m", "raydist.node.fork_server", *args, *modules]
        env = {
            "OMP_NUM_THREADS": str(threads),
            **MALLOC,
            **os.environ,
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(
                current_search_path() if keep == "0" else own_search_path()
            ),
        }
        failure = run_detached(command, folder / "server.log", env, descriptors)
        server_end.close()
        listener.close()
        if failure:
            lifeline.close()
            shutil.rmtree(folder, ignore_errors=True)
            why = NO_MORE_PROCESSES if is_refusal(failure) else failure
            raise LaunchError(f"the fork server of this node could not start: {why}")
        return cls(folder, lifeline)

    def alive(self) -> bool:
        """Return whether the server still holds its end of the lifeline."""
        try:
            return self.lifeline.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:  # closed by end()
            return False

    def end(self, wait: bool = True) -> bool:
        """End the server, or let it go if it is kept; return once its processes have ended.

        Returns False if they have not ended and made no progress for END_S; the server then ends by
        itself. The server reports progress, which takes minutes while the last state is written.
        `wait`: False for a server that has forked nothing; it may still import torch, and notices
        only then.
        """
        try:
            self.lifeline.shutdown(socket.SHUT_WR)
            self.lifeline.settimeout(END_S)
            while wait and self.lifeline.recv(64):
                pass
        except TimeoutError:
            return False
        except OSError:  # it is dead
            pass
        finally:
            self.lifeline.close()
        return True


def run_detached(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    descriptors: Sequence[int],
) -> str:
    """Run a command that detaches itself, with its output in a log; return its error, or "".

    It runs in /, because `python -m` imports from the current folder first, which may be /tmp.
    """
    with open(log, "wb") as output:
        try:
            subprocess.run(
                command,
                pass_fds=descriptors,
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=True,
            )
        except OSError as error:
            return str(error)
        except subprocess.CalledProcessError as error:
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "rror" in line]
            return errors[-1] if errors else f"{command[0]} ended with code {error.returncode}"
    return ""


def node_folder(name: str, room: int = 18) -> Path:
    """Return the path of a folder on this node's disk, in /tmp if TMPDIR is too long for a socket.

    The path of a Unix socket has at most 107 bytes. `room`: bytes of the longest path of a socket
    below the folder, including the slash before it.
    """
    path = Path(tempfile.gettempdir()) / name
    return path if len(os.fsencode(path)) + room <= SOCKET_PATH else Path("/tmp") / name


def current_search_path() -> list[str]:
    """Return where the server of one run finds modules: in the folders of this process.

    The current folder is one of them, unless other users may have put modules there.
    """
    entries = [each for each in sys.path if each]
    with contextlib.suppress(OSError):  # it has been removed
        here = Path.cwd()
        if not others_may_add(here):
            entries.insert(0, str(here))
    return entries


def own_search_path() -> list[str]:
    """Return where a kept server finds modules besides the installed ones.

    That is raydist's own folder and PYTHONPATH, without the working_dir of a Ray job, which is
    another folder whenever a file in it has changed.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    lasting = [
        os.path.abspath(each) for each in entries if each and ray_private.WORKING_DIRS not in each
    ]
    return [str(Path(__file__).parents[2]), *lasting]


def rank_search_path(entries: Sequence[str], cwd: str, own: bool) -> tuple[str, ...]:
    """Return a rank's search path: the driver's folders `entries`, then this process's.

    `cwd`, `own`: as in safe_search_path.
    """
    safe = safe_search_path(entries, cwd, own)
    return (*safe, *(path for path in sys.path if path not in safe))


def names_folder(python_path: str, folder: str, here: str) -> bool:
    """Report whether a PYTHONPATH names a folder in some way. `here`: the current one."""
    named = python_path.split(os.pathsep) if python_path else []
    return any(os.path.normpath(os.path.join(here, each)) == folder for each in named)


def safe_search_path(entries: Sequence[str], cwd: str = "", own: bool = False) -> tuple[str, ...]:
    """Return the driver's folders for modules, except those with modules that others may have made.

    For example /tmp, or /tmp/project if only the driver's node has it: on this node another user
    could create it. `cwd`: the folder of relative entries. `own`: whether this is the driver's
    machine, where /tmp may be imported from, as with plain Python.
    """
    folders = {entry: Path(cwd, entry).absolute() for entry in entries}
    if own:
        return tuple(each for each in entries if not each or of_others(folders[each]) is None)
    return tuple(each for each in entries if not others_may_add(folders[each]))


def heritage() -> tuple[str, ...]:
    """Return the properties that a child inherits from this process.

    They are interpreter, user, rights, limits, namespaces, cgroup (container) and machine. Two
    processes with equal properties may start each other's ranks. Two properties that Ray changes in
    its workers are left out: a rank takes the OOM score of its agent, and the nice value of the
    server from which it is forked.
    """
    properties = [sys.executable, str(os.getuid()), boot_id()]
    for kind in sorted(
        getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")
    ):
        soft, hard = resource.getrlimit(kind)
        properties.append(f"{kind} {'raised' if kind in RAISED else soft} {hard}")
    with contextlib.suppress(OSError):
        properties.append(Path("/proc/self/cgroup").read_text())
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text().splitlines()
        properties += [line for line in status if line.partition(":")[0] in STATUS]
    with contextlib.suppress(OSError):
        properties += [
            os.readlink(f"/proc/self/ns/{space}") for space in sorted(os.listdir("/proc/self/ns"))
        ]
    return tuple(properties)
