"""Each check fires where it should, and stays silent on a sound machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.network import checks_node, checks_site
from raydist.network.facts import Facts, Limits, Machine, Nic, Rdma
from raydist.network.finding import CHECKS, Finding
from raydist.settings.config import Backend, Fabric, Job, Scale
from raydist.shared.errors import LaunchError
from tests import machines
from tests.machines import Box, Card, Link
from tests.network.test_rdma import facts, only_opens


def look(
    *nodes: Facts,
    gpu: bool = True,
    env: dict[str, str] | None = None,
    backend: str = "",
    same: bool = False,
    **fabric: Any,
) -> list[Finding]:
    """Return the findings of a job with one rank on each of these nodes. A backend that is named
    has no GPUs. `same`: the nodes have one address."""
    gpu = gpu and not backend
    have = {"CPU": 8.0, **({"GPU": 8.0} if gpu else {})}
    there = [
        Node(f"id-{i}", f"10.0.0.{i + 1}", here.hostname, have, have)
        for i, here in enumerate(nodes)
    ]
    job = Job(backend=Backend(backend or ("nccl" if gpu else "gloo")), scale=Scale(nodes=len(nodes), per_node=1),
              fabric=Fabric(**fabric), env=env or {})  # fmt: skip
    own = [replace(here, address=f"10.0.0.{5 + i}") if here.address == "10.0.0.5" and not same else here
           for i, here in enumerate(nodes)]  # fmt: skip
    return checks_node.findings(
        job, placement.assign_ranks(placement.resources_for(job, there), there), own
    )


def sound(tmp_path: Path, name: str = "node-1", box: Box | None = None, **more: Any) -> Facts:
    here = facts(tmp_path / name, box or machines.dgx(), hostname=name, **more)
    spacious = replace(here.limits, shm=2**34)
    return replace(here, **{"limits": spacious, **more})


def checks(findings: list[Finding]) -> dict[str, str]:
    assert {one.check for one in findings} <= set(CHECKS)
    return {one.check: one.level for one in findings}


def test_two_sound_machines_of_one_kind_only_tell_that_storage_is_left_out(tmp_path: Path) -> None:
    findings = look(sound(tmp_path, "a"), sound(tmp_path, "b"))
    assert checks(findings) == {"storage hcas": "note"}
    assert findings[0].nodes == ("a", "b")
    assert checks(look(sound(tmp_path, "c", machines.plain_box()))) == {}


def card(port: Link = Link(), **more: Any) -> Box:  # noqa: B008
    return Box((Card("mlx5_0", "pci0000:00/0000:00:02.0", (port,), **more),), files={
        "proc/driver/nvidia/version": machines.OPEN_DRIVER})  # fmt: skip


def worn_cable() -> Box:
    """Eight cards next to eight GPUs; one of the cards came up at half its rate."""
    box = machines.dgx()
    return replace(box, cards=tuple(replace(one, ports=(Link(machines.HDR),)) if one.name == "mlx5_3" else one
                                    for one in box.cards[:8]))  # fmt: skip


def two_indexes() -> Box:
    """RoCE cards whose routable GIDs stand at different places of their tables."""
    other = machines.roce("10.2.0.5", "eth2")
    other = replace(
        other, gids={0: other.gids[0], 1: other.gids[1], 4: other.gids[2], 5: other.gids[3]}
    )
    ports = (machines.roce("10.1.0.5", "eth1"), other)
    return Box(
        tuple(
            Card(f"mlx5_{i}", f"pci0000:00/0000:00:0{i + 2}.0", (port,))
            for i, port in enumerate(ports)
        )
    )


def twelve() -> Box:
    """Twelve equal cards: mlx5_1 begins like mlx5_10 and mlx5_11."""
    return Box(tuple(Card(f"mlx5_{i}", f"pci0000:{i:02x}/0000:{i:02x}:02.0") for i in range(12)))


def beside_storage() -> Box:
    """Return a card whose IPoIB interface also leads to a Lustre server."""
    mounts = "10.9.0.7@o2ib:/fs /data lustre rw 0 0"
    wires = (machines.Wire("eth0", "10.0.0.0/24", default=True),
             machines.Wire("ib0", "10.9.0.0/24", 2044, 32, pci="pci0000:00/0000:00:02.0"))  # fmt: skip
    return replace(card(), wires=wires, files={**card().files, "proc/mounts": mounts})


def google(plugin: str = "usr/local/nvidia/lib64/libnccl-net.so") -> Box:
    """Return an instance with GPUDirect-TCPXO, whose profile nobody has sourced, or with gIB."""
    return Box(files={"sys/class/dmi/id/sys_vendor": "Google", plugin: ""})


ROCE_WITHOUT = Link(layer="Ethernet", gids={1: (machines.IB_GID, "RoCE v2", "eth1")})
WRONG: dict[str, tuple[Box, dict[str, Any], str, str]] = {
    "init": (card(Link(state="2: INIT")), {}, "hca state", "INIT"),
    "armed": (card(Link(state="3: ARMED")), {}, "hca state", "ARMED"),
    "no manager": (card(Link(sm_lid=0)), {}, "hca state", "mlx5_0/1 has no subnet manager"),
    "down": (card(Link(state="1: DOWN", phys="2: Polling")), {}, "hca state", "DOWN, Polling"),
    "no library": (card(), {"rdma": Rdma()}, "rdma libraries", "libibverbs.so.1 is missing"),
    "no driver": (card(), {"rdma": Rdma("/lib/x", ("efa",))}, "rdma libraries", "no driver mlx5"),
    "no nodes": (replace(card(), nodes=False), {}, "rdma devices", "/dev/infiniband/uverbs0"),
    "memlock": (card(), {"limits": Limits(65536)}, "memlock", "64 KiB"),
    "plug-in's library": (machines.efa_box(), {"rdma": Rdma("/lib/x", ("mlx5",))}, "rdma libraries", "no driver efa"),
    "plug-in's nodes": (replace(machines.efa_box(), nodes=False), {}, "rdma devices", "/dev/infiniband/uverbs0"),
    "plug-in's memlock": (machines.efa_box(), {"limits": Limits(65536)}, "memlock", "64 KiB"),
    "gid": (card(ROCE_WITHOUT), {}, "roce gid", "no routable RoCE v2 GID"),
    "gpudirect": (machines.dgx(), {"rdma": Rdma("/lib/x", ("mlx5",))}, "gpudirect", "host memory"),
    "affinity": (replace(card(), gpus=(("pci0000:80/0000:80:02.0", 1),)), {}, "affinity", "0000:80:02.0"),
    "width": (card(width=(8, 16)), {}, "links", "x8 32.0"),
    "speed": (card(speed=("16.0 GT/s PCIe", "32.0 GT/s PCIe")), {}, "links", "x16 32.0"),
    "a worse cable": (worn_cable(), {}, "links", "mlx5_3 came up at 200 Gb/sec (4X HDR)"),
    "old driver": (machines.plain_box(), {"versions": {"cuda": "12.4.127"}, "machine": Machine(driver="470.82.01")},
                   "versions", "driver 470.82.01"),
    "stack": (machines.plain_box(), {"versions": {"nccl": "2.27.3"}, "limits": Limits(stack=-1)}, "limits", "stack"),
    "gid index": (machines.plain_box(), {"environment": {"NCCL_IB_GID_INDEX": "3"}}, "site settings", "since 2.21"),
    "gid indexes": (two_indexes(), {"versions": {"nccl": "2.18.1"}}, "roce gid", "mlx5_0: 3, mlx5_1: 5"),
    "gloo's name": (machines.plain_box(), {"environment": {"GLOO_SOCKET_IFNAME": "eth"}}, "site settings",
                    "no interface eth (eth0)"),
    "no such hca": (card(), {"environment": {"NCCL_IB_HCA": "mlx4"}}, "storage hcas", "names no active HCA (mlx5_0)"),
    "prefix": (twelve(), {"environment": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}}, "storage hcas",
               "mlx5_1 also selects mlx5_10, mlx5_11"),
    "file server": (beside_storage(), {}, "storage hcas", "10.9.0.7"),
    "tcpx": (google(), {}, "vendor", "plain TCP"),
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
def test_a_check_fires_where_something_is_wrong_and_only_that_one(
    case: str, tmp_path: Path
) -> None:
    box, more, check, words = WRONG[case]
    every = look(sound(tmp_path, box=box, **more))
    (finding,) = [one for one in every if one.check == check and words in one.text]
    assert {one.check for one in every} <= {check, "storage hcas"}
    assert finding.nodes == ("node-1",)


def test_a_sound_card_is_silent(tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=card())) == []
    assert (
        look(sound(tmp_path, "r", machines.roce_box())) != []
    )  # its GPUs' driver gives no GPUDirect
    assert checks(look(sound(tmp_path, "e", machines.efa_box()))) == {}


@pytest.mark.parametrize("value", ["=eth0", "eth", "^docker,lo", "^=lo"])
def test_an_interface_setting_that_works_is_silent(value: str, tmp_path: Path) -> None:
    assert (
        look(sound(tmp_path, box=machines.plain_box(), environment={"NCCL_SOCKET_IFNAME": value}))
        == []
    )


@pytest.mark.parametrize("name", checks_site.HARMFUL)
def test_a_harmful_setting_is_reported_wherever_it_is_set_unless_overruled(
    name: str, tmp_path: Path
) -> None:
    here, bad = sound(tmp_path, box=machines.plain_box()), checks_site.HARMFUL[name]
    value = bad[0] if bad else "7"
    file = "/home/me/.nccl.conf"
    for own, where in (
        (replace(here, environment={name: value}), "the environment"),
        (replace(here, nccl_conf={name: (value, file)}), file),
    ):
        (finding,) = look(own)
        assert (finding.check, finding.level, finding.text) == (
            "site settings",
            "warn",
            f"{name}={value} is set in {where}",
        )
        assert look(own, env={name: "whatever"}) == []
    assert not bad or look(replace(here, environment={name: "harmless"})) == []


def test_every_check_has_a_machine_where_it_fires() -> None:
    """Those between nodes have their own tests, below."""
    between = {"interface", "same fabric", "ipoib", "identity"}
    assert {check for _, _, check, _ in WRONG.values()} | between == set(CHECKS)


@pytest.mark.parametrize(
    ("box", "more"),
    [
        (
            machines.plain_box(),
            {"environment": {"NCCL_IB_GID_INDEX": "3"}, "versions": {"nccl": "2.18.1"}},
        ),
        (
            machines.plain_box(),
            {"environment": {"GLOO_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_IFACE": "eth0"}},
        ),
        (
            machines.plain_box(),
            {"versions": {"cuda": "12.4.127"}, "machine": Machine(driver="535.104.05")},
        ),
        (
            machines.plain_box(),
            {"versions": {"cuda": "13.2.86"}, "machine": Machine(driver="580.65.06")},
        ),
        (machines.plain_box(), {"versions": {"nccl": "2.28.3"}, "limits": Limits(stack=-1)}),
        (two_indexes(), {"versions": {"nccl": "2.21.5"}}),
        (twelve(), {"environment": {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}}),
        (twelve(), {"environment": {"NCCL_IB_HCA": "mlx5"}}),
        (twelve(), {"environment": {"NCCL_IB_HCA": "^mlx5_9"}}),
        (google(), {"environment": {"NCCL_FASTRAK_IFNAME": "eth1"}}),
        (google(), {"environment": {"NCCL_NET": "gIB"}}),
        (google("usr/local/gib/lib64/libnccl-net_internal.so"), {}),
        (card(), {"limits": Limits(65536, ipc_lock=True)}),
        (card(), {"limits": Limits(-1)}),
        (machines.efa_box(), {"limits": Limits(-1)}),
        (
            machines.vm_box(),
            {"machine": Machine(iommu=True), "rdma": Rdma("/lib/x", ("mlx5",), peermem=True)},
        ),
        (machines.plain_box(), {"machine": Machine(own_name=("10.0.0.5",))}),
        (
            replace(
                beside_storage(),
                files={**card().files, "proc/mounts": "nas:/fs /data nfs4 rw,addr=nas 0 0"},
            ),
            {},
        ),
    ],
)
def test_what_is_right_is_silent(box: Box, more: dict[str, Any], tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=box, **more)) == []


OVERRIDDEN: dict[str, tuple[dict[str, Any], dict[str, str], str, str]] = {
    # setting, site's value, words of the finding, fix
    "hca": ({"hca": ["mlx5_0", "mlx5_4"]}, {"NCCL_IB_HCA": "=mlx5_1,mlx5_5"},
            "wins over fabric.hca=[mlx5_0,mlx5_4]", "'env.NCCL_IB_HCA=\"=mlx5_0,mlx5_4\"'"),
    "tcp": ({"kind": "ethernet"}, {"NCCL_IB_DISABLE": "0"}, "wins over fabric.kind=ethernet", "env.NCCL_IB_DISABLE=1"),
    "tcp by plug-in": ({"kind": "ethernet"}, {"NCCL_NET": "AWS Libfabric"}, "wins over fabric.kind=ethernet",
                       "env.NCCL_NET=Socket"),
    "nccl": ({"interface": "eth0"}, {"NCCL_SOCKET_IFNAME": "eth"}, "wins over fabric.interface=eth0",
             "env.NCCL_SOCKET_IFNAME==eth0"),
    "gloo": ({"interface": "eth0"}, {"GLOO_SOCKET_IFNAME": "eth1"}, "wins over fabric.interface=eth0",
             "env.GLOO_SOCKET_IFNAME=eth0"),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERRIDDEN)
def test_a_site_value_that_wins_over_a_setting_is_a_warning(case: str, tmp_path: Path) -> None:
    """A person who types fabric=ethernet for this run got RDMA, without a word."""
    fabric, environment, words, fix = OVERRIDDEN[case]
    box = machines.plain_box() if "interface" in fabric else machines.dgx()
    interfaces = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",), "eth1": ("10.1.0.5",)}
    here = sound(tmp_path, box=box, environment=environment, interfaces=interfaces)
    (finding,) = look(here, **fabric)
    assert (finding.check, finding.level, finding.fix) == ("site settings", "warn", fix)
    assert words in finding.text
    overruled = look(here, env=dict.fromkeys(environment, "mlx5_0"), **fabric)
    assert not [one for one in overruled if "wins over" in one.text]
    if "interface" in fabric:
        assert look(here, kind="site", **fabric) == []


@pytest.mark.parametrize(
    ("fabric", "environment"),
    [
        ({"hca": ["mlx5_4", "mlx5_0"]}, {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_4:1"}),
        ({"kind": "ethernet"}, {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}),
        ({"interface": "eth0"}, {"NCCL_SOCKET_IFNAME": "^lo,docker", "GLOO_SOCKET_IFNAME": "eth0"}),
    ],
    ids=["hca", "tcp", "interface"],
)
def test_a_site_value_that_selects_the_same_wins_over_nothing(
    fabric: dict[str, Any], environment: dict[str, str], tmp_path: Path
) -> None:
    interfaces = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",)}
    here = sound(tmp_path, environment=environment, interfaces=interfaces)
    assert not [one for one in look(here, **fabric) if "wins over" in one.text]


def test_a_list_of_hcas_with_storage_among_them_is_told_whoever_wrote_it(tmp_path: Path) -> None:
    box = machines.dgx()
    best = ",".join(f"mlx5_{i}" for i in range(8))
    (site,) = [
        one
        for one in look(sound(tmp_path, "s", box, environment={"NCCL_IB_HCA": "mlx5"}))
        if one.level == "warn"
    ]
    assert site.text.startswith(
        "NCCL_IB_HCA=mlx5 in the environment: mlx5_8 shares no PCIe switch with a GPU; mlx5_9 "
    )
    assert site.fix == f"'env.NCCL_IB_HCA=\"={best}\"'"
    (from_site,) = [
        one
        for one in look(sound(tmp_path, "t", box), env={"NCCL_IB_HCA": "=mlx5_0,mlx5_11"})
        if one.level == "warn"
    ]
    assert (
        from_site.text
        == "NCCL_IB_HCA==mlx5_0,mlx5_11 in env.NCCL_IB_HCA: mlx5_11 shares no PCIe switch with a "
        "GPU"
    )
    (from_setting,) = [
        one
        for one in look(sound(tmp_path, "a", box), hca=["mlx5_0", "mlx5_8"])
        if one.check != "affinity"
    ]
    assert (from_setting.check, from_setting.level, from_setting.fix) == (
        "storage hcas",
        "warn",
        f"fabric.hca=[{best}]",
    )
    assert look(sound(tmp_path, "n", box), hca=["mlx5_0", "mlx5_4"]) == []


def test_where_no_gpu_tells_which_are_for_storage_the_choice_is_a_warning(tmp_path: Path) -> None:
    slow, fast = (Card(f"mlx5_{i}", f"pci0000:00/0000:00:0{i}.0", (Link(rate),))
                  for i, rate in ((1, machines.EDR), (2, machines.NDR)))  # fmt: skip
    (finding,) = look(sound(tmp_path, box=Box((slow, fast))))
    assert (finding.check, finding.level) == ("storage hcas", "warn")
    assert "NCCL_IB_HCA==mlx5_2" in finding.text
    assert look(sound(tmp_path, "b", Box((slow,)))) == []


def test_mpi_without_gpus_takes_infiniband_and_says_that_it_guesses(tmp_path: Path) -> None:
    """Two 100GbE ports have more Gbit/s than one HDR100 HCA: MPI left InfiniBand out, silently."""
    infiniband, *ethernet = (
        Card(f"mlx5_{i}", f"pci0000:00/0000:00:0{i}.0", (link,))
        for i, link in enumerate(
            (
                Link(machines.EDR),
                machines.roce("10.1.0.5", "eth1", rate=machines.EDR),
                machines.roce("10.2.0.5", "eth2", rate=machines.EDR),
            )
        )
    )
    here = sound(tmp_path, "both", Box((infiniband, *ethernet)))
    (finding,) = look(here, backend="mpi")
    assert (finding.check, finding.level) == ("storage hcas", "warn")
    assert "UCX_NET_DEVICES=mlx5_0," in finding.text
    assert look(sound(tmp_path, "one", Box((infiniband,))), backend="mpi") == []


def test_an_hca_that_was_asked_for_and_is_down_is_an_error(tmp_path: Path) -> None:
    down = replace(card().cards[0], name="mlx5_1", ports=(Link(state="1: DOWN"),))
    findings = look(
        sound(tmp_path, box=replace(card(), cards=(*card().cards, down))), hca=["mlx5_1"]
    )
    assert checks(findings)["hca state"] == "fail"


def test_roce_ports_of_two_families_or_two_mtus_are_told(tmp_path: Path) -> None:
    def node(name: str, gid: str = machines.mapped("10.1.0.5"), mtu: int = 9000) -> Facts:
        port = replace(machines.roce("10.1.0.5", "eth1"), gids={3: (gid, "RoCE v2", "eth1")})
        wires = (machines.Wire("eth0", "10.0.0.0/24"), machines.Wire("eth1", "10.1.0.0/24", mtu))
        return sound(tmp_path, name, replace(card(port), wires=wires))

    one = node("a")
    assert look(one, node("b")) == []
    assert checks(look(one, node("c", gid="2001:0db8:0000:0000:0000:0000:0000:0001"))) == {
        "roce gid": "fail"
    }
    assert checks(look(one, node("d", mtu=1500))) == {"roce gid": "warn"}


def test_addresses_where_no_other_node_reaches(tmp_path: Path) -> None:
    one = sound(tmp_path, "a", machines.plain_box())
    other = replace(one, hostname="b", address="10.0.0.6")
    bridge = replace(other, interface="docker0", address="172.17.0.1")
    assert checks(look(one, bridge)) == {"interface": "warn"}
    assert "docker0 (172.17.0.1)" in look(one, bridge)[0].text
    elsewhere = replace(bridge, machine=replace(bridge.machine, boot_id="another"))
    for twice, told in (
        ((replace(bridge, hostname="a"), elsewhere), [("interface", ("a", "b"))]),
        ((one, replace(one, hostname="b")), []),  # deploy/docker/compose.yaml on one machine
    ):
        found = look(*twice, same=True)
        assert [(each.check, each.nodes) for each in found if each.level == "fail"] == told
    routed = replace(other, nics=(Nic("eth0", True, 1500, subnets=("10.7.0.0/24",)),))
    (note,) = look(one, routed)
    assert (note.level, note.text) == (
        "note",
        "network 10.7.0.0/24; 1 of 2 nodes have network 10.0.0.0/24",
    )
    assert look(one) == []


def test_strict_with_a_plug_in_that_no_name_forces(tmp_path: Path) -> None:
    """HPC-X: NCCL's log is watched instead, and has to be there."""
    box = replace(
        card(), files={"opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so": "NCCL RDMA Plugin v11"}
    )
    strict = Job(fabric=Fabric(strict=True))
    for here, level in (
        (sound(tmp_path, "a", box), "note"),
        (sound(tmp_path, "b", box, environment={"NCCL_DEBUG": "info"}), "note"),
        (sound(tmp_path, "c", box, environment={"NCCL_DEBUG": "WARN"}), "fail"),
    ):
        (finding,) = [one for one in look(here, strict=True) if one.check == "vendor"]
        assert finding.level == level
        assert bool(checks_node.refusals(strict, [finding])) == (level == "fail")
    assert look(sound(tmp_path, "d", box)) == []
    missing = look(sound(tmp_path, "e", machines.efa_box(), machine=Machine()), strict=True)
    assert [one.check for one in checks_node.refusals(strict, missing)] == ["vendor"]


