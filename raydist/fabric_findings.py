"""(settings, plan, facts of all nodes) -> what would keep the ranks from the network, and how to mend it. (pure)"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raydist import fabric_network
from raydist.config import Job
from raydist.errors import LaunchError
from raydist.findings import Finding, fold
from raydist.node.facts import Facts, Hca, Nic
from raydist.placement import Plan

PROVIDERS = {"0x15b3": "mlx5", "0x1d0f": "efa", "0x14e4": "bnxt_re", "0x8086": "irdma"}
"""PCI vendor -> its user-space driver."""
SABOTAGE = {
    "NCCL_IB_DISABLE": ("1",), "NCCL_NET": ("socket",), "NCCL_P2P_DISABLE": ("1",), "NCCL_SHM_DISABLE": ("1",),
    "NCCL_ALGO": (), "NCCL_PROTO": (), "NCCL_IB_GID_INDEX": (),
}  # fmt: skip
"""Settings that slow a job down or break it; with the values that do, or whatever the value."""
SHM, NOFILE = 2**30, 65536
NO_RDMA = ("NCCL_IB_DISABLE", "NCCL_NET")
RDMA = ("hca state", "rdma libraries", "rdma devices", "memlock", "site settings")
"""Checks that fabric.strict refuses over."""


def findings(job: Job, plan: Plan, facts: Sequence[Facts]) -> list[Finding]:
    """All that the facts tell, the worst first. `facts`: of each rank's node, in order of rank."""
    nodes = [facts[seat.rank] for seat in plan.seats if seat.local_rank == 0]
    found = [finding for here in nodes for look in EACH for finding in look(job, here)]
    if plan.ask.rank_resources.get("GPU") or plan.ask.backend == "nccl":
        found += [finding for here in nodes for look in WITH_GPUS for finding in look(job, here)]
        found += [finding for across in BETWEEN_GPUS for finding in across(job, nodes)]
    found += [finding for across in BETWEEN for finding in across(job, nodes)]
    return fold(found)


def check(job: Job, plan: Plan, facts: Sequence[Facts], warn: Callable[[str], object]) -> None:
    """Give every warning to `warn`; LaunchError where fabric.strict is asked and RDMA is known not to work."""
    found = findings(job, plan, facts)
    for one in found:
        if one.level != "note":
            warn(one.told())
    if refused := refusals(job, found):
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


