"""HCAs that only claim to be there, on hosts of the rig: for libibverbs as for raydist.

    plug_in(host, box, build(folder))

The `Box` of tests/machines.py becomes part of the host: its HCAs, GPUs and their places in /sys, device
files, NVIDIA's /proc/driver/nvidia, and a driver that libibverbs loads by a file in /etc/libibverbs.d. What
`ibv_devinfo` prints there comes from libibverbs and from that driver (`provider.c`): the driver reads the
box's numbers from a file, not from /sys. Nothing can be sent over these HCAs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.machines import FIRMWARE, NULL, Box, Card, node_guid, write
from tests.machines import build as build_machine
from tests.rig import Host

HERE = Path(__file__).parent
VERSION = "34"
"""Of the calls between libibverbs and its drivers (IBVERBS_PRIVATE_34), which provider.c declares."""
SPEEDS = {"SDR": 1, "DDR": 2, "QDR": 4, "FDR10": 8, "FDR": 16, "EDR": 32, "HDR": 64, "NDR": 128}
WIDTHS = {"1X": 1, "4X": 2, "8X": 4, "12X": 8, "2X": 16}
LAYERS = {"InfiniBand": 1, "Ethernet": 2}
MOUNTS = """
mount -t overlay overlay -o lowerdir=/run/machine/sys:/sys /sys
mount --bind /run/machine/proc/driver /proc/driver
mkdir /run/dev
mount --rbind /dev /run/dev
mount -t overlay overlay -o lowerdir=/run/machine/dev:/dev /dev
for each in shm pts; do mount --rbind /run/dev/$each /dev/$each; done
mount --bind /run/machine/etc/libibverbs.d /etc/libibverbs.d
"""


def obstacle() -> str:
    """Return why there can be no such HCAs on this machine; empty if there can."""
    tools = [tool for tool in ("gcc", "ibv_devinfo") if shutil.which(tool) is None]
    if tools:
        return f"no {tools[0]} here (apt install ibverbs-utils libibverbs-dev)"
    if not Path("/usr/include/infiniband/verbs.h").exists():
        return "no infiniband/verbs.h here (apt install libibverbs-dev)"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlay file system"
    try:  # libibverbs asks the kernel this way, and /sys only if there is no answer
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20).close()
    except OSError:
        return ""
    return "this kernel has RDMA devices of its own"


requires_fake_infiniband = pytest.mark.skipif(obstacle() != "", reason=obstacle() or "-")


def build(into: Path) -> Path:
    """Compile the driver into a folder; return its path as files in /etc/libibverbs.d name it."""
    library = into / f"libmlx5-rdmav{VERSION}.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run([*command, str(HERE / "provider.c"), "-libverbs"], check=True)
    return into / "libmlx5"


def plug_in(host: Host, box: Box, driver: Path) -> None:
    """Make the HCAs and GPUs of the box those of the host; its other parts stay the host's."""
    machine = build_machine(host.root / "run/machine", replace(box, wires=()))
    for node in machine.glob("dev/infiniband/*"):
        node.unlink()
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(*map(int, NULL.split(":"))))
    write(machine / "etc/libibverbs.d/mlx5.driver", f"driver {driver}")
    (machine / "proc/driver").mkdir(parents=True, exist_ok=True)
    (host.root / "etc/libibverbs.d").mkdir(exist_ok=True)
    every = [line for number, card in enumerate(box.cards) for line in lines(number, card)]
    write(host.root / "run/hcas", "\n".join(every))
    host.run(["sh", "-ec", MOUNTS])


def lines(number: int, card: Card) -> Iterator[str]:
    """Yield what provider.c reads about a card: the numbers that a real driver gets from the kernel."""
    yield f"hca {card.name} {FIRMWARE} {node_guid(number)} {card.guid} {len(card.ports)}"
    for i, port in enumerate(card.ports, 1):
        width, speed = re.findall(r"\((\w+) (\w+)\)", port.rate)[0]
        state, phys = (text.partition(":")[0] for text in (port.state, port.phys))
        numbers = [state, phys, WIDTHS[width], SPEEDS[speed], port.sm_lid, LAYERS[port.layer]]
        yield " ".join(map(str, ["port", card.name, i, *numbers]))
