"""Small files of /sys and /proc, read without fuss: what is not there is empty. (actor)"""

from __future__ import annotations

import re
from pathlib import Path


def text(path: Path) -> str:
    """The file's text, stripped; empty if it can't be read: sysfs answers EINVAL for what does not apply."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path, default: int) -> int:
    """The file's number, decimal or 0x."""
    try:
        return int(text(path), 0)
    except ValueError:
        return default


def names(path: Path) -> list[str]:
    """What a folder holds, mlx5_2 before mlx5_10; nothing if there is no such folder."""
    try:
        found = [one.name for one in path.iterdir()]
    except OSError:
        return []
    return sorted(found, key=lambda name: [(not part.isdigit(), int(part) if part.isdigit() else 0, part)
                                           for part in re.split(r"(\d+)", name) if part])  # fmt: skip


def place(device: Path, root: Path) -> str:
    """Where a device hangs: its real path below /sys/devices; empty for a virtual one, or none."""
    if not device.exists():
        return ""
    try:
        found = device.resolve().relative_to((root / "sys/devices").resolve()).as_posix()
    except (OSError, ValueError):
        return ""
    return "" if found.startswith("virtual/") else found
