"""Which HCAs and which variables follow from whole machines, with their reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.network import rdma, variables
from raydist.network.facts import Facts
from raydist.network.variables import Rendezvous
from raydist.node.probe import hca, machine, nics
from raydist.settings.config import Backend, Fabric, Job, Scale
from raydist.settings.validate import validate
from raydist.shared.errors import ConfigError
from tests import machines
from tests.machines import Box, Card, Link, build


def facts(root: Path, box: Box, **more: object) -> Facts:
    """Return the facts that a slot on that machine would report."""
    build(root, box)
    plain = Facts("node-1", "10.0.0.5", "eth0", "10.0.0.5", interfaces={"eth0": ("10.0.0.5",)}, nics=nics.nics(root),
                  hcas=hca.read_hcas(root), devices=hca.read_gpus(root), rdma=hca.read_rdma({}, root),
                  limits=machine.read_limits(root),
                  machine=machine.machine("node-1", {}, root))  # fmt: skip
    return replace(plain, **more)  # type: ignore[arg-type]


def settings_of(here: Facts, nodes: int = 2, **fabric: Any) -> dict[str, tuple[str, str]]:
    job = Job(fabric=Fabric(**fabric))
    return {name: (value, why) for name, value, why in rdma.device_settings(job, here, nodes)}


def values(here: Facts, **fabric: Any) -> dict[str, str]:
    """Return the variables other than those of the two sockets."""
    variables = {name: value for name, (value, _) in settings_of(here, **fabric).items()}
    assert variables.pop("GLOO_SOCKET_IFNAME") == "eth0"
    assert variables.pop("NCCL_SOCKET_IFNAME") == "=eth0"
    return variables


def test_a_dgx_takes_the_eight_beside_its_gpus_and_leaves_storage(tmp_path: Path) -> None:
    variables = settings_of(facts(tmp_path, machines.dgx()))
    value, why = variables["NCCL_IB_HCA"]
    assert value == "=" + ",".join(f"mlx5_{i}" for i in range(8))
    assert "mlx5_8 shares no PCIe switch with a GPU" in why
    assert variables["NCCL_IGNORE_NET_MISMATCH"][0] == "0"
    assert variables["GLOO_SOCKET_IFNAME"][0] == "eth0"


def test_renamed_devices_are_taken_by_their_own_names(tmp_path: Path) -> None:
    assert values(facts(tmp_path, machines.dgx(machines.HDR, "ibp{}s0")))["NCCL_IB_HCA"].startswith(
        "=ibp0s0,ibp1s0,"
    )


def test_where_nothing_needs_choosing_nothing_is_said(tmp_path: Path) -> None:
    assert values(facts(tmp_path / "r", machines.roce_box())) == {"NCCL_IGNORE_NET_MISMATCH": "0"}
    assert values(facts(tmp_path / "v", machines.vm_box())) == {"NCCL_IGNORE_NET_MISMATCH": "0"}
    assert values(facts(tmp_path / "p", machines.plain_box())) == {}


def test_one_node_has_no_mismatch(tmp_path: Path) -> None:
    assert "NCCL_IGNORE_NET_MISMATCH" not in settings_of(
        facts(tmp_path, machines.roce_box()), nodes=1
    )


def test_without_pci_the_class_with_the_most_bandwidth_wins(tmp_path: Path) -> None:
    """A VM: all flat. Two storage ports at 100 Gbit/s are more cards than one at 400, and still
    that one carries."""
    slow = [
        Card(f"mlx5_{i}", f"pci0000:00/0000:00:0{i}.0", (Link(machines.EDR),)) for i in range(2)
    ]
    fast = Card("mlx5_9", "pci0000:00/0000:00:09.0", (Link(machines.NDR),))
    value, why = settings_of(facts(tmp_path, Box((*slow, fast))))["NCCL_IB_HCA"]
    assert value == "=mlx5_9"
    assert (
        "mlx5_0 is InfiniBand at 100 Gbit/s in subnet fe80:0000:0000:0000, not InfiniBand at 400 "
        "Gbit/s" in why
    )


def test_only_mpi_without_gpus_takes_infiniband_before_roce(tmp_path: Path) -> None:
    """A machine with AMD GPUs is read as one without, and trained over its storage HCA."""
    storage = Card("mlx5_0", "pci0000:00/0000:00:01.0", (Link(machines.HDR),))
    nics = [
        Card(f"bnxt_re{i}", f"pci0000:00/0000:00:1{i}.0", (machines.roce(f"10.{i}.0.5", f"r{i}"),))
        for i in range(8)
    ]
    here = facts(tmp_path, Box((storage, *nics)))

    def chosen(job: Job, **more: object) -> list[str]:
        node = replace(here, **more)  # type: ignore[arg-type]
        return [hca.name for hca in rdma.choose_devices(job, node).hcas]

    assert chosen(Job()) == [nic.name for nic in nics]
    assert chosen(Job(backend=Backend("mpi"))) == ["mlx5_0"]
    assert chosen(Job(backend=Backend("mpi")), gpus=("0", "1")) == [nic.name for nic in nics]


def test_a_port_that_is_down_is_not_counted(tmp_path: Path) -> None:
    down = Card("mlx5_1", "pci0000:00/0000:00:03.0", (Link(machines.HDR, state="1: DOWN"),))
    up = Card("mlx5_0", "pci0000:00/0000:00:02.0")
    assert values(facts(tmp_path, Box((up, down)))) == {"NCCL_IGNORE_NET_MISMATCH": "0"}


def in_subnet(card: Card, number: int) -> Card:
    gid = f"fec0:0000:0000:{number:04x}:0000:0000:0000:00a1"
    return replace(card, ports=(Link(gids={0: (gid, "IB/RoCE v1", "")}),))


def test_rails_with_a_subnet_each_are_all_taken(tmp_path: Path) -> None:
    """One of eight HCAs was used, with no more than a note."""
    box = machines.dgx()
    rails = tuple(in_subnet(card, i) for i, card in enumerate(box.cards[:8]))
    assert values(facts(tmp_path / "r", replace(box, cards=rails))) == {
        "NCCL_IGNORE_NET_MISMATCH": "0"
    }
    here = facts(tmp_path / "s", replace(box, cards=(*rails, *box.cards[8:])))
    assert values(here)["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_{i}" for i in range(8))
    assert rdma.choose_devices(Job(), here).doubt == ""


@pytest.mark.parametrize("count", [1, 8])
def test_storage_in_another_subnet_beside_a_gpu_is_left_out(count: int, tmp_path: Path) -> None:
    box = machines.dgx()
    compute = box.cards[:8]
    storage = tuple(
        replace(in_subnet(card, 2), name=f"mlx5_{8 + i}", pci=card.pci + ".1")
        for i, card in enumerate(compute[:count])
    )
    choice = rdma.choose_devices(Job(), facts(tmp_path, replace(box, cards=(*compute, *storage))))
    assert choice.hcas[0].name == "mlx5_0"
    assert len(choice.hcas) == 8
    assert choice.doubt == "GPUs are near HCAs of several subnets"


def only_opens(here: Facts, *names: str) -> Facts:
    """A container that gets some of the host's HCAs, and sees all of them in /sys."""
    return replace(here, hcas=tuple(replace(hca, openable=hca.name in names) for hca in here.hcas))


