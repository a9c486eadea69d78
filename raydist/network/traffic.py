"""Port counters before and after a run, and NCCL's logs -> the network that carried it. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from raydist.network import nccl_log
from raydist.network.nccl_log import Log
from raydist.shared import kinds
from raydist.shared.rank_names import counted

NOTICED = 10e6
"""Bytes above which a port counts as used; Ray's own processes send less."""


NCCLS = ("nccl", "horovod")
"""The backends whose ranks use NCCL where there are GPUs, as fabric.strict requires."""
UNCHECKED = (
    "fabric.strict could not be checked: NCCL's log names no network, as when NCCL_DEBUG is not "
    "INFO, or in a release that words it otherwise"
)


class _NicCounters(TypedDict):
    """The fields that every port has."""

    hca: bool
    sent: int | None
    """Bytes; None if the port has no counters."""
    received: int | None
    rate: float
    """GB/s; 0 if unknown."""
    active: bool


class PortCounters(_NicCounters, total=False):
    """State of one network port, as node.counters.read_counters reads it."""

    errors: dict[str, int]
    """Error counters of an HCA's port."""


Ports = Mapping[str, PortCounters]
"""State by port: eth0, or mlx5_0:1 of an HCA."""


class NodeBytes(TypedDict):
    """Bytes that the ports of one node sent."""

    host: str
    sent: dict[str, int]
    """Bytes by port."""
    rate: float
    """Total GB/s of the ports that carried the run; 0 if one is unknown."""
    ports: int
    """Number of these ports."""
    gpus: int
    """Number of GPUs of the machine; 0 if it is unknown."""


@dataclass(frozen=True)
class NodeTraffic:
    """Port counters of one node, at the start and at the end of a run."""

    host: str
    interface: str
    """The chosen interface."""
    before: Ports
    after: Ports
    gpus: int = 0
    """Number of GPUs of the machine; 0 if it is unknown."""

    def sent(self, port: str) -> int | None:
        """Return the bytes that a port sent during the run.

        None if the port has no counters, or if they were reset.
        """
        start, end = (
            ports[port]["sent"] if port in ports else None for ports in (self.before, self.after)
        )
        return None if start is None or end is None or end < start else end - start

    @property
    def hcas(self) -> list[str]:
        """The active ports of HCAs."""
        return [name for name, port in self.after.items() if port["hca"] and port["active"]]


def traffic_event(
    backend: str,
    nodes: Sequence[NodeTraffic],
    node_of: Sequence[int],
    logs: Sequence[Log],
    strict: bool = False,
) -> tuple[kinds.Network, list[str]]:
    """Return the event `network`, and warnings about contradictions and errors.

    `node_of`: for each rank the index of its node in `nodes`. `logs`: NCCL's log of each rank.
    `strict`: as fabric.strict.
    """
    networks = sorted({log.network for log in logs if log.network})
    rdma = any(nccl_log.is_rdma(name) for name in networks)
    hcas = sorted({hca for log in logs for hca in log.hcas}) if rdma else []
    direct = [
        channel.direct
        for channel in nccl_log.channels_between(logs, node_of)
        if channel.kind == "NET"
    ]
    tcp = backend == "gloo" or networks == [nccl_log.SOCKET]
    carriers = [hcas or carrying_ports(node, rdma, tcp) for node in nodes]
    by_hca = any(ports != [node.interface] for node, ports in zip(nodes, carriers, strict=True))
    sent = sum(
        node.sent(port) or 0 for node, ports in zip(nodes, carriers, strict=True) for port in ports
    )
    library = " and ".join(f"NET/{name}" for name in networks) or backend
    names = ", ".join(dict.fromkeys(port for ports in carriers for port in ports))
    gpudirect = (
        (" with GPUDirect" if all(direct) else " without GPUDirect") if rdma and direct else ""
    )
    text = (
        f"{library} over {names}{gpudirect} on {counted(len(nodes), 'node')}, {amount(sent)} sent"
    )
    if not (rdma or by_hca):
        text += f"; {unused_infiniband(nodes, logs, tcp)}"
    event = kinds.Network(
        text=text,
        nodes=[_node_bytes(node, ports) for node, ports in zip(nodes, carriers, strict=True)],
    )
    warnings = [UNCHECKED] if strict and backend in NCCLS and not networks else []
    warnings += counter_contradictions(nodes, hcas, carriers)
    return event, [*warnings, *merged_nodes(len(nodes), len(node_of), logs), *port_errors(nodes)]


