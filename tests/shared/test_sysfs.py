"""Small files of /sys: what is not there is empty, numbers in both bases, names in counting
order."""

from __future__ import annotations

from pathlib import Path

from raydist.shared import sysfs
from tests.machines import link, write


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    assert sysfs.read_text(tmp_path / "no") == ""
    assert sysfs.read_text(tmp_path) == ""  # a folder: as EINVAL, an OSError
    assert sysfs.read_number(tmp_path / "no", -1) == -1
    assert sysfs.names(tmp_path / "no") == []
    assert sysfs.pci_path(tmp_path / "no", tmp_path) == ""


def test_numbers_in_both_bases(tmp_path: Path) -> None:
    for text, value in (("12", 12), ("0x1f", 31), ("N/A", -1), ("-1", -1)):
        write(tmp_path / "n", text)
        assert sysfs.read_number(tmp_path / "n", -1) == value


def test_names_count(tmp_path: Path) -> None:
    for name in ("mlx5_10", "mlx5_2", "ibp1s0", "mlx5_1"):
        write(tmp_path / name, "")
    assert sysfs.names(tmp_path) == ["ibp1s0", "mlx5_1", "mlx5_2", "mlx5_10"]


def test_the_place_of_a_real_and_of_a_virtual_device(tmp_path: Path) -> None:
    for i, device in enumerate(("pci0000:00/0000:00:02.0", "virtual/net/veth0")):
        (tmp_path / "sys/devices" / device).mkdir(parents=True)
        link(tmp_path / f"device{i}", tmp_path / "sys/devices" / device)
    assert sysfs.pci_path(tmp_path / "device0", tmp_path) == "pci0000:00/0000:00:02.0"
    assert sysfs.pci_path(tmp_path / "device1", tmp_path) == ""
