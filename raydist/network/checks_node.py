"""(settings, plan, facts of all nodes) -> what would keep ranks from the network; fixes. (pure)"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan, assign_ranks
from raydist.network import checks_cluster, checks_site
from raydist.network.binding import bind_node
from raydist.network.facts import Facts, Hca, version_numbers
from raydist.network.finding import Finding, fold_findings
from raydist.network.rdma import (
    EFA,
    LOUD,
    best_gid,
    choose_devices,
    device_settings,
    likely_devices,
    nccl_finds_gid,
    none_of_kind,
    rdma_only_net,
    share_bridge,
    vendor_plugin,
)
from raydist.settings.config import Job
from raydist.shared.errors import LaunchError

PROVIDERS = {"0x15b3": "mlx5", "0x1d0f": "efa", "0x14e4": "bnxt_re", "0x8086": "irdma"}
"""PCI vendor -> its user-space driver."""
SHM, NOFILE = 2**30, 65536
"""The smallest number of bytes of /dev/shm, and of open files, that raises no finding."""
LEAST_DRIVER = {13: (580,), 12: (525, 60), 11: (450, 80)}
"""Major version of CUDA -> the oldest NVIDIA driver for it.

Source: CUDA release notes, minor version compatibility.
"""
STACK_SAFE = (2, 28)
"""The first NCCL version that runs with an unlimited stack (NCCL user guide, troubleshooting)."""
RDMA = (
    "hca state",
    "rdma libraries",
    "rdma devices",
    "memlock",
    "site settings",
    "storage hcas",
    "vendor",
)
"""Checks whose failures stop a run with fabric.strict."""
TCP_ONLY = ("gloo", "horovod")
"""Backends that use TCP; Horovod only without GPUs."""
TCPX = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
"""Prefixes of the variables of Google's plug-ins (GPUDirect-TCPXO, GPUDirect-TCPX)."""
GIB = "/usr/local/gib/"
"""Folder of Google's plug-in for RDMA (A3 Ultra and later), which needs no such variables."""


def findings(job: Job, plan: Plan, facts: Sequence[Facts]) -> list[Finding]:
    """Return all findings, the worst first.

    `facts`: those of each rank's node, in order of rank.
    """
    nodes = [facts[slot.rank] for slot in plan.leads]
    backend, gpus = plan.request.backend, bool(plan.request.rank_resources.get("GPU"))
    found = [finding for node in nodes for check in EACH for finding in check(job, node)]
    # UCX uses RDMA without GPUs too.
    strict_mpi = job.fabric.strict and backend == "mpi"
    if gpus or backend == "nccl" or strict_mpi:
        found += [finding for node in nodes for check in WITH_GPUS for finding in check(job, node)]
        found += [finding for check_all in BETWEEN_GPUS for finding in check_all(job, nodes)]
    elif backend == "mpi":
        found += [finding for node in nodes for finding in check_storage(job, node)]
    if job.fabric.strict:
        found += backend_findings(backend, gpus)
    found += [finding for check_all in BETWEEN for finding in check_all(job, nodes)]
    return fold_findings(found)


def backend_findings(backend: str, gpus: bool) -> Iterator[Finding]:
    """Find a backend that fabric.strict cannot hold to RDMA. `gpus`: whether ranks have some."""
    fix = "fabric.strict=false, or backend=nccl on GPUs"
    if backend in TCP_ONLY and not (gpus and backend == "horovod"):
        without = " without GPUs" if backend == "horovod" else ""
        text = f"backend {backend}{without} supports TCP only"
        yield Finding("hca state", "fail", (), text, fix)
    elif backend == "ucc":
        text = "raydist cannot tell whether UCC uses RDMA or TCP"
        yield Finding("hca state", "fail", (), text, "fabric.strict=false env.UCX_TLS=^tcp")


def check_nodes(
    job: Job, plan: Plan, facts: Sequence[Facts], warn: Callable[[str], object]
) -> None:
    """Pass each finding above a note to `warn`.

    With fabric.strict, raise LaunchError if RDMA can't work. Findings that the error contains are
    not passed to `warn`.
    """
    found = findings(job, plan, facts)
    refused = refusals(job, found)
    for finding in found:
        if finding.level != "note" and finding not in refused:
            warn(finding.line())
    if refused:
        raise LaunchError("fabric.strict: " + "; ".join(finding.line() for finding in refused))


