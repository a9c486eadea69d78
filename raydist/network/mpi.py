"""mpirun's command line, and the variables that keep MPI on the planned network. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raydist.network.names import EnvVar

CHILD = ("/bin/sh", "-c", 'exec "$RAYDIST_MPI_PYTHON" -IS "$RAYDIST_MPI_CHILD" rank')
"""The command that mpirun starts for each rank.

The rank's agent sets the variables, because paths differ between hosts.
"""
LOOPBACK = ("lo", "lo0")
OPEN_MPI_TCP = (("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "^openib,ofi,uct"))
"""Variables that leave Open MPI 4 or 5 only TCP and shared memory."""

OTHER_SOCKETS = "udp,sockets"
"""libfabric's other providers over the kernel's network."""


def host(node_rank: int) -> str:
    """Return mpirun's name of a host.

    It is not a real host name, so that mpirun calls the launch agent for every host.
    """
    return f"node{node_rank}"


def command(
    mpi: Mapping[str, str], ranks: Sequence[int], interface: str, root: bool, more: Sequence[str]
) -> list[str]:
    """Return mpirun's arguments.

    `ranks`: number of ranks on each host. `more`: the user's arguments (backend.mpi.args). The
    caller replaces `{agent}` by the path of the launch agent. Source: prterun --help-placement,
    prte_info --all, plm_ssh_component.c (PRRTE 3.0); mpiexec --help (Hydra 5.0).
    """
    hosts = ",".join(f"{host(i)}:{count}" for i, count in enumerate(ranks))
    if mpi["kind"] == "openmpi":
        options = open_mpi_5 if int(mpi["version"].partition(".")[0]) >= 5 else open_mpi_4
        arguments = options(len(ranks), interface)
        arguments += ["--allow-run-as-root"] if root else []
        # The ranks fill all slots: without OVERSUBSCRIBE, MPI_Comm_spawn fails with
        # MPI_ERR_UNKNOWN.
        arguments += ["--host", hosts, "--map-by", "slot:OVERSUBSCRIBE", "--wdir", "/"]
        bind = "--bind-to"
    else:
        arguments = ["-launcher", "ssh", "-launcher-exec", "{agent}", "-hosts", hosts, "-wdir", "/"]
        # Otherwise the ranks of all hosts get the environment of this one.
        arguments += ["-genvnone"]
        arguments += ["-iface", interface] if interface not in LOOPBACK else []
        bind = "-bind-to"
    if bind not in more and "--bind-to" not in more:
        arguments += [bind, "none"]  # Ray reserves no particular cores for a rank
    return [*arguments, *more, "-np", str(sum(ranks)), *CHILD]


def open_mpi_5(hosts: int, interface: str) -> list[str]:
    """Return PRRTE's options. A launch failed without each of them."""
    settings = {
        "plm_ssh_agent": "{agent}",
        "plm_ssh_no_tree_spawn": "1",  # otherwise daemons call the agent on their own hosts
        # With fewer than `hosts`, mpirun waits for agents that never end.
        "plm_ssh_num_concurrent": str(max(128, hosts)),
        "prte_do_not_resolve": "1",
        # PRRTE 3.0.11 does not understand a network (a.b.c.d/n) here; each agent puts in its host's
        # interface name.
        **({"prte_if_include": interface} if interface not in LOOPBACK else {}),
    }
    # Without --leave-session-attached daemons detach, and their launch agent would end while they
    # still run.
    return [
        *(word for name in settings for word in ("--prtemca", name, settings[name])),
        "--leave-session-attached",
    ]


def open_mpi_4(hosts: int, interface: str) -> list[str]:
    """Return the same options with ORTE's names."""
    settings = {
        "plm_rsh_agent": "{agent}",
        "plm_rsh_no_tree_spawn": "1",
        "plm_rsh_num_concurrent": str(max(128, hosts)),
        "orte_do_not_resolve": "1",
        **({"oob_tcp_if_include": interface} if interface not in LOOPBACK else {}),
    }
    return [
        *(word for name in settings for word in ("--mca", name, settings[name])),
        "--leave-session-attached",
    ]


def network_options(
    mpi: Mapping[str, str],
    interface: str,
    hcas: Sequence[str] = (),
    tcp: str = "",
    strict: bool = False,
    rdma: bool = False,
) -> Iterator[EnvVar]:
    """Yield variables that keep MPI on the interface and the HCAs.

    UCX finds a host's RDMA devices without them. `hcas`: ports of the chosen HCAs (mlx5_0:1), if
    others were left out. `tcp`: why never RDMA, or empty. `strict`: RDMA or an error. `rdma`:
    whether the node has an HCA that carries data.
    """
    if interface in LOOPBACK:
        return
    open_mpi = mpi["kind"] == "openmpi"
    if open_mpi:
        why = "by default Open MPI stripes over every interface that is up"
        yield EnvVar("OMPI_MCA_btl_tcp_if_include", interface, why)
    else:
        yield EnvVar(
            "FI_TCP_IFACE",
            interface,
            "by default libfabric's TCP takes the first interface that is up",
        )
        if not (tcp or strict):
            why = "they ignore FI_TCP_IFACE; MPICH took sockets over another interface"
            yield EnvVar("FI_PROVIDER", f"^{OTHER_SOCKETS}", why)
    if tcp:
        for name, value in OPEN_MPI_TCP if open_mpi else (("FI_PROVIDER", "tcp"),):
            yield EnvVar(name, value, tcp)
        yield EnvVar("UCX_NET_DEVICES", interface, tcp)
        return
    if strict:
        why = "fabric.strict: RDMA or an error, never silently TCP"
        yield (
            EnvVar("OMPI_MCA_pml", "ucx", why)
            if open_mpi
            else EnvVar("FI_PROVIDER", f"^tcp,{OTHER_SOCKETS}", why)
        )
        yield EnvVar("UCX_TLS", "^tcp", why)
    if hcas:
        why = "the chosen HCAs; by default UCX takes all active HCAs, those of storage too"
        yield EnvVar("UCX_NET_DEVICES", ",".join(hcas), why)
    elif not (open_mpi or rdma):
        why = "the node has no usable HCA; by default UCX stripes over every interface"
        yield EnvVar("UCX_NET_DEVICES", interface, why)
