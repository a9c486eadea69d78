"""What the doctor measured on the nodes -> findings, each with what to type to mend it. (pure)"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from raydist.findings import HOSTS_NAMED, Finding, named
from raydist.node.peers import Trip

FAR_S = 0.01
"""A round trip that no network of one site needs."""
SKEW_S = 0.5
"""Clocks further apart than this put events, and the first cause of a failure, into the wrong order."""
LINES = 8
"""Most lines about pairs of one kind."""

CHECKS = {
    "launch": "the gang can be placed, its nodes can be opened, and they answer",
    "run folder": "the run folder can be made, and every node sees it",
    "versions": "python, torch, ray and raydist are the same everywhere",
    "imports": "what the ranks import is installed on every node",
    "hostname": "each host's own name leads to an address that the others can reach",
    "rendezvous": "every node reaches the store on rank 0's node, on its real port",
    "peers": "every node connects to every other on the training addresses, on ports that the kernel chose",
    "mtu": "64 KiB pass between every two nodes, both ways",
    "latency": "a round trip between any two nodes takes less than 10 ms",
    "clock": "the nodes' clocks agree to half a second",
    "gloo": "gloo's own device listens on the planned address",
    "nccl": "NCCL's own choice (ncclGetUniqueId) is the planned interface",
    "shm": "/dev/shm can be written",
}
"""What the doctor does, in the order in which one failure explains the next."""


@dataclass(frozen=True)
class Host:
    """A node, as the words about it need it."""

    name: str
    address: str
    """Its training address."""
    interface: str


Pairs = Collection[tuple[int, int]]


def silent(step: str, whys: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Nodes that could not do their part in a step. `whys`: {the reason: nodes}."""
    for why, names in whys.items():
        text = f"{named(names)} could not do the check-up's step '{step}': {why}"
        mend = "see what ray status says of these nodes; python -m pip install the same raydist on all of them"
        yield Finding("launch", "fail", tuple(names), text, mend)


def rendezvous(hosts: Sequence[Host], refused: Sequence[str | None], port: int) -> Iterator[Finding]:
    """`refused`: by node, empty where the store was reached, None where nobody asked."""
    first = hosts[0]
    for why in sorted({why for why in refused if why}):
        bad = tuple(host.name for host, own in zip(hosts, refused, strict=True) if own == why)
        yield Finding(
            "rendezvous", "fail", bad,
            f"{named(bad)} -> {first.name} ({first.address} port {port}): {why}",
            f"let all TCP ports in on {first.name}, or choose another network: fabric.interface=NAME",
        )  # fmt: skip


MENDS = {
    "twice": "both nodes have the address {address} on {interface}, so each calls itself: choose a network whose "
    "addresses differ from node to node: fabric.interface=NAME",
    "silent": "a firewall or security group drops it, or the way back is missing: open all TCP ports between the nodes "
    "(gloo and NCCL take any of net.ipv4.ip_local_port_range); on {caller}: ip route get {address}",
    "refused": "{called} does listen, so a firewall refuses: open all TCP ports between the nodes; "
    "on {called}: nft list ruleset, or iptables -S",
    "unreachable": "there is no way from {caller} to that network; on {caller}: ip route get {address}, "
    "or choose a network that all nodes are on: fabric.interface=NAME",
    "stalled": "short packets pass and long ones vanish, so the MTU of {interface} is larger than the path's; on every "
    "node: ip link set dev {interface} mtu 1400 (or sysctl -w net.ipv4.tcp_mtu_probing=1)",
    "broken": "something between the nodes ends connections: a proxy, a service mesh's sidecar, or a node that died; "
    "keep it out of the pods' way, or choose another network: fabric.interface=NAME",
}


def peers(hosts: Sequence[Host], trips: Sequence[Sequence[Trip] | None]) -> Iterator[Finding]:
    """The pairs that don't connect, or lose long packets. `trips`: by caller, then by called; None: no answer."""
    bad: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for own, row in enumerate(trips):
        for index, trip in enumerate(row or ()):
            if trip.kind != "fine":
                bad.setdefault((trip.kind, trip.words), set()).add((own, index))
    for (kind, why), pairs in sorted(bad.items()):
        check = "mtu" if kind == "stalled" else "peers"
        lines = list(fold_pairs(pairs))
        for callers, called, both in lines[:LINES]:
            one, other = hosts[callers[0]], hosts[called[-1]]
            text = f"{line(hosts, callers, called, both)}: {why}"
            mend = MENDS["twice" if one.address == other.address else kind].format(
                caller=one.name, called=other.name, address=other.address, interface=other.interface
            )
            yield Finding(check, "fail", blamed(hosts, callers, called), text, mend)
        if more := sum(len(callers) * len(called) for callers, called, _ in lines[LINES:]):
            yield Finding(check, "fail", (), f"and {more} more pairs: {why}", "see --json")


