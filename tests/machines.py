"""Machines as folders: the /sys, /proc, /etc and /dev of hardware that this machine does not have.

A `Box` describes a machine. `build` writes it below a folder, with the links that sysfs has, so
that raydist.node reads the folder as it would read the machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

MELLANOX, AMAZON, VIRTIO = "0x15b3", "0x1d0f", "0x1af4"
NDR, HDR, EDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"
IB_GID, OTHER_IB_GID = (
    "fe80:0000:0000:0000:0000:0000:0000:00a1",
    "fec0:0000:0000:0002:0000:0000:0000:00a1",
)
FIRMWARE = "28.43.1014"
NULL = "1:3"
"""Numbers of /dev/null, in place of those of an HCA's device file."""
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"


@dataclass(frozen=True)
class Link:
    """A port of a card: its state as the kernel words it, and its GID table."""

    rate: str = NDR
    layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    phys: str = "5: LinkUp"
    sm_lid: int = 1
    gids: Mapping[int, tuple[str, str, str]] = field(
        default_factory=lambda: {0: (IB_GID, "IB/RoCE v1", "")}
    )
    """index -> (gid, type, netdev)."""
    counters: str | None = "12345"
    """port_xmit_data; None if there is no such file."""


@dataclass(frozen=True)
class Card:
    """An HCA: its name, its PCI path and its ports."""

    name: str
    pci: str
    ports: tuple[Link, ...] = (Link(),)
    numa: int = 0
    vendor: str = MELLANOX
    netdev: str = ""
    virtual: bool = False
    uverbs: bool = True
    guid: str = "1070:fd03:0012:3456"
    width: tuple[int, int] = (16, 16)
    speed: tuple[str, str] = ("32.0 GT/s PCIe", "32.0 GT/s PCIe")


@dataclass(frozen=True)
class Wire:
    """A network interface."""

    name: str
    network: str = ""
    mtu: int = 1500
    kind: int = 1
    speed: int = 25000
    state: str = "up"
    default: bool = False
    pci: str = ""
    mode: str = ""


@dataclass(frozen=True)
class Processors:
    """The CPUs: cores in NUMA nodes in sockets. The second threads of all cores come after the
    first ones."""

    sockets: int = 2
    nodes: int = 1
    """NUMA nodes of a socket."""
    cores: int = 8
    """Cores of a NUMA node."""
    threads: int = 2
    complex: int = 2
    """Cores that share an L3 cache."""
    allowed: str = ""
    """The affinity of this process, like 0-3,8; empty means all."""


