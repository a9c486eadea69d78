"""The fork server of the driver's machine: it warms up while Ray connects, and stays for the next run. (driver)

Agents on this machine use it if they would start an equal one; all others start their own.
"""

from __future__ import annotations

import atexit
import os
import threading
import uuid

from raydist.launch import preload
from raydist.node.fork_launcher import ForkServer, heritage, node_folder
from raydist.settings.config import Job
from raydist.worker.protocol import WarmServer

IDLE_S = 300.0
"""Seconds without a run after which a server ends: a notebook may stay open for days."""

_Key = tuple[tuple[str, ...], int, tuple[tuple[str, str], ...]]
_servers: dict[_Key, ForkServer] = {}
_lock = threading.Lock()


def acquire(job: Job) -> WarmServer | None:
    """Start a server for the job on this machine, or return one that runs; None if ranks are not forked."""
    if job.start != "fork":
        return None
    # The user's own files change from run to run: the ranks import those themselves.
    modules = tuple(name for name in preload.of(job) if preload.is_installed(name.partition(".")[0]))
    threads = max(1, int(job.scale.cpus))
    key = modules, threads, tuple(sorted(job.env.items()))
    with _lock:
        if key not in _servers or not _servers[key].alive():
            path = node_folder(f"raydist-{os.getuid()}-{uuid.uuid4().hex[:8]}")
            _servers[key] = ForkServer.launch(path, job.start, modules, threads, idle_s=IDLE_S, env=job.env)
        return WarmServer(str(_servers[key].folder), heritage())


@atexit.register
def end_all() -> None:
    """End all servers."""
    with _lock:
        for server in _servers.values():
            server.end()
        _servers.clear()
