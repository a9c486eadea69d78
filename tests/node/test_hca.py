"""Whole machines read from their /sys, without tools: HCAs, ports, GIDs, GPUs, libraries, device
nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raydist.node.probe import hca
from tests import machines
from tests.machines import Box, Card, Link, build


def test_a_dgx_has_its_twelve_hcas_in_order_with_their_places(tmp_path: Path) -> None:
    hcas = hca.read_hcas(build(tmp_path, machines.dgx()))
    assert [one.name for one in hcas] == [
        f"mlx5_{i}" for i in range(12)
    ]  # not mlx5_10 after mlx5_1
    assert hcas[5].pci == "pci0050:00/0050:00:01.0/0051:00:00.0/0052:00:00.0/0053:00:00.0"
    assert (hcas[5].numa, hcas[5].vendor, hcas[5].board, hcas[5].firmware) == (
        1, "0x15b3", "MT_0000000838", "28.43.1014")  # fmt: skip
    (port,) = hcas[5].ports
    assert (port.state, port.phys_state, port.gbps, port.link_layer) == (
        "ACTIVE",
        "LinkUp",
        400.0,
        "InfiniBand",
    )
    assert port.active
    assert port.counters
    assert port.sm_lid == 1
    assert [gid.index for gid in port.gids] == [0]
    assert all(
        one.openable and one.uverbs == f"/dev/infiniband/uverbs{i}" for i, one in enumerate(hcas)
    )


def test_the_gpus_of_a_dgx_and_where_they_hang(tmp_path: Path) -> None:
    hcas = hca.read_gpus(build(tmp_path, machines.dgx()))
    assert [one.bdf for one in hcas] == [f"00{i}4:00:00.0" for i in range(8)]
    assert hcas[6].pci.startswith("pci0060:00/0060:00:01.0/0061:00:00.0/")
    assert (hcas[6].numa, hcas[6].model) == (1, "NVIDIA H100 80GB HBM3")


def test_the_mig_instances_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    whole, cut = hca.read_gpus(build(tmp_path / "a", machines.mig_box()))
    names = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-0f5b0a2e-3c5d-5a8f-9d5e-6f0c8f1d7b11")
    assert (whole.instances, cut.instances) == ((), names)
    assert [
        gpu.instances for gpu in hca.read_gpus(build(tmp_path / "b", machines.mig_box(tool=False)))
    ] == [(), ()]


def test_hdr_is_half_of_ndr_and_a_half_is_kept(tmp_path: Path) -> None:
    (one, *_) = hca.read_hcas(build(tmp_path / "a", machines.dgx(machines.HDR)))
    assert one.ports[0].gbps == 200
    slow = Card("mlx5_0", "pci0000:00/0000:00:02.0", (Link("2.5 Gb/sec (1X SDR)"),))
    assert hca.read_hcas(build(tmp_path / "b", Box((slow,))))[0].ports[0].gbps == 2.5


def test_two_gid_tables_with_their_types_and_netdevs(tmp_path: Path) -> None:
    first, second = hca.read_hcas(build(tmp_path, machines.roce_box()))
    assert [(g.index, g.kind, g.netdev) for g in first.ports[0].gids] == [
        (0, "IB/RoCE v1", "eth1"), (1, "RoCE v2", "eth1"), (2, "IB/RoCE v1", "eth1"), (3, "RoCE v2", "eth1"),
    ]  # fmt: skip
    assert first.ports[0].gids[3].gid == "0000:0000:0000:0000:0000:ffff:0a01:0005"
    assert second.ports[0].gids[3].netdev == "eth2"


def test_a_gid_behind_empty_entries_is_found(tmp_path: Path) -> None:
    table = {
        0: (machines.IB_GID, "RoCE v2", "eth1"),
        9: (machines.mapped("10.0.0.1"), "RoCE v2", "eth1"),
    }
    card = Card("mlx5_0", "pci0000:00/0000:00:02.0", (Link(layer="Ethernet", gids=table),))
    assert [gid.index for gid in hca.read_hcas(build(tmp_path, Box((card,))))[0].ports[0].gids] == [
        0,
        9,
    ]


def test_ports_without_subnet_manager_or_cable(tmp_path: Path) -> None:
    ports = (Link(state="2: INIT", sm_lid=0), Link(state="1: DOWN", phys="2: Polling"))
    (one,) = hca.read_hcas(
        build(tmp_path, Box((Card("mlx5_0", "pci0000:00/0000:00:02.0", ports),)))
    )
    assert [(port.state, port.phys_state, port.sm_lid) for port in one.ports] == [
        ("INIT", "LinkUp", 0), ("DOWN", "Polling", 1)]  # fmt: skip
    assert one.active == ()


def test_a_virtual_function_without_counters(tmp_path: Path) -> None:
    first, _ = hca.read_hcas(build(tmp_path, machines.vm_box()))
    assert first.virtual
    assert not first.ports[0].counters
    assert first.numa == -1


def test_counters_that_read_not_available_are_none(tmp_path: Path) -> None:
    card = Card("mlx5_0", "pci0000:00/0000:00:02.0", (Link(counters="N/A (no PMA)"),))
    assert not hca.read_hcas(build(tmp_path, Box((card,))))[0].ports[0].counters


def test_efa_has_an_unknown_link_layer(tmp_path: Path) -> None:
    hcas = hca.read_hcas(build(tmp_path, machines.efa_box()))
    assert [one.name for one in hcas] == [f"rdmap{i}s0" for i in range(4)]
    assert {(one.vendor, one.ports[0].link_layer) for one in hcas} == {("0x1d0f", "Unknown")}


def test_a_container_sees_hcas_that_it_may_not_open(tmp_path: Path) -> None:
    hcas = hca.read_hcas(build(tmp_path, replace(machines.dgx(), nodes=False)))
    assert len(hcas) == 12
    assert not any(one.openable for one in hcas)
    assert hcas[0].uverbs == "/dev/infiniband/uverbs0"


def test_libraries_and_drivers_of_user_space(tmp_path: Path) -> None:
    hcas = hca.read_rdma({}, build(tmp_path / "dgx", machines.dgx()))
    assert hcas.libibverbs == "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    assert hcas.providers == ("mlx5",)
    assert (hcas.peermem, hcas.dmabuf) == (False, True)
    bare = hca.read_rdma({}, build(tmp_path / "plain", machines.plain_box()))
    assert (bare.libibverbs, bare.providers, bare.dmabuf) == ("", (), False)


def test_libraries_on_the_loaders_path_and_providers_beside_them(tmp_path: Path) -> None:
    machines.write(tmp_path / "opt/rdma/libibverbs.so.1", "")
    machines.write(tmp_path / "opt/rdma/libibverbs/libmlx5-rdmav34.so", "")
    hcas = hca.read_rdma({"LD_LIBRARY_PATH": "/nowhere:/opt/rdma"}, tmp_path)
    assert (hcas.libibverbs, hcas.providers) == ("/opt/rdma/libibverbs.so.1", ("mlx5",))


def test_a_driver_counts_if_a_file_names_it_and_its_library_exists(tmp_path: Path) -> None:
    """libibverbs loads no other; a removed package may leave its file in /etc/libibverbs.d."""
    for name in ("mlx5", "efa"):
        machines.write(tmp_path / f"usr/lib64/libibverbs/lib{name}-rdmav34.so", "")
    machines.write(tmp_path / "opt/x/libirdma-rdmav34.so", "")
    machines.write(tmp_path / "etc/libibverbs.d/all.driver", "driver mlx5\n# driver efa")
    machines.write(tmp_path / "etc/libibverbs.d/own.driver", "driver /opt/x/libirdma")
    machines.write(tmp_path / "etc/libibverbs.d/bnxt_re.driver", "driver bnxt_re")
    assert hca.read_rdma({}, tmp_path).providers == ("irdma", "mlx5")


def test_gpudirect_needs_the_module_or_an_open_driver_on_a_new_kernel(tmp_path: Path) -> None:
    closed = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01 "
        " Wed"
    }
    assert not hca.read_rdma({}, build(tmp_path / "closed", Box(files=closed))).dmabuf
    old = {
        "proc/driver/nvidia/version": machines.OPEN_DRIVER,
        "proc/sys/kernel/osrelease": "5.4.0-100",
    }
    assert not hca.read_rdma({}, build(tmp_path / "old", Box(files=old))).dmabuf
    assert hca.read_rdma(
        {}, build(tmp_path / "module", Box(files={"sys/module/nvidia_peermem/version": "1"}))
    ).peermem
