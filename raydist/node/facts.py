"""What a machine is, as plain data: interfaces, HCAs, GPUs, limits, versions, the site's own settings. (pure)"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Nic:
    """One network interface, as the kernel tells it."""

    name: str
    up: bool = False
    """operstate is up, or unknown (lo, some tunnels)."""
    mtu: int = 0
    speed: int | None = None
    """Mb/s; None where the kernel does not know (virtual, IPoIB)."""
    kind: int = 1
    """ARPHRD number: 1 Ethernet, 32 InfiniBand (IPoIB), 772 loopback."""
    default_route: bool = False
    subnets: tuple[str, ...] = ()
    """IPv4 networks reached directly over it: 10.0.0.0/24."""
    mode: str = ""
    """datagram or connected, of an IPoIB interface."""
    pci: str = ""
    """Its device's path below /sys/devices; empty for a virtual one."""

    @property
    def ipoib(self) -> bool:
        """IP over InfiniBand: TCP, not RDMA."""
        return self.kind == 32


@dataclass(frozen=True)
class Gid:
    """One used entry of a port's GID table."""

    index: int
    gid: str
    """Eight groups of four hex digits."""
    kind: str = ""
    """`IB/RoCE v1`, `RoCE v2`, or empty where the kernel does not tell."""
    netdev: str = ""


@dataclass(frozen=True)
class Port:
    """One port of an HCA."""

    number: int
    state: str = ""
    """ACTIVE, INIT, ARMED, DOWN."""
    phys_state: str = ""
    """LinkUp, Polling, Disabled."""
    gbps: float = 0.0
    """Line rate in Gbit/s; 0 where unknown."""
    rate: str = ""
    """As the kernel writes it: 400 Gb/sec (4X NDR)."""
    link_layer: str = ""
    """InfiniBand, Ethernet (RoCE), Unknown (EFA)."""
    sm_lid: int = 0
    """LID of the subnet manager; 0: none."""
    gids: tuple[Gid, ...] = ()
    counters: bool = False
    """port_xmit_data can be read."""

    @property
    def active(self) -> bool:
        """Carries data."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Hca:
    """One RDMA device."""

    name: str
    ports: tuple[Port, ...] = ()
    pci: str = ""
    """Its path below /sys/devices."""
    numa: int = -1
    vendor: str = ""
    """PCI vendor: 0x15b3 Mellanox, 0x1d0f EFA, 0x14e4 Broadcom, 0x8086 Intel."""
    board: str = ""
    firmware: str = ""
    card: str = ""
    """sys_image_guid: the same for all functions of one card."""
    virtual: bool = False
    """A virtual function (SR-IOV)."""
    link_width: int = 0
    link_width_max: int = 0
    link_speed: str = ""
    link_speed_max: str = ""
    uverbs: str = ""
    """Its device node; empty where the kernel has none for it."""
    openable: bool = False
    """That node opens for reading and writing here."""

    @property
    def active(self) -> tuple[Port, ...]:
        """The ports that carry data."""
        return tuple(port for port in self.ports if port.active)


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine."""

    bdf: str
    """Its PCI address: 0000:1b:00.0."""
    pci: str = ""
    """Its path below /sys/devices."""
    numa: int = -1
    model: str = ""


@dataclass(frozen=True)
class Rdma:
    """What user space needs beside the devices."""

    libibverbs: str = ""
    """The library's file; empty: not installed here."""
    providers: tuple[str, ...] = ()
    """User-space drivers: mlx5, efa, ..."""
    peermem: bool = False
    """nvidia_peermem is loaded."""
    dmabuf: bool = False
    """Kernel >= 5.12 and NVIDIA's open driver."""


@dataclass(frozen=True)
class Limits:
    """The limits of the process that looks, which are those of its ranks. -1: unlimited; None: not known."""

    memlock: int | None = None
    """Bytes."""
    nofile: int | None = None
    ipc_lock: bool = False
    """CAP_IPC_LOCK: memlock does not count."""
    shm: int | None = None
    """Bytes of /dev/shm."""
    stack: int | None = None
    """Bytes."""


@dataclass(frozen=True)
class Machine:
    """What the machine is beside its devices."""

    boot_id: str = ""
    kernel: str = ""
    driver: str = ""
    """Version of NVIDIA's driver."""
    container: bool = False
    cloud: str = ""
    """Vendor by DMI: Amazon EC2, Google, ..."""
    iommu: bool = False
    own_name: tuple[str, ...] = ()
    """The addresses that /etc/hosts gives the host's own name."""
    storage: tuple[str, ...] = ()
    """Addresses of file servers that are mounted here."""
    plugins: tuple[str, ...] = ()
    """Files of NCCL network plug-ins."""
    networks: tuple[str, ...] = ()
    """Those of their networks that NCCL_NET can name."""


@dataclass(frozen=True)
class Facts:
    """What one rank's machine is, as seen from its seat; plain JSON data."""

    hostname: str
    ip: str
    """The address that Ray knows the node by."""
    interface: str
    """The network interface to talk over: the owner of `ip`, or the one that fabric.interface names."""
    address: str
    """Its numeric address."""
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The addresses of every interface that is up and has any."""
    gpus: Sequence[str] | None = None
    """The GPUs held for this rank; None where nobody keeps account of them."""
    cpus: int = 1
    """CPUs that this process may use."""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of raydist, and of torch, ray, nccl and cuda (its runtime) where installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is set already of the variables that matter."""
    nccl_conf: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """NCCL's settings from its files: name -> (value, file)."""
    mpi: Mapping[str, str] = field(default_factory=dict)
    """backend=mpi: the kind of MPI here, its version, the path of its mpirun, and its RDMA devices, with commas."""
    nics: tuple[Nic, ...] = ()
    hcas: tuple[Hca, ...] = ()
    devices: tuple[Gpu, ...] = ()
    """All GPUs of the machine, in PCI order."""
    rdma: Rdma = field(default_factory=Rdma)
    limits: Limits = field(default_factory=Limits)
    machine: Machine = field(default_factory=Machine)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Facts:
        """The Facts that `dataclasses.asdict` took apart, also after JSON; what is not known here is left out."""
        found: Facts = build(cls, plain)
        return found


def build(kind: Any, plain: Any) -> Any:
    """A value of the annotated type `kind` from what JSON left of it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if plain is None else build(next(one for one in args if one is not type(None)), plain)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = {f.name: f for f in fields(kind)}
        return kind(**{name: build(hints[name], value) for name, value in plain.items() if name in known})  # type: ignore[operator]
    if origin in (tuple, Sequence):
        return tuple(build(args[0], one) for one in plain)
    if origin is Mapping:
        return {key: build(args[1], value) for key, value in plain.items()}
    return plain
