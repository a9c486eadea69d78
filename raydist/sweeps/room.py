"""Whether the cluster has room for another trial now, and whether it can ever have it. (driver)

A trial is one placement group, which Ray places as a whole or not at all: two trials never hold a part each. It is
started only when there is room for all of it, and while every other trial has its place: so nodes that are free go to
a trial that has lost one.
"""

from __future__ import annotations

from dataclasses import replace

from raydist.cluster import connect, drain, nodes, placement
from raydist.cluster.nodes import fit_count
from raydist.launch.gangs import Gangs
from raydist.settings.config import Job

PATIENCE_S = 1e9
"""scale.wait_s of a trial that waits for the autoscaler's nodes, or for those of another trial."""


def check_can_ever_fit(job: Job) -> None:
    """Raise ConfigError if the cluster can never hold the job."""
    placement.resources_for(job, connect.alive_nodes(), connect.node_types())


def find_room(job: Job, gangs: Gangs, alone: bool, fresh: bool = False) -> Job | None:
    """The job to start now, or None.

    `gangs`: those of trials that have ended. `alone`: no trial is under way. `fresh`: what Ray says of free resources
    is not to be believed yet.
    """
    usable = drain.usable_nodes(job, connect.alive_nodes())
    request = placement.resources_for(job, usable, None)
    if gangs.has(request):
        return job
    if fresh:
        return None
    chosen, _ = nodes.select_nodes(usable, (), job.scale.labels)
    free = [(fit_count(node.free, request.bundles[0]), 1) for node in drain.not_draining(chosen)]
    if nodes.room(request, free) >= len(request.bundles):
        return job
    gangs.clear()  # they are of another size
    if alone:
        return job
    may_grow = connect.node_types() != []
    return replace(job, scale=replace(job.scale, wait_s=PATIENCE_S)) if may_grow else None


def job_of_all(jobs: list[Job], parallel: int) -> Job:
    """A job that needs as many CPUs as `parallel` of these: a Ray that is started for it has room for them."""
    largest = max(jobs, key=connect.cpus_needed)
    ranks = (largest.scale.nodes or 1) * (largest.scale.per_node or 2)
    scale = replace(largest.scale, nodes=1, max_nodes=None, per_node=ranks * parallel, spares=0)
    return replace(largest, scale=scale)