def test_hcas_that_cannot_be_opened_are_a_note_where_others_can(tmp_path: Path) -> None:
    """Such a job works; the doctor ended with 1, and fabric.strict refused it."""
    here = sound(tmp_path, box=machines.roce_box(), rdma=Rdma("/lib/x", ("mlx5",), peermem=True))
    some, none = only_opens(here, "mlx5_1"), only_opens(here)
    (note,) = look(some, strict=True)
    assert (note.check, note.level) == ("rdma devices", "note")
    assert note.text == "can't open /dev/infiniband/uverbs0; used: mlx5_1"
    assert look(some, hca=["mlx5_1"]) == []
    for findings in (look(none), look(some, hca=["mlx5_0", "mlx5_1"])):
        assert checks(findings)["rdma devices"] == "fail"


def test_a_job_without_gpus_hears_nothing_of_hcas(tmp_path: Path) -> None:
    assert look(sound(tmp_path, box=replace(machines.dgx(), nodes=False)), gpu=False) == []


def test_nodes_that_differ_are_named_with_what_the_others_have(tmp_path: Path) -> None:
    few = Box(machines.dgx().cards[:4], machines.dgx().gpus, files=machines.dgx().files)
    findings = look(sound(tmp_path, "a"), sound(tmp_path, "b"), sound(tmp_path, "c", few))
    odd = next(one for one in findings if one.check == "same fabric")
    assert (odd.level, odd.nodes) == ("fail", ("c",))
    assert odd.text == "4 x InfiniBand 400 Gbit/s; 2 of 3 nodes have 8 x InfiniBand 400 Gbit/s"


