"""Interfaces read from /sys and /proc/net/route."""

from __future__ import annotations

from pathlib import Path

import psutil

from raydist.node.probe.nics import nics, routes
from tests.machines import Box, Wire, build

WIRES = (
    Wire("eth0", "10.0.0.0/24", default=True, pci="pci0000:00/0000:00:03.0"),
    Wire(
        "ib0",
        "10.82.0.0/16",
        mtu=2044,
        kind=32,
        speed=-1,
        mode="datagram",
        pci="pci0000:00/0000:00:04.0",
    ),
    Wire("docker0", "172.17.0.0/16", state="down"),
)


def test_interfaces_with_state_mtu_kind_networks_and_place(tmp_path: Path) -> None:
    docker, eth, ib = nics(build(tmp_path, Box(wires=WIRES)))
    assert (eth.name, eth.up, eth.mtu, eth.speed, eth.default_route) == (
        "eth0",
        True,
        1500,
        25000,
        True,
    )
    assert (eth.subnets, eth.pci) == (("10.0.0.0/24",), "pci0000:00/0000:00:03.0")
    assert (ib.ipoib, ib.mtu, ib.speed, ib.mode) == (True, 2044, None, "datagram")
    assert (ib.subnets, ib.default_route, eth.ipoib) == (("10.82.0.0/16",), False, False)
    assert (docker.up, docker.pci) == (False, "")


def test_a_gateway_route_is_no_network_of_the_interface(tmp_path: Path) -> None:
    root = build(tmp_path, Box(wires=WIRES))
    with (root / "proc/net/route").open("a") as file:
        file.write("eth0\t0000020A\t0100000A\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0\n")
    direct, default = routes(root)
    assert direct["eth0"] == ["10.0.0.0/24"]
    assert default == {"eth0"}


def test_a_machine_without_these_files_has_no_interfaces(tmp_path: Path) -> None:
    assert nics(tmp_path) == ()


def test_this_machine_is_read_as_psutil_reads_it() -> None:
    here = {nic.name: nic.mtu for nic in nics()}
    known = {name: state.mtu for name, state in psutil.net_if_stats().items()}
    assert here["lo"] == known["lo"]
    assert any(name in known for name in here)
