"""NCCL's own log -> which transport carried each pair of ranks, and why not a better one. (pure)

The texts are those of NCCL 2.10 to 2.30 (src/transport/net_ib, src/transport/net.cc, src/plugin/net.cc); a line that is
cut off or mixed with another is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (?P<one>\d+)\[[0-9a-f]+\] -> (?P<other>\d+)\[[0-9a-f]+\] (?:\[(?:send|receive)\] )?"
    r"via (?P<kind>NET|P2P|SHM)/(?P<name>[^/\n]+?)(?:/\d+(?:\(\d+\))?)?(?P<more>(?:/[A-Za-z()]+|\(PCI\))*)\s*$"
)
NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
COUNTED = re.compile(r"NCCL INFO comm \S+ rank \d+ nRanks (\d+) nNodes (\d+) ")
FOUND_IB = re.compile(r"\[\d+\](\S+?):(\d+)(?::-?\d*)*/(?:IB|RoCE)")
# The place of each line's own host, process and device is taken by any text: Ray and timestamps write before it.
CAUSES = (
    (re.compile(r"NET/IB : No device found"), "NCCL found no active device"),
    (re.compile(r"(?:Count not open|Failed to open) libibverbs\.so"), "libibverbs is missing on the node"),
    (re.compile(r"NET/IB : Unable to open device (\S+)"), "a device can't be opened: /dev/infiniband is not there"),
    (re.compile(r"NCCL_IB_DISABLE set by environment to 1"), "NCCL_IB_DISABLE=1 is set"),
)
SOCKET = "Socket"
RDMA = ("IB", "IBext", "UCX", "Libfabric", "AWS Libfabric", "OFI")


@dataclass(frozen=True)
class Channel:
    """How one rank reaches another."""

    one: int
    other: int
    kind: str
    """NET, P2P or SHM."""
    name: str
    """IB, Socket, a plug-in's name; of P2P and SHM how they do it."""
    direct: bool = False
    """Straight from GPU memory to the network card (GPUDirect RDMA)."""


@dataclass(frozen=True)
class Log:
    """What the log of one rank tells."""

    network: str = ""
    """IB, Socket or a plug-in's name; empty where the log does not say."""
    hcas: tuple[str, ...] = ()
    """The ports of HCAs that NCCL uses: mlx5_0:1."""
    channels: tuple[Channel, ...] = ()
    why_not: str = ""
    """Why it does not use InfiniBand, as far as the log says."""
    counted: tuple[int, int] = (0, 0)
    """(ranks, nodes) of the largest communicator, as NCCL sees them; zeros where the log does not say."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Log:
        """The Log that `dataclasses.asdict` took apart."""
        channels = tuple(Channel(**one) for one in plain["channels"])
        counted: tuple[int, int] = tuple(plain["counted"])
        return cls(plain["network"], tuple(plain["hcas"]), channels, plain["why_not"], counted)


def parse(text: str) -> Log:
    """What a log tells; lines of several ranks, or of other programs, do no harm."""
    network, why_not, counted = "", "", (0, 0)
    hcas: dict[str, None] = {}
    channels: dict[Channel, None] = {}
    for line in text.splitlines():
        if match := CHANNEL.search(line):
            direct = "/GDRDMA" in match["more"]
            channels[Channel(int(match["one"]), int(match["other"]), match["kind"], match["name"], direct)] = None
        elif match := NETWORK.search(line):
            network = match[1]
        elif match := COUNTED.search(line):
            counted = max(counted, (int(match[1]), int(match[2])))
        elif "NET/IB : Using" in line:
            hcas |= {f"{name}:{port}": None for name, port in FOUND_IB.findall(line)}
        elif cause := next((cause for pattern, cause in CAUSES if pattern.search(line)), None):
            why_not = why_not or cause
    return Log(network, tuple(hcas), tuple(channels), why_not, counted)


def is_rdma(network: str) -> bool:
    """Whether a network of NCCL's goes past the kernel; HPC-X writes a version after the name, as in IBext_v11."""
    return re.sub(r"_v\d+$", "", network).partition("-")[0] in RDMA


def between(logs: Sequence[Log], nodes: Sequence[int]) -> list[Channel]:
    """The channels between ranks on different nodes. `nodes`: of each rank its node."""
    known = [channel for log in logs for channel in log.channels if max(channel.one, channel.other) < len(nodes)]
    return [channel for channel in known if nodes[channel.one] != nodes[channel.other]]
