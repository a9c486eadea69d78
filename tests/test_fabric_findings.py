"""Each check fires where it should, and stays silent on a sound machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist import fabric_findings, placement
from raydist.config import Backend, Fabric, Job, Scale
from raydist.errors import LaunchError
from raydist.findings import CHECKS, Finding
from raydist.node.facts import Facts, Limits, Machine, Nic, Rdma
from raydist.placement import Node
from tests import machines
from tests.machines import Box, Card, Link
from tests.test_fabric_network import facts


def look(*nodes: Facts, gpu: bool = True, **fabric: Any) -> list[Finding]:
    """The findings of a job with one rank on each of these nodes."""
    have = {"CPU": 8.0, **({"GPU": 8.0} if gpu else {})}
    there = [Node(f"id-{i}", f"10.0.0.{i + 1}", here.hostname, have, have) for i, here in enumerate(nodes)]
    job = Job(backend=Backend("nccl" if gpu else "gloo"), scale=Scale(nodes=len(nodes), per_node=1),
              fabric=Fabric(**fabric))  # fmt: skip
    return fabric_findings.findings(job, placement.seat(placement.ask(job, there), there), nodes)


def sound(tmp_path: Path, name: str = "node-1", box: Box | None = None, **more: Any) -> Facts:
    here = facts(tmp_path / name, box or machines.dgx(), hostname=name, **more)
    spacious = replace(here.limits, shm=2**34)
    return replace(here, **{"limits": spacious, **more})


def checks(found: list[Finding]) -> dict[str, str]:
    assert {one.check for one in found} <= set(CHECKS)
    return {one.check: one.level for one in found}


def test_two_sound_machines_of_one_kind_only_tell_that_storage_is_left_out(tmp_path: Path) -> None:
    found = look(sound(tmp_path, "a"), sound(tmp_path, "b"))
    assert checks(found) == {"storage hcas": "note"}
    assert found[0].nodes == ("a", "b")
    assert checks(look(sound(tmp_path, "c", machines.plain_box()))) == {}


def card(port: Link = Link(), **more: Any) -> Box:  # noqa: B008
    return Box((Card("mlx5_0", "pci0000:00/0000:00:02.0", (port,), **more),), files={
        "proc/driver/nvidia/version": machines.OPEN_DRIVER})  # fmt: skip


ROCE_WITHOUT = Link(layer="Ethernet", gids={1: (machines.IB_GID, "RoCE v2", "eth1")})
WRONG: dict[str, tuple[Box, dict[str, Any], str, str]] = {
    "init": (card(Link(state="2: INIT")), {}, "hca state", "INIT"),
    "down": (card(Link(state="1: DOWN", phys="2: Polling")), {}, "hca state", "DOWN, Polling"),
    "no library": (card(), {"rdma": Rdma()}, "rdma libraries", "libibverbs.so.1 is missing"),
    "no driver": (card(), {"rdma": Rdma("/lib/x", ("efa",))}, "rdma libraries", "no driver mlx5"),
    "no nodes": (replace(card(), nodes=False), {}, "rdma devices", "/dev/infiniband/uverbs0"),
    "memlock": (card(), {"limits": Limits(65536)}, "memlock", "64 KiB"),
    "gid": (card(ROCE_WITHOUT), {}, "roce gid", "no routable RoCE v2 GID"),
    "gpudirect": (machines.dgx(), {"rdma": Rdma("/lib/x", ("mlx5",))}, "gpudirect", "host memory"),
    "affinity": (replace(card(), gpus=(("pci0000:80/0000:80:02.0", 1),)), {}, "affinity", "0000:80:02.0"),
    "width": (card(width=(8, 16)), {}, "links", "x8 32.0"),
    "speed": (card(speed=("16.0 GT/s PCIe", "32.0 GT/s PCIe")), {}, "links", "could x16 32.0"),
    "iommu": (card(), {"machine": Machine(iommu=True)}, "iommu", "IOMMU"),
    "plugin": (machines.efa_box(), {"machine": Machine()}, "vendor", "libnccl-net.so"),
    "shm": (machines.plain_box(), {"limits": Limits(shm=2**26)}, "limits", "64 MiB"),
    "nofile": (machines.plain_box(), {"limits": Limits(nofile=1024)}, "limits", "1024 files"),
    "name": (machines.plain_box(), {"machine": Machine(own_name=("127.0.1.1",))}, "hostname", "127.0.1.1"),
    "disable": (machines.plain_box(), {"environment": {"NCCL_IB_DISABLE": "1"}}, "site settings", "the environment"),
    "conf": (machines.plain_box(), {"nccl_conf": {"NCCL_ALGO": ("Ring", "/etc/nccl.conf")}}, "site settings",
             "set in /etc/nccl.conf"),
    "caret": (machines.plain_box(), {"environment": {"NCCL_SOCKET_IFNAME": "^docker0"}}, "site settings", "take lo"),
    "absent": (machines.plain_box(), {"environment": {"NCCL_SOCKET_IFNAME": "=ib0"}}, "site settings", "no such"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_check_fires_where_something_is_wrong_and_only_that_one(case: str, tmp_path: Path) -> None:
    box, more, check, words = WRONG[case]
    (found,) = [one for one in look(sound(tmp_path, box=box, **more)) if one.check != "storage hcas"]
    assert found.check == check
    assert words in found.text
    assert found.nodes == ("node-1",)


def test_a_sound_card_is_silent(tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=card())) == []
    assert look(sound(tmp_path, "r", machines.roce_box())) != []  # its GPUs' driver gives no GPUDirect
    assert checks(look(sound(tmp_path, "e", machines.efa_box()))) == {}


@pytest.mark.parametrize("value", ["=eth0", "eth", "^docker,lo", "^=lo"])
def test_an_interface_setting_that_works_is_silent(value: str, tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=machines.plain_box(), environment={"NCCL_SOCKET_IFNAME": value})) == []


def test_a_harmless_setting_and_one_overruled_are_silent(tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=machines.plain_box(), environment={"NCCL_IB_DISABLE": "0"})) == []


def test_a_job_without_gpus_hears_nothing_of_hcas(tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=replace(machines.dgx(), nodes=False)), gpu=False) == []


def test_nodes_that_differ_are_named_with_what_the_others_have(tmp_path: Path) -> None:
    few = Box(machines.dgx().cards[:4], machines.dgx().gpus, files=machines.dgx().files)
    found = look(sound(tmp_path, "a"), sound(tmp_path, "b"), sound(tmp_path, "c", few))
    odd = next(one for one in found if one.check == "same fabric")
    assert (odd.level, odd.nodes) == ("fail", ("c",))
    assert odd.text == "4 x InfiniBand 400 Gbit/s; 2 of 3 have 8 x InfiniBand 400 Gbit/s"


def test_versions_mtu_identity_and_loopback_between_nodes(tmp_path: Path) -> None:
    one = sound(tmp_path, "a", machines.plain_box())
    other = replace(one, hostname="b", address="10.0.0.6")
    assert look(one, other) == []
    assert checks(look(one, replace(other, versions={"nccl": "2.18.1"}))) == {"versions": "warn"}
    assert checks(look(one, replace(other, nics=(Nic("eth0", True, 9000),)))) == {"interface": "warn"}
    ib = replace(one, nics=(Nic("eth0", True, 2044, kind=32, mode="datagram"),))
    assert checks(look(ib, replace(ib, hostname="b", nics=(Nic("eth0", True, 65520, kind=32, mode="connected"),)))) == {
        "ipoib": "warn"}  # fmt: skip
    assert checks(look(one, replace(other, hostname="a"))) == {"identity": "fail"}
    assert checks(look(one, replace(other, address="127.0.0.1"))) == {"interface": "fail"}


@pytest.mark.parametrize(("name", "value"), [("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")])
def test_strict_refuses_a_site_that_turns_rdma_off(tmp_path: Path, name: str, value: str) -> None:
    here = sound(tmp_path, "d", environment={name: value})
    told = [one for one in look(here, strict=True) if one.check == "site settings"]
    assert fabric_findings.refusals(Job(fabric=Fabric(strict=True)), told) == told != []
    assert [one.level for one in look(here) if one.check == "site settings"] == ["warn"]


def test_strict_refuses_what_the_facts_already_deny(tmp_path: Path) -> None:
    strict = Job(fabric=Fabric(strict=True))
    bare = look(sound(tmp_path, "p", machines.plain_box()), strict=True)
    assert [one.text for one in fabric_findings.refusals(strict, bare)] == ["no HCA has an active port"]
    assert fabric_findings.refusals(Job(), bare) == []
    assert fabric_findings.refusals(strict, look(sound(tmp_path, "d"), strict=True)) == []


def test_warnings_are_told_in_one_line_each_notes_are_not_and_strict_raises(tmp_path: Path) -> None:
    here = sound(tmp_path, box=machines.plain_box(), limits=Limits(shm=2**26, nofile=1024))
    node = Node("id", "10.0.0.5", "node-1", {"CPU": 8.0}, {"CPU": 8.0})
    plan = placement.seat(placement.ask(Job(scale=Scale(per_node=1)), [node]), [node])
    heard: list[str] = []
    fabric_findings.check(Job(), plan, [here], heard.append)
    assert len(heard) == 1
    assert heard[0].startswith("node-1: /dev/shm has 64 MiB (mend: docker run --shm-size=8g")
    with_gpu = replace(plan, ask=replace(plan.ask, backend="nccl"))
    with pytest.raises(LaunchError, match=r"fabric\.strict: node-1: no HCA has an active port"):
        fabric_findings.check(Job(fabric=Fabric(strict=True)), with_gpu, [here], heard.append)