def test_versions_mtu_identity_and_loopback_between_nodes(tmp_path: Path) -> None:
    one = sound(tmp_path, "a", machines.plain_box())
    other = replace(one, hostname="b", address="10.0.0.6")
    assert look(one, other) == []
    assert checks(look(one, replace(other, versions={"nccl": "2.18.1"}))) == {"versions": "warn"}
    assert checks(look(one, replace(other, nics=(Nic("eth0", True, 9000),)))) == {
        "interface": "warn"
    }
    ib = replace(one, nics=(Nic("eth0", True, 2044, kind=32, mode="datagram"),))
    assert checks(look(ib, replace(ib, hostname="b", nics=(Nic("eth0", True, 65520, kind=32, mode="connected"),)))) == {
        "ipoib": "warn"}  # fmt: skip
    assert look(ib, replace(ib, hostname="b", address="10.0.0.6")) == []
    twin = replace(other, hostname="a")
    assert checks(look(one, twin)) == {"identity": "fail"}
    assert (
        look(
            *(
                replace(each, environment={"NCCL_HOSTID": str(i)})
                for i, each in enumerate((one, twin))
            )
        )
        == []
    )
    (same,) = look(one, other, env={"NCCL_HOSTID": "x"})  # env. is of all ranks
    assert (same.check, same.level, same.nodes) == ("identity", "fail", ("a", "b"))
    assert "NCCL_HOSTID=x" in same.text
    of_nodes = (replace(each, environment={"NCCL_HOSTID": "x"}) for each in (one, other))
    assert checks(look(*of_nodes)) == {"identity": "fail"}
    assert checks(look(one, replace(other, address="127.0.0.1"))) == {"interface": "fail"}


