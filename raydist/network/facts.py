"""Facts of a node as data: interfaces, HCAs, GPUs, limits, versions, site variables. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Nic:
    """One network interface, as the kernel reports it."""

    name: str
    up: bool = False
    """Whether operstate is up, or unknown (lo, some tunnels)."""
    mtu: int = 0
    speed: int | None = None
    """Mb/s; None if the kernel does not know it (virtual, IPoIB)."""
    kind: int = 1
    """ARPHRD number: 1 Ethernet, 32 InfiniBand (IPoIB), 772 loopback."""
    default_route: bool = False
    subnets: tuple[str, ...] = ()
    """IPv4 networks that are reached directly over it, such as 10.0.0.0/24."""
    mode: str = ""
    """datagram or connected; empty unless IPoIB."""
    pci: str = ""
    """Path of its device below /sys/devices; empty for a virtual interface."""

    @property
    def ipoib(self) -> bool:
        """Whether the interface is IP over InfiniBand: TCP, not RDMA."""
        return self.kind == 32


@dataclass(frozen=True)
class Gid:
    """One used entry of a port's GID table."""

    index: int
    gid: str
    """Eight groups of four hex digits."""
    kind: str = ""
    """`IB/RoCE v1`, `RoCE v2`, or empty if the kernel does not report it."""
    netdev: str = ""
    """The network interface of a RoCE GID."""


@dataclass(frozen=True)
class Port:
    """One port of an HCA."""

    number: int
    state: str = ""
    """ACTIVE, INIT, ARMED, DOWN."""
    phys_state: str = ""
    """LinkUp, Polling, Disabled."""
    gbps: float = 0.0
    """Line rate in Gbit/s; 0 if unknown."""
    rate: str = ""
    """The rate as the kernel writes it: 400 Gb/sec (4X NDR)."""
    link_layer: str = ""
    """InfiniBand, Ethernet (RoCE), Unknown (EFA)."""
    sm_lid: int = 0
    """LID of the subnet manager; 0: none."""
    gids: tuple[Gid, ...] = ()
    counters: bool = False
    """Whether port_xmit_data can be read."""

    @property
    def active(self) -> bool:
        """Whether the port carries data."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Hca:
    """One RDMA device."""

    name: str
    ports: tuple[Port, ...] = ()
    pci: str = ""
    """The device's path below /sys/devices."""
    numa: int = -1
    vendor: str = ""
    """PCI vendor: 0x15b3 Mellanox, 0x1d0f EFA, 0x14e4 Broadcom, 0x8086 Intel."""
    board: str = ""
    firmware: str = ""
    card: str = ""
    """sys_image_guid: the same for all functions of one card."""
    virtual: bool = False
    """Whether it is a virtual function (SR-IOV)."""
    link_width: int = 0
    link_width_max: int = 0
    link_speed: str = ""
    link_speed_max: str = ""
    uverbs: str = ""
    """Path of its device file, /dev/infiniband/uverbsN; empty if it has none."""
    openable: bool = False
    """Whether this process can open that file for reading and writing."""

    @property
    def active(self) -> tuple[Port, ...]:
        """The ports that carry data."""
        return tuple(port for port in self.ports if port.active)


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine."""

    bdf: str
    """The GPU's PCI address, such as 0000:1b:00.0."""
    pci: str = ""
    """The GPU's path below /sys/devices."""
    numa: int = -1
    model: str = ""
    uuid: str = ""
    """`GPU-…`, the name that Ray and CUDA may use."""
    instances: tuple[str, ...] = ()
    """The names of the GPU's MIG instances: `MIG-…`."""


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node with the CPUs that this process may use.

    Other nodes and CPUs are left out.
    """

    number: int
    socket: int = 0
    cores: tuple[tuple[int, ...], ...] = ()
    """The logical CPUs of each physical core, in order of the first one."""
    caches: tuple[tuple[int, ...], ...] = ()
    """The logical CPUs of each core complex: those that share the last cache level."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """All logical CPUs of the node."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))


@dataclass(frozen=True)
class Rdma:
    """RDMA's parts outside the devices: libraries and kernel modules."""

    libibverbs: str = ""
    """Path of the library; empty: not installed."""
    providers: tuple[str, ...] = ()
    """User-space drivers: mlx5, efa, ..."""
    peermem: bool = False
    """Whether nvidia_peermem is loaded."""
    dmabuf: bool = False
    """Whether the kernel is >= 5.12 and NVIDIA's driver is the open one."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of the probing process, which its ranks inherit.

    -1: unlimited; None: unknown.
    """

    memlock: int | None = None
    """Bytes."""
    nofile: int | None = None
    ipc_lock: bool = False
    """Whether the process has CAP_IPC_LOCK, to which memlock does not apply."""
    shm: int | None = None
    """Bytes of /dev/shm."""
    stack: int | None = None
    """Bytes."""


@dataclass(frozen=True)
class Machine:
    """The machine apart from its devices."""

    boot_id: str = ""
    kernel: str = ""
    driver: str = ""
    """Version of NVIDIA's driver."""
    container: bool = False
    cloud: str = ""
    """Vendor by DMI: Amazon EC2, Google, ..."""
    iommu: bool = False
    own_name: tuple[str, ...] = ()
    """The addresses that /etc/hosts assigns to the host's own name."""
    storage: tuple[str, ...] = ()
    """Addresses of file servers that are mounted here."""
    plugins: tuple[str, ...] = ()
    """Paths of NCCL network plug-ins."""
    networks: tuple[str, ...] = ()
    """The plug-ins' networks that NCCL_NET can name."""


@dataclass(frozen=True)
class Facts:
    """Facts about the node of one rank, as its agent sees it; plain JSON data."""

    hostname: str
    ip: str
    """The node's address in Ray."""
    interface: str
    """The network interface for training: the one with `ip`, or fabric.interface."""
    address: str
    """The numeric address of that interface."""
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The addresses of every interface that is up and has one."""
    gpus: Sequence[str] | None = None
    """The GPU ids that Ray assigned to this rank; None outside Ray."""
    cpus: int = 1
    """CPUs that this process may use, by its affinity and its cgroup's quota."""
    numa: tuple[NumaNode, ...] = ()
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of raydist, and of torch, ray, nccl and cuda (runtime) if installed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Network variables that were set before raydist started."""
    nccl_conf: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """NCCL's settings from its files: name -> (value, file)."""
    mpi: Mapping[str, str] = field(default_factory=dict)
    """With backend=mpi: `kind`, `version` and `mpirun` (its path)."""
    nics: tuple[Nic, ...] = ()
    hcas: tuple[Hca, ...] = ()
    devices: tuple[Gpu, ...] = ()
    """All GPUs of the machine, in PCI order."""
    rdma: Rdma = field(default_factory=Rdma)
    limits: Limits = field(default_factory=Limits)
    machine: Machine = field(default_factory=Machine)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 18, 1) of 2.18.1, (2, 8) of 2.8.0+cu128.

    Empty if the version is unknown.
    """
    return tuple(int(part) for part in version.split(".") if part.isdigit())
