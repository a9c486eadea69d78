"""The fork server of the driver's machine: warms up while Ray connects, and may be kept. (driver)

Agents on this machine use it if they would start an equal one; all others start their own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from raydist.messages.agent import WarmServer
from raydist.messages.server import ImportModules
from raydist.node import kept_server
from raydist.node.fork_launcher import ALWAYS, END_S, ForkServer, heritage, node_folder
from raydist.settings import slurm
from raydist.settings.config import Job, Scale

IDLE_S = 300.0
"""Seconds without a run after which a server that is not kept ends: a notebook may stay open for
days."""

_Key = tuple[int, tuple[tuple[str, str], ...]]
"""The threads of each rank, and the variables that modules may read at import."""
SETTINGS = ("env.", "env=", "env_file=", "scale.cpus=", "scale.keep_warm_s=", "start=")
"""The overrides that change the server, or make a run that has none."""
_servers: dict[_Key, ForkServer] = {}
_acquired = False
"""Whether a run has come so far as to use a server; one whose settings were refused has not."""
_lock = threading.Lock()


def acquire(job: Job) -> WarmServer | None:
    """Start a server for the job on this machine, or return one that runs.

    None if ranks are not forked.
    """
    global _acquired
    if job.start != "fork":
        return None
    _acquired = True
    server = _server(max(1, int(job.scale.cpus)), job.env, job.scale.keep_warm_s)
    return WarmServer(str(server.folder), heritage())


def prepare(job: Job) -> WarmServer | None:
    """Start the server of acquire(), and have it import what the job's ranks need.

    The driver continues meanwhile.
    """
    from raydist.launch import preload  # the server starts before this is imported

    if server := acquire(job):
        kept_server.tell(
            Path(server.folder), ImportModules(preload.lasting_modules(preload.of(job)))
        )
    return server


def begin(overrides: Sequence[str]) -> None:
    """Start the server of the most likely run with these overrides, while they are composed.

    Without settings that change the server, it is the one that acquire() returns. In a Slurm
    allocation without Ray nothing is started: there the run may be refused.
    """
    if slurm.may_refuse(os.environ):
        return
    if not any(text.lstrip("+~").startswith(SETTINGS) for text in overrides):
        threading.Thread(target=_begin, name="raydist-warm", daemon=True).start()


def _begin() -> None:
    with contextlib.suppress(Exception):  # acquire() raises it again, where it is handled
        _server(1, {}, Scale().keep_warm_s)


def _server(threads: int, env: Mapping[str, str], keep_s: float) -> ForkServer:
    key = threads, tuple(sorted(env.items()))
    with _lock:
        if key not in _servers or not _servers[key].alive():
            path = node_folder(f"raydist-{os.getuid()}-{uuid.uuid4().hex[:8]}")
            _servers[key] = kept_server.obtain(threads, env, keep_s, ALWAYS) or ForkServer.launch(
                path, "fork", threads, IDLE_S, modules=ALWAYS, env=env
            )
        return _servers[key]


@atexit.register
def end_all() -> None:
    """End all servers; those that are kept wait for another program."""
    with _lock:
        for server in _servers.values():
            if not server.end(wait=_acquired):
                print(
                    f"raydist: a process of the run has not ended for {END_S:g} s after its "
                    "kill; the fork server of "
                    f"this machine still waits for it ({server.folder}/server.log)",
                    file=sys.stderr,
                )
        _servers.clear()