@pytest.mark.parametrize(("name", "value"), [("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")])
def test_strict_refuses_a_site_that_turns_rdma_off(tmp_path: Path, name: str, value: str) -> None:
    here = sound(tmp_path, "d", environment={name: value})
    findings = [one for one in look(here, strict=True) if one.check == "site settings"]
    assert checks_node.refusals(Job(fabric=Fabric(strict=True)), findings) == findings != []
    assert [one.level for one in look(here) if one.check == "site settings"] == ["warn"]


def test_strict_refuses_what_the_facts_already_deny(tmp_path: Path) -> None:
    strict = Job(fabric=Fabric(strict=True))
    bare = look(sound(tmp_path, "p", machines.plain_box()), strict=True)
    assert [one.text for one in checks_node.refusals(strict, bare)] == ["no HCA has an active port"]
    assert checks_node.refusals(Job(), bare) == []
    assert checks_node.refusals(strict, look(sound(tmp_path, "d"), strict=True)) == []


def test_strict_refuses_a_backend_that_knows_only_tcp(tmp_path: Path) -> None:
    here, strict = sound(tmp_path), Job(fabric=Fabric(strict=True))
    (refused,) = checks_node.refusals(strict, look(here, gpu=False, strict=True))
    assert (refused.check, refused.level, refused.nodes) == ("hca state", "fail", ())
    assert refused.line() == f"{refused.text} (fix: {refused.fix})"
    assert look(here, gpu=False) == []


