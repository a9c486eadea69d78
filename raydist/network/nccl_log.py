"""NCCL's log -> the transport between each pair of ranks, and why none better was used. (pure)

The patterns fit NCCL 2.10 to 2.30 (src/transport/net_ib, src/transport/net.cc, src/plugin/net.cc).
A line that is truncated or mixed with another matches none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (?P<one>\d+)\[[0-9a-f]+\] -> (?P<other>\d+)\[[0-9a-f]+\] "
    r"(?:\[(?:send|receive)\] )?"
    r"via (?P<kind>NET|P2P|SHM)/(?P<name>[^/\n]+?)(?:/\d+(?:\(\d+\))?)?"
    r"(?P<more>(?:/[A-Za-z()]+|\(PCI\))*)\s*$"
)
NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
COUNTED = re.compile(r"NCCL INFO comm \S+ rank \d+ nRanks (\d+) nNodes (\d+) ")
FOUND_IB = re.compile(r"\[\d+\](\S+?):(\d+)(?::-?\d*)*/(?:IB|RoCE)")
# No pattern is anchored at the start of the line: Ray and timestamps come before NCCL's own text.
CAUSES = (
    (re.compile(r"NET/IB : No device found"), "NCCL found no active device"),
    (
        re.compile(r"(?:Count not open|Failed to open) libibverbs\.so"),
        "libibverbs is missing on the node",
    ),
    (
        re.compile(r"NET/IB : Unable to open device (\S+)"),
        "NCCL can't open a device: /dev/infiniband is missing",
    ),
    (re.compile(r"NCCL_IB_DISABLE set by environment to 1"), "NCCL_IB_DISABLE=1 is set"),
)
SOCKET = "Socket"
RDMA = ("IB", "IBext", "UCX", "Libfabric", "AWS Libfabric", "OFI", "gIB")


@dataclass(frozen=True)
class NcclChannel:
    """The transport from one rank to another."""

    one: int
    other: int
    kind: str
    """NET, P2P or SHM."""
    name: str
    """The name of the transport.

    For NET: IB, Socket or a plug-in's name; for P2P and SHM: NCCL's name of the mechanism.
    """
    direct: bool = False
    """Whether data goes from GPU memory directly to the network card (GPUDirect RDMA)."""


@dataclass(frozen=True)
class Log:
    """Contents of the NCCL log of one rank."""

    network: str = ""
    """IB, Socket or a plug-in's name; empty if the log does not name it."""
    hcas: tuple[str, ...] = ()
    """The ports of HCAs that NCCL uses, such as mlx5_0:1."""
    channels: tuple[NcclChannel, ...] = ()
    why_not: str = ""
    """Why NCCL does not use InfiniBand; empty if the log gives no reason."""
    counted: tuple[int, int] = (0, 0)
    """(ranks, nodes) of the largest communicator, as NCCL counts them.

    Zeros if the log does not name them.
    """


def parse_nccl_log(text: str) -> Log:
    """Parse the log of one rank; lines of other ranks and of other programs do no harm."""
    network = ""
    why_not = ""
    counted = (0, 0)
    hcas: dict[str, None] = {}
    channels: dict[NcclChannel, None] = {}
    for line in text.splitlines():
        if match := CHANNEL.search(line):
            direct = "/GDRDMA" in match["more"]
            channels[
                NcclChannel(
                    int(match["one"]), int(match["other"]), match["kind"], match["name"], direct
                )
            ] = None
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
    """Report whether this NCCL network is RDMA.

    HPC-X appends a version to the name, as in IBext_v11.
    """
    return re.sub(r"_v\d+$", "", network).partition("-")[0] in RDMA


def channels_between(logs: Sequence[Log], node_of: Sequence[int]) -> list[NcclChannel]:
    """Return the channels between ranks on different nodes.

    `node_of`: for each rank the number of its node.
    """
    known = [
        channel
        for log in logs
        for channel in log.channels
        if max(channel.one, channel.other) < len(node_of)
    ]
    return [channel for channel in known if node_of[channel.one] != node_of[channel.other]]