def check_joining(job: Job, request: ResourceRequest, node: Node, facts: Facts) -> None:
    """Raise RaydistError if ranks of a run could not start on a node that joins it.

    LaunchError: fabric.strict. ConfigError: fabric.hca or, without GPUs, scale.numa does not suit
    it. (Which GPUs the ranks will have is not known before they do.)
    """
    plan = assign_ranks(replace(request, bundles=request.bundles[:1], spares=0), [node])
    of_ranks = [facts] * plan.world_size
    check_nodes(job, plan, of_ranks, lambda warning: None)
    if not request.rank_resources.get("GPU"):
        bind_node(job, plan, of_ranks, plan.leads[0])
    for _ in device_settings(job, facts, 2):  # it raises what it finds
        pass


def refusals(job: Job, found: Sequence[Finding]) -> list[Finding]:
    """Return the failures that stop a run with fabric.strict, because RDMA can't work.

    Empty without fabric.strict.
    """
    return [
        finding
        for finding in found
        if job.fabric.strict and finding.check in RDMA and finding.level == "fail"
    ]


def check_hostname(job: Job, node: Facts) -> Iterator[Finding]:
    """Find a host name that resolves to a loopback address.

    This is only a note, because raydist gives ranks the interface by name.
    """
    loopback = [
        address for address in node.machine.own_name if ipaddress.ip_address(address).is_loopback
    ]
    if loopback and job.fabric.kind == "site":
        yield Finding(
            "hostname",
            "warn",
            (node.hostname,),
            f"the host's own name resolves to {loopback[0]}: gloo would listen there",
            "remove fabric.kind=site, or correct /etc/hosts",
        )
    elif loopback:
        yield Finding(
            "hostname",
            "note",
            (node.hostname,),
            f"the host's own name resolves to {loopback[0]}; raydist gives the ranks the "
            "interface by name",
        )


def check_limits(job: Job, node: Facts) -> Iterator[Finding]:
    """Find a small /dev/shm, and a low limit on open files."""
    if node.limits.shm is not None and node.limits.shm < SHM:
        yield Finding(
            "limits",
            "warn",
            (node.hostname,),
            f"/dev/shm has {node.limits.shm // 2**20} MiB",
            "docker run --shm-size=8g; on Kubernetes an emptyDir of medium Memory at /dev/shm",
        )
    if node.limits.nofile is not None and 0 <= node.limits.nofile < NOFILE:
        yield Finding(
            "limits",
            "note",
            (node.hostname,),
            f"a process may open {node.limits.nofile} files",
            f"ulimit -n {NOFILE} before ray start",
        )


def check_hca_state(job: Job, node: Facts) -> Iterator[Finding]:
    """Find ports of HCAs that carry no data.

    They have no link, no subnet manager, or are not yet configured.
    """
    host = (node.hostname,)
    for hca in node.hcas:
        requested = hca.name in job.fabric.hca
        if requested and not hca.active:
            yield Finding(
                "hca state",
                "fail",
                host,
                f"{hca.name}, named in fabric.hca, has no active port",
                "remove it from fabric.hca, or repair its link",
            )
        for port in hca.ports:
            name = f"{hca.name}/{port.number}"
            unmanaged = port.active and port.link_layer == "InfiniBand" and port.sm_lid == 0
            if port.state in ("INIT", "ARMED") or unmanaged:
                text = (
                    f"{name} has no subnet manager"
                    if unmanaged
                    else f"{name} is {port.state}, not ACTIVE"
                )
                yield Finding(
                    "hca state",
                    "warn",
                    host,
                    text,
                    "start a subnet manager: opensm, or the switch's own",
                )
            elif port.state == "DOWN" and not requested:
                yield Finding(
                    "hca state",
                    "note",
                    host,
                    f"{name} is DOWN, {port.phys_state}",
                    "check the cable",
                )
    if job.fabric.strict and not any(hca.active for hca in node.hcas):
        yield Finding(
            "hca state",
            "fail",
            host,
            "no HCA has an active port",
            "fabric.strict=false, or a node with RDMA",
        )
    elif job.fabric.strict and choose_devices(job, node).none_fits:
        fix = "fabric.kind=auto, or fabric.strict=false"
        yield Finding("hca state", "fail", host, none_of_kind(job), fix)