@dataclass(frozen=True)
class Box:
    """A machine."""

    cards: tuple[Card, ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    """(PCI path, NUMA node)."""
    wires: tuple[Wire, ...] = (Wire("eth0", "10.0.0.0/24", default=True),)
    files: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ("mlx5",)
    """User-space drivers; without any there is no libibverbs either."""
    nodes: bool = True
    """Whether /dev/infiniband exists."""
    cpus: Processors | None = None
    """None: those of the machine that runs the test, in one NUMA node."""


def write(path: Path, text: str) -> None:
    """Write a file, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def link(path: Path, target: Path) -> None:
    """Make a relative link, like those of sysfs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def build(root: Path, box: Box) -> Path:
    """Write the machine below `root`."""
    for i, card in enumerate(box.cards):
        write_card(root, card, i, box.nodes)
    for pci, numa in box.gpus:
        write_gpu(root, pci, numa)
    write_wires(root, box.wires)
    if box.libraries:
        write(root / "usr/lib/x86_64-linux-gnu/libibverbs.so.1", "")
    for name in box.libraries:
        write(root / f"usr/lib/x86_64-linux-gnu/libibverbs/lib{name}-rdmav34.so", "")
        write(root / f"etc/libibverbs.d/{name}.driver", f"driver {name}")
    write(root / "proc/self/limits", LIMITS)
    write(root / "proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000")
    if box.cpus:
        write_cpus(root, box.cpus)
    write(root / "proc/sys/kernel/osrelease", "6.8.0-45-generic")
    write(root / "proc/sys/kernel/random/boot_id", "8f1c0a32-0000-4000-8000-000000000001")
    (root / "dev/shm").mkdir(parents=True)
    for name, text in box.files.items():
        write(root / name, text)
        if text.startswith("#!"):
            (root / name).chmod(0o755)
    return root


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes"""


def write_card(root: Path, card: Card, number: int, nodes: bool) -> None:
    device = root / "sys/devices" / card.pci
    own = device / "infiniband" / card.name
    values = {
        "numa_node": str(card.numa), "vendor": card.vendor, "current_link_width": str(card.width[0]),
        "max_link_width": str(card.width[1]), "current_link_speed": card.speed[0], "max_link_speed": card.speed[1],
        "modalias": f"pci:v0000{card.vendor[2:].upper()}d00001021sv000015B3sd00000000bc02sc07i00",
    }  # fmt: skip
    for name, text in values.items():
        write(device / name, text)
    if card.virtual:
        link(device / "physfn", root / "sys/devices/pci0000:00")
    for name, text in {
        "fw_ver": FIRMWARE,
        "board_id": "MT_0000000838",
        "node_type": "1: CA",
        "node_guid": node_guid(number),
        "sys_image_guid": card.guid,
    }.items():
        write(own / name, text)
    link(own / "device", device)
    link(root / "sys/class/infiniband" / card.name, own)
    for i, port in enumerate(card.ports, 1):
        write_port(own / f"ports/{i}", port)
    if card.uverbs:
        verbs = device / f"infiniband_verbs/uverbs{number}"
        for name, text in {"ibdev": card.name, "abi_version": "1", "dev": NULL}.items():
            write(verbs / name, text)
        link(verbs / "device", device)
        link(root / f"sys/class/infiniband_verbs/uverbs{number}", verbs)
        write(root / "sys/class/infiniband_verbs/abi_version", "6")
        if nodes:
            write(root / f"dev/infiniband/uverbs{number}", "")


def node_guid(number: int) -> str:
    """Return the GUID of an HCA; those of functions of one card differ."""
    return f"1070:fd03:0099:{number:04x}"


def write_port(own: Path, port: Link) -> None:
    values = {"state": port.state, "phys_state": port.phys, "rate": port.rate, "link_layer": port.layer,
            "sm_lid": hex(port.sm_lid)}  # fmt: skip
    for name, text in values.items():
        write(own / name, text)
    for i in range(32):
        gid, kind, netdev = port.gids.get(i, ("0000:" * 7 + "0000", "", ""))
        write(own / f"gids/{i}", gid)
        if kind:  # reading an empty entry's type gives EINVAL; here the file is missing
            write(own / f"gid_attrs/types/{i}", kind)
        if netdev:
            write(own / f"gid_attrs/ndevs/{i}", netdev)
    if port.counters is not None:
        write(own / "counters/port_xmit_data", port.counters)


def write_gpu(root: Path, pci: str, numa: int) -> None:
    device, bdf = root / "sys/devices" / pci, pci.rpartition("/")[2]
    write(device / "numa_node", str(numa))
    write(device / "class", "0x030200")
    link(root / "sys/bus/pci/devices" / bdf, device)
    write(
        root / f"proc/driver/nvidia/gpus/{bdf}/information",
        f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{bdf}",
    )


def write_cpus(root: Path, processors: Processors) -> None:
    total, system = (
        processors.sockets * processors.nodes * processors.cores,
        root / "sys/devices/system",
    )
    allowed = processors.allowed or f"0-{total * processors.threads - 1}"
    write(
        root / "proc/self/status",
        f"Name:\tpython\nCapEff:\t0000000000000000\nCpus_allowed_list:\t{allowed}",
    )

    def cpus(cores: range) -> str:
        return ",".join(
            f"{cores[0] + i * total}-{cores[-1] + i * total}" for i in range(processors.threads)
        )

    write(system / "node/possible", f"0-{processors.sockets * processors.nodes - 1}")
    for node in range(processors.sockets * processors.nodes):
        write(
            system / f"node/node{node}/cpulist",
            cpus(range(node * processors.cores, (node + 1) * processors.cores)),
        )
    for core in range(total):
        first = core - core % processors.complex
        for i in range(processors.threads):
            own = system / f"cpu/cpu{core + i * total}"
            write(
                own / "topology/physical_package_id",
                str(core // (processors.nodes * processors.cores)),
            )
            write(own / "topology/thread_siblings_list", cpus(range(core, core + 1)))
            levels = [
                (1, "Data", core, 1),
                (1, "Instruction", core, 1),
                (3, "Unified", first, processors.complex),
            ]
            for index, (level, kind, start, size) in enumerate(levels):
                values = {
                    "level": str(level),
                    "type": kind,
                    "shared_cpu_list": cpus(range(start, start + size)),
                }
                for name, text in values.items():
                    write(own / f"cache/index{index}/{name}", text)


def write_wires(root: Path, wires: tuple[Wire, ...]) -> None:
    lines = ["Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"]
    for wire in wires:
        own = root / "sys/class/net" / wire.name
        values = {
            "operstate": wire.state,
            "mtu": str(wire.mtu),
            "type": str(wire.kind),
            "speed": str(wire.speed),
        }
        for name, text in values.items():
            write(own / name, text)
        if wire.mode:
            write(own / "mode", wire.mode)
        if wire.pci:
            (root / "sys/devices" / wire.pci).mkdir(parents=True, exist_ok=True)
            link(own / "device", root / "sys/devices" / wire.pci)
        if wire.default:
            lines.append(f"{wire.name}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0")
        if wire.network:
            net = ipaddress.ip_network(wire.network)
            lines.append(
                f"{wire.name}\t{word(net.network_address)}\t00000000\t0001\t0\t0\t0\t{word(net.netmask)}\t0\t0\t0"
            )
    write(root / "proc/net/route", "\n".join(lines))


def word(address: object) -> str:
    """Format an address like /proc/net/route."""
    return f"{struct.unpack('=I', socket.inet_aton(str(address)))[0]:08X}"


def mapped(ip: str) -> str:
    """Return the GID of an IPv4 address."""
    plain = ipaddress.IPv4Address(ip).packed.hex()
    return f"0000:0000:0000:0000:0000:ffff:{plain[:4]}:{plain[4:]}"


def roce(ip: str, netdev: str, **more: object) -> Link:
    """Return a RoCE port with link-local and IPv4 GIDs, v1 and v2 of each."""
    local = "fe80:0000:0000:0000:0e42:a1ff:fe12:3456"
    table = {
        0: (local, "IB/RoCE v1", netdev), 1: (local, "RoCE v2", netdev),
        2: (mapped(ip), "IB/RoCE v1", netdev), 3: (mapped(ip), "RoCE v2", netdev),
    }  # fmt: skip
    return replace(Link(rate=NDR, layer="Ethernet", sm_lid=0, gids=table), **more)  # type: ignore[arg-type]


def switch(i: int) -> str:
    """Return the PCI path of switch `i`: four in each half of the machine, each below a separate
    root complex."""
    return f"pci00{i}0:00/00{i}0:00:01.0/00{i}1:00:00.0"


def dgx(rate: str = NDR, name: str = "mlx5_{}") -> Box:
    """Return a machine with eight GPUs, an HCA under the same switch as each of them, and two
    dual-port storage cards elsewhere."""
    compute = [
        Card(name.format(i), f"{switch(i)}/00{i}2:00:00.0/00{i}3:00:00.0", (Link(rate),), i // 4)
        for i in range(8)
    ]
    storage = [
        Card(name.format(8 + 2 * card + port), f"pci00a{card}:00/00a{card}:00:01.0/00a{card}:01:00.{port}",
             (Link(EDR, gids={0: (OTHER_IB_GID, "IB/RoCE v1", "")}),), card, guid=f"a088:c203:00a{card}:0000")
        for card in range(2) for port in range(2)
    ]  # fmt: skip
    gpus = tuple((f"{switch(i)}/00{i}2:00:01.0/00{i}4:00:00.0", i // 4) for i in range(8))
    files = {"proc/driver/nvidia/version": OPEN_DRIVER, "sys/class/dmi/id/sys_vendor": "NVIDIA"}
    return Box((*compute, *storage), gpus, files=files)


def roce_box() -> Box:
    """Return a machine with two GPUs and a RoCE card for each. One card has no address, so it has
    only link-local GIDs."""
    cards = (
        Card(
            "mlx5_0",
            f"{switch(0)}/0002:00:00.0/0003:00:00.0",
            (roce("10.1.0.5", "eth1"),),
            netdev="eth1",
        ),
        Card(
            "mlx5_1",
            f"{switch(1)}/0012:00:00.0/0013:00:00.0",
            (roce("10.2.0.5", "eth2"),),
            netdev="eth2",
        ),
    )
    gpus = tuple((f"{switch(i)}/00{i}2:00:01.0/00{i}4:00:00.0", 0) for i in range(2))
    return Box(
        cards, gpus, (Wire("eth0", "10.0.0.0/24", default=True), Wire("eth1", "10.1.0.0/24", 9000))
    )


def efa_box() -> Box:
    """Return an instance with EFA: link_layer Unknown, no port counters, the vendor's plug-in in
    /opt."""
    port = Link("100 Gb/sec (4X EDR)", "Unknown", sm_lid=0, counters=None)
    cards = tuple(
        Card(f"rdmap{i}s0", f"pci0000:0{i}/0000:0{i}:1b.0", (port,), vendor=AMAZON)
        for i in range(4)
    )
    gpus = tuple((f"pci0000:0{i}/0000:0{i}:1c.0", 0) for i in range(4))
    plugin = {"opt/amazon/ofi-nccl/lib/libnccl-net.so": "Libfabric\0AWS Libfabric\0"}
    files = {"sys/class/dmi/id/sys_vendor": "Amazon EC2", **plugin}
    return Box(cards, gpus, files=files, libraries=("efa",))


def vm_box() -> Box:
    """Return a VM with flat PCI: everything is directly below one root, and the HCAs are virtual
    functions."""
    cards = tuple(
        Card(
            f"mlx5_{i}", f"pci0000:00/0000:00:0{i + 2}.0", (Link(counters=None),), -1, virtual=True
        )
        for i in range(2)
    )
    return Box(cards, tuple((f"pci0000:00/0000:00:1{i}.0", -1) for i in range(2)))


def mig_box(tool: bool = True) -> Box:
    """Return a machine with two GPUs, the second with two MIG instances. With `tool` it has an
    nvidia-smi that prints the list of R570."""
    gpus = tuple((f"pci0000:00/0000:0{i}:00.0", 0) for i in (1, 2))
    nvidia_smi = """#!/bin/sh
cat << END
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0000:01:00.0)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-0000:02:00.0)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.40gb     Device  1: (UUID: MIG-0f5b0a2e-3c5d-5a8f-9d5e-6f0c8f1d7b11)
END"""
    files = {"proc/driver/nvidia/capabilities/gpu1/mig/gi1/access": "DeviceFileMinor: 12"}
    return Box(gpus=gpus, files={**files, **({"usr/bin/nvidia-smi": nvidia_smi} if tool else {})})


def plain_box() -> Box:
    """Return a machine with Ethernet only."""
    return Box(libraries=())
