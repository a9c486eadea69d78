"""(settings, facts of all nodes) -> differences between nodes, unreachable addresses. (pure)"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from raydist.network import checks_site, rdma
from raydist.network.facts import Facts, Gid, Hca, Nic
from raydist.network.finding import Finding
from raydist.settings.config import Job
from raydist.shared.rank_names import joined_names

VIRTUAL = re.compile(r"docker\d|virbr\d|cni\d|lxcbr\d|lxdbr\d|podman\d|br-[0-9a-f]{12}$")
"""Names of bridges inside one machine: no other machine can reach their addresses."""


def check_addresses(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find addresses that no other node can reach.

    Different networks may be routed: only the doctor can test that.
    """
    if len({(node.hostname, node.address) for node in nodes}) < 2:
        return
    fix = "ray start --node-ip-address=<one that the others reach>, or fabric.interface=NAME"
    for node in nodes:
        host = (node.hostname,)
        if ipaddress.ip_address(node.address).is_loopback:
            yield Finding("interface", "fail", host, f"{node.address} is a loopback address", fix)
        elif VIRTUAL.match(node.interface):
            text = (
                f"{node.interface} ({node.address}) is a bridge inside this machine: other "
                "nodes can't reach it"
            )
            yield Finding("interface", "warn", host, text, fix)
    for address in {node.address for node in nodes}:
        same = [node for node in nodes if node.address == address]
        hosts = tuple(dict.fromkeys(node.hostname for node in same))
        # Containers on the network of one host share its address, and reach each other there.
        kernels = {node.machine.boot_id or node.hostname for node in same}
        if min(len(hosts), len(kernels)) > 1 and not ipaddress.ip_address(address).is_loopback:
            text = (
                f"{joined_names(hosts)} have the same address {address}: each would connect "
                "to itself"
            )
            yield Finding("interface", "fail", hosts, text, fix)
    yield from _different_networks(nodes)


def _different_networks(nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find nodes in other networks than most nodes: harmless if a router connects the networks."""
    networks = [(node, nic.subnets) for node in nodes if (nic := _nic(node)) and nic.subnets]
    yield from odd_nodes(
        "interface",
        "note",
        [node for node, _ in networks],
        [f"network {', '.join(sorted(subnets))}" for _, subnets in networks],
        "raydist doctor tests the connection",
    )


def check_same_fabric(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find nodes whose chosen HCAs differ from the others' in number, link layer or speed."""
    fabrics = [_fabric(rdma.choose_devices(job, node).hcas) for node in nodes]
    fix = "fabric.hca=[...] with HCAs that all nodes have, or fabric.kind=ethernet"
    yield from odd_nodes("same fabric", "fail", nodes, fabrics, fix)


def _fabric(hcas: tuple[Hca, ...]) -> str:
    ports = Counter((hca.active[0].link_layer, hca.active[0].gbps) for hca in hcas if hca.active)
    return (
        ", ".join(f"{n} x {layer} {gbps:g} Gbit/s" for (layer, gbps), n in sorted(ports.items()))
        or "no HCA"
    )


def check_mtu(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find nodes whose chosen interface has a different MTU, or IPoIB mode, than most."""
    nics = [(node, nic) for node in nodes if (nic := _nic(node))]
    mtus = [
        f"{'IPoIB ' + nic.mode if nic.ipoib else 'interface'} with MTU {nic.mtu}" for _, nic in nics
    ]
    check = "ipoib" if any(nic.ipoib for _, nic in nics) else "interface"
    fix = "the same mode and MTU everywhere: ip link set ... mtu"
    yield from odd_nodes(check, "warn", [node for node, _ in nics], mtus, fix)


def _nic(node: Facts) -> Nic | None:
    return next((nic for nic in node.nics if nic.name == node.interface), None)


def check_roce(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find RoCE ports whose IP family or MTU differs between nodes.

    A packet longer than the MTU of the receiver is lost.
    """
    gids_of = [(node, gids) for node in nodes if (gids := _gids(job, node))]
    families = [" and ".join(sorted({rdma.family(gid) for gid in gids})) for _, gids in gids_of]
    yield from odd_nodes(
        "roce gid",
        "fail",
        [node for node, _ in gids_of],
        [f"{family} GIDs on its RoCE ports" for family in families],
        "addresses of one family on all nodes, or NCCL_IB_ADDR_FAMILY",
    )
    mtus = [
        (node, sorted({nic.mtu for nic in node.nics if nic.name in {gid.netdev for gid in gids}}))
        for node, gids in gids_of
    ]
    mtus = [(node, sizes) for node, sizes in mtus if sizes]
    yield from odd_nodes(
        "roce gid",
        "warn",
        [node for node, _ in mtus],
        [f"RoCE interfaces with MTU {', '.join(map(str, sizes))}" for _, sizes in mtus],
        "the same MTU everywhere: ip link set ... mtu 9000",
    )


def _gids(job: Job, node: Facts) -> list[Gid]:
    return [gid for hca in rdma.choose_devices(job, node).hcas if (gid := rdma.best_gid(hca))]


def check_gpu_versions(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find nodes with other versions of NCCL, CUDA or the NVIDIA driver.

    The doctor compares Python and packages.
    """
    for name, versions in {
        "NCCL": [node.versions.get("nccl", "") for node in nodes],
        "CUDA": [node.versions.get("cuda", "") for node in nodes],
        "NVIDIA driver": [node.machine.driver for node in nodes],
    }.items():
        texts = [f"{name} {version}" if version else f"no {name}" for version in versions]
        yield from odd_nodes("versions", "warn", nodes, texts, "the same image on all nodes")


def check_identity(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Find nodes that NCCL takes for one machine.

    They have the same NCCL_HOSTID or, without it, the same host name and boot id.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        site = checks_site.site_settings(job, node).get("NCCL_HOSTID", ("", ""))[0]
        if named := str(job.env.get("NCCL_HOSTID", site)):
            alike.setdefault(("", named), []).append(node.hostname)
        elif node.machine.boot_id:
            alike.setdefault((node.hostname, node.machine.boot_id), []).append(node.hostname)
    for (hostname, id), hosts in alike.items():
        if len(hosts) > 1:
            same = "host name and boot id" if hostname else f"NCCL_HOSTID={id}"
            yield Finding(
                "identity",
                "fail",
                tuple(dict.fromkeys(hosts)),
                f"NCCL takes {len(hosts)} nodes for one machine: they have the same {same}",
                "another host name for each container, or another NCCL_HOSTID in the environment "
                "of each",
            )


def odd_nodes(
    check: str, level: str, nodes: Sequence[Facts], values: Sequence[str], fix: str
) -> Iterator[Finding]:
    """Yield a finding for each node whose value differs from the most common one.

    `values`: one text for each node.
    """
    if not values:
        return
    common, n = Counter(values).most_common(1)[0]
    for node, value in zip(nodes, values, strict=True):
        if value != common:
            yield Finding(
                check,
                level,
                (node.hostname,),
                f"{value}; {n} of {len(values)} nodes have {common}",
                fix,
            )