def test_an_hca_that_cannot_be_opened_is_not_taken(tmp_path: Path) -> None:
    """The GPU is near mlx5_1, the container has mlx5_0 only: NCCL_IB_HCA kept NCCL from that."""
    box = machines.dgx()
    here = facts(tmp_path, replace(box, gpus=box.gpus[1:2]))
    assert values(here)["NCCL_IB_HCA"] == "=mlx5_1"
    assert values(only_opens(here, "mlx5_0")) == {"NCCL_IGNORE_NET_MISMATCH": "0"}
    assert values(only_opens(here))["NCCL_IB_HCA"] == "=mlx5_1"
    with_mpi = replace(only_opens(here, "mlx5_0", "mlx5_8"), mpi=OPEN_MPI)
    assert rank(with_mpi, "mpi")["UCX_NET_DEVICES"] == "mlx5_0:1"


@pytest.mark.parametrize(
    ("kind", "taken", "left"), [("ib", "mlx5_0", "mlx5_1"), ("roce", "mlx5_1", "mlx5_0")]
)
def test_only_the_kind_asked_for(kind: str, taken: str, left: str, tmp_path: Path) -> None:
    both = (Card("mlx5_0", "pci0000:00/0000:00:02.0"),
            Card("mlx5_1", "pci0000:00/0000:00:03.0", (machines.roce("10.1.0.5", "eth1"),)))  # fmt: skip
    value, why = settings_of(facts(tmp_path, Box(both)), kind=kind)["NCCL_IB_HCA"]
    assert value == f"={taken}"
    assert why.startswith(f"fabric.kind={kind}: {left} is not")


