"""The network interfaces: state, MTU, speed, kind, networks and route. (actor)"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections import defaultdict
from pathlib import Path

from raydist.network.facts import Nic
from raydist.shared import sysfs

RTF_GATEWAY = 0x2


def nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """Return all interfaces of this network namespace, including those that are down."""
    direct, default = routes(root)
    folder = root / "sys/class/net"
    return tuple(
        _nic(folder / name, root, tuple(direct.get(name, ())), name in default)
        for name in sysfs.names(folder)
        if (folder / name).is_dir()  # bonding_masters is a file
    )


def _nic(own: Path, root: Path, subnets: tuple[str, ...], default_route: bool) -> Nic:
    speed = sysfs.read_number(own / "speed", -1)
    return Nic(
        name=own.name,
        up=sysfs.read_text(own / "operstate") in ("up", "unknown"),
        mtu=sysfs.read_number(own / "mtu", 0),
        speed=speed if 0 < speed < 2**31 else None,
        kind=sysfs.read_number(own / "type", 1),
        default_route=default_route,
        subnets=subnets,
        mode=sysfs.read_text(own / "mode"),
        pci=sysfs.pci_path(own / "device", root),
    )


def routes(root: Path = Path("/")) -> tuple[dict[str, list[str]], set[str]]:
    """Return the IPv4 networks of each interface, and the interfaces with a default route.

    The networks are those that the interface reaches directly.
    """
    direct: dict[str, list[str]] = defaultdict(list)
    default: set[str] = set()
    for line in sysfs.read_text(root / "proc/net/route").splitlines()[1:]:
        name, target, _, flags, _, _, _, mask, *_ = line.split()
        if int(mask, 16) == 0:
            default.add(name)
        elif not int(flags, 16) & RTF_GATEWAY:
            direct[name].append(
                str(ipaddress.ip_network(f"{_dotted(target)}/{_dotted(mask)}", strict=False))
            )
    return dict(direct), default


def _dotted(word: str) -> str:
    # The kernel prints the bytes in its own order.
    return socket.inet_ntoa(struct.pack("=I", int(word, 16)))
