"""Counters of ports, read from folders that stand for machines."""

from __future__ import annotations

from pathlib import Path

from raydist.node import counters


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def nic(
    root: Path, name: str, sent: str, received: str, speed: str = "10000", real: bool = True
) -> None:
    path = root / "sys/class/net" / name
    write(
        path, statistics__tx_bytes=sent, statistics__rx_bytes=received, speed=speed, operstate="up"
    )
    if real:
        (path / "device").mkdir()


def test_a_network_card_has_bytes_and_a_rate(tmp_path: Path) -> None:
    nic(tmp_path, "eth0", "100", "200", speed="100000")
    nic(tmp_path, "lo", "5", "5")
    port_counters = counters.read_counters(tmp_path)
    assert port_counters == {
        "eth0": {"hca": False, "sent": 100, "received": 200, "rate": 12.5, "active": True}
    }


def test_the_speed_of_a_virtual_interface_is_ignored(tmp_path: Path) -> None:
    nic(tmp_path, "veth0", "1", "1", real=False)
    nic(tmp_path, "ib0", "1", "1", speed="-1")
    assert [each["rate"] for each in counters.read_counters(tmp_path).values()] == [0.0, 0.0]


def test_infiniband_counts_in_fours(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    write(
        port,
        counters__port_xmit_data="25",
        counters__port_rcv_data="50",
        rate="400 Gb/sec (4X NDR)",
        state="4: ACTIVE",
    )
    assert counters.read_counters(tmp_path) == {
        "mlx5_0:1": {
            "hca": True,
            "sent": 100,
            "received": 200,
            "rate": 50.0,
            "active": True,
            "errors": {},
        }
    }


def test_efa_counts_bytes_elsewhere(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/rdmap0s6/ports/1"
    write(
        port,
        hw_counters__tx_bytes="7",
        hw_counters__rdma_write_bytes="3",
        hw_counters__rx_bytes="8",
        state="4: ACTIVE",
    )
    port_counters = counters.read_counters(tmp_path)["rdmap0s6:1"]
    assert (port_counters["sent"], port_counters["received"], port_counters["rate"]) == (10, 8, 0.0)


def test_a_port_without_counters_or_that_is_down(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_1/ports/1"
    write(port, counters__port_xmit_data="N/A (no PMA)", rate="10 Gb/sec (4X SDR)", state="1: DOWN")
    port_counters = counters.read_counters(tmp_path)["mlx5_1:1"]
    assert (port_counters["sent"], port_counters["received"], port_counters["active"]) == (
        None,
        None,
        False,
    )


def test_this_machine_can_be_read() -> None:
    for port_counters in counters.read_counters().values():
        assert {"hca", "sent", "received", "rate", "active"} <= set(port_counters)


def test_errors_that_a_port_has_counted(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    write(
        port,
        counters__symbol_error="3",
        counters__link_downed="N/A (no PMA)",
        hw_counters__out_of_sequence="9",
    )
    port_counters = counters.read_counters(tmp_path)["mlx5_0:1"]
    assert port_counters["errors"] == {"symbol_error": 3, "out_of_sequence": 9}
