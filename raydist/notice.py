"""The cluster's word that nodes are about to be taken away: heard while there is time to save and to leave. (driver)"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raydist.config import Job
from raydist.group import Gang
from raydist.placement import Node, Seat

POLL_S = 1.0
"""Seconds between two looks; a look takes Ray a millisecond. Spot instances are given 30 to 120 seconds."""
USUAL_S = 30.0
"""Seconds that are taken for granted where the cluster names no deadline, as `ray start --block` has on SIGTERM."""
SHARE = 1 / 3
"""The part of the time left that ranks get to come to their next step, and then, if they want it, to save on SIGTERM.
The last third is for the disk."""
STEPS = 2
"""Steps after which each rank has kept a state that all have: no rank is more than one step ahead of another."""


@dataclass(frozen=True)
class Notice:
    """Nodes of the gang that are being drained."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    left_s: float | None
    """Seconds until they are gone; None where the cluster has not said."""

    @property
    def text(self) -> str:
        """For a person."""
        names, many = ", ".join(self.hosts), len(self.hosts) > 1
        when = "" if self.left_s is None else f" in {self.left_s:.0f} s"
        return f"Ray drains {names}: {'they are' if many else 'it is'} to be taken away{when}"

    @property
    def share_s(self) -> float:
        """Seconds that ranks get to come to their next step, or to save."""
        return SHARE * (USUAL_S if self.left_s is None else self.left_s)


@contextlib.contextmanager
def heard(gang: Gang, tell: Callable[[Notice], None]) -> Iterator[None]:
    """Inside, `tell` is called once, from another thread, when nodes of the gang are to be taken away."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(POLL_S):
            if found := notice(gang.plan.seats, gang.draining(), time.time()):
                tell(found)
                return

    threading.Thread(target=look, name="raydist-notice", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def draining() -> dict[str, float]:
    """The nodes that are about to be taken away, each with its deadline in seconds since the epoch, or 0."""
    import ray

    try:
        return {node: at / 1000 for node, at in ray._private.state.state.get_draining_nodes().items()}
    except Exception:  # the GCS is away for a moment, or for good: other parts say so
        return {}


def remaining(nodes: Sequence[Node]) -> list[Node]:
    """Those that are not about to be taken away."""
    going = draining()
    return [node for node in nodes if node.id not in going]


def staying(job: Job, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that a job may count on: all, or, where it takes all that are there, those that stay."""
    return remaining(nodes) if job.scale.nodes is None or job.scale.max_nodes else list(nodes)


def notice(seats: Sequence[Seat], draining: Mapping[str, float], now: float) -> Notice | None:
    """What is to be told of these nodes. `draining`: by node id the deadline in seconds since the epoch, 0 for none."""
    going = [seat for seat in seats if seat.node.id in draining]
    if not going:
        return None
    deadlines = [at for seat in going if (at := draining[seat.node.id])]
    left = max(0.0, min(deadlines) - now) if deadlines else None
    return Notice(tuple(seat.rank for seat in going), tuple(dict.fromkeys(seat.node.host for seat in going)), left)
