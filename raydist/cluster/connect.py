"""Join a Ray cluster or start one here, and read its nodes. (driver)"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydist.cluster import autoscaler, drain, local_ray, placement, ray_private
from raydist.cluster.gcs import answers
from raydist.cluster.nodes import Node, NodeType, nodes_from_ray, types_from_config
from raydist.cluster.reach import Address, reached_addresses
from raydist.settings.config import Job
from raydist.shared import ending, kinds, signals
from raydist.shared.errors import LaunchError
from raydist.shared.events import Events
from raydist.shared.home import home_folder
from raydist.shared.own_path import others_may_add

CONNECT_S = 0.5
"""Longest wait for a connection to a node."""
CONNECT_AT_ONCE = 16
"""Number of nodes to which this process connects at the same time."""

_lock = threading.Lock()
"""Held while a run connects or leaves: the runs of several threads share the connection."""
_runs = 0
"""Number of runs that use the connection now; the last one leaves Ray."""
_leave = False
"""Whether the last run must leave Ray.

It must if the program itself was not connected, and the cluster is not the program's own.
"""
_dashboard = ""
"""HOST:PORT of the dashboard of the Ray that was joined."""
_local_cpus = 0
"""CPUs of the Ray that this process started; 0 if it started none."""
_local_address = ""
"""Address of that Ray. The program may have left it since (`ray.shutdown()`) and joined another."""
_reaper: subprocess.Popen[bytes] | None = None
"""The process that kills what remains of that Ray when this process ends it or is killed.

Ray's agents may take over a minute.
"""


@contextlib.contextmanager
def connect(job: Job, events: Events) -> Iterator[None]:
    """Connect to a running cluster, or to a Ray that is started here and kept for the next run.

    If the program is already connected (a notebook), its connection is used, and kept.
    """
    import ray

    began = time.time()
    started = _enter(job)
    try:
        signals.raise_again()
        address = ray.get_runtime_context().gcs_address
        events.add(
            kinds.Cluster(
                address=address,
                started=started,
                nodes=len(alive_nodes()),
                job=ray_private.submission_id(),
                dashboard=_dashboard,
            )
        )
        for text in ray_private.missing_parts():
            events.warn(text)
        events.add(kinds.Phase(name="connect", s=time.time() - began))
        yield
    finally:
        _exit()


def _enter(job: Job) -> bool:
    """Connect this process unless it is connected; return whether that started a Ray here."""
    global _runs, _leave
    import ray

    with _lock:
        started = False
        if _runs == 0:
            ending.tidied()  # the cleanup of an earlier run of this process
            if _local_cpus and not (
                is_local_ray() and _local_cpus >= cpus_needed(job) and answers(_local_address)
            ):
                end_local_ray()
            connected = ray.is_initialized()
            if ending.is_command():
                ray_private.skip_serializers()
            started = False if connected else start_or_join(job)
            _leave = not connected and not started
            signals.take()  # ray.init has installed a SIGTERM handler that exits without a message
        _runs += 1
    return started


def _exit() -> None:
    """Leave Ray if this was the last run on the connection, and a run established it."""
    global _runs
    import ray

    with _lock:
        _runs -= 1
        if _runs == 0 and _leave:
            ending.tidy_up(ray.shutdown)


def is_local_ray() -> bool:
    """Return whether this process started the Ray to which it is connected."""
    import ray

    return (
        bool(_local_cpus)
        and ray.is_initialized()  # else Ray would start one to answer the next line
        and ray.get_runtime_context().gcs_address == _local_address
    )


def end_local_ray() -> None:
    """End the Ray that this process started, if it is still running."""
    global _local_cpus, _reaper
    import ray

    if is_local_ray():
        with ray_private.killed_on_shutdown():
            ray.shutdown()
    if _reaper is not None:
        # This line makes it kill Ray's agents now. Closing its input would not: processes that this
        # program has forked keep it open.
        _reaper.communicate(b"\n")
        _reaper = None
    _local_cpus = 0


def running_address() -> str | None:
    """Return the address of a running Ray: RAY_ADDRESS, else the last Ray started on this machine.

    None if none is running.
    """
    address = ray_private.default_address()
    if address is None or answers(address):
        return address
    # A cluster that was killed leaves its address behind, and ray.init would wait ten minutes for
    # it.
    if named := os.environ.get("RAY_ADDRESS"):
        raise LaunchError(
            f"RAY_ADDRESS={named}: no Ray answers at {address}; start it there, or unset "
            "RAY_ADDRESS to start a Ray "
            "on this machine"
        )
    return None


def cpus_needed(job: Job) -> int:
    """Return the CPUs of a Ray that is started for this job.

    It is the number of the machine's CPUs, or of those that the job's ranks request, if more.
    """
    ranks = (job.scale.nodes or 1) * (job.scale.per_node or 2)
    return max(os.cpu_count() or 1, math.ceil(min(ranks, 64) * job.scale.cpus))


def local_node(job: Job) -> Node:
    """Return this machine as the only node of a Ray that would be started for the job."""
    import ray.util

    gpus = ray_private.count_gpus()
    have = {"CPU": float(cpus_needed(job))} | ({"GPU": float(gpus)} if gpus else {})
    return Node(
        id="here",
        ip=ray.util.get_node_ip_address(),
        host=socket.gethostname(),
        total=have,
        free=have,
    )


def settle_group(job: Job) -> Job:
    """Return the job with `group=auto` replaced by what it means for this job here."""
    if job.group != "auto":
        return job
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    inline = placement.needs_no_ray(job) and not connected and not running_address()
    return replace(job, group="inline" if inline else "ray")


def start_or_join(job: Job) -> bool:
    """Connect this process to Ray; return whether it had to start a Ray on this machine."""
    global _dashboard
    import ray

    # Ray runs its workers at nice 15, below everything else on the node. On a node for training
    # that is wrong.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Retries don't help if a package does not exist.
    os.environ.setdefault("RUNTIME_ENV_RETRY_TIMES", "1")
    # Ray refuses a driver, like a node, whose Python has another patch version than the head's.
    os.environ.setdefault("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    ray_private.quiet_loggers()
    quiet: dict[str, Any] = {
        "logging_level": "ERROR",
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        if address := running_address():
            # /tmp is open to the users of each node: Ray would have all workers import from there.
            if any(map(others_may_add, (Path.cwd(), Path(os.path.realpath(sys.argv[0])).parent))):
                quiet["job_config"] = ray_private.job_config_without_folders()
            _dashboard = ray.init(address=address, **quiet).dashboard_url or ""
            return False
        # Refuse an impossible request before starting Ray for it.
        placement.resources_for(job, [local_node(job)])
        _start_local_ray(cpus_needed(job), quiet)
        return True
    except (OSError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS") or "this machine"
        raise LaunchError(f"can't connect to Ray at {where}: {error}") from error


def _start_local_ray(cpus: int, quiet: Mapping[str, Any]) -> None:
    global _local_address, _local_cpus, _reaper
    import ray

    local_ray.protect_token(home_folder())
    folder = local_ray.temp_folder() / "ray"
    atexit.register(end_local_ray)  # not after each run: the next run of this program uses it
    with ray_private.few_processes_in_own_sessions():
        ray.init(
            address="local", include_dashboard=False, num_cpus=cpus, _temp_dir=str(folder), **quiet
        )
    _local_cpus, _local_address = cpus, ray.get_runtime_context().gcs_address
    if started := ray_private.started_processes():
        _reaper = local_ray.reaper(started)


def own_node() -> str:
    """Return Ray's id of this process's node; empty while it is not connected to Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_node_id())


