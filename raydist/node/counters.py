"""Byte counters and rates of this machine's network ports, from /sys under a given root. (actor)"""

from __future__ import annotations

import re
from pathlib import Path

from raydist.network.traffic import PortCounters
from raydist.shared.sysfs import read_text

RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec \((\d+)X")
ERRORS = {
    "counters": ("symbol_error", "link_downed", "port_rcv_errors", "link_error_recovery"),
    "hw_counters": ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rx_drops"),
}
"""Counters of an HCA's port that do not change on a healthy network: Linux,
Documentation/ABI/stable/sysfs-class-infiniband, and NVIDIA's "Understanding mlx5 counters"."""


def read_counters(root: Path = Path("/")) -> dict[str, PortCounters]:
    """Return the counters of all ports except the loopback.

    A port without counters (a VF, a container) has None for its bytes.
    """
    nics = {
        path.name: nic(path)
        for path in sorted((root / "sys/class/net").glob("*"))
        if path.name != "lo"
    }
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return nics | {f"{path.parent.parent.name}:{path.name}": hca(path) for path in ports}


def nic(path: Path) -> PortCounters:
    """Return a network interface.

    The speed of one without hardware (veth, bridge) is meaningless.
    """
    speed = read_counter(path / "speed") if (path / "device").exists() else None
    return {
        "hca": False,
        "sent": read_counter(path / "statistics/tx_bytes"),
        "received": read_counter(path / "statistics/rx_bytes"),
        "rate": max(0, speed or 0) / 8000,
        "active": read_text(path / "operstate") in ("up", "unknown"),
    }


def hca(path: Path) -> PortCounters:
    """Return a port of an HCA.

    Its data counters are octets divided by 4 (Linux,
    Documentation/ABI/stable/sysfs-class-infiniband). EFA counts bytes in hw_counters, those of RDMA
    reads and writes separately.
    """
    quarters = [
        read_counter(path / "counters" / name) for name in ("port_xmit_data", "port_rcv_data")
    ]
    sent, received = (None if count is None else 4 * count for count in quarters)
    if sent is None:
        sent = sum_counters(path, "tx_bytes", "rdma_write_bytes")
        received = sum_counters(path, "rx_bytes", "rdma_read_bytes", "rdma_write_recv_bytes")
    rate = RATE.match(read_text(path / "rate"))
    return {
        "hca": True,
        "sent": sent,
        "received": received,
        "rate": float(rate[1]) / 8 if rate else 0.0,
        "active": read_text(path / "state").startswith("4"),
        "errors": {
            name: count
            for folder, names in ERRORS.items()
            for name in names
            if (count := read_counter(path / folder / name)) is not None
        },
    }


def sum_counters(path: Path, *names: str) -> int | None:
    """Return the sum of the hw_counters of these names that exist; None if none exists."""
    counts = [
        count for name in names if (count := read_counter(path / "hw_counters" / name)) is not None
    ]
    return sum(counts) if counts else None


def read_counter(path: Path) -> int | None:
    """Return the number in a file.

    None if the file is missing, has no value (EINVAL), or reads "N/A (no PMA)".
    """
    text = read_text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None
