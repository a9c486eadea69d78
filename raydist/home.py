"""The fork server of the driver's own machine: warm while Ray still answers, and kept for the next run. (driver)

The seats of this machine use it where they could have started the same themselves; all others start their own.
"""

from __future__ import annotations

import atexit
import os
import threading
import uuid
from typing import Any

from raydist import preload
from raydist.config import Job
from raydist.node.server import ForkServer, folder, heritage

IDLE_S = 300.0
"""Seconds without a run after which it ends; a notebook may stay open for days."""

_Key = tuple[tuple[str, ...], int, tuple[tuple[str, str], ...]]
_kept: dict[_Key, ForkServer] = {}
_keeping = threading.Lock()


def warm(job: Job) -> dict[str, Any] | None:
    """Have a server for the job on this machine, and offer it to its seats; None where ranks are not forked."""
    if job.start != "fork":
        return None
    needed = preload.of(job)
    # A person's own files change from run to run: the ranks import those themselves.
    modules = tuple(name for name in needed if preload.is_installed(name.partition(".")[0]))
    threads = max(1, int(job.scale.cpus))
    key = modules, threads, tuple(sorted(job.env.items()))
    with _keeping:
        if key not in _kept or not _kept[key].alive():
            place = folder(f"raydist-{os.getuid()}-{uuid.uuid4().hex[:8]}")
            _kept[key] = ForkServer.launch(place, job.start, modules, threads, idle_s=IDLE_S, env=job.env)
        return {"folder": str(_kept[key].folder), "heritage": heritage()}


@atexit.register
def let_go() -> None:
    """End all of them."""
    with _keeping:
        for server in _kept.values():
            server.end()
        _kept.clear()
