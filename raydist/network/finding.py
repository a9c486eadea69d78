"""Result of a check: the problem, the hosts that have it, and what to type to fix it. (pure)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from raydist.shared.rank_names import joined_names

LEVELS = ("note", "warn", "fail")
"""From harmless to severe.

note: for information; warn: the job runs, but less well than it could; fail: the job would
break.
"""
CHECKS = {
    "interface": "each node's address is on an interface that is up, and the nodes' networks are "
    "connected",
    "hostname": "the host's own name is not a loopback address",
    "hca state": "the ports of the HCAs are active",
    "rdma libraries": "libibverbs and the device's provider are installed",
    "rdma devices": "the HCAs' device files can be opened",
    "memlock": "enough memory may be locked for RDMA",
    "same fabric": "all nodes have the same kind and number of HCAs",
    "storage hcas": "no HCA that is meant for storage carries gradients",
    "site settings": "no variable of the site keeps ranks from the network",
    "roce gid": "each RoCE port has a routable RoCE v2 GID",
    "gpudirect": "NICs reach GPU memory directly",
    "affinity": "each GPU has an HCA close to it",
    "limits": "/dev/shm and the number of open files suffice",
    "links": "no link is slower than it could be",
    "ipoib": "IPoIB interfaces agree over the nodes",
    "versions": "all nodes run the same versions",
    "identity": "NCCL can tell the nodes apart",
    "iommu": "the IOMMU does not slow GPUDirect down",
    "vendor": "the network plug-in of the cloud is installed",
}
"""Checks that need only the facts of the nodes, the most valuable first."""
PEER_FIXES = {
    "twice": "both nodes have the address {address} on {interface}, so each connects to itself: "
    "choose a network with "
    "different addresses on all nodes: fabric.interface=NAME",
    "silent": "a firewall or security group drops packets, or a route back is missing: open all "
    "TCP ports between the "
    "nodes (gloo and NCCL use any of net.ipv4.ip_local_port_range); on {caller}: ip route get "
    "{address}",
    "refused": "{called} listens, so a firewall refuses: open all TCP ports between the nodes; "
    "on {called}: nft list ruleset, or iptables -S",
    "unreachable": "{caller} has no route to that network; on {caller}: ip route get {address}, "
    "or choose a network that all nodes are on: fabric.interface=NAME",
    "stalled": "short packets arrive and long ones are lost, so the MTU of {interface} is larger "
    "than the path's; on "
    "every node: ip link set dev {interface} mtu 1400 (or sysctl -w net.ipv4.tcp_mtu_probing=1)",
    "broken": "a proxy, a service mesh's sidecar or a node that died ends connections between "
    "the nodes; "
    "take it out of the path, or choose another network: fabric.interface=NAME",
}
"""What to do about a call to another node, by the kind of its Trip; `twice`: two nodes with one
address."""


def peer_fix(kind: str, caller: tuple[str, str], called: tuple[str, str], interface: str) -> str:
    """Return what to do about a call between two nodes, each a name and an address."""
    return PEER_FIXES["twice" if caller[1] == called[1] else kind].format(
        caller=caller[0], called=called[0], address=called[1], interface=interface
    )


@dataclass(frozen=True)
class Finding:
    """One problem or piece of information that a person should know before the job runs."""

    check: str
    """The check that produced the finding: a key of CHECKS, or a check of the doctor."""
    level: str
    """note, warn or fail."""
    nodes: tuple[str, ...]
    """The hosts that the finding concerns; empty: the whole job."""
    text: str
    fix: str = ""
    """What to type to fix it."""

    def line(self) -> str:
        """Format the finding as `hosts: text (fix: what to type)`."""
        where = f"{joined_names(self.nodes)}: " if self.nodes else ""
        return f"{where}{self.text}" + (f" (fix: {self.fix})" if self.fix else "")


def clock_finding(host: str, ahead_s: float, reference: str) -> Finding:
    """Describe a clock that is `ahead_s` seconds ahead of the reference; behind it, if negative."""
    side = "ahead of" if ahead_s > 0 else "behind"
    return Finding(
        "clock",
        "warn",
        (host,),
        f"the clock of {host} is {abs(ahead_s):.1f} s {side} {reference}: the times in its logs "
        "are wrong, and S3 refuses requests that are 15 minutes off",
        f"on {host}: timedatectl set-ntp true (or start chrony)",
    )


def fold_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in their hosts.

    Sorted by level, the worst first; otherwise the order is kept.
    """
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    folded = [
        replace(finding, nodes=tuple(dict.fromkeys(names))) for finding, names in hosts.items()
    ]
    return sorted(folded, key=lambda finding: -LEVELS.index(finding.level))
