"""Starts and ends a fork server: for the first agent of a node, or for the driver on its machine. (either side)"""

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

from raydist.network.names import MALLOC
from raydist.shared.own_path import of_others

ALWAYS = ("torch", "torch.distributed", "cloudpickle")
"""The modules that each rank of a job needs."""
END_S = 10.0
"""Longest wait for a fork server that ends its processes without getting on."""


@dataclass(frozen=True)
class ForkServer:
    """A fork server that this process started. It owns its folder. When the lifeline closes, all its processes end."""

    folder: Path
    lifeline: socket.socket

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
        """Start a server; it listens long before it has imported `modules`, which agents may add to.

        `keep`: as KEEP of fork_server. `idle_s`: seconds without an agent after which it ends; None: never. `env`:
        variables of the ranks beside those of this process, because some modules read theirs at import.
        """
        folder.mkdir(mode=0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "fork"))
        listener.listen(1024)
        lifeline, server_end = socket.socketpair()
        descriptors = (listener.fileno(), server_end.fileno())
        args = [*map(str, descriptors), start, f"{idle_s or 0:g}", keep]
        command = [sys.executable, "-m", "raydist.node.fork_server", *args, *modules]
        env = {
            "OMP_NUM_THREADS": str(threads),
            **MALLOC,
            **os.environ,
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path) if keep == "0" else own_search_path()),
        }
        with open(folder / "server.log", "wb") as log:  # the server detaches itself, so this returns at once
            subprocess.run(
                command, pass_fds=descriptors, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True
            )
        server_end.close()
        listener.close()
        return cls(folder, lifeline)

    def alive(self) -> bool:
        """Whether the server still holds its end of the lifeline."""
        try:
            return self.lifeline.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:  # closed by end()
            return False

    def end(self, wait: bool = True) -> bool:
        """End the server, or let it go if it is kept. Returns once its processes have ended.

        False: they have not, and did not get on for END_S; it ends by itself. It reports that they do, which takes
        minutes while the last state is written. `wait`: False for a server that has forked nothing. It may still
        import torch, and notices only then.
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


def node_folder(name: str) -> Path:
    """The path of a folder on this node's disk, in /tmp if TMPDIR is too long: a Unix socket's path has 107 bytes."""
    path = Path(tempfile.gettempdir()) / name
    return path if len(os.fsencode(path)) < 90 else Path("/tmp") / name


def own_search_path() -> list[str]:
    """Where a server that stays finds modules beside the installed ones: raydist's own folder, PYTHONPATH.

    Without the working_dir of a Ray job, which is another folder whenever a file in it has changed.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(__file__).parents[2]), *(each for each in entries if each and "/working_dir_files/" not in each)]


def rank_search_path(entries: Sequence[str]) -> tuple[str, ...]:
    """Where a rank finds modules: the driver's folders `entries`, then those of this process."""
    safe = safe_search_path(entries)
    return (*safe, *(path for path in sys.path if path not in safe))


def safe_search_path(entries: Sequence[str]) -> tuple[str, ...]:
    """The driver's folders for modules, without those that another user of this node may have made.

    That is /tmp/project where only the driver's node has it: somebody could make it here, with modules of their own.
    """
    return tuple(entry for entry in entries if not entry or of_others(Path(entry).absolute()) is None)


def heritage() -> tuple[str, ...]:
    """The properties that a child inherits: interpreter, user, limits, namespaces, cgroup (container), machine.

    Two processes with equal ones may start each other's ranks. Of the limits memlock matters to RDMA.
    """
    import resource

    properties = [sys.executable, str(os.getuid())]
    properties += [str(resource.getrlimit(kind)[1]) for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)]
    for name in ("self/cgroup", "sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            properties.append(Path("/proc", name).read_text())
    with contextlib.suppress(OSError):
        properties += [os.readlink(f"/proc/self/ns/{space}") for space in sorted(os.listdir("/proc/self/ns"))]
    return tuple(properties)