def fold_pairs(pairs: Pairs) -> Iterator[tuple[list[int], list[int], bool]]:
    """Pairs as few lines: (callers, called, whether it is so the other way round too).

    A node cut off, two halves of a cluster that don't see each other, or nodes none of which sees another (they are
    callers and called then) are one line, not hundreds.
    """
    left = set(pairs)
    while left:
        reached: dict[tuple[int, bool], set[int]] = {}
        for caller, called in left:
            reached.setdefault((caller, (called, caller) in left), set()).add(called)
        groups: dict[tuple[frozenset[int], bool], list[int]] = {}
        for (caller, both), those in reached.items():
            groups.setdefault((frozenset(those), both), []).append(caller)
            groups.setdefault((frozenset(those | {caller}), both), []).append(caller)
        apart = [(those, both, own) for (those, both), own in groups.items() if those.isdisjoint(own)]
        among = [(those, both, own) for (those, both), own in groups.items() if those == {*own} and len(own) > 2]
        those_called, both, callers = min([*apart, *among], key=_biggest_first)
        yield sorted(callers), sorted(those_called), both
        left -= {pair for a in callers for b in those_called for pair in ([(a, b), (b, a)] if both else [(a, b)])}


def _biggest_first(line: tuple[frozenset[int], bool, list[int]]) -> tuple[int, int, list[int]]:
    called, _, callers = line
    return -len(callers) * len(called), len(callers), sorted(callers)


def line(hosts: Sequence[Host], callers: Sequence[int], called: Sequence[int], both: bool) -> str:
    """`host1 (10.0.0.1) <-> host2 (10.0.0.2)`."""
    if callers == called:
        return f"{'all nodes' if len(called) == len(hosts) else side(hosts, called)}, from each to any other"
    return f"{side(hosts, callers)} {'<->' if both else '->'} {side(hosts, called)}"


def side(hosts: Sequence[Host], those: Sequence[int]) -> str:
    """One end of a line: a node with its address, or several nodes."""
    if len(those) == 1:
        return f"{hosts[those[0]].name} ({hosts[those[0]].address})"
    if len(those) == len(hosts) - 1 and len(those) > HOSTS_NAMED:
        return f"all {len(those)} others"
    return named([hosts[one].name for one in those])


def blamed(hosts: Sequence[Host], callers: Sequence[int], called: Sequence[int]) -> tuple[str, ...]:
    """The nodes to look at: the fewer of the two ends, for a node that nobody reaches is not the others' fault."""
    ends = sorted((callers, called), key=len)
    few = ends[0] if len(ends[0]) < len(ends[1]) else sorted({*callers, *called})
    return tuple(hosts[one].name for one in few)


def latency(hosts: Sequence[Host], trips: Sequence[Sequence[Trip] | None]) -> Iterator[Finding]:
    """Nodes that are far from each other."""
    far = {
        (caller, called)
        for caller, row in enumerate(trips)
        for called, trip in enumerate(row or ())
        if trip.rtt_s > FAR_S
    }
    for callers, called, both in list(fold_pairs(far))[:LINES]:
        took = 1e3 * median(trip.rtt_s for one in callers for at, trip in enumerate(trips[one] or ()) if at in called)
        yield Finding(
            "latency", "warn", blamed(hosts, callers, called),
            f"{line(hosts, callers, called, both)}: a round trip takes {took:.0f} ms",
            "take nodes of one zone: scale.labels.KEY=VALUE; fewer, larger messages help: train.accumulate=8",
        )  # fmt: skip


def clocks(hosts: Sequence[Host], trips: Sequence[Sequence[Trip] | None]) -> Iterator[Finding]:
    """Nodes whose clock is away from the middle one, as far as the first that answered can see."""
    row = next((row for row in trips if row), ())
    ahead = [trip.ahead_s for trip in row if trip.kind in ("fine", "stalled")]
    for host, trip in zip(hosts, row, strict=False):
        off = trip.ahead_s - median(ahead)
        if trip.kind in ("fine", "stalled") and abs(off) > SKEW_S + trip.rtt_s:
            yield Finding(
                "clock", "warn", (host.name,),
                f"the clock of {host.name} is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}: "
                "what came first in a failure can't be told from the times of its events",
                f"on {host.name}: timedatectl set-ntp true (or start chrony)",
            )  # fmt: skip


