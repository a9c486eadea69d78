"""What a worker group needs of the machines of its agents: with Ray or without. (driver)"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from raydist.cluster.placement import Plan
from raydist.launch.standby import StandbyNodes
from raydist.messages.request import AnyReply, Request
from raydist.shared.outcome import End, Slow

T = TypeVar("T")


class Hosts(Protocol):
    """The machines that host the agents of a run.

    Implemented by placement_group.RayHosts and inline.LocalHosts.
    """

    standby: StandbyNodes | None
    """The nodes without ranks of a job that has or may get some."""
    ray_stays: bool
    """As in Open."""

    def call(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to the agent of a rank, as a Transport."""
        ...

    def gpus(self) -> Sequence[Sequence[str]] | None:
        """Return each rank's GPUs; None if Ray assigns none."""
        ...

    def start_other_actors(self) -> None:
        """Start the actors that host no agent; they can wait until the ranks have begun."""
        ...

    def replace_nodes(self, lost: Sequence[int]) -> Plan:
        """Find other nodes for lost ranks, and return the new plan.

        Raises LaunchError if none came within scale.wait_s.
        """
        ...

    def draining(self) -> Mapping[str, float]:
        """Return the nodes that are draining, by id.

        Each with its deadline in seconds since the epoch, or 0.
        """
        ...

    def wanted_by(self) -> str:
        """Return for which other run this one is to make way, for a person; empty for none."""
        ...

    def record_attempt(self, cause: End | None, slow: Sequence[Slow]) -> None:
        """Record the first cause of an attempt, and its stragglers, in the node history."""
        ...

    def reachable(self, node_ids: Collection[str]) -> set[str]:
        """Return those of these nodes whose kernels answer.

        Ray itself notices that the others are gone.
        """
        ...

    def leave_out(self, node_ids: Collection[str]) -> None:
        """Give these nodes no ranks until their kernels answer again.

        They do not, although Ray has not given them up.
        """
        ...

    def put(self, call: bytes) -> bytes | Awaitable[bytes]:
        """Put bytes where each node fetches them once."""
        ...

    def on_node(self, rank: int, look: Callable[..., T | None], *args: Any) -> Future[T | None]:
        """Call a function on the node of a rank whose agent does not answer."""
        ...
