"""(settings, facts of one node) -> its interface, HCAs, and their variables, each with its reason. (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from raydist.config import Job
from raydist.errors import ConfigError, suggest
from raydist.node.facts import Facts, Gid, Hca

Line = tuple[str, str, str]
"""(name, value, reason)."""
LAYERS = {"ib": "InfiniBand", "roce": "Ethernet"}
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"
EFA = "0x1d0f"
MAPPED = "0000:0000:0000:0000:0000:ffff"
"""How the GID of an IPv4 address begins."""
FINDS_GID = (2, 21)
"""NCCL since which GIDs need no index (its user guide, troubleshooting)."""
LIBFABRIC = "AWS Libfabric"
"""The name that every version of aws-ofi-nccl obeys."""
LOUD = ("INFO", "TRACE")
"""NCCL_DEBUG that tells the network."""


@dataclass(frozen=True)
class Choice:
    """The HCAs that carry the gradients on one node."""

    hcas: tuple[Hca, ...]
    reason: str = ""
    aside: tuple[tuple[str, str], ...] = ()
    """(name, reason) of active ones that are left out."""
    sure: bool = True
    """Whether the place of the GPUs decided, and not the speed alone, which HCAs are for gradients."""


def vendor(here: Facts) -> str:
    """What of a vendor's own network is on the node, that NCCL_NET and NCCL_IB_HCA must not bypass; else empty."""
    if here.machine.plugins:
        return here.machine.plugins[0]
    return "EFA" if any(hca.vendor == EFA for hca in here.hcas) else ""


def near(pci: str, other: str) -> bool:
    """Whether two devices share a PCIe bridge below the root complex (PIX or PXB in nvidia-smi's words)."""
    shared = 0
    for one, two in zip(pci.split("/")[:-1], other.split("/")[:-1], strict=False):
        if one != two:
            break
        shared += 1
    return shared >= 2  # the first is the root complex


def choose(job: Job, here: Facts) -> Choice:
    """The HCAs asked for; else the active ones of the kind asked for that the GPUs reach best, of one class."""
    if job.fabric.hca:
        return Choice(_asked(job, here), "fabric.hca")
    if job.fabric.kind in ("ethernet", "site") or vendor(here):
        return Choice(())
    layer = LAYERS.get(job.fabric.kind)
    active = [hca for hca in here.hcas if hca.active]
    chosen = [hca for hca in active if layer is None or hca.active[0].link_layer == layer]
    aside = [(hca.name, f"is not {layer}") for hca in active if hca not in chosen]
    close = [hca for hca in chosen if any(near(hca.pci, gpu.pci) for gpu in here.devices)]
    if close:
        aside += [(hca.name, "shares no PCIe switch with a GPU") for hca in chosen if hca not in close]
        chosen = close
    if chosen:
        best = _class(chosen)
        aside += [(hca.name, f"is {_told(kind(hca))}, not {_told(best)}") for hca in chosen if kind(hca) != best]
        chosen = [hca for hca in chosen if kind(hca) == best]
    sure = bool(close) or len({kind(hca) for hca in active if layer is None or hca.active[0].link_layer == layer}) < 2
    return Choice(tuple(chosen), f"fabric.kind={job.fabric.kind}", tuple(aside), sure)


def _asked(job: Job, here: Facts) -> tuple[Hca, ...]:
    known = {hca.name: hca for hca in here.hcas}
    for name in job.fabric.hca:
        if name not in known:
            there = suggest(name, known) if known else "it has none at all; leave fabric.hca out"
            raise ConfigError(f"fabric.hca: {here.hostname} has no HCA {name}; {there}")
    return tuple(known[name] for name in job.fabric.hca)


def kind(hca: Hca) -> tuple[str, float, str]:
    """What HCAs of one fabric have in common: link layer, Gbit/s and, on InfiniBand, the subnet prefix."""
    port = hca.active[0]
    prefix = port.gids[0].gid[:19] if port.gids and port.link_layer == "InfiniBand" else ""
    return port.link_layer, port.gbps, prefix


