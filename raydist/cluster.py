"""The Ray cluster: connect to it, know its nodes, place the gang on it. (driver)"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from raydist import autoscaler, check, ledger, lifetime, notice, placement, shipping, signals
from raydist.config import Job
from raydist.errors import LaunchError
from raydist.events import Events
from raydist.gcs import answers
from raydist.group import Gang
from raydist.placement import Ask, Node, NodeType, Plan
from raydist.places import AGAIN_S, Places, Waiting
from raydist.reserve import Reserve
from raydist.result import End
from raydist.straggler import Slow

WAIT_S = 1
"""Seconds between two looks at what is still awaited; whole ones, because Ray cuts off the rest."""


_own_cpus = 0
"""CPUs of the Ray that this process has started; 0 while there is none."""
_reaper: subprocess.Popen[bytes] | None = None
"""Ends that Ray if this process is killed. Ray's agents notice by themselves, but may take more than a minute."""


@contextlib.contextmanager
def connect(job: Job, events: Events) -> Iterator[None]:
    """Be connected to Ray: to the cluster that is there, or to one started on this machine, which stays for a next run.

    A connection that the program had already (a notebook) is used, and kept.
    """
    import ray

    began = time.time()
    if _own_cpus and not (_own_cpus >= cpus_to_have(job) and answers(ray.get_runtime_context().gcs_address)):
        end_own()
    here = ray.is_initialized()
    started = False if here else start_or_join(job)
    signals.take()  # Ray has put in a SIGTERM handler of its own, which exits without a word
    try:
        address = ray.get_runtime_context().gcs_address
        events.say("cluster", address=address, started=started, nodes=len(nodes()))
        events.say("phase", name="connect", s=time.time() - began)
        yield
    finally:
        if not here and not started:
            ray.shutdown()


def end_own() -> None:
    """End the Ray that this process has started, if it is there still."""
    global _own_cpus, _reaper
    import ray

    node = ray._private.worker._global_node
    if _own_cpus and node is not None:
        # Ray asks its processes one after the other to end, and waits for each: a second and more, when Ctrl-C has two.
        end = node.kill_all_processes
        node.kill_all_processes = lambda **_: end(check_alive=False, allow_graceful=False)
        ray.shutdown()
    if _reaper is not None:
        _reaper.kill()
        _reaper.communicate()
        _reaper = None
    _own_cpus = 0


def running() -> str | None:
    """The address of the Ray that is there: what RAY_ADDRESS says, else the last one started on this machine."""
    from ray._private.services import canonicalize_bootstrap_address

    address: str | None = canonicalize_bootstrap_address(None)
    if address is None or answers(address):
        return address
    # A cluster that was killed leaves its address behind, and ray.init would wait ten minutes for it.
    if named := os.environ.get("RAY_ADDRESS"):
        raise LaunchError(f"no Ray at {named} (RAY_ADDRESS): nothing answers as Ray does at {address}")
    return None


def cpus_to_have(job: Job) -> int:
    """The CPUs of a Ray that is started for this job: as many as its ranks ask for, where the machine has fewer."""
    ranks = (job.scale.nodes or 1) * (job.scale.per_node or 2)
    return max(os.cpu_count() or 1, math.ceil(min(ranks, 64) * job.scale.cpus))


def this_machine(job: Job) -> Node:
    """This machine as the only node of a Ray that would be started for the job."""
    import ray.util
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Found

    visible = Found.get_current_process_visible_accelerator_ids()
    gpus = Found.get_current_node_num_accelerators() if visible is None else len(visible)
    have = {"CPU": float(cpus_to_have(job))} | ({"GPU": float(gpus)} if gpus else {})
    return Node(id="here", ip=ray.util.get_node_ip_address(), host=socket.gethostname(), total=have, free=have)


def start_or_join(job: Job) -> bool:
    """Connect this process to Ray; True if Ray was started for it, on this machine."""
    import ray

    # Ray runs its workers at nice 15, below whatever else a node does. On a node that is there to train, that is wrong.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RUNTIME_ENV_RETRY_TIMES", "1")  # a package that is not there is not there at a third try
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
    try:
        if address := running():
            ray.init(address=address if os.environ.get("RAY_ADDRESS") else "auto", **quiet)
            return False
        placement.ask(job, [this_machine(job)])  # what can't be is refused before anything is started for it
        _start_own(cpus_to_have(job), quiet)
        return True
    except (OSError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS") or "this machine"
        raise LaunchError(f"no Ray at {where}: {error}") from error


def _start_own(cpus: int, quiet: Mapping[str, Any]) -> None:
    global _own_cpus, _reaper
    import ray

    atexit.register(end_own)  # each further run of this program finds it running
    with lifetime.in_own_sessions():
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, **quiet)
    _own_cpus = cpus
    _reaper = lifetime.reaper(
        info.process.pid for each in ray._private.worker._global_node.all_processes.values() for info in each
    )


