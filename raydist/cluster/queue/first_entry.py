"""The entry with which a run of this process enters the queue. (driver)"""

from __future__ import annotations

import getpass
import os
import socket
import time
import uuid

from raydist.cluster import connect
from raydist.cluster.nodes import ResourceRequest
from raydist.cluster.queue.entry import Demand, Entry
from raydist.settings.config import Job
from raydist.settings.duration import seconds_of
from raydist.settings.priority import priority_of


def first_entry(job: Job, request: ResourceRequest) -> Entry:
    """Return the entry with which a run enters the queue."""
    return Entry(
        id=new_id(),
        name=job.name,
        folder=job.dir,
        owner=owner(),
        priority=priority_of(job.queue.priority),
        since=time.time(),
        exempt_s=job.queue.exempt_s,
        yields=job.queue.killable if job.script else job.backend.name != "mpi",
        demand=Demand.of(request),
        limit_s=seconds_of("queue.limit", job.queue.limit) if job.queue.limit else 0.0,
    )


def new_id() -> str:
    """Return an id for an entry: Ray job, a unique text, and this process's actor if it is one."""
    import ray

    parts = [ray.get_runtime_context().get_job_id(), uuid.uuid4().hex[:8]]
    if actor := connect.own_actor():
        parts.append(actor)
    return "/".join(parts)


def owner() -> str:
    """Return `user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a password entry
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