def test_a_kind_that_no_hca_has_is_a_warning_and_strict_refuses_it(tmp_path: Path) -> None:
    """The doctor said that the RoCE cards were left out, and NCCL used them."""
    here = sound(tmp_path, box=machines.roce_box())
    (warning,) = [one for one in look(here, kind="ib") if one.check == "storage hcas"]
    assert (warning.level, warning.fix) == ("warn", "fabric.kind=auto")
    strict = Job(fabric=Fabric(strict=True))
    (refused,) = checks_node.refusals(strict, look(here, kind="ib", strict=True))
    assert refused.check == "hca state"
    assert checks_node.refusals(strict, look(here, kind="roce", strict=True)) == []


@pytest.mark.parametrize(
    ("backend", "gpus", "refusals"),
    [
        ("gloo", 1, 1),
        ("auto", 0.5, 1),  # becomes gloo
        ("ucc", 1, 1),
        ("ucc", 0, 1),
        ("horovod", 0, 1),
        ("horovod", 1, 0),
        ("nccl", 1, 0),
    ],
)
def test_strict_looks_at_the_backend_also_where_ranks_have_gpus(
    tmp_path: Path, backend: str, gpus: float, refusals: int
) -> None:
    """gloo sent the gradients of ranks with GPUs over TCP, and the run was not refused."""
    here, have = sound(tmp_path), {"CPU": 8.0, "GPU": 8.0}
    node = Node("id", "10.0.0.5", "node-1", have, have)
    scale, strict = Scale(per_node=1, gpus=gpus), Fabric(strict=True)
    job = Job(backend=Backend(backend), scale=scale, fabric=strict)
    plan = placement.assign_ranks(placement.resources_for(job, [node]), [node])
    assert len(checks_node.refusals(job, checks_node.findings(job, plan, [here]))) == refusals


