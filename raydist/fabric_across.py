"""(settings, facts of all nodes) -> where the nodes differ from each other, or can't meet. (pure)"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from raydist import fabric_network
from raydist.config import Job
from raydist.findings import Finding, named
from raydist.node.facts import Facts, Gid, Hca, Nic

VIRTUAL = re.compile(r"docker\d|virbr\d|cni\d|lxcbr\d|lxdbr\d|podman\d|br-[0-9a-f]{12}$")
"""Bridges inside of one machine: no other machine reaches their addresses."""


def meet(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 1: addresses that no other node can reach. Other networks may be routed: the doctor tries."""
    if len({(here.hostname, here.address) for here in nodes}) < 2:
        return
    mend = "ray start --node-ip-address=<one that the others reach>, or fabric.interface=NAME"
    for here in nodes:
        host = (here.hostname,)
        if ipaddress.ip_address(here.address).is_loopback:
            yield Finding("interface", "fail", host, f"{here.address} is a loopback address", mend)
        elif VIRTUAL.match(here.interface):
            text = f"{here.interface} ({here.address}) is a bridge of the machine's own: others do not reach it"
            yield Finding("interface", "warn", host, text, mend)
    for address in {here.address for here in nodes}:
        twice = [here.hostname for here in nodes if here.address == address]
        if len(set(twice)) > 1 and not ipaddress.ip_address(address).is_loopback:
            text = f"{named(dict.fromkeys(twice))} have one address, {address}: each would call itself"
            yield Finding("interface", "fail", tuple(dict.fromkeys(twice)), text, mend)
    yield from _apart(nodes)


def _apart(nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Nodes whose networks differ: fine if somebody routes between them."""
    own = [(here, nic.subnets) for here in nodes if (nic := _nic(here)) and nic.subnets]
    told = [f"network {', '.join(sorted(subnets))}" for _, subnets in own]
    yield from odd("interface", "note", [here for here, _ in own], told, "python -m raydist.tools.doctor tries the way")


def same_fabric(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 8."""
    kinds = [_fabric(fabric_network.choose(job, here).hcas) for here in nodes]
    yield from odd("same fabric", "fail", nodes, kinds, "fabric.hca=[...] with what all have, or fabric.kind=ethernet")


def _fabric(hcas: tuple[Hca, ...]) -> str:
    ports = Counter((hca.active[0].link_layer, hca.active[0].gbps) for hca in hcas if hca.active)
    return ", ".join(f"{n} x {layer} {gbps:g} Gbit/s" for (layer, gbps), n in sorted(ports.items())) or "no HCA"


def mtu(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 21, and of plain networks the same, of the interface that the ranks talk over."""
    own = [(here, nic) for here in nodes if (nic := _nic(here))]
    told = [f"{'IPoIB ' + nic.mode if nic.ipoib else 'interface'} with MTU {nic.mtu}" for _, nic in own]
    check = "ipoib" if any(nic.ipoib for _, nic in own) else "interface"
    yield from odd(
        check, "warn", [here for here, _ in own], told, "the same mode and MTU everywhere: ip link set ... mtu"
    )


def _nic(here: Facts) -> Nic | None:
    return next((nic for nic in here.nics if nic.name == here.interface), None)


def roce(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 12 between nodes: RoCE ports of one IP family, and of one MTU, since longer packets vanish."""
    own = [(here, gids) for here in nodes if (gids := _gids(job, here))]
    there = [here for here, _ in own]
    families = [" and ".join(sorted({fabric_network.family(gid) for gid in gids})) for _, gids in own]
    yield from odd("roce gid", "fail", there, [f"its RoCE ports have {each} GIDs" for each in families],
                   "addresses of one family on all nodes, or NCCL_IB_ADDR_FAMILY")  # fmt: skip
    known = [{nic.name: nic.mtu for nic in here.nics} for here in there]
    sizes = [sorted({mtus[gid.netdev] for gid in gids if gid.netdev in mtus})
             for mtus, (_, gids) in zip(known, own, strict=True)]  # fmt: skip
    sized = [(here, size) for here, size in zip(there, sizes, strict=True) if size]
    yield from odd("roce gid", "warn", [here for here, _ in sized],
                   [f"RoCE interfaces with MTU {', '.join(map(str, size))}" for _, size in sized],
                   "the same MTU everywhere: ip link set ... mtu 9000")  # fmt: skip


def _gids(job: Job, here: Facts) -> list[Gid]:
    return [gid for hca in fabric_network.choose(job, here).hcas if (gid := fabric_network.gid(hca))]


def versions(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 22 between nodes, as far as it is about GPUs; the doctor compares the others."""
    for name, values in {
        "NCCL": [here.versions.get("nccl", "") for here in nodes],
        "CUDA": [here.versions.get("cuda", "") for here in nodes],
        "NVIDIA driver": [here.machine.driver for here in nodes],
    }.items():
        told = [f"{name} {value}" if value else f"no {name}" for value in values]
        yield from odd("versions", "warn", nodes, told, "the same image on all nodes")


def identity(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 23: NCCL takes nodes of one host name and boot id for one machine."""
    seen = Counter((here.hostname, here.machine.boot_id) for here in nodes if "NCCL_HOSTID" not in here.environment)
    for (name, boot), n in seen.items():
        if n > 1 and boot:
            yield Finding("identity", "fail", (name,), f"NCCL takes {n} nodes for one: same host name, same boot id",
                          "another host name for each container")  # fmt: skip


def odd(check: str, level: str, nodes: Sequence[Facts], told: Sequence[str], mend: str) -> Iterator[Finding]:
    """Those that are not like the most."""
    if not told:
        return
    usual, n = Counter(told).most_common(1)[0]
    for here, own in zip(nodes, told, strict=True):
        if own != usual:
            yield Finding(check, level, (here.hostname,), f"{own}; {n} of {len(told)} have {usual}", mend)
