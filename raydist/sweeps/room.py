"""Find out whether the cluster has room for another trial now, or can ever have it. (driver)

A trial is placed as a whole or not at all: two trials never hold a part each. It is started only
when there is room for all of it, and while every other trial has its slots: free nodes thus go to a
trial that has lost one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from raydist.cluster import connect, drain, nodes, placement
from raydist.cluster.nodes import Node, fit_count
from raydist.launch.gangs import Gangs
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError

PATIENCE_S = 1e9
"""scale.wait_s of a trial that waits for the autoscaler's nodes, or for those of another trial."""


def check_can_ever_fit(job: Job) -> None:
    """Raise ConfigError if the cluster can never hold the job."""
    placement.resources_for(job, connect.alive_nodes(), connect.node_types())


def find_room(job: Job, gangs: Gangs, alone: bool) -> Job | None:
    """Return the job to start now, or None.

    `gangs`: those of trials that have ended. `alone`: no trial is under way.
    """
    usable, types = drain.usable_nodes(job, connect.alive_nodes()), connect.node_types()
    try:
        request = placement.resources_for(job, usable, types)
        chosen, _ = nodes.select_nodes(usable, types or (), job.scale.labels)
    except ConfigError:  # nodes that the job needs are lost; alone, it fails with the reason
        gangs.clear()
        return job if alone else None
    if gangs.has(request):
        return job
    held = placed_resources()
    free = [
        (fit_count(unplaced_resources(node, held), request.bundles[0]), 1)
        for node in drain.not_draining(chosen)
    ]
    if nodes.room(request, free) >= len(request.bundles):
        return job
    gangs.clear()  # they have another size
    if alone:
        return job
    return replace(job, scale=replace(job.scale, wait_s=PATIENCE_S)) if types != [] else None


def placed_resources() -> Mapping[str, Counter[str]]:
    """Return by node the resources of all placed bundles.

    Ray's view of free resources includes them a moment later.
    """
    from ray.util import placement_group_table

    held: dict[str, Counter[str]] = defaultdict(Counter)
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            for bundle, node in group["bundles_to_node_id"].items():
                held[node].update(group["bundles"][bundle])
    return held


def unplaced_resources(node: Node, held: Mapping[str, Counter[str]]) -> dict[str, float]:
    """Return what is free on a node: for each resource the lesser of what both views report."""
    own = held.get(node.id, Counter())
    return {key: min(node.free.get(key, 0), total - own[key]) for key, total in node.total.items()}


def job_of_all(jobs: list[Job], parallel: int) -> Job:
    """Return a job that needs as many CPUs as `parallel` of these jobs.

    A Ray that is started for it has room for them.
    """
    largest = max(jobs, key=connect.cpus_needed)
    ranks = (largest.scale.nodes or 1) * (largest.scale.per_node or 2)
    scale = replace(largest.scale, nodes=1, max_nodes=None, per_node=ranks * parallel, spares=0)
    return replace(largest, scale=scale)
