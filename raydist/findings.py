"""What a check found: what is wrong, where, and what to type to mend it. (pure)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

LEVELS = ("note", "warn", "fail")
"""From the least to the worst: good to know; works, but not as well as it could; the job would break."""
HOSTS_NAMED = 4
CHECKS = {
    "interface": "each node's address is on an interface that is up, and all are in networks that meet",
    "hostname": "the host's own name is not a loopback address",
    "hca state": "the ports of the HCAs are active",
    "rdma libraries": "libibverbs and the device's provider are installed",
    "rdma devices": "the HCAs' device nodes can be opened",
    "memlock": "enough memory may be locked for RDMA",
    "same fabric": "all nodes have the same kind and number of HCAs",
    "storage hcas": "no HCA that is meant for storage carries gradients",
    "site settings": "nothing set already keeps ranks from the network",
    "roce gid": "each RoCE port has a routable RoCE v2 GID",
    "gpudirect": "NICs reach GPU memory directly",
    "affinity": "each GPU has an HCA close to it",
    "limits": "/dev/shm and the number of open files suffice",
    "links": "no link is slower than it could be",
    "ipoib": "IPoIB interfaces agree over the nodes",
    "versions": "all nodes run the same versions",
    "identity": "NCCL can tell the nodes apart",
    "iommu": "no IOMMU stands between GPU and NIC",
    "vendor": "a cloud's own network plug-in is there",
}
"""What the facts of the nodes alone can answer, in order of value."""


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before the job runs."""

    check: str
    """Which check found it."""
    level: str
    """note, warn or fail."""
    nodes: tuple[str, ...]
    """The hosts that it is about; none: the job as a whole."""
    text: str
    mend: str = ""
    """What to type to mend it."""

    def told(self) -> str:
        """One line: where, what, and how to mend it."""
        where = f"{named(self.nodes)}: " if self.nodes else ""
        return f"{where}{self.text}" + (f" (mend: {self.mend})" if self.mend else "")


def fold(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ only in their nodes as one; the worst first, otherwise in the order they came."""
    equal: dict[Finding, list[str]] = {}
    for finding in findings:
        equal.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    found = [replace(finding, nodes=tuple(dict.fromkeys(nodes))) for finding, nodes in equal.items()]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


def named(names: Iterable[str]) -> str:
    """The first few hosts, and how many more there are."""
    every = list(names)
    more = len(every) - HOSTS_NAMED
    return ", ".join(every[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")
