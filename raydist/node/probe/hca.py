"""The RDMA devices, GPUs and user-space libraries, read from files and nvidia-smi. (actor)

nvidia-smi is only needed for MIG instances. Source:
Documentation/ABI/stable/sysfs-class-infiniband, drivers/infiniband/core/sysfs.c.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from raydist.network.facts import Gid, Gpu, Hca, Port, Rdma
from raydist.shared import sysfs

RATE = re.compile(r"^(\d+(?:\.5)?) Gb/sec")
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
GAP = 16
"""Number of empty entries after which the rest of a GID table, filled from the start, is empty too.
A table has 256 entries."""
LIBRARIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib",
    "usr/local/lib",
)
LISTING_S = 10.0
"""Limit on the wait for nvidia-smi: a driver without persistence takes seconds."""
DMABUF_KERNEL = (5, 12)


def read_hcas(root: Path = Path("/")) -> tuple[Hca, ...]:
    """Return all RDMA devices of the machine.

    A container sees them even if it may not open them.
    """
    folder, nodes = root / "sys/class/infiniband", uverbs(root)
    return tuple(_hca(folder / name, nodes.get(name, ""), root) for name in sysfs.names(folder))


def _hca(own: Path, uverb: str, root: Path) -> Hca:
    device = own / "device"
    return Hca(
        name=own.name,
        ports=tuple(
            _port(own / "ports" / number)
            for number in sysfs.names(own / "ports")
            if number.isdigit()
        ),
        pci=sysfs.pci_path(device, root),
        numa=sysfs.read_number(device / "numa_node", -1),
        vendor=sysfs.read_text(device / "vendor"),
        board=sysfs.read_text(own / "board_id"),
        firmware=sysfs.read_text(own / "fw_ver"),
        card=sysfs.read_text(own / "sys_image_guid"),
        virtual=(device / "physfn").exists(),
        link_width=sysfs.read_number(device / "current_link_width", 0),
        link_width_max=sysfs.read_number(device / "max_link_width", 0),
        link_speed=sysfs.read_text(device / "current_link_speed"),
        link_speed_max=sysfs.read_text(device / "max_link_speed"),
        uverbs=uverb,
        openable=bool(uverb) and opens(root / uverb.lstrip("/")),
    )


def _port(own: Path) -> Port:
    rate, layer = sysfs.read_text(own / "rate"), sysfs.read_text(own / "link_layer")
    speed = RATE.match(rate)
    return Port(
        number=int(own.name),
        state=_word(own / "state"),
        phys_state=_word(own / "phys_state"),
        gbps=float(speed.group(1)) if speed else 0.0,
        rate=rate,
        link_layer=layer,
        sm_lid=sysfs.read_number(own / "sm_lid", 0),
        gids=tuple(_gids(own, 2 if layer == "InfiniBand" else 256)),
        counters=sysfs.read_text(own / "counters/port_xmit_data").isdigit(),
    )


def _word(path: Path) -> str:
    """Return ACTIVE of `4: ACTIVE`."""
    return sysfs.read_text(path).rpartition(": ")[2]


def _gids(port: Path, most: int) -> Iterator[Gid]:
    empty = 0
    for i in range(most):
        gid = sysfs.read_text(port / f"gids/{i}")
        if gid in ("", EMPTY):
            if (empty := empty + 1) == GAP:
                return
            continue
        empty = 0
        yield Gid(
            i,
            gid,
            sysfs.read_text(port / f"gid_attrs/types/{i}"),
            sysfs.read_text(port / f"gid_attrs/ndevs/{i}"),
        )


def uverbs(root: Path) -> dict[str, str]:
    """Return each HCA's device node."""
    folder = root / "sys/class/infiniband_verbs"
    return {
        sysfs.read_text(folder / name / "ibdev"): f"/dev/infiniband/{name}"
        for name in sysfs.names(folder)
        if name.startswith("uverbs")
    }


