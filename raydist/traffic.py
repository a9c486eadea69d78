"""Ports before and after a run, and what NCCL says -> one line that tells which network carried it. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist import transport
from raydist.transport import Log

NOTICED = 10e6
"""Bytes from which a port counts as used: less is what Ray's own processes say to each other."""

Ports = Mapping[str, Mapping[str, Any]]
"""As node.counters.read gives them."""


@dataclass(frozen=True)
class Node:
    """What one node's ports carried."""

    host: str
    interface: str
    """The one that was chosen."""
    before: Ports
    after: Ports

    def sent(self, port: str) -> int | None:
        """Bytes since the run began; None where nobody counted, or the counters began anew."""
        began, ended = (ports.get(port, {}).get("sent") for ports in (self.before, self.after))
        return None if began is None or ended is None or ended < began else ended - began

    @property
    def hcas(self) -> list[str]:
        """The ports of HCAs that are active."""
        return [port for port, its in self.after.items() if its["hca"] and its["active"]]


def tell(backend: str, nodes: Sequence[Node], seated: Sequence[int], logs: Sequence[Log]) -> dict[str, Any]:
    """The facts of the `network` event: text for a person, what each node's ports carried, and what does not fit.

    `seated`: of each rank its node, as a position in `nodes`. `logs`: each rank's of NCCL, where there is one.
    """
    networks = sorted({log.network for log in logs if log.network})
    rdma = [name for name in networks if transport.is_rdma(name)]
    hcas = sorted({hca for log in logs for hca in log.hcas}) if rdma else []
    direct = [channel.direct for channel in transport.between(logs, seated) if channel.kind == "NET"]
    carriers = [hcas or [node.interface] for node in nodes]
    sent = sum(node.sent(port) or 0 for node, ports in zip(nodes, carriers, strict=True) for port in ports)
    who = " and ".join(f"NET/{name}" for name in networks) or backend
    over = ", ".join(hcas or dict.fromkeys(node.interface for node in nodes))
    gpudirect = (" with GPUDirect" if all(direct) else " without GPUDirect") if rdma and direct else ""
    text = f"{who} over {over}{gpudirect} on {len(nodes)} nodes, {amount(sent)} sent"
    if not rdma:
        text += f"; {unused(nodes, logs, backend)}"
    return {
        "text": text,
        "nodes": [_as_data(node, ports) for node, ports in zip(nodes, carriers, strict=True)],
        "odd": [*odd(nodes, hcas), *miscounted(nodes, seated, logs), *worn(nodes)],
    }


def _as_data(node: Node, carriers: Sequence[str]) -> dict[str, Any]:
    rates = [node.after.get(port, {}).get("rate", 0.0) for port in carriers]
    return {
        "host": node.host,
        "sent": {port: sent for port in node.after if (sent := node.sent(port)) is not None},
        "rate": sum(rates) if all(rates) else 0.0,
    }


def unused(nodes: Sequence[Node], logs: Sequence[Log], backend: str) -> str:
    """What is to be said of the InfiniBand that did not carry it."""
    there = sum(bool(node.hcas) for node in nodes)
    if not there:
        return "InfiniBand present on none"
    why = next((log.why_not for log in logs if log.why_not), "")
    if not why and not any(log.network for log in logs):
        why = f"{backend} talks over TCP" if backend == "gloo" else ""
    return f"InfiniBand present on {there}, NOT USED" + (f": {why}" if why else "")


def odd(nodes: Sequence[Node], hcas: Sequence[str]) -> list[str]:
    """Where what NCCL says, what was chosen and what the ports counted do not fit together."""
    found = []
    for node in nodes:
        chosen = node.sent(node.interface)
        counted = [sent for hca in hcas if (sent := node.sent(hca)) is not None]
        if counted and sum(counted) == 0 and (chosen or 0) > NOTICED:
            found.append(
                f"NCCL says it used {', '.join(hcas)}, but on {node.host} these ports sent nothing and "
                f"{node.interface} sent {amount(chosen or 0)}"
            )
        elif not hcas and chosen is not None:
            found += [
                f"{node.interface} was chosen on {node.host} and sent {amount(chosen)}, but {port} sent {amount(sent)}"
                for port in node.after
                if (sent := node.sent(port) or 0) > max(NOTICED, 2 * chosen) and node.after[port]["rate"]
            ]
    return found


def miscounted(nodes: Sequence[Node], seated: Sequence[int], logs: Sequence[Log]) -> list[str]:
    """Whether NCCL takes several nodes for one: their ranks would try each other's memory, or crowd one card."""
    seen = {log.counted[1] for log in logs if log.counted[0] == len(seated)}
    return [
        f"NCCL counts {n} {'node' if n == 1 else 'nodes'} where there are {len(nodes)}: another host name for each "
        "container, or NCCL_HOSTID"
        for n in sorted(seen)
        if n < len(nodes)
    ]


def worn(nodes: Sequence[Node]) -> list[str]:
    """Ports that counted errors during the run."""
    found = []
    for node in nodes:
        for port, its in node.after.items():
            before = node.before.get(port, {}).get("errors", {})
            grown = {name: n - before.get(name, n) for name, n in its.get("errors", {}).items()}
            if told := ", ".join(f"{n} {name}" for name, n in grown.items() if n > 0):
                found.append(
                    f"{port} on {node.host} counted errors meanwhile ({told}): a cable, or a lossy RoCE network"
                )
    return found


def amount(size: float) -> str:
    """`1.2 GB`, in powers of 1000 as networks are measured."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