def check_libraries(job: Job, node: Facts) -> Iterator[Finding]:
    """Find chosen HCAs for which libibverbs or the user-space driver is not installed."""
    chosen = likely_devices(job, node).hcas
    fix = "apt install libibverbs1 ibverbs-providers, or dnf install rdma-core, in the ranks' image"
    if chosen and not node.rdma.libibverbs:
        yield Finding(
            "rdma libraries",
            "fail",
            (node.hostname,),
            "libibverbs.so.1 is missing: NCCL would use TCP",
            fix,
        )
    for name in sorted({PROVIDERS[hca.vendor] for hca in chosen if hca.vendor in PROVIDERS}):
        if node.rdma.libibverbs and name not in node.rdma.providers:
            yield Finding(
                "rdma libraries", "fail", (node.hostname,), f"libibverbs has no driver {name}", fix
            )


def check_device_files(job: Job, node: Facts) -> Iterator[Finding]:
    """Find active HCAs whose /dev/infiniband file is missing, or closed to this user.

    It is only a note if the ranks can open others, as in a container that has some of the host's.
    """
    chosen = likely_devices(job, node).hcas
    closed = [hca for hca in chosen if not hca.openable]
    level = "fail" if closed else "note"
    if chosen and not closed and not job.fabric.hca:
        closed = [hca for hca in node.hcas if hca.active and not hca.openable]
    if closed:
        names = ", ".join(hca.uverbs or f"{hca.name}, which has no device file" for hca in closed)
        others = "" if level == "fail" else f"; used: {', '.join(hca.name for hca in chosen)}"
        yield Finding(
            "rdma devices",
            level,
            (node.hostname,),
            f"can't open {names}{others}",
            "docker run --device=/dev/infiniband; on Kubernetes an RDMA device plug-in",
        )


def check_memlock(job: Job, node: Facts) -> Iterator[Finding]:
    """Find a limit on locked memory that is not `unlimited`: RDMA locks its buffers in memory."""
    limit = node.limits.memlock
    if (
        likely_devices(job, node).hcas
        and limit is not None
        and limit >= 0
        and not node.limits.ipc_lock
    ):
        yield Finding(
            "memlock",
            "fail",
            (node.hostname,),
            f"a process may lock only {limit // 1024} KiB of memory",
            "ulimit -l unlimited (docker: --ulimit memlock=-1), then ray start again",
        )


def check_storage(job: Job, node: Facts) -> Iterator[Finding]:
    """Find active HCAs that raydist leaves out, and chosen HCAs that also carry storage.

    checks_site.check_hcas checks lists of HCAs that a person wrote.
    """
    choice, host = choose_devices(job, node), (node.hostname,)
    names = ",".join(hca.name for hca in choice.hcas)
    if choice.none_fits and not job.fabric.strict:
        text = f"{none_of_kind(job)}: TCP is used"
        yield Finding("storage hcas", "warn", host, text, "fabric.kind=auto")
    elif choice.hcas and choice.aside:
        left_out = "; ".join(f"{name} {why}" for name, why in choice.aside)
        guess = (
            ""
            if not choice.doubt
            else f"PCIe does not show which HCAs are for storage: {choice.doubt}; "
            f"{'UCX_NET_DEVICES' if job.backend.name == 'mpi' else 'NCCL_IB_HCA='}={names}, "
        )
        yield Finding(
            "storage hcas",
            "warn" if choice.doubt else "note",
            host,
            f"{guess}active HCAs left out: {left_out}",
            f"fabric.hca=[{names}] chooses explicitly",
        )
    for hca in choice.hcas:
        if servers := servers_over(hca, node):
            text = (
                f"{hca.name} also leads to the mounted file server {', '.join(servers)}: both "
                "share its bandwidth"
            )
            yield Finding(
                "storage hcas",
                "note",
                host,
                text,
                "fabric.hca=[...] without it, if storage has its own",
            )


def servers_over(hca: Hca, node: Facts) -> list[str]:
    """Return the addresses of mounted file servers in a network of this HCA's interface."""
    netdevs = {gid.netdev for port in hca.ports for gid in port.gids} - {""}
    nics = [nic for nic in node.nics if nic.name in netdevs or (nic.pci and nic.pci == hca.pci)]
    networks = [ipaddress.ip_network(subnet) for nic in nics for subnet in nic.subnets]
    return [
        server
        for server in node.machine.storage
        if any(_address(server) in network for network in networks)
    ]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a mount; a host name becomes `::`, which is in no network."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return ipaddress.IPv6Address("::")