def test_the_name_of_a_host_matters_where_nobody_tells_the_ranks_their_interface(
    tmp_path: Path,
) -> None:
    here = sound(tmp_path, box=machines.plain_box(), machine=Machine(own_name=("127.0.1.1",)))
    assert [one.level for one in look(here)] == ["note"]
    assert [one.level for one in look(here, kind="site")] == ["warn"]


def test_strict_holds_for_mpi_on_nodes_without_gpus(tmp_path: Path) -> None:
    """Horovod's and gloo's ranks would always be refused there; UCX has a use for an HCA."""
    strict, box = Job(fabric=Fabric(strict=True)), card()
    assert (
        checks_node.refusals(strict, look(sound(tmp_path, "a", box), backend="mpi", strict=True))
        == []
    )
    for name, bad in (("b", machines.plain_box()), ("c", replace(box, nodes=False))):
        (refused,) = checks_node.refusals(
            strict, look(sound(tmp_path, name, bad), backend="mpi", strict=True)
        )
        assert refused.check in ("hca state", "rdma devices")
    assert look(sound(tmp_path, "d", replace(box, nodes=False)), backend="mpi") == []


def test_warnings_are_told_in_one_line_each_notes_are_not_and_strict_raises(tmp_path: Path) -> None:
    here = sound(tmp_path, box=machines.plain_box(), limits=Limits(shm=2**26, nofile=1024))
    node = Node("id", "10.0.0.5", "node-1", {"CPU": 8.0}, {"CPU": 8.0})
    plan = placement.assign_ranks(
        placement.resources_for(Job(scale=Scale(per_node=1)), [node]), [node]
    )
    lines: list[str] = []
    checks_node.check_nodes(Job(), plan, [here], lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("node-1: /dev/shm has 64 MiB (fix: docker run --shm-size=8g")
    with_gpu = replace(plan, request=replace(plan.request, backend="nccl"))
    lines.clear()
    with pytest.raises(LaunchError, match=r"fabric\.strict: node-1: no HCA has an active port"):
        checks_node.check_nodes(Job(fabric=Fabric(strict=True)), with_gpu, [here], lines.append)
    assert [text[:16] for text in lines] == [
        "node-1: /dev/shm"
    ]  # what is refused is told once, by the error
