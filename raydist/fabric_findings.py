"""(settings, plan, facts of all nodes) -> what would keep the ranks from the network, and how to mend it. (pure)"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence

from raydist import fabric_across, fabric_network, fabric_site
from raydist.config import Job
from raydist.errors import LaunchError
from raydist.findings import Finding, fold
from raydist.node.facts import Facts, Hca
from raydist.placement import Plan

PROVIDERS = {"0x15b3": "mlx5", "0x1d0f": "efa", "0x14e4": "bnxt_re", "0x8086": "irdma"}
"""PCI vendor -> its user-space driver."""
SHM, NOFILE = 2**30, 65536
LEAST_DRIVER = {13: (580,), 12: (525, 60), 11: (450, 80)}
"""The oldest NVIDIA driver for each major version of CUDA: CUDA's release notes, minor version compatibility."""
STACK_SAFE = (2, 28)
"""NCCL from which an unlimited stack is no trouble (its user guide, troubleshooting)."""
RDMA = ("hca state", "rdma libraries", "rdma devices", "memlock", "site settings", "storage hcas", "vendor")
"""Checks that fabric.strict refuses over."""
TCP_ONLY = ("gloo", "horovod")


def findings(job: Job, plan: Plan, facts: Sequence[Facts]) -> list[Finding]:
    """All that the facts tell, the worst first. `facts`: of each rank's node, in order of rank."""
    nodes = [facts[seat.rank] for seat in plan.seats if seat.local_rank == 0]
    found = [finding for here in nodes for look in EACH for finding in look(job, here)]
    strict_mpi = job.fabric.strict and plan.ask.backend == "mpi"  # UCX has a use for RDMA without GPUs
    if plan.ask.rank_resources.get("GPU") or plan.ask.backend == "nccl" or strict_mpi:
        found += [finding for here in nodes for look in WITH_GPUS for finding in look(job, here)]
        found += [finding for across in BETWEEN_GPUS for finding in across(job, nodes)]
    elif job.fabric.strict and plan.ask.backend in TCP_ONLY:
        text = f"{plan.ask.backend} without GPUs knows only TCP"
        found.append(Finding("hca state", "fail", (), text, "fabric.strict=false, or backend=nccl on GPUs"))
    found += [finding for across in BETWEEN for finding in across(job, nodes)]
    return fold(found)


def check(job: Job, plan: Plan, facts: Sequence[Facts], warn: Callable[[str], object]) -> None:
    """Give every warning to `warn`; LaunchError where fabric.strict is asked and RDMA is known not to work.

    What is refused is in the error alone.
    """
    found = findings(job, plan, facts)
    refused = refusals(job, found)
    for one in found:
        if one.level != "note" and one not in refused:
            warn(one.told())
    if refused:
        raise LaunchError("fabric.strict: " + "; ".join(one.told() for one in refused))


def refusals(job: Job, found: Sequence[Finding]) -> list[Finding]:
    """Those over which fabric.strict does not start: RDMA is known not to work."""
    return [one for one in found if job.fabric.strict and one.check in RDMA and one.level == "fail"]