def test_a_kind_that_no_hca_has_is_tcp(tmp_path: Path) -> None:
    """NCCL and UCX took the RoCE cards of a node that has no InfiniBand."""
    here = facts(tmp_path, machines.roce_box())
    assert values(here, kind="ib") == {"NCCL_IB_DISABLE": "1"}
    for mpi in (OPEN_MPI, MPICH):
        with_mpi = replace(here, mpi=mpi)
        assert rank(with_mpi, "mpi", kind="ib")["UCX_NET_DEVICES"] == "eth0"
        assert "UCX_NET_DEVICES" not in rank(with_mpi, "mpi", kind="roce")


def test_an_hca_asked_for_that_is_down_leaves_mpi_no_other(tmp_path: Path) -> None:
    here = facts(tmp_path, PORT_DOWN, mpi=MPICH)
    assert rank(here, "mpi", hca=["mlx5_1"])["UCX_NET_DEVICES"] == "eth0"


@pytest.mark.parametrize(
    "box",
    [
        Box((Card("mlx5_0", "pci0000:00/0000:00:02.0", (Link(state="1: DOWN"),)),)),
        Box((Card("mlx5_0", "pci0000:00/0000:00:02.0"),), nodes=False),
        replace(machines.dgx(), nodes=False),
    ],
    ids=["down", "container without device files", "storage left out, without device files"],
)
def test_hcas_that_carry_nothing_leave_mpich_on_the_interface(box: Box, tmp_path: Path) -> None:
    """UCX sent over every interface of the host, whatever fabric.interface was."""
    assert rank(facts(tmp_path, box, mpi=MPICH), "mpi")["UCX_NET_DEVICES"] == "eth0"


def test_ethernet_turns_rdma_off_and_site_says_nothing(tmp_path: Path) -> None:
    here = facts(tmp_path, machines.dgx())
    assert values(here, kind="ethernet") == {"NCCL_IB_DISABLE": "1"}
    assert settings_of(here, kind="site") == {}


def test_ethernet_keeps_nccl_from_a_plug_in_too(tmp_path: Path) -> None:
    """NCCL asks plug-ins first, and EFA's does not read NCCL_IB_DISABLE: RDMA was used."""
    variables = settings_of(facts(tmp_path, machines.efa_box()), kind="ethernet")
    value, why = variables["NCCL_NET"]
    assert (value, variables["NCCL_IB_DISABLE"][0]) == ("Socket", "1")
    assert "ofi-nccl" in why


def test_the_hcas_asked_for_exactly(tmp_path: Path) -> None:
    here = facts(tmp_path, machines.dgx())
    assert settings_of(here, hca=["mlx5_1", "mlx5_10"])["NCCL_IB_HCA"] == (
        "=mlx5_1,mlx5_10",
        "fabric.hca",
    )
    with pytest.raises(ConfigError, match=r"fabric\.hca=mlx_1: node-1 has no such HCA.*mlx5_1"):
        settings_of(here, hca=["mlx_1"])
    with pytest.raises(
        ConfigError, match=r"fabric\.hca=mlx5_0: node-1 has no HCA; set fabric\.hca=\[\]"
    ):
        settings_of(facts(tmp_path / "p", machines.plain_box()), hca=["mlx5_0"])
    assert settings_of(here, kind="ib", hca=["mlx5_1"])["NCCL_IB_HCA"][0] == "=mlx5_1"
    with pytest.raises(ConfigError, match=r"fabric\.hca=mlx5_1: on node-1 it is not Ethernet"):
        settings_of(here, kind="roce", hca=["mlx5_1"])


def test_strict_forces_rdma_and_contradicts_ethernet(tmp_path: Path) -> None:
    assert values(facts(tmp_path, machines.roce_box()), strict=True)["NCCL_NET"] == "IB"
    with pytest.raises(ConfigError, match=r"fabric.strict.*fabric.kind=ethernet"):
        validate(Job(fabric=Fabric(kind="ethernet", strict=True)))


PORT_DOWN = Box((Card("mlx5_0", "pci0000:00/0000:00:02.0"),
                 Card("mlx5_1", "pci0000:00/0000:00:03.0", (Link(machines.HDR, state="1: DOWN"),))))  # fmt: skip
HAS = "it has 10.0.0.5, the node's address in Ray; "
SOCKETS = {
    "GLOO_SOCKET_IFNAME": (
        "eth0",
        HAS + "by default gloo takes the interface of the host name's address",
    ),
    "NCCL_SOCKET_IFNAME": ("=eth0", HAS + "without = it would also select longer names"),
}
EQUAL = {
    "NCCL_IGNORE_NET_MISMATCH": (
        "0",
        "nodes with unequal HCAs are an error; by default they may hang",
    )
}
STRICT = "fabric.strict: RDMA or an error, never silently TCP"