def libraries(hosts: Sequence[Host], tried: Sequence[Mapping[str, Mapping[str, Any]] | None]) -> Iterator[Finding]:
    """Where gloo or NCCL would go another way than planned, or nowhere. `tried`: by node, what node.dryrun told."""
    for host, own in zip(hosts, tried, strict=True):
        for name, answer in (own or {}).items():
            variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[name]
            planned = f"env.{variable}={'=' * (name == 'nccl')}{host.interface}"
            mend = f"'{planned}'; python -m raydist.tools.plan says where {variable} comes from"
            if "error" in answer:
                yield Finding(name, "fail", (host.name,), f"{name} can't start: {answer['error']}", mend)
            elif host.address not in answer["addresses"]:
                where = ", ".join(answer["addresses"]) or "no address"
                alone = all(ipaddress.ip_address(address).is_loopback for address in answer["addresses"])
                if not alone:  # each node has its own address there: the nodes fold into one line by the interface
                    where = answer.get("interface", "an interface") + " of its own choice"
                level = "fail" if alone and len(hosts) > 1 else "warn"
                yield Finding(name, level, (host.name,), f"{name} would take {where}, not {host.interface}", mend)


def imports(hosts: Sequence[Host], failed: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Modules that a rank will ask for and not find. `failed`: by node, {module: error}."""
    for name in sorted({name for own in failed for name in own}):
        bad = tuple(host.name for host, own in zip(hosts, failed, strict=True) if name in own)
        why = next(own[name] for own in failed if name in own)
        where = "every node" if len(bad) == len(hosts) else named(bad)
        lacking = re.search(r"No module named '(\w+)", why)
        package = lacking[1] if lacking else name.partition(".")[0]
        mend = f"on {where}: python -m pip install {package}"
        yield Finding("imports", "fail", bad, f"{where} can't import {name}: {why}", mend)


def shm(hosts: Sequence[Host], refused: Sequence[str | None]) -> Iterator[Finding]:
    """Nodes whose /dev/shm takes nothing. `refused`: by node, empty where it can be written."""
    mend = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory on /dev/shm)"
    for host, why in zip(hosts, refused, strict=True):
        if why:
            yield Finding("shm", "fail", (host.name,), f"/dev/shm can't be written: {why}", mend)


def hostnames(hosts: Sequence[Host], resolved: Sequence[Sequence[str] | None]) -> Iterator[Finding]:
    """Hosts whose own name leads nowhere that others reach. `resolved`: by node, what the name resolves to."""
    for host, addresses in zip(hosts, resolved, strict=True):
        loopback = [address for address in addresses or () if ipaddress.ip_address(address).is_loopback]
        if addresses is None or (addresses and not loopback):
            continue
        where = f"resolves to {loopback[0]}" if loopback else "does not resolve"
        text = (
            f"the host's own name {where}: gloo, Horovod and torchrun by themselves would wait there for the others; "
            "raydist names the interface to them, so this job is not hurt"
        )
        mend = "in each host's /etc/hosts: its own address before its own name, instead of a loopback address"
        yield Finding("hostname", "warn", (host.name,), text, mend)


SAME = ("raydist", "torch", "ray", "python")
"""What has to be the same everywhere; of Python only the first two numbers decide about pickles and wheels."""


def versions(hosts: Sequence[Host], told: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Nodes with another version than most have. `told`: by node, {name: version}."""
    for name in SAME:
        have = [own.get(name, "missing") for own in told]
        most = max(have, key=have.count)
        for other in sorted(set(have) - {most}):
            bad = tuple(host.name for host, version in zip(hosts, have, strict=True) if version == other)
            close = name == "python" and other.split(".")[:2] == most.split(".")[:2]
            text = f"{named(bad)} {'has' if len(bad) == 1 else 'have'} {name} {other}, the others {most}"
            install = f"on {named(bad)}: python -m pip install {name}=={most}"
            mend = f"the same image on every node, with Python {most}" if name == "python" else install
            yield Finding("versions", "note" if close else "fail", bad, text, mend)


def run_folder(hosts: Sequence[Host], sees: Sequence[bool | None], folder: str) -> Iterator[Finding]:
    """Nodes that don't see the run folder. `sees`: by node, None where nobody asked."""
    blind = tuple(host.name for host, own in zip(hosts, sees, strict=True) if own is False)
    if blind:
        yield Finding(
            "run folder", "warn" if hosts[0].name in blind else "note", blind,
            f"{named(blind)} can't see {folder}: what rank 0 saves on {hosts[0].name} is found again only where it is "
            "seen",
            "hydra.run.dir=<a folder that all nodes see>",
        )  # fmt: skip
