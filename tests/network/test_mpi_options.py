"""mpirun's words, and the network of its ranks."""

from __future__ import annotations

import pytest

from raydist.network import mpi as network_mpi

OMPI = {"kind": "openmpi", "version": "5.0.11", "mpirun": "/usr/bin/mpirun"}


def pairs(words: list[str], option: str) -> dict[str, str]:
    return {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == option}


def test_open_mpi_5() -> None:
    words = network_mpi.command(OMPI, [2, 2, 1], "eth0", root=False, more=[])
    assert pairs(words, "--prtemca") == {
        "plm_ssh_agent": "{agent}",
        "plm_ssh_no_tree_spawn": "1",
        "plm_ssh_num_concurrent": "128",
        "prte_do_not_resolve": "1",
        "prte_if_include": "eth0",
    }
    assert "--leave-session-attached" in words
    assert words[words.index("--host") + 1] == "node0:2,node1:2,node2:1"
    assert words[-5:-2] == ["-np", "5", "/bin/sh"]
    assert "--allow-run-as-root" not in words


def test_open_mpi_4_has_other_words_for_the_same() -> None:
    words = network_mpi.command({**OMPI, "version": "4.1.6"}, [1] * 200, "eth0", root=True, more=[])
    assert pairs(words, "--mca") == {
        "plm_rsh_agent": "{agent}",
        "plm_rsh_no_tree_spawn": "1",
        "plm_rsh_num_concurrent": "200",
        "orte_do_not_resolve": "1",
        "oob_tcp_if_include": "eth0",
    }
    assert "--prtemca" not in words
    assert "--allow-run-as-root" in words


@pytest.mark.parametrize("kind", ["mpich", "intel"])
def test_hydra(kind: str) -> None:
    words = network_mpi.command({**OMPI, "kind": kind}, [4, 4], "ib0", root=True, more=["-verbose"])
    assert words[: words.index("-np")] == [
        "-launcher", "ssh", "-launcher-exec", "{agent}", "-hosts", "node0:4,node1:4", "-wdir", "/", "-genvnone",
        "-iface", "ib0", "-bind-to", "none", "-verbose",
    ]  # fmt: skip


@pytest.mark.parametrize("mpi", [OMPI, {**OMPI, "kind": "mpich"}])
def test_a_person_may_bind(mpi: dict[str, str]) -> None:
    words = network_mpi.command(mpi, [2], "lo", root=False, more=["--bind-to", "core"])
    assert "none" not in words
    assert words[words.index("--bind-to") + 1] == "core"


def test_loopback_is_named_to_nobody() -> None:
    """PRRTE finds no network at all when it is told lo."""
    assert "lo" not in network_mpi.command(OMPI, [2], "lo", root=False, more=[])
    assert list(network_mpi.network_options(OMPI, "lo")) == []


def test_tcp_stays_on_the_interface_and_rdma_is_left_alone() -> None:
    assert {name: value for name, value, _ in network_mpi.network_options(OMPI, "ib0")} == {
        "OMPI_MCA_btl_tcp_if_include": "ib0"
    }
    mpich = {**OMPI, "kind": "mpich"}
    assert {name for name, _, _ in network_mpi.network_options(mpich, "ib0")} == {
        "FI_TCP_IFACE",
        "FI_PROVIDER",
        "UCX_NET_DEVICES",
    }
    assert {name for name, _, _ in network_mpi.network_options(mpich, "ib0", rdma=True)} == {
        "FI_TCP_IFACE",
        "FI_PROVIDER",
    }


def test_hosts_have_names_of_no_machine() -> None:
    """Its own name mpirun would not hand to the agent."""
    assert [network_mpi.host(i) for i in range(2)] == ["node0", "node1"]