def nodes() -> list[Node]:
    """The nodes that are alive now."""
    import ray

    return placement.nodes_from_ray(ray.nodes(), ray._private.state.available_resources_per_node())


def remaining_nodes() -> list[Node]:
    """Those that are not about to be taken away."""
    return notice.remaining(nodes())


def node_types() -> list[NodeType] | None:
    """The kinds of node that the autoscaler could bring; none without an autoscaler, None if nobody can tell."""
    import ray

    told = ray._private.state.state.get_cluster_config()
    return placement.types_from_config(told) if told else autoscaler.types()


@contextlib.contextmanager
def placed(job: Job, ask: Ask, events: Events) -> Iterator[Gang]:
    """The gang: one placement group, one actor per rank, all gone when the block is left."""
    import ray
    from ray.util.placement_group import remove_placement_group

    began = time.time()
    address = ray.get_runtime_context().gcs_address
    with ledger.steered(job, ask, nodes(), address, events) as steered:
        held = hold(ask, len(ask.bundles))
        if steered:
            held.wait(ledger.PLACE_S)
    places: Places | None = None
    try:
        wait_for(held, ask, job.scale.wait_s, events)
        plan = placement.seat(ask, bundle_nodes(held))
        events.say("phase", name="place", s=time.time() - began)
        places = Places(plan, held, shipping.runtime_env(job))
        gpus = places.gpus if ask.rank_resources.get("GPU") else None
        may_change = check.size_word(job.scale)
        against = partial(ledger.against, job, address)
        reserve = Reserve(places, job.scale, events, remaining_nodes, hold, against) if may_change else None
        renew = reserve.regroup if reserve else partial(renewed, places, held, job, events)
        with Gang(plan, places.call, events, gpus, places.take, renew, notice.draining, reserve) as gang:
            gang.report_to = partial(note, job, address, places)
            yield gang
    finally:
        if places is not None:
            places.leave()
        remove_placement_group(held)


def hold(ask: Ask, bundles: int, elsewhere: Sequence[str] = ()) -> Any:
    """A placement group of so many of these bundles. `elsewhere`: ids of the nodes that it must not be on."""
    from ray.util.placement_group import placement_group

    wanted = {**({"ray.io/node-id": f"!in({','.join(elsewhere)})"} if elsewhere else {}), **ask.selector}
    selector: dict[str, Any] = {"bundle_label_selector": [wanted] * bundles} if wanted else {}
    return placement_group([dict(bundle) for bundle in ask.bundles[:bundles]], strategy=ask.strategy, **selector)


def note(job: Job, address: str, places: Places, cause: End | None, slow: Sequence[Slow]) -> None:
    """Note what nodes did to an attempt. A cluster of one node has nobody to avoid."""
    if len(nodes()) > 1:
        now = time.time()
        ledger.note(ledger.file(), ledger.offences(address, job.dir, places.plan, cause, slow, now), now)


def wait_for(held: Any, ask: Ask, patience: float, events: Events) -> None:
    """Wait until every bundle has its place, saying what for."""
    waiting = Waiting(patience, events)
    while not held.wait(WAIT_S):
        waiting.still(placement.missing(ask, nodes()))


def renewed(places: Places, held: Any, job: Job, events: Events, lost: Sequence[int]) -> Plan:
    """The plan with other nodes for the ranks of lost ones, once there are any, and actors on them.

    Ray finds another place for the bundles of a node that it has given up, and keeps all others where they are.
    """
    waiting = Waiting(job.scale.wait_s, events)
    while not all_placed(held):
        waiting.still(placement.missing(places.plan.ask, nodes()))
        time.sleep(AGAIN_S)
    places.replace(lost, placement.reseat(places.plan, bundle_nodes(held)))
    return places.plan


def all_placed(held: Any) -> bool:
    """Whether every bundle has its place on a node that is alive."""
    from ray.util.placement_group import placement_group_table

    table, alive = placement_group_table(held), {node.id for node in nodes()}
    return bool(table["state"] == "CREATED" and alive.issuperset(table["bundles_to_node_id"].values()))


def bundle_nodes(held: Any) -> list[Node]:
    """The node of each bundle, from the placement group's own table: known before any actor is."""
    from ray.util.placement_group import placement_group_table

    there = {node.id: node for node in nodes()}
    table: Mapping[int, str] = placement_group_table(held)["bundles_to_node_id"]
    return [there[table[bundle]] for bundle in sorted(table)]
