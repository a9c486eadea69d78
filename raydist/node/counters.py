"""What every network port of this machine has carried, and how fast it is; reads /sys under a given root. (actor)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec \((\d+)X")
ERRORS = {
    "counters": ("symbol_error", "link_downed", "port_rcv_errors", "link_error_recovery"),
    "hw_counters": ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rx_drops"),
}
"""Counters of an HCA's port that stand still on a sound network: Linux, Documentation/ABI/stable/
sysfs-class-infiniband, and NVIDIA's "Understanding mlx5 counters"."""
Counters = dict[str, dict[str, Any]]
"""By port (`eth0`, or `mlx5_0:1` of an HCA): hca?, sent and received in bytes, rate in GB/s (0: not known), active?;
of an HCA also the errors that it has counted."""


def read(root: Path = Path("/")) -> Counters:
    """All ports but the loopback. A port without counters (a VF, a container) has None for its bytes."""
    nics = {path.name: nic(path) for path in sorted((root / "sys/class/net").glob("*")) if path.name != "lo"}
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return nics | {f"{path.parent.parent.name}:{path.name}": hca(path) for path in ports}


def nic(path: Path) -> dict[str, Any]:
    """A network interface. One without hardware (veth, bridge) claims a speed that means nothing."""
    speed = number(path / "speed") if (path / "device").exists() else None
    return {
        "hca": False,
        "sent": number(path / "statistics/tx_bytes"),
        "received": number(path / "statistics/rx_bytes"),
        "rate": max(0, speed or 0) / 8000,
        "active": word(path / "operstate") in ("up", "unknown"),
    }


def hca(path: Path) -> dict[str, Any]:
    """A port of an HCA.

    Its data counters are octets divided by 4 (Linux, Documentation/ABI/stable/sysfs-class-infiniband); EFA counts plain
    bytes in hw_counters, and what is written or read by RDMA apart.
    """
    quarters = [number(path / "counters" / name) for name in ("port_xmit_data", "port_rcv_data")]
    sent, received = (None if one is None else 4 * one for one in quarters)
    if sent is None:
        sent = total(path, "tx_bytes", "rdma_write_bytes")
        received = total(path, "rx_bytes", "rdma_read_bytes", "rdma_write_recv_bytes")
    rate = RATE.match(word(path / "rate"))
    return {
        "hca": True,
        "sent": sent,
        "received": received,
        "rate": float(rate[1]) / 8 if rate else 0.0,
        "active": word(path / "state").startswith("4"),
        "errors": {
            name: found
            for folder, names in ERRORS.items()
            for name in names
            if (found := number(path / folder / name)) is not None
        },
    }


def total(path: Path, *names: str) -> int | None:
    """The sum of those of these counters that are there; None if none is."""
    there = [one for name in names if (one := number(path / "hw_counters" / name)) is not None]
    return sum(there) if there else None


def number(path: Path) -> int | None:
    """The number in a file; None where there is no file, no value for it (EINVAL), or "N/A (no PMA)"."""
    text = word(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