def check_gid(job: Job, node: Facts) -> Iterator[Finding]:
    """Find chosen RoCE ports without a routable RoCE v2 GID.

    Also find GID indexes that an old NCCL can't handle.
    """
    chosen = [
        hca
        for hca in choose_devices(job, node).hcas
        if hca.active and hca.active[0].link_layer == "Ethernet"
    ]
    gids = {hca.name: best_gid(hca) for hca in chosen}
    for hca in chosen:
        if gids[hca.name] is None:
            netdev = next((gid.netdev for gid in hca.active[0].gids if gid.netdev), "its interface")
            yield Finding(
                "roce gid",
                "fail",
                (node.hostname,),
                f"{hca.name} has no routable RoCE v2 GID",
                f"ip addr add ADDRESS/PREFIX dev {netdev}",
            )
    if len({gid.index for gid in gids.values() if gid}) > 1 and not nccl_finds_gid(node):
        indexes = ", ".join(f"{name}: {gid.index}" for name, gid in gids.items() if gid)
        text = (
            f"NCCL {node.versions['nccl']} takes one GID index for all HCAs, but these need "
            f"several ({indexes})"
        )
        yield Finding(
            "roce gid", "warn", (node.hostname,), text, "NCCL 2.21 or later: a newer torch"
        )


def check_gpudirect(job: Job, node: Facts) -> Iterator[Finding]:
    """Find GPUs for which neither nvidia_peermem nor DMA-BUF is available."""
    if (
        node.devices
        and choose_devices(job, node).hcas
        and not (node.rdma.peermem or node.rdma.dmabuf)
    ):
        yield Finding(
            "gpudirect",
            "warn",
            (node.hostname,),
            "no GPUDirect: data is copied through host memory",
            "modprobe nvidia-peermem, or NVIDIA's open driver on kernel 5.12 or later",
        )


def check_affinity(job: Job, node: Facts) -> Iterator[Finding]:
    """Find GPUs on a NUMA node that has no chosen HCA."""
    hcas = choose_devices(job, node).hcas
    far = [
        gpu.bdf
        for gpu in node.devices
        if hcas and gpu.numa >= 0 and all(hca.numa >= 0 and hca.numa != gpu.numa for hca in hcas)
    ]
    if far:
        yield Finding(
            "affinity",
            "warn",
            (node.hostname,),
            f"no HCA on the NUMA node of GPU {', '.join(far)}",
            "fabric.hca=[...] with one of each NUMA node",
        )


def check_links(job: Job, node: Facts) -> Iterator[Finding]:
    """Find chosen HCAs whose PCIe link is narrower or slower than card and slot allow."""
    for hca in choose_devices(job, node).hcas:
        if 0 < hca.link_width < hca.link_width_max or _gt(hca.link_speed) < _gt(hca.link_speed_max):
            yield Finding(
                "links",
                "warn",
                (node.hostname,),
                f"{hca.name} runs at x{hca.link_width} {hca.link_speed} "
                f"instead of x{hca.link_width_max} {hca.link_speed_max}",
                "reseat the card",
            )


def check_slow_ports(job: Job, node: Facts) -> Iterator[Finding]:
    """Find HCAs near a GPU of the same model as a chosen one, but with a slower network link."""
    chosen = choose_devices(job, node).hcas
    usual = max((hca.active[0].gbps for hca in chosen if hca.active), default=0.0)
    boards = {(hca.board, hca.active[0].link_layer) for hca in chosen if hca.active}
    for hca in node.hcas:
        port = hca.active[0] if hca.active else None
        close = any(share_bridge(hca.pci, gpu.pci) for gpu in node.devices)
        if port and close and 0 < port.gbps < usual and (hca.board, port.link_layer) in boards:
            yield Finding(
                "links",
                "warn",
                (node.hostname,),
                f"{hca.name} came up at {port.rate}, others of its model at {usual:g} Gb/sec",
                "another cable, or the switch port's settings",
            )


def _gt(speed: str) -> float:
    try:
        return float(speed.split()[0])
    except (IndexError, ValueError):
        return 0.0


def check_iommu(job: Job, node: Facts) -> Iterator[Finding]:
    """Find an IOMMU that is on. Virtual machines are left out, because they need it."""
    virtual = any(hca.virtual for hca in node.hcas)
    if node.machine.iommu and choose_devices(job, node).hcas and not virtual:
        yield Finding(
            "iommu",
            "note",
            (node.hostname,),
            "the IOMMU is on: it may slow GPUDirect down on bare metal",
            "kernel parameter iommu=pt, and ACS off in the BIOS",
        )