def _node_bytes(node: NodeTraffic, carriers: Sequence[str]) -> NodeBytes:
    rates = [node.after[name]["rate"] if name in node.after else 0.0 for name in carriers]
    return {
        "host": node.host,
        "sent": {name: sent for name in node.after if (sent := node.sent(name)) is not None},
        "rate": sum(rates) if all(rates) else 0.0,
        "ports": len(rates),
        "gpus": node.gpus,
    }


def carrying_ports(node: NodeTraffic, rdma: bool, tcp: bool) -> list[str]:
    """Return the ports that carried a run whose logs name no HCA.

    `rdma`, `tcp`: what the logs or the backend tell; UCX and libfabric tell neither.
    """
    least = max(NOTICED, 2 * (node.sent(node.interface) or 0))
    busy = [port for port in node.hcas if not tcp and (node.sent(port) or 0) > least]
    return busy or (node.hcas if rdma else []) or [node.interface]


def unused_infiniband(nodes: Sequence[NodeTraffic], logs: Sequence[Log], tcp: bool) -> str:
    """Return the part of the line about InfiniBand after a run over the interface.

    It tells how many nodes have InfiniBand, and why it was not used.
    """
    equipped = sum(bool(node.hcas) for node in nodes)
    if not equipped:
        return "no node has InfiniBand"
    have = "1 node has" if equipped == 1 else f"{equipped} nodes have"
    if not (tcp or all(_idle(node, port) for node in nodes for port in node.hcas)):
        return f"{have} InfiniBand, whose counters do not tell whether it was used"
    why = next((log.why_not for log in logs if log.why_not), "")
    if not why and tcp and not any(log.network for log in logs):
        why = "gloo uses TCP"
    return f"{have} InfiniBand, NOT USED" + (f": {why}" if why else "")


def _idle(node: NodeTraffic, port: str) -> bool:
    """Report whether a port of an HCA sent next to nothing, compared with the interface."""
    sent = node.sent(port)
    return sent is not None and 2 * sent <= (node.sent(node.interface) or 0)


def counter_contradictions(
    nodes: Sequence[NodeTraffic], hcas: Sequence[str], carriers: Sequence[Sequence[str]]
) -> list[str]:
    """Return contradictions of the port counters to NCCL's log or the choice of the interface.

    `hcas`: the ports that the log names. `carriers`: for each node the ports that carried the run.
    """
    texts = []
    for node, ports in zip(nodes, carriers, strict=True):
        chosen = node.sent(node.interface)
        by_hcas = [sent for hca in hcas if (sent := node.sent(hca)) is not None]
        if by_hcas and sum(by_hcas) == 0 and (chosen or 0) > NOTICED:
            texts.append(
                f"NCCL's log names {', '.join(hcas)}, but on {node.host} these ports sent "
                "nothing and "
                f"{node.interface} sent {amount(chosen or 0)}"
            )
        elif not hcas and chosen is not None:
            texts += [
                f"{node.interface} was chosen on {node.host} and sent {amount(chosen)}, but "
                f"{port} sent {amount(sent)}"
                for port in node.after
                if (sent := node.sent(port) or 0) > max(NOTICED, 2 * chosen)
                and node.after[port]["rate"]
                and port not in ports
            ]
    return texts


def merged_nodes(nodes: int, world_size: int, logs: Sequence[Log]) -> list[str]:
    """Return warnings if NCCL takes several nodes for one.

    It would then try shared memory between them, or one HCA for all.
    """
    counts = {log.counted[1] for log in logs if log.counted[0] == world_size}
    return [
        f"NCCL counts {counted(count, 'node')}, but the job has {nodes}: give each container its "
        "own host name, or NCCL_HOSTID, different in each container's own environment"
        for count in sorted(counts)
        if count < nodes
    ]


def port_errors(nodes: Sequence[NodeTraffic]) -> list[str]:
    """Return warnings for ports whose error counters grew during the run."""
    texts = []
    for node in nodes:
        for name, port in node.after.items():
            before = node.before[name].get("errors", {}) if name in node.before else {}
            new = {error: n - before.get(error, n) for error, n in port.get("errors", {}).items()}
            if errors := ", ".join(f"{n} {error}" for error, n in new.items() if n > 0):
                texts.append(
                    f"{name} on {node.host} counted errors during the run ({errors}): a bad "
                    "cable, or a lossy RoCE "
                    "network"
                )
    return texts


def amount(size: float) -> str:
    """Format `size` bytes as `1.2 GB`, in powers of 1000, as networks are measured."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
