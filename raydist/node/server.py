"""A fork server brought up and let go: by the first seat of a node, or by the driver on its own. (either side)"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.node.wire import MALLOC


@dataclass(frozen=True)
class ForkServer:
    """A fork server of ours. It owns its folder; when our end of the lifeline closes it ends, and all it forked."""

    folder: Path
    lifeline: socket.socket

    @classmethod
    def launch(
        cls,
        folder: Path,
        start: str,
        modules: Sequence[str],
        threads: int,
        idle_s: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> ForkServer:
        """Start one; it is up to listen long before it is warm. `idle_s`: it ends after so long without a seat.

        `env`: variables that the ranks will have beside those of this process; some modules read theirs at import.
        """
        folder.mkdir(mode=0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "fork"))
        listener.listen(1024)
        ours, its = socket.socketpair()
        descriptors = (listener.fileno(), its.fileno())
        told = [*map(str, descriptors), start, f"{idle_s or 0:g}"]
        command = [sys.executable, "-m", "raydist.node.forkserver", *told, *modules]
        env = {
            "OMP_NUM_THREADS": str(threads),
            **MALLOC,
            **os.environ,
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with open(folder / "server.log", "wb") as log:  # it detaches itself: this returns at once
            subprocess.run(
                command, pass_fds=descriptors, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True
            )
        its.close()
        listener.close()
        return cls(folder, ours)

    def alive(self) -> bool:
        """Whether it still holds its end of the lifeline."""
        try:
            return self.lifeline.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:  # closed by end()
            return False

    def end(self) -> None:
        """Return when it is gone, with every process forked from it: each of them holds the lifeline's other end."""
        with contextlib.suppress(OSError):
            self.lifeline.shutdown(socket.SHUT_WR)
            self.lifeline.recv(1)
        self.lifeline.close()


def folder(name: str) -> Path:
    """A place on this node's own disk; a Unix socket's path may have 107 bytes, and some TMPDIRs alone have more."""
    place = Path(tempfile.gettempdir()) / name
    return place if len(os.fsencode(place)) < 90 else Path("/tmp") / name


def heritage() -> list[str]:
    """What a process has from the one that starts it. Where two are equal in it, each may start the other's ranks.

    Interpreter, user, limits (memlock decides about RDMA), namespaces and cgroup (a container), and the machine itself.
    """
    import resource

    own = [sys.executable, str(os.getuid())]
    own += [str(resource.getrlimit(kind)) for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)]
    for name in ("self/cgroup", "sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            own.append(Path("/proc", name).read_text())
    with contextlib.suppress(OSError):
        own += [os.readlink(f"/proc/self/ns/{space}") for space in sorted(os.listdir("/proc/self/ns"))]
    return own