def check_plugin(job: Job, node: Facts) -> Iterator[Finding]:
    """Find a cloud's network without its NCCL plug-in or variables.

    Also find fabric.strict where NCCL_NET can't name the plug-in.
    """
    plugin, host = vendor_plugin(node), (node.hostname,)
    site = checks_site.site_settings(job, node).get("NCCL_NET", ("", ""))[0]
    network = str(job.env.get("NCCL_NET", site))
    if any(hca.vendor == EFA for hca in node.hcas) and not node.machine.plugins:
        level = "fail" if job.fabric.strict else "warn"
        yield Finding(
            "vendor",
            level,
            host,
            "the node has EFA, but not its plug-in libnccl-net.so",
            "install aws-ofi-nccl in the ranks' image",
        )
    elif (
        "Google" in node.machine.cloud
        and plugin
        and not plugin.startswith(GIB)
        and network.lower() != "gib"
        and not any(name.startswith(TCPX) for name in node.environment)
    ):
        yield Finding(
            "vendor",
            "warn",
            host,
            f"{plugin} is installed, but its variables are not set: NCCL would use plain TCP",
            f". {plugin.rpartition('/')[0]}/nccl-env-profile.sh before ray start",
        )
    elif plugin and job.fabric.strict and not rdma_only_net(node):
        debug = (
            job.env.get("NCCL_DEBUG")
            or checks_site.site_settings(job, node).get("NCCL_DEBUG", ("INFO", ""))[0]
        )
        if debug.upper() in LOUD:
            text = (
                f"no NCCL_NET names {plugin}: raydist reads NCCL's log, and ends the run if "
                "NCCL takes sockets"
            )
            yield Finding("vendor", "note", host, text)
        else:
            text = (
                f"no NCCL_NET names {plugin}, and with NCCL_DEBUG={debug} NCCL does not log "
                "which network it takes"
            )
            yield Finding("vendor", "fail", host, text, "env.NCCL_DEBUG=INFO")


def check_driver(job: Job, node: Facts) -> Iterator[Finding]:
    """Find an NVIDIA driver that is too old for torch's CUDA."""
    cuda, driver = node.versions.get("cuda", ""), node.machine.driver
    least = LEAST_DRIVER.get(version_numbers(cuda)[0]) if version_numbers(cuda) else None
    if least and driver and version_numbers(driver)[: len(least)] < least:
        yield Finding(
            "versions",
            "fail",
            (node.hostname,),
            f"NVIDIA driver {driver} is too old for torch's CUDA {cuda}",
            f"driver {'.'.join(map(str, least))} or later, or a torch for an older CUDA",
        )


def check_stack(job: Job, node: Facts) -> Iterator[Finding]:
    """Find an unlimited stack with an NCCL that may crash with it."""
    nccl = version_numbers(node.versions.get("nccl", ""))
    if node.limits.stack == -1 and nccl and nccl < STACK_SAFE:
        yield Finding(
            "limits",
            "warn",
            (node.hostname,),
            "the stack is unlimited: NCCL before 2.28 may crash",
            "ulimit -s 8192 before ray start",
        )


NodeCheck = Callable[[Job, Facts], Iterator[Finding]]
ClusterCheck = Callable[[Job, Sequence[Facts]], Iterator[Finding]]
EACH: tuple[NodeCheck, ...] = (
    check_hostname,
    checks_site.check_site,
    checks_site.check_gloo_overridden,
    check_limits,
)
WITH_GPUS: tuple[NodeCheck, ...] = (
    check_hca_state,
    check_libraries,
    check_device_files,
    check_memlock,
    check_storage,
    checks_site.check_hcas,
    checks_site.check_nccl_overridden,
    check_gid,
    check_gpudirect,
    check_affinity,
    check_links,
    check_slow_ports,
    check_iommu,
    check_plugin,
    check_driver,
    check_stack,
)
BETWEEN: tuple[ClusterCheck, ...] = (checks_cluster.check_addresses, checks_cluster.check_mtu)
BETWEEN_GPUS: tuple[ClusterCheck, ...] = (
    checks_cluster.check_same_fabric,
    checks_cluster.check_gpu_versions,
    checks_cluster.check_identity,
    checks_cluster.check_roce,
)