def beside_gpus(name: str) -> dict[str, tuple[str, str]]:
    """Eight HCAs taken, and four left out."""
    left = "; ".join(f"{name.format(i)} shares no PCIe switch with a GPU" for i in range(8, 12))
    return {
        "NCCL_IB_HCA": (
            "=" + ",".join(name.format(i) for i in range(8)),
            f"fabric.kind=auto: {left}",
        )
    }


MACHINES: dict[str, tuple[Box, dict[str, tuple[str, str]], str]] = {
    # the machine -> all its variables with their reasons, and NCCL_NET where fabric.strict is asked
    "DGX with storage HCAs": (machines.dgx(), EQUAL | beside_gpus("mlx5_{}"), "IB"),
    "HDR, renamed": (machines.dgx(machines.HDR, "ibp{}s0"), EQUAL | beside_gpus("ibp{}s0"), "IB"),
    "container without device nodes": (
        replace(machines.dgx(), nodes=False),
        EQUAL | beside_gpus("mlx5_{}"),
        "IB",
    ),
    "RoCE with two GID tables": (machines.roce_box(), EQUAL, "IB"),
    "EFA": (machines.efa_box(), {}, "AWS Libfabric"),
    "VM": (machines.vm_box(), EQUAL, "IB"),
    "port down": (PORT_DOWN, EQUAL, "IB"),
    "Ethernet only": (machines.plain_box(), {}, "IB"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_gets_just_these_variables_for_these_reasons(
    name: str, tmp_path: Path
) -> None:
    box, more, network = MACHINES[name]
    here = facts(tmp_path, box)
    assert settings_of(here) == SOCKETS | more
    assert settings_of(here, strict=True) == SOCKETS | more | {"NCCL_NET": (network, STRICT)}


def test_an_old_nccl_is_told_the_index_of_the_routable_gid(tmp_path: Path) -> None:
    here = facts(tmp_path, machines.roce_box())
    value, why = settings_of(replace(here, versions={"nccl": "2.18.1"}))["NCCL_IB_GID_INDEX"]
    assert (value, why[:11]) == ("3", "NCCL 2.18.1")
    assert "NCCL_IB_GID_INDEX" not in settings_of(replace(here, versions={"nccl": "2.21.5"}))


LIBFABRIC = "\x7fELF\x02 Libfabric\0 AWS Libfabric\0 OFI\0"
PLUGINS = {
    # the file's words -> what NCCL_NET is when fabric.strict asks for RDMA
    "aws-ofi-nccl without EFA, on Slingshot": (LIBFABRIC, "AWS Libfabric"),
    "HPC-X, called otherwise before and after it is initialised": (
        "NCCL RDMA Plugin v11\0IBext_v11\0",
        None,
    ),
    "one that nobody knows": ("", None),
}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_strict_names_a_vendors_network_so_that_it_cannot_fall_to_sockets(
    plugin: str, tmp_path: Path
) -> None:
    text, network = PLUGINS[plugin]
    here = facts(tmp_path, Box(files={"opt/aws-ofi-nccl/lib/libnccl-net.so": text}))
    assert values(here, strict=True).get("NCCL_NET") == network
    assert values(here) == {}


@pytest.mark.parametrize("plug_in_installed", [True, False])
def test_strict_on_efa_is_never_tcp_even_where_the_plug_in_is_missing(
    plug_in_installed: bool, tmp_path: Path
) -> None:
    here = facts(tmp_path, machines.efa_box())
    here = (
        here
        if plug_in_installed
        else replace(here, machine=replace(here.machine, plugins=(), networks=()))
    )
    assert values(here, strict=True) == {"NCCL_NET": "AWS Libfabric"}


def test_what_the_site_has_set_stays_and_is_said(tmp_path: Path) -> None:
    conf = {"NCCL_IB_HCA": ("=mlx5_2", "/etc/nccl.conf")}
    here = facts(
        tmp_path, machines.dgx(), environment={"NCCL_SOCKET_IFNAME": "=ib0"}, nccl_conf=conf
    )
    have = {"CPU": 8.0, "GPU": 8.0}
    job = Job(backend=Backend("nccl"), scale=Scale(per_node=1))
    node = Node("id", "10.0.0.5", "node-1", have, have)
    request = placement.resources_for(job, [node])
    (own,) = variables.plan_variables(
        job, placement.assign_ranks(request, [node]), [here], Rendezvous("10.0.0.5", 1)
    )
    by_name = {var.name: var for var in own}
    assert by_name["NCCL_SOCKET_IFNAME"].value == "=ib0"
    assert "node-1" in by_name["NCCL_SOCKET_IFNAME"].reason
    assert by_name["NCCL_IB_HCA"].value == "=mlx5_2"
    assert "/etc/nccl.conf" in by_name["NCCL_IB_HCA"].reason


OPEN_MPI = {"kind": "openmpi", "version": "5.0.11", "mpirun": "/usr/bin/mpirun"}
MPICH = {**OPEN_MPI, "kind": "mpich", "version": "5.0.2"}
ALIKE = {
    # who talks -> the backend, the MPI on the node, the variable that holds its interface, and how
    "gloo": ("gloo", {}, "GLOO_SOCKET_IFNAME", "{}"),
    "NCCL": ("nccl", {}, "NCCL_SOCKET_IFNAME", "={}"),
    "Horovod": ("horovod", {}, "HOROVOD_GLOO_IFACE", "{}"),
    "Open MPI": ("mpi", OPEN_MPI, "OMPI_MCA_btl_tcp_if_include", "{}"),
    "MPICH over libfabric": ("mpi", MPICH, "FI_TCP_IFACE", "{}"),
    "UCX": ("mpi", MPICH, "UCX_NET_DEVICES", "{}"),
}


def rank(
    here: Facts, backend: str, env: dict[str, str] | None = None, **fabric: Any
) -> dict[str, str]:
    """Return all variables of the only rank there."""
    have = {"CPU": 8.0, **({"GPU": 8.0} if backend == "nccl" else {})}
    node = Node("id", "10.0.0.5", "node-1", have, have)
    job = Job(
        backend=Backend(backend), scale=Scale(per_node=1), fabric=Fabric(**fabric), env=env or {}
    )
    plan = placement.assign_ranks(placement.resources_for(job, [node]), [node])
    (own,) = variables.plan_variables(job, plan, [here], Rendezvous("10.0.0.5", 1))
    return {var.name: var.value for var in own}


@pytest.mark.parametrize("who", ALIKE)
def test_the_interface_is_everybodys_alike(who: str, tmp_path: Path) -> None:
    backend, mpi, name, how = ALIKE[who]
    here = facts(tmp_path, machines.plain_box(), mpi=mpi)
    assert rank(here, backend)[name] == how.format("eth0")
    assert rank(replace(here, interface="ib0"), backend, interface="ib0")[name] == how.format("ib0")
    assert name not in rank(here, backend, kind="site")
    own = replace(here, environment={name: "bond0"})
    assert rank(own, backend)[name] == "bond0"
    assert rank(own, backend, env={name: "ens3"})[name] == "ens3"


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_the_hcas_are_everybodys_alike(mpi: dict[str, str], tmp_path: Path) -> None:
    here = facts(tmp_path, machines.dgx(), mpi=mpi)
    chosen = [f"mlx5_{i}" for i in range(8)]
    assert rank(here, "nccl")["NCCL_IB_HCA"] == "=" + ",".join(chosen)
    assert rank(here, "mpi")["UCX_NET_DEVICES"] == ",".join(f"{name}:1" for name in chosen)
    assert rank(here, "mpi", hca=["mlx5_2"])["UCX_NET_DEVICES"] == "mlx5_2:1"
    tcp, strict, usual = (
        rank(here, "mpi", kind="ethernet"),
        rank(here, "mpi", strict=True),
        rank(here, "mpi"),
    )
    assert (rank(here, "nccl", kind="ethernet")["NCCL_IB_DISABLE"], tcp["UCX_NET_DEVICES"]) == (
        "1",
        "eth0",
    )
    assert (rank(here, "nccl", strict=True)["NCCL_NET"], strict["UCX_TLS"]) == ("IB", "^tcp")
    name, sockets, rdma, either = {
        "openmpi": ("OMPI_MCA_pml", "ob1", "ucx", None),
        "mpich": ("FI_PROVIDER", "tcp", "^tcp,udp,sockets", "^udp,sockets"),
    }[mpi["kind"]]
    assert (tcp[name], strict[name], usual.get(name)) == (sockets, rdma, either)
    assert not {"UCX_TLS", "OMPI_MCA_btl"} & set(usual)
    alone = facts(
        tmp_path / "one",
        Box((Card("mlx5_0", "pci0000:00/0000:00:02.0"),)),
        mpi=mpi,
    )
    assert "UCX_NET_DEVICES" not in rank(alone, "mpi")  # nothing to choose: it finds its only one
