"""mpirun's command line, and the variables that keep MPI on the planned network. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

CHILD = ("/bin/sh", "-c", 'exec "$RAYDIST_MPI_PYTHON" -IS "$RAYDIST_MPI_CHILD" rank')
"""What mpirun starts for each rank. Python and raydist may lie elsewhere on each host: their seats know."""
LOOPBACK = ("lo", "lo0")
OPEN_MPI_TCP = (("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "^openib,ofi,uct"))
"""What leaves Open MPI, 4 or 5, no way but TCP and shared memory."""

Line = tuple[str, str, str]
"""An environment variable: name, value, reason."""


def host(node_rank: int) -> str:
    """What mpirun is told to call a host: no name of this or any machine, so that each goes through the agent."""
    return f"node{node_rank}"


def command(mpi: Mapping[str, str], ranks: Sequence[int], interface: str, root: bool, more: Sequence[str]) -> list[str]:
    """mpirun's words. `ranks`: how many on each host; `{agent}` stands for the agent's path; `more`: the person's.

    Source: prterun --help-placement, prte_info --all, plm_ssh_component.c (PRRTE 3.0); mpiexec --help (Hydra 5.0).
    """
    hosts = ",".join(f"{host(i)}:{count}" for i, count in enumerate(ranks))
    if mpi["kind"] == "openmpi":
        dialect = open_mpi_5 if int(mpi["version"].partition(".")[0]) >= 5 else open_mpi_4
        words = dialect(len(ranks), interface)
        words += ["--allow-run-as-root"] if root else []
        words += ["--host", hosts, "--map-by", "slot", "--wdir", "/"]
        bind = "--bind-to"
    else:
        words = ["-launcher", "ssh", "-launcher-exec", "{agent}", "-hosts", hosts, "-wdir", "/"]
        words += ["-genvnone"]  # or the ranks of all hosts get the environment of this one
        words += ["-iface", interface] if interface not in LOOPBACK else []
        bind = "-bind-to"
    words += (
        [] if bind in more or "--bind-to" in more else [bind, "none"]
    )  # torch's and Ray's ranks have no cores of own
    return [*words, *more, "-np", str(sum(ranks)), *CHILD]


def open_mpi_5(hosts: int, interface: str) -> list[str]:
    """PRRTE's options. Each is there because a launch without it went wrong."""
    settings = {
        "plm_ssh_agent": "{agent}",
        "plm_ssh_no_tree_spawn": "1",  # or daemons call the agent on their own hosts
        "plm_ssh_num_concurrent": str(max(128, hosts)),  # with fewer than hosts it waits for agents that never end
        "prte_do_not_resolve": "1",
        # a network (a.b.c.d/n) is not understood by PRRTE 3.0.11, a name is; each seat puts in that of its own host
        **({"prte_if_include": interface} if interface not in LOOPBACK else {}),
    }
    # leave-session-attached: without it daemons detach, and the agent tells of an end that is none
    return [*(word for name in settings for word in ("--prtemca", name, settings[name])), "--leave-session-attached"]


def open_mpi_4(hosts: int, interface: str) -> list[str]:
    """The same in the words of ORTE."""
    settings = {
        "plm_rsh_agent": "{agent}",
        "plm_rsh_no_tree_spawn": "1",
        "plm_rsh_num_concurrent": str(max(128, hosts)),
        "orte_do_not_resolve": "1",
        **({"oob_tcp_if_include": interface} if interface not in LOOPBACK else {}),
    }
    return [*(word for name in settings for word in ("--mca", name, settings[name])), "--leave-session-attached"]


def network(
    mpi: Mapping[str, str], interface: str, hcas: Sequence[str] = (), tcp: bool = False, strict: bool = False
) -> Iterator[Line]:
    """What keeps a rank on the interface and the HCAs. A host with RDMA devices is left to UCX, which finds them.

    `hcas`: those that were chosen among others, as mlx5_0:1. `tcp`: never RDMA. `strict`: RDMA or an error.
    """
    if interface in LOOPBACK:
        return
    open_mpi = mpi["kind"] == "openmpi"
    if open_mpi:
        yield "OMPI_MCA_btl_tcp_if_include", interface, "unset, Open MPI stripes over every interface that is up"
    else:
        yield "FI_TCP_IFACE", interface, "libfabric's TCP; unset, it takes the first interface that is up"
    if tcp:
        why = "fabric.kind=ethernet: TCP even where there is RDMA"
        yield from ((*each, why) for each in (OPEN_MPI_TCP if open_mpi else (("FI_PROVIDER", "tcp"),)))
        yield "UCX_NET_DEVICES", interface, why
        return
    if strict:
        why = "fabric.strict: RDMA or an error, never silently TCP"
        yield ("OMPI_MCA_pml", "ucx", why) if open_mpi else ("FI_PROVIDER", "^tcp,sockets", why)
        yield "UCX_TLS", "^tcp", why
    if hcas:
        yield "UCX_NET_DEVICES", ",".join(hcas), "the planned HCAs; unset, UCX takes all that are active, storage too"
    elif not (open_mpi or mpi["rdma"]):
        yield "UCX_NET_DEVICES", interface, "no RDMA device here; unset, UCX stripes over every interface"
