"""(settings, facts of one node) -> its interface, HCAs, and their variables with reasons. (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raydist.network.facts import Facts, Gid, Hca, version_numbers
from raydist.network.names import EnvVar
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError

LAYERS = {"ib": "InfiniBand", "roce": "Ethernet"}
"""fabric.kind -> link layer of the HCAs."""
TCP = "fabric.kind=ethernet: TCP even where the node has RDMA"
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"
EFA = "0x1d0f"
"""PCI vendor of AWS's Elastic Fabric Adapter."""
MAPPED = "0000:0000:0000:0000:0000:ffff"
"""Prefix of the GID of an IPv4 address."""
FINDS_GID = (2, 21)
"""The first NCCL version that finds the GID index itself (NCCL user guide, troubleshooting)."""
LIBFABRIC = "AWS Libfabric"
"""The value of NCCL_NET that every version of aws-ofi-nccl accepts."""
LOUD = ("INFO", "TRACE")
"""Values of NCCL_DEBUG with which NCCL logs the network that it uses."""
LinkClass = tuple[str, float, str]
"""(link layer, Gbit/s, subnet prefix): equal for all HCAs of one fabric. Rails have no prefix."""


@dataclass(frozen=True)
class DeviceChoice:
    """The HCAs of one node that carry the gradients."""

    hcas: tuple[Hca, ...]
    reason: str = ""
    aside: tuple[tuple[str, str], ...] = ()
    """(name, reason) of each active HCA that is left out, although it could be opened."""
    doubt: str = ""
    """Why PCIe does not tell gradient HCAs from storage HCAs, so that only the link does.

    Empty if the choice is certain.
    """

    @property
    def none_fits(self) -> bool:
        """Whether the node has active HCAs, but none of fabric.kind."""
        return bool(self.aside) and not self.hcas


def vendor_plugin(node: Facts) -> str:
    """Return the cloud vendor's NCCL plug-in or network; empty if there is none.

    NCCL_NET and NCCL_IB_HCA must not bypass it.
    """
    if node.machine.plugins:
        return node.machine.plugins[0]
    return "EFA" if any(hca.vendor == EFA for hca in node.hcas) else ""


def share_bridge(pci: str, other: str) -> bool:
    """Report whether two devices share a PCIe bridge below the root complex.

    This is PIX or PXB in `nvidia-smi topo -m`.
    """
    shared = 0
    for one, two in zip(pci.split("/")[:-1], other.split("/")[:-1], strict=False):
        if one != two:
            break
        shared += 1
    return shared >= 2  # the first one is the root complex


def choose_devices(job: Job, node: Facts) -> DeviceChoice:
    """Return the HCAs that raydist chooses: none if a vendor's plug-in chooses them itself."""
    if vendor_plugin(node) and not job.fabric.hca:
        return DeviceChoice(())
    return likely_devices(job, node)


def likely_devices(job: Job, node: Facts) -> DeviceChoice:
    """Return the HCAs of fabric.hca, else the active HCAs of fabric.kind nearest to GPUs.

    The latter all belong to one link class. Those that this process can't open, as in a container,
    are not among them, unless it can open none. A vendor's plug-in needs them too.
    """
    if job.fabric.hca:
        return DeviceChoice(_requested_hcas(job, node), "fabric.hca")
    if job.fabric.kind in ("ethernet", "site"):
        return DeviceChoice(())
    layer = LAYERS.get(job.fabric.kind)
    active = [hca for hca in node.hcas if hca.active]
    candidates = [hca for hca in active if layer is None or hca.active[0].link_layer == layer]
    aside = [(hca.name, f"is not {layer}") for hca in active if hca not in candidates]
    candidates = [hca for hca in candidates if hca.openable] or candidates
    close = [
        hca for hca in candidates if any(share_bridge(hca.pci, gpu.pci) for gpu in node.devices)
    ]
    if close:
        aside += [
            (hca.name, "shares no PCIe switch with a GPU") for hca in candidates if hca not in close
        ]
        candidates = close
    links = {hca: link_class(hca) for hca in candidates}
    doubt = "" if close or len({*links.values()}) < 2 else "no GPU is near one"
    if candidates:
        for hca in _rails(links, node) if close else ():
            links[hca] = (*links[hca][:2], "")
        # A machine with AMD GPUs has no `devices`.
        without_gpus = not (node.devices or node.gpus)
        best = _widest_class([*links.values()], job.backend.name == "mpi" and without_gpus)
        aside += [
            (hca.name, f"is {_describe_link(link)}, not {_describe_link(best)}")
            for hca, link in links.items()
            if link != best
        ]
        candidates = [hca for hca, link in links.items() if link == best]
        if close and any(link != best and link[:2] == best[:2] for link in links.values()):
            doubt = "GPUs are near HCAs of several subnets"
    return DeviceChoice(tuple(candidates), f"fabric.kind={job.fabric.kind}", tuple(aside), doubt)