def opens(node: Path) -> bool:
    """Return whether the device node opens for reading and writing.

    The device cgroup may refuse what the node's mode allows.
    """
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def read_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Return all NVIDIA GPUs of the machine, in PCI order."""
    folder, bus = root / "proc/driver/nvidia/gpus", root / "sys/bus/pci/devices"
    instances = read_instances(root)
    return tuple(
        Gpu(
            bdf=name,
            pci=sysfs.pci_path(bus / name, root),
            numa=sysfs.read_number(bus / name / "numa_node", -1),
            model=_field(information := sysfs.read_text(folder / name / "information"), "Model"),
            uuid=(uuid := _field(information, "GPU UUID")),
            instances=instances.get(uuid, ()),
        )
        for name in sorted(sysfs.names(folder))
    )


def read_instances(root: Path = Path("/")) -> dict[str, tuple[str, ...]]:
    """Return the MIG instances of each GPU, by its uuid.

    Only nvidia-smi reports them; it runs only if there are any.
    """
    if not any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*")):
        return {}
    folders = [
        root / folder.lstrip("/") for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)
    ]
    tool = shutil.which("nvidia-smi", path=os.pathsep.join(map(str, folders)))
    if tool is None:
        return {}
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=LISTING_S)
    except (OSError, subprocess.SubprocessError):
        return {}
    instances: dict[str, tuple[str, ...]] = {}
    gpu = ""
    # nvidia-smi lists each GPU, followed by its instances.
    for name in re.findall(r"\(UUID: ([^)]+)\)", listed.stdout):
        if name.startswith("MIG-"):
            instances[gpu] = (*instances.get(gpu, ()), name)
        else:
            gpu = name
    return instances


def _field(information: str, name: str) -> str:
    match = re.search(rf"^{name}:\s*(.+)$", information, re.MULTILINE)
    return match.group(1).strip() if match else ""


def read_rdma(environ: Mapping[str, str], root: Path = Path("/")) -> Rdma:
    """Return libraries, user-space drivers and GPUDirect support."""
    folders = library_folders(environ, root)
    found = next(
        (path for folder in folders if (path := folder / "libibverbs.so.1").exists()), None
    )
    release = re.match(r"(\d+)\.(\d+)", sysfs.read_text(root / "proc/sys/kernel/osrelease"))
    recent = release is not None and (int(release[1]), int(release[2])) >= DMABUF_KERNEL
    peers = (
        "kernel/mm/memory_peers/nv_mem",
        "kernel/mm/memory_peers/nv_mem_nc",
        "module/nvidia_peermem",
    )
    return Rdma(
        libibverbs="" if found is None else f"/{found.relative_to(root)}",
        providers=tuple(sorted(set(_providers(folders, root)))),
        peermem=any((root / "sys" / peer / "version").exists() for peer in peers),
        dmabuf=recent
        and "Open Kernel Module" in sysfs.read_text(root / "proc/driver/nvidia/version"),
    )


def _providers(folders: list[Path], root: Path) -> Iterator[str]:
    """Yield the drivers that libibverbs can load.

    The files in its folder of settings name them, with a path or without; a removed package may
    leave such a file behind. Where there is none, that folder is elsewhere, and all drivers count.
    """
    files = (root / "etc/libibverbs.d").glob("*")
    lines = [line.split() for file in files for line in sysfs.read_text(file).splitlines()]
    named = [words[1] for words in lines if len(words) > 1 and words[0] == "driver"]
    searched = [path for folder in folders for path in (folder / "libibverbs", folder)]
    for name in named or ["*"]:
        places = [root] if name.startswith("/") else searched
        library = name[1:] if name.startswith("/") else f"lib{name}"
        for place in places:
            for path in place.glob(f"{library}-rdmav*.so"):
                yield path.name[len("lib") :].partition("-rdmav")[0]


def library_folders(environ: Mapping[str, str], root: Path) -> list[Path]:
    """Return where the loader looks for libraries, LD_LIBRARY_PATH first."""
    own = [
        folder.lstrip("/")
        for folder in environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder.startswith("/")
    ]
    return [root / folder for folder in (*own, *LIBRARIES)]