def _class(hcas: list[Hca]) -> tuple[str, float, str]:
    counted = Counter(kind(hca) for hca in hcas)
    return max(counted, key=lambda one: (counted[one] * one[1], one[1]))  # the most Gbit/s in all


def _told(of: tuple[str, float, str]) -> str:
    layer, gbps, prefix = of
    return f"{layer} at {gbps:g} Gbit/s" + (f" in subnet {prefix}" if prefix else "")


def settings(job: Job, here: Facts, nodes: int) -> Iterator[Line]:
    """The network's variables of one node. `nodes`: of the whole job."""
    if job.fabric.kind != "site":
        yield from sockets(job, here)
        yield from rdma(job, here, nodes)


def sockets(job: Job, here: Facts) -> Iterator[Line]:
    """What makes gloo and NCCL's sockets talk over the interface."""
    asked = job.fabric.interface == here.interface
    why = "fabric.interface" if asked else f"it owns {here.ip}, the node's address in Ray"
    yield "GLOO_SOCKET_IFNAME", here.interface, f"{why}; unset, gloo goes where the host name points"
    # without the = it would be a prefix: eth1 also means eth10
    yield "NCCL_SOCKET_IFNAME", f"={here.interface}", f"{why}; the = keeps NCCL from others that begin like it"


def rdma(job: Job, here: Facts, nodes: int) -> Iterator[Line]:
    """What makes NCCL take these HCAs and no others; nothing where nothing needs choosing."""
    if job.fabric.kind == "ethernet":
        yield "NCCL_IB_DISABLE", "1", "fabric.kind=ethernet: TCP even where there is RDMA"
        return
    choice = choose(job, here)
    if choice.aside or job.fabric.hca:
        names = ",".join(hca.name for hca in choice.hcas)
        left = "; ".join(f"{name} {why}" for name, why in choice.aside)
        # a bare mlx5_1 would also mean mlx5_10
        if names:
            yield "NCCL_IB_HCA", f"={names}", choice.reason + (f": {left}" if left else "")
    if choice.hcas and nodes > 1:
        yield "NCCL_IGNORE_NET_MISMATCH", "0", "nodes with unequal HCAs are an error; by default they may hang"
    yield from gid_index(here, choice)
    if job.fabric.strict and (network := forced(here)):
        yield "NCCL_NET", network, "fabric.strict: RDMA or an error, never silently TCP"


def gid(hca: Hca) -> Gid | None:
    """The GID by which NCCL would reach other nodes over RoCE: routable, v2, of IPv4 if there is one; None: no such.

    Source: NCCL 2.30 src/transport/net_ib/connect.cc.
    """
    port = hca.active[0] if hca.active else None
    if port is None or port.link_layer != "Ethernet":
        return None
    routable = [one for one in port.gids if one.kind == "RoCE v2" and not one.gid.startswith("fe80")]
    return min(routable, key=lambda one: family(one) != "IPv4", default=None)


def family(gid: Gid) -> str:
    return "IPv4" if gid.gid.startswith(MAPPED) else "IPv6"


def finds_gid(here: Facts) -> bool:
    """Whether this node's NCCL finds the right GID of each HCA by itself; one of unknown version is taken for new."""
    told = [int(one) for one in here.versions.get("nccl", "").split(".")[:2] if one.isdigit()]
    return len(told) < 2 or tuple(told) >= FINDS_GID


def gid_index(here: Facts, choice: Choice) -> Iterator[Line]:
    """The GID index that an old NCCL must be told, where one fits all HCAs."""
    found = {one.index for hca in choice.hcas if (one := gid(hca))}
    if len(found) == 1 and not finds_gid(here):
        why = f"NCCL {here.versions['nccl']} takes GID 0 unless it is told; since 2.21 it finds the routable one itself"
        yield "NCCL_IB_GID_INDEX", str(found.pop()), why


def forced(here: Facts) -> str:
    """What NCCL_NET must be, so that NCCL can't fall back to sockets; empty where no name forces the plug-in there."""
    if not vendor(here):
        return "IB"
    if any(hca.vendor == EFA for hca in here.hcas):
        return LIBFABRIC
    return next(iter(here.machine.networks), "")