def _requested_hcas(job: Job, node: Facts) -> tuple[Hca, ...]:
    known = {hca.name: hca for hca in node.hcas}
    for name in job.fabric.hca:
        if name not in known:
            if not known:
                raise ConfigError.of(
                    "fabric.hca", name, f"{node.hostname} has no HCA", "fabric.hca=[]"
                )
            raise ConfigError.unknown("fabric.hca", name, known, f"{node.hostname} has no such HCA")
        layer = LAYERS.get(job.fabric.kind)
        if layer and all(port.link_layer != layer for port in known[name].ports):
            cause = f"on {node.hostname} it is not {layer}, as fabric.kind={job.fabric.kind} says"
            raise ConfigError.of("fabric.hca", name, cause, "fabric.kind=auto")
    return tuple(known[name] for name in job.fabric.hca)


def link_class(hca: Hca) -> LinkClass:
    """Return link layer, Gbit/s and, on InfiniBand, subnet prefix of an HCA's first active port."""
    port = hca.active[0]
    prefix = port.gids[0].gid[:19] if port.gids and port.link_layer == "InfiniBand" else ""
    return port.link_layer, port.gbps, prefix


def _rails(links: Mapping[Hca, LinkClass], node: Facts) -> list[Hca]:
    """Return the HCAs that all carry gradients although their subnets differ: rails.

    At each PCIe switch there is a GPU for each HCA, and each subnet has as many HCAs as the others.
    """
    rails: list[Hca] = []
    for kind in {link[:2] for link in links.values()}:
        hcas = [hca for hca, link in links.items() if link[:2] == kind]
        sizes = {*Counter(links[hca] for hca in hcas).values()}
        if len(sizes) == 1 and all(
            sum(share_bridge(hca.pci, other.pci) for other in hcas)
            <= sum(share_bridge(hca.pci, gpu.pci) for gpu in node.devices)
            for hca in hcas
        ):
            rails += hcas
    return rails


def _widest_class(links: Sequence[LinkClass], infiniband_first: bool) -> LinkClass:
    """Return the link class whose HCAs have the most Gbit/s in total.

    `infiniband_first`: take InfiniBand where there is some, because the RoCE ports of a node
    without GPUs, which MPI uses too, may be its plain NICs.
    """
    count = Counter(links)

    def preference(each: LinkClass) -> tuple[bool, float, float]:
        first = infiniband_first and each[0] == "InfiniBand"
        return first, count[each] * each[1], each[1]

    return max(count, key=preference)


def _describe_link(of: LinkClass) -> str:
    layer, gbps, prefix = of
    return f"{layer} at {gbps:g} Gbit/s" + (f" in subnet {prefix}" if prefix else "")


def device_settings(job: Job, node: Facts, nodes: int) -> Iterator[EnvVar]:
    """Yield the network's variables of one node. `nodes`: number of nodes of the job."""
    if job.fabric.kind != "site":
        yield from socket_variables(job, node)
        yield from rdma_variables(job, node, nodes)