def own_actor() -> str:
    """Return the id of the actor that this process is, in hex; empty if it is none."""
    import ray

    return ray.get_runtime_context().get_actor_id() or ""


def alive_nodes() -> list[Node]:
    """Return the nodes that are alive now."""
    import ray

    return nodes_from_ray(ray.nodes(), ray_private.free_resources())


def remaining_nodes() -> list[Node]:
    """Return the nodes that are alive and not being drained by Ray."""
    return drain.not_draining(alive_nodes())


def node_types() -> list[NodeType] | None:
    """Return the node types that the autoscaler may add.

    Empty without an autoscaler, None if they can't be read.
    """
    config = ray_private.cluster_config()
    return types_from_config(config) if config else autoscaler.autoscaler_types()


def keep_workers(counts: Mapping[str, int], keep_s: float) -> None:
    """Make Ray start this number of workers on each node, by id, for the next run's actors.

    The actors then begin at once. Ray ends the workers after `keep_s` seconds. None are started on
    a Ray that this process started, and none for a submitted job with a runtime_env, which has its
    own workers.
    """
    import ray

    if (
        not keep_s
        or is_local_ray()
        or ray.get_runtime_context().get_runtime_env_string() not in ("", "{}")
    ):
        return

    def ask(node: tuple[str, Address]) -> None:
        id, (ip, port) = node
        ray_private.prestart_workers(f"{ip}:{port}", counts[id], keep_s, CONNECT_S)

    # No run fails without them: a node may be gone or busy, or Ray may be.
    with contextlib.suppress(Exception), ThreadPoolExecutor(CONNECT_AT_ONCE) as pool:
        list(pool.map(ask, [node for node in raylets().items() if node[0] in counts]))


def raylets() -> dict[str, Address]:
    """Return address and port of the raylet of each node that is alive, by the node's id."""
    import ray

    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["Alive"]
    }


def reachable(node_ids: Collection[str]) -> set[str]:
    """Return those of these nodes whose kernel answers at the port of their raylets."""
    addresses = {id: address for id, address in raylets().items() if id in node_ids}
    answering = reached_addresses(addresses.values(), CONNECT_S)
    return {id for id, address in addresses.items() if address in answering}
