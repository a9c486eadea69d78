"""Driver and agent: the doctor's check-up of a node. (either side)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from raydist.messages.request import Reply, Request
from raydist.shared.stack_ways import Tracing


class LibraryTrial(TypedDict, total=False):
    """The addresses that gloo or NCCL chose (node.dryrun), or its error."""

    addresses: list[str]
    interface: str
    """NCCL's interface."""
    error: str
    """The library's own message."""
    status: int
    """The ncclResult_t of a trial, dropped before the reply."""


class CheckupRequest(Request[Reply]):
    """A request of the doctor."""


class Peer(NamedTuple):
    """The address on which a node listens for the others."""

    address: str
    port: int


class Trip(NamedTuple):
    """The outcome of a call to a peer."""

    kind: str
    """fine, silent, refused, unreachable, broken, or stalled (short packets passed, long ones did
    not)."""
    words: str = ""
    rtt_s: float = 0.0
    ahead_s: float = 0.0
    """The lead of the peer's clock over the caller's; exact to half a round trip."""


@dataclass(frozen=True)
class ListenForPeers(CheckupRequest[Peer]):
    """Start to answer the other nodes, only on the training address."""

    address: str
    secret: bytes


@dataclass(frozen=True)
class CallPeers(CheckupRequest["list[Trip]"]):
    """Call all other nodes."""

    peers: Sequence[Peer]
    own: int
    """The index of this node among them."""
    secret: bytes
    timeout: float


@dataclass(frozen=True)
class StopListening(CheckupRequest[None]):
    """Answer the other nodes no longer."""


@dataclass(frozen=True)
class ReachStore(CheckupRequest[str]):
    """Connect to the store as the ranks will; reply with the error, or with an empty text."""

    address: str
    port: int
    timeout: float


@dataclass(frozen=True)
class TryLibraries(CheckupRequest["dict[str, LibraryTrial]"]):
    """Try which addresses gloo and NCCL choose with the variables of a rank.

    Reply with the result of node.dryrun by library.
    """

    names: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class HostCheck:
    """The reply to CheckHost."""

    shm_error: str
    """The error of writing to /dev/shm, or an empty text."""
    sees_folder: bool
    addresses: Sequence[str]
    """The addresses of the host's own name."""
    lookup_s: float = 0.0
    """Seconds that the look-up of the name of `CheckHost.address` took; at most
    checkup.LOOKUP_LIMIT_S."""
    tracing: Tracing | None = None


@dataclass(frozen=True)
class CheckHost(CheckupRequest[HostCheck]):
    """Check /dev/shm, the visibility of the driver's folder, the host's name, and name servers."""

    folder: str
    address: str = ""
    """The address of another node, whose name is looked up; empty: no look-up."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables that the job sets: RES_OPTIONS shortens a look-up."""