def socket_variables(job: Job, node: Facts) -> Iterator[EnvVar]:
    """Yield variables that put gloo and NCCL's sockets on the chosen interface."""
    requested = job.fabric.interface == node.interface
    why = "fabric.interface" if requested else f"it has {node.ip}, the node's address in Ray"
    name = node.interface
    yield EnvVar(
        "GLOO_SOCKET_IFNAME",
        name,
        f"{why}; by default gloo takes the interface of the host name's address",
    )
    # Without the = it would be a prefix: eth1 also selects eth10.
    yield EnvVar(
        "NCCL_SOCKET_IFNAME", f"={name}", f"{why}; without = it would also select longer names"
    )


def rdma_variables(job: Job, node: Facts, nodes: int) -> Iterator[EnvVar]:
    """Yield variables that restrict NCCL to the chosen HCAs; none if NCCL would choose the same."""
    if job.fabric.kind == "ethernet":
        yield EnvVar("NCCL_IB_DISABLE", "1", TCP)
        if plugin := vendor_plugin(node):
            yield EnvVar("NCCL_NET", "Socket", f"{TCP}; {plugin} does not read NCCL_IB_DISABLE")
        return
    choice = choose_devices(job, node)
    names = ",".join(hca.name for hca in choice.hcas)
    if choice.none_fits:
        yield EnvVar("NCCL_IB_DISABLE", "1", none_of_kind(job))
    if names and (choice.aside or job.fabric.hca):
        left_out = "; ".join(f"{name} {why}" for name, why in choice.aside)
        # Without the = mlx5_1 would also select mlx5_10.
        yield EnvVar(
            "NCCL_IB_HCA", f"={names}", choice.reason + (f": {left_out}" if left_out else "")
        )
    if choice.hcas and nodes > 1:
        yield EnvVar(
            "NCCL_IGNORE_NET_MISMATCH",
            "0",
            "nodes with unequal HCAs are an error; by default they may hang",
        )
    yield from gid_index(node, choice)
    if job.fabric.strict and (network := rdma_only_net(node)):
        yield EnvVar("NCCL_NET", network, "fabric.strict: RDMA or an error, never silently TCP")


def none_of_kind(job: Job) -> str:
    """Return the reason for TCP on a node without an HCA of fabric.kind."""
    return f"fabric.kind={job.fabric.kind}: no active HCA is {LAYERS[job.fabric.kind]}"


def best_gid(hca: Hca) -> Gid | None:
    """Return the GID that NCCL prefers for RoCE; None if the port has none.

    It is routable, RoCE v2, and IPv4 before IPv6. Source: NCCL 2.30
    src/transport/net_ib/connect.cc.
    """
    port = hca.active[0] if hca.active else None
    if port is None or port.link_layer != "Ethernet":
        return None
    routable = [
        gid for gid in port.gids if gid.kind == "RoCE v2" and not gid.gid.startswith("fe80")
    ]
    return min(routable, key=lambda gid: family(gid) != "IPv4", default=None)


def family(gid: Gid) -> str:
    """Return IPv4 or IPv6, the family of a GID."""
    return "IPv4" if gid.gid.startswith(MAPPED) else "IPv6"


def nccl_finds_gid(node: Facts) -> bool:
    """Report whether this node's NCCL finds the right GID index of each HCA itself.

    True if its version is unknown.
    """
    version = version_numbers(node.versions.get("nccl", ""))
    return len(version) < 2 or version >= FINDS_GID


def gid_index(node: Facts, choice: DeviceChoice) -> Iterator[EnvVar]:
    """Yield NCCL_IB_GID_INDEX for an old NCCL, if one index is right for all HCAs."""
    indexes = {gid.index for hca in choice.hcas if (gid := best_gid(hca))}
    if len(indexes) == 1 and not nccl_finds_gid(node):
        why = (
            f"NCCL {node.versions['nccl']} takes GID 0 by default; since 2.21 it finds the "
            "routable one itself"
        )
        yield EnvVar("NCCL_IB_GID_INDEX", str(indexes.pop()), why)


def rdma_only_net(node: Facts) -> str:
    """Return the value of NCCL_NET with which NCCL can't fall back to sockets.

    Empty if no value selects the plug-in.
    """
    if not vendor_plugin(node):
        return "IB"
    if any(hca.vendor == EFA for hca in node.hcas):
        return LIBFABRIC
    return next(iter(node.machine.networks), "")