def site(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 10."""
    told = {name: (value, "the environment") for name, value in here.environment.items()}
    for name, (value, origin) in {**here.nccl_conf, **told}.items():
        bad = SABOTAGE.get(name)
        if bad is not None and name not in job.env and (not bad or value.lower() in bad):
            level = "fail" if job.fabric.strict and name in NO_RDMA else "warn"
            yield Finding("site settings", level, (here.hostname,), f"{name}={value} is set in {origin}",
                          f"remove it there, or overrule it: env.{name}=...")  # fmt: skip
        if name == "NCCL_SOCKET_IFNAME" and name not in job.env and (text := _interface(value, here)):
            yield Finding("site settings", "fail", (here.hostname,), f"{name}={value} in {origin}: {text}",
                          f"env.{name}=={here.interface}")  # fmt: skip


def _interface(value: str, here: Facts) -> str:
    """What is wrong with NCCL_SOCKET_IFNAME; empty: nothing. The syntax: NCCL's parseStringList."""
    if value.startswith("^"):
        barred = any("lo".startswith(one) for one in value[1:].removeprefix("=").split(",") if one)
        return "" if barred else "a list that begins with ^ and does not name lo lets NCCL take lo"
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    fits = any(name == one if exact else name.startswith(one) for name in here.interfaces for one in wanted)
    return "" if fits or not here.interfaces else f"there is no such interface ({', '.join(here.interfaces)})"


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
    for hca in here.hcas:
        for port in hca.ports:
            if port.state == "INIT":
                yield Finding("hca state", "warn", (here.hostname,), f"{hca.name}/{port.number} is INIT",
                              "no subnet manager: start opensm, or the switch's own")  # fmt: skip
            elif port.state == "DOWN":
                yield Finding("hca state", "note", (here.hostname,),
                              f"{hca.name}/{port.number} is DOWN, {port.phys_state}", "check the cable")  # fmt: skip
    if job.fabric.strict and not any(hca.active for hca in here.hcas):
        yield Finding("hca state", "fail", (here.hostname,), "no HCA has an active port",
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
    """Check 9."""
    choice = fabric_network.choose(job, here)
    if choice.aside:
        names = ",".join(hca.name for hca in choice.hcas)
        left = "; ".join(f"{name} {why}" for name, why in choice.aside)
        yield Finding(
            "storage hcas", "note", (here.hostname,), f"left out: {left}", f"fabric.hca=[{names}] says it outright"
        )


def gid(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 12. What NCCL takes: net_ib/connect.cc."""
    for hca in fabric_network.choose(job, here).hcas:
        port = hca.active[0] if hca.active else None
        if port is None or port.link_layer != "Ethernet":
            continue
        routable = [one for one in port.gids if one.kind == "RoCE v2" and not one.gid.startswith("fe80")]
        if not routable:
            ndev = next((one.netdev for one in port.gids if one.netdev), "its interface")
            yield Finding("roce gid", "fail", (here.hostname,), f"{hca.name} has no routable RoCE v2 GID",
                          f"ip addr add ADDRESS/PREFIX dev {ndev}")  # fmt: skip


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
    """Check 25."""
    if any(hca.vendor == fabric_network.EFA for hca in here.hcas) and not here.machine.plugins:
        yield Finding("vendor", "warn", (here.hostname,), "EFA is there, its plug-in libnccl-net.so is not",
                      "install aws-ofi-nccl in the ranks' image")  # fmt: skip
    elif fabric_network.vendor(here) and job.fabric.strict:
        yield Finding("vendor", "note", (here.hostname,), f"{fabric_network.vendor(here)}: NCCL_NET is left to it")


def meet(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 1: loopback between several nodes. Other networks may be routed: the doctor tries."""
    for here in nodes if len({here.address for here in nodes}) > 1 else ():
        if ipaddress.ip_address(here.address).is_loopback:
            yield Finding("interface", "fail", (here.hostname,), f"{here.address} is a loopback address",
                          "ray start --node-ip-address=<one that the others reach>")  # fmt: skip


def same_fabric(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 8."""
    kinds = [_fabric(fabric_network.choose(job, here).hcas) for here in nodes]
    yield from _odd("same fabric", "fail", nodes, kinds, "fabric.hca=[...] with what all have, or fabric.kind=ethernet")


def _fabric(hcas: tuple[Hca, ...]) -> str:
    ports = Counter((hca.active[0].link_layer, hca.active[0].gbps) for hca in hcas if hca.active)
    return ", ".join(f"{n} x {layer} {gbps:g} Gbit/s" for (layer, gbps), n in sorted(ports.items())) or "no HCA"


def mtu(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Checks 12 and 21, of the interface that the ranks talk over."""
    own = [(here, nic) for here in nodes if (nic := _nic(here))]
    told = [f"{'IPoIB ' + nic.mode if nic.ipoib else 'interface'} with MTU {nic.mtu}" for _, nic in own]
    check = "ipoib" if any(nic.ipoib for _, nic in own) else "interface"
    yield from _odd(
        check, "warn", [here for here, _ in own], told, "the same mode and MTU everywhere: ip link set ... mtu"
    )


def _nic(here: Facts) -> Nic | None:
    return next((nic for nic in here.nics if nic.name == here.interface), None)


def versions(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 22, as far as it is about NCCL and the driver; others are compared when the nodes report."""
    for name, values in {
        "NCCL": [here.versions.get("nccl", "") for here in nodes],
        "NVIDIA driver": [here.machine.driver for here in nodes],
    }.items():
        told = [f"{name} {value}" if value else f"no {name}" for value in values]
        yield from _odd("versions", "warn", nodes, told, "the same image on all nodes")


def identity(job: Job, nodes: Sequence[Facts]) -> Iterator[Finding]:
    """Check 23: NCCL takes nodes of one host name and boot id for one machine."""
    seen = Counter((here.hostname, here.machine.boot_id) for here in nodes if "NCCL_HOSTID" not in here.environment)
    for (name, boot), n in seen.items():
        if n > 1 and boot:
            yield Finding("identity", "fail", (name,), f"NCCL takes {n} nodes for one: same host name, same boot id",
                          "another host name for each container")  # fmt: skip


def _odd(check: str, level: str, nodes: Sequence[Facts], told: Sequence[str], mend: str) -> Iterator[Finding]:
    """Those that are not like the most."""
    if not told:
        return
    usual, n = Counter(told).most_common(1)[0]
    for here, own in zip(nodes, told, strict=True):
        if own != usual:
            yield Finding(check, level, (here.hostname,), f"{own}; {n} of {len(told)} have {usual}", mend)


Check = Callable[[Job, Facts], Iterator[Finding]]
Across = Callable[[Job, Sequence[Facts]], Iterator[Finding]]
EACH: tuple[Check, ...] = (hostname, site, limits)
WITH_GPUS: tuple[Check, ...] = (
    state,
    libraries,
    devices,
    memlock,
    storage,
    gid,
    gpudirect,
    affinity,
    links,
    iommu,
    plugin,
)
BETWEEN: tuple[Across, ...] = (meet, mtu)
BETWEEN_GPUS: tuple[Across, ...] = (same_fabric, versions, identity)
