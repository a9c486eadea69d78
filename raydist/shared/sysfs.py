"""Read small files of /sys and /proc; a missing file reads as empty. (either side)"""

from __future__ import annotations

import re
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the file's text, stripped; empty if it cannot be read.

    sysfs returns EINVAL for attributes that do not apply.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path, default: int) -> int:
    """Return the file's number, decimal or hexadecimal with 0x; `default` if it has none."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return default


def counter(text: str, name: str) -> int | None:
    """Return the number in the line `name NUMBER` of a text; None if there is no such line."""
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def cpu_list(text: str) -> list[int]:
    """Return the numbers of a list like 0-3,8."""
    ends = [part.split("-") for part in text.split(",") if part]
    return [number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)]


def names(path: Path) -> list[str]:
    """Return the names in a folder, mlx5_2 before mlx5_10; empty if the folder does not exist."""
    try:
        found = [entry.name for entry in path.iterdir()]
    except OSError:
        return []
    return sorted(
        found,
        key=lambda name: [
            (not part.isdigit(), int(part) if part.isdigit() else 0, part)
            for part in re.split(r"(\d+)", name)
            if part
        ],
    )


def pci_path(device: Path, root: Path) -> str:
    """Return a device's real path below /sys/devices; empty for a virtual or missing device."""
    if not device.exists():
        return ""
    try:
        found = device.resolve().relative_to((root / "sys/devices").resolve()).as_posix()
    except (OSError, ValueError):
        return ""
    return "" if found.startswith("virtual/") else found