def hostname(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 3. A note only: the variables name the interface, so that nobody asks the host name."""
    bad = [one for one in here.machine.own_name if ipaddress.ip_address(one).is_loopback]
    if bad and job.fabric.kind == "site":
        yield Finding("hostname", "warn", (here.hostname,), f"its own name is {bad[0]}: gloo would listen there",
                      "leave fabric.kind=site out, or mend /etc/hosts")  # fmt: skip
    elif bad:
        yield Finding(
            "hostname", "note", (here.hostname,), f"its own name is {bad[0]}; the ranks are told the interface"
        )


def limits(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 18."""
    if here.limits.shm is not None and here.limits.shm < SHM:
        yield Finding("limits", "warn", (here.hostname,), f"/dev/shm has {here.limits.shm // 2**20} MiB",
                      "docker run --shm-size=8g; on Kubernetes an emptyDir of medium Memory at /dev/shm")  # fmt: skip
    if here.limits.nofile is not None and 0 <= here.limits.nofile < NOFILE:
        yield Finding("limits", "note", (here.hostname,), f"a process may open {here.limits.nofile} files",
                      f"ulimit -n {NOFILE} before ray start")  # fmt: skip


def state(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 4."""
    host = (here.hostname,)
    for hca in here.hcas:
        asked = hca.name in job.fabric.hca
        if asked and not hca.active:
            yield Finding("hca state", "fail", host, f"{hca.name}, asked for by fabric.hca, has no active port",
                          "leave it out of fabric.hca, or mend its link")  # fmt: skip
        for port in hca.ports:
            name = f"{hca.name}/{port.number}"
            lone = port.active and port.link_layer == "InfiniBand" and port.sm_lid == 0
            if port.state in ("INIT", "ARMED") or lone:
                text = f"{name} knows no subnet manager" if lone else f"{name} is {port.state}"
                yield Finding("hca state", "warn", host, text, "no subnet manager: start opensm, or the switch's own")
            elif port.state == "DOWN" and not asked:
                yield Finding("hca state", "note", host, f"{name} is DOWN, {port.phys_state}", "check the cable")
    if job.fabric.strict and not any(hca.active for hca in here.hcas):
        yield Finding("hca state", "fail", host, "no HCA has an active port",
                      "fabric.strict=false, or a node with RDMA")  # fmt: skip


def libraries(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 5."""
    chosen = fabric_network.choose(job, here).hcas
    mend = "apt install libibverbs1 ibverbs-providers, or dnf install rdma-core, in the ranks' image"
    if chosen and not here.rdma.libibverbs:
        yield Finding("rdma libraries", "fail", (here.hostname,),
                      "libibverbs.so.1 is missing: NCCL would use TCP", mend)  # fmt: skip
    for name in sorted({PROVIDERS[hca.vendor] for hca in chosen if hca.vendor in PROVIDERS}):
        if here.rdma.libibverbs and name not in here.rdma.providers:
            yield Finding("rdma libraries", "fail", (here.hostname,), f"libibverbs has no driver {name}", mend)


def devices(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 6."""
    shut = [hca for hca in fabric_network.choose(job, here).hcas if not hca.openable]
    if shut:
        names = ", ".join(hca.uverbs or f"no device node for {hca.name}" for hca in shut)
        yield Finding("rdma devices", "fail", (here.hostname,), f"can't be opened: {names}",
                      "docker run --device=/dev/infiniband; on Kubernetes an RDMA device plug-in")  # fmt: skip


def memlock(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 7."""
    held = here.limits.memlock
    if fabric_network.choose(job, here).hcas and held is not None and held >= 0 and not here.limits.ipc_lock:
        yield Finding("memlock", "fail", (here.hostname,), f"only {held // 1024} KiB may be locked in memory",
                      "ulimit -l unlimited (docker: --ulimit memlock=-1), then ray start again")  # fmt: skip


def storage(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 9, of what raydist chose; fabric_site.hcas looks at what somebody wrote."""
    choice, host = fabric_network.choose(job, here), (here.hostname,)
    names = ",".join(hca.name for hca in choice.hcas)
    if choice.aside:
        left = "; ".join(f"{name} {why}" for name, why in choice.aside)
        guess = (
            "" if choice.sure else f"no GPU's place on PCIe tells which HCAs are for storage; NCCL_IB_HCA=={names}, "
        )
        yield Finding(
            "storage hcas", "note" if choice.sure else "warn", host, f"{guess}left out: {left}",
            f"fabric.hca=[{names}] says it outright",
        )  # fmt: skip
    for hca in choice.hcas:
        if servers := servers_over(hca, here):
            text = f"{hca.name} also leads to the mounted file server {', '.join(servers)}: both share its bandwidth"
            yield Finding("storage hcas", "note", host, text, "fabric.hca=[...] without it, if storage has its own")


def servers_over(hca: Hca, here: Facts) -> list[str]:
    """The mounted file servers that lie in a network of this HCA's interface."""
    netdevs = {gid.netdev for port in hca.ports for gid in port.gids} - {""}
    own = [nic for nic in here.nics if nic.name in netdevs or (nic.pci and nic.pci == hca.pci)]
    nets = [ipaddress.ip_network(net) for nic in own for net in nic.subnets]
    return [one for one in here.machine.storage if any(_address(one) in net for net in nets)]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """A mount's address; one that is written as a name lies in no network."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return ipaddress.IPv6Address("::")


def gid(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 12."""
    chosen = [hca for hca in fabric_network.choose(job, here).hcas
              if hca.active and hca.active[0].link_layer == "Ethernet"]  # fmt: skip
    found = {hca.name: fabric_network.gid(hca) for hca in chosen}
    for hca in chosen:
        if found[hca.name] is None:
            ndev = next((one.netdev for one in hca.active[0].gids if one.netdev), "its interface")
            yield Finding("roce gid", "fail", (here.hostname,), f"{hca.name} has no routable RoCE v2 GID",
                          f"ip addr add ADDRESS/PREFIX dev {ndev}")  # fmt: skip
    indexes = {one.index for one in found.values() if one}
    if len(indexes) > 1 and not fabric_network.finds_gid(here):
        told = ", ".join(f"{name}: {one.index}" for name, one in found.items() if one)
        text = f"NCCL {here.versions['nccl']} takes one GID index for all HCAs, and these need different ones ({told})"
        yield Finding("roce gid", "warn", (here.hostname,), text, "NCCL 2.21 or later: a newer torch")


def gpudirect(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 13."""
    if here.devices and fabric_network.choose(job, here).hcas and not (here.rdma.peermem or here.rdma.dmabuf):
        yield Finding("gpudirect", "warn", (here.hostname,), "no GPUDirect: data takes the way over host memory",
                      "modprobe nvidia-peermem, or NVIDIA's open driver on kernel 5.12 or later")  # fmt: skip


def affinity(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 14."""
    hcas = fabric_network.choose(job, here).hcas
    far = [gpu.bdf for gpu in here.devices if hcas and gpu.numa >= 0 and all(
        hca.numa >= 0 and hca.numa != gpu.numa for hca in hcas)]  # fmt: skip
    if far:
        yield Finding("affinity", "warn", (here.hostname,), f"no HCA on the NUMA node of GPU {', '.join(far)}",
                      "fabric.hca=[...] with one of each NUMA node")  # fmt: skip


def links(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 20."""
    for hca in fabric_network.choose(job, here).hcas:
        if 0 < hca.link_width < hca.link_width_max or _gt(hca.link_speed) < _gt(hca.link_speed_max):
            yield Finding("links", "warn", (here.hostname,),
                          f"{hca.name} runs x{hca.link_width} {hca.link_speed}, "
                          f"could x{hca.link_width_max} {hca.link_speed_max}", "reseat the card")  # fmt: skip


def slower(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 20, of the network's own links: a card like the chosen ones, beside a GPU as they are, yet slower."""
    chosen = fabric_network.choose(job, here).hcas
    usual = max((hca.active[0].gbps for hca in chosen if hca.active), default=0.0)
    boards = {(hca.board, hca.active[0].link_layer) for hca in chosen if hca.active}
    for hca in here.hcas:
        port = hca.active[0] if hca.active else None
        close = any(fabric_network.near(hca.pci, gpu.pci) for gpu in here.devices)
        if port and close and 0 < port.gbps < usual and (hca.board, port.link_layer) in boards:
            yield Finding("links", "warn", (here.hostname,),
                          f"{hca.name} came up at {port.rate}, others of its kind at {usual:g} Gb/sec",
                          "another cable, or the switch port's settings")  # fmt: skip


def _gt(speed: str) -> float:
    try:
        return float(speed.split()[0])
    except (IndexError, ValueError):
        return 0.0


def iommu(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 24. In a VM the IOMMU belongs there."""
    if here.machine.iommu and fabric_network.choose(job, here).hcas and not any(hca.virtual for hca in here.hcas):
        yield Finding("iommu", "note", (here.hostname,), "the IOMMU is on: it may slow GPUDirect down on bare metal",
                      "kernel parameter iommu=pt, and ACS off in the BIOS")  # fmt: skip


def plugin(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 25, and what fabric.strict comes to where NCCL_NET can't name the plug-in."""
    own, host = fabric_network.vendor(here), (here.hostname,)
    if any(hca.vendor == fabric_network.EFA for hca in here.hcas) and not here.machine.plugins:
        level = "fail" if job.fabric.strict else "warn"
        yield Finding("vendor", level, host, "EFA is there, its plug-in libnccl-net.so is not",
                      "install aws-ofi-nccl in the ranks' image")  # fmt: skip
    elif "Google" in here.machine.cloud and own and not any(name.startswith(TCPX) for name in here.environment):
        yield Finding("vendor", "warn", host, f"{own} is there, its settings are not: NCCL would use plain TCP",
                      f". {own.rpartition('/')[0]}/nccl-env-profile.sh before ray start")  # fmt: skip
    elif own and job.fabric.strict and not fabric_network.forced(here):
        debug = job.env.get("NCCL_DEBUG") or fabric_site.settings(job, here).get("NCCL_DEBUG", ("INFO", ""))[0]
        if debug.upper() in fabric_network.LOUD:
            text = f"no NCCL_NET names {own}: NCCL's log is watched, and the run ends if it takes sockets"
            yield Finding("vendor", "note", host, text)
        else:
            text = f"no NCCL_NET names {own}, and with NCCL_DEBUG={debug} nobody sees which network NCCL takes"
            yield Finding("vendor", "fail", host, text, "env.NCCL_DEBUG=INFO")


TCPX = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
"""How the settings of Google's plug-ins begin (GPUDirect-TCPXO, GPUDirect-TCPX)."""


def driver(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 22 on one node: NVIDIA's driver is new enough for the CUDA that torch brings."""
    cuda, found = here.versions.get("cuda", ""), here.machine.driver
    least = LEAST_DRIVER.get(_numbers(cuda)[0]) if _numbers(cuda) else None
    if least and found and _numbers(found)[: len(least)] < least:
        yield Finding("versions", "fail", (here.hostname,),
                      f"NVIDIA driver {found} is too old for CUDA {cuda}, which torch brings",
                      f"driver {'.'.join(map(str, least))} or later, or a torch for an older CUDA")  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in version.split(".") if one.isdigit())


def stack(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 18, of the stack."""
    nccl = _numbers(here.versions.get("nccl", ""))
    if here.limits.stack == -1 and nccl and nccl < STACK_SAFE:
        yield Finding("limits", "warn", (here.hostname,), "the stack is unlimited: NCCL before 2.28 may crash",
                      "ulimit -s 8192 before ray start")  # fmt: skip


Check = Callable[[Job, Facts], Iterator[Finding]]
Across = Callable[[Job, Sequence[Facts]], Iterator[Finding]]
EACH: tuple[Check, ...] = (hostname, fabric_site.site, limits)
WITH_GPUS: tuple[Check, ...] = (
    state, libraries, devices, memlock, storage, fabric_site.hcas, gid, gpudirect, affinity, links, slower, iommu,
    plugin, driver, stack,
)  # fmt: skip
BETWEEN: tuple[Across, ...] = (fabric_across.meet, fabric_across.mtu)
BETWEEN_GPUS: tuple[Across, ...] = (
    fabric_across.same_fabric, fabric_across.versions, fabric_across.identity, fabric_across.roce,
)  # fmt: skip
