"""Drain notices: Ray announces that it will remove nodes, with time to save and leave. (driver)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydist.cluster import ray_private
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Slot
from raydist.settings.config import Job

USUAL_S = 30.0
"""Assumed seconds if Ray gives no deadline: what `ray start --block` has after SIGTERM."""
SHARE = 1 / 3
"""Fraction of the remaining time for ranks to reach their next step.

They get the same again to save on SIGTERM. The last third is for writing to disk.
"""


@dataclass(frozen=True)
class DrainNotice:
    """Nodes of the worker group that Ray drains."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    left_s: float | None
    """Seconds until Ray takes them away; None if Ray has given no deadline."""

    @property
    def text(self) -> str:
        """The notice as a sentence."""
        when = "" if self.left_s is None else f" in {self.left_s:.0f} s"
        return (
            f"Ray drains {', '.join(self.hosts)}: it takes "
            f"{'them' if len(self.hosts) > 1 else 'it'} away{when}"
        )

    @property
    def share_s(self) -> float:
        """Seconds that ranks get to reach their next step, or to save."""
        return SHARE * (USUAL_S if self.left_s is None else self.left_s)


def drain_deadlines() -> dict[str, float]:
    """Return node id -> deadline of each node that Ray drains.

    A deadline is in seconds since the epoch; 0 means none.
    """
    from ray.exceptions import RayError

    try:
        return {node: at / 1000 for node, at in ray_private.draining_nodes().items()}
    # If the GCS does not answer, other parts report that it is gone.
    except (
        RayError,
        RuntimeError,
        OSError,
    ):
        return {}


def not_draining(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that Ray does not drain."""
    drained = drain_deadlines()
    return [node for node in nodes if node.id not in drained]


def usable_nodes(job: Job, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that a job may plan with.

    Drained nodes are left out if the job takes all nodes that the cluster has.
    """
    return not_draining(nodes) if job.scale.nodes is None or job.scale.max_nodes else list(nodes)


def drain_notice(
    slots: Sequence[Slot], deadlines: Mapping[str, float], now: float
) -> DrainNotice | None:
    """Return the notice for these ranks; None if Ray drains none of their nodes.

    `deadlines`: as returned by `drain_deadlines`.
    """
    drained = [slot for slot in slots if slot.node.id in deadlines]
    if not drained:
        return None
    known = [at for slot in drained if (at := deadlines[slot.node.id])]
    left_s = max(0.0, min(known) - now) if known else None
    hosts = tuple(dict.fromkeys(slot.node.host for slot in drained))
    return DrainNotice(tuple(slot.rank for slot in drained), hosts, left_s)
