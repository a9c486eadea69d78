"""The doctor's measurements -> findings, each with a fix. (pure)"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from raydist.messages.checkup import Trip
from raydist.network.finding import Finding, clock_finding, peer_fix
from raydist.shared.rank_names import HOSTS_NAMED, joined_names
from raydist.shared.stack_ways import Tracing, native_obstacle, ways_line

FAR_S = 0.01
"""A longer round trip than that of any network of a single site."""
SKEW_S = 0.5
"""Difference of clocks above which there is a finding: with NTP it is milliseconds; without it,
lines of the ranks' logs cannot be put in order. A run warns of a minute
(launch/network_check.py)."""
SLOW_LOOKUP_S = 2.0
"""A longer look-up waited for a name server.

With the shortest timeout of resolv.conf(5) it waits 1 s.
"""
LINES = 8
"""Maximum number of findings about pairs of one kind."""

CHECKS = {
    "launch": "Ray can place the worker group, and its agents start and answer",
    "run folder": "the run folder can be made, and every node sees it unless storage= is set",
    "storage": "storage= can be written here, and every node sees it",
    "versions": "python, torch, ray and raydist are the same everywhere",
    "imports": "the modules that the ranks import are installed on every node",
    "hostname": "each host's own name resolves to an address that the others can reach",
    "lookup": "each node looks up the name of another's address in less than 2 s",
    "rendezvous": "every node reaches the store on rank 0's node, on its real port",
    "peers": "every node connects to every other on the training addresses, on ports that the "
    "kernel chose",
    "mtu": "64 KiB pass between every two nodes, both ways",
    "latency": "a round trip between any two nodes takes less than 10 ms",
    "clock": "the nodes' clocks agree to half a second",
    "gloo": "gloo's own device listens on the planned address",
    "nccl": "NCCL's own choice (ncclGetUniqueId) is the planned interface",
    "shm": "/dev/shm can be written",
    "stacks": "raydist stacks can show the frames of C code: py-spy is installed, and may trace",
}
"""The doctor's checks. Causes come before their effects."""


@dataclass(frozen=True)
class Host:
    """A node of the job."""

    name: str
    address: str
    """The node's training address."""
    interface: str


Pairs = Collection[tuple[int, int]]


def check_answers(step: str, nodes_by_error: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Find nodes whose agent did not answer in a step.

    `nodes_by_error`: {error: names of nodes}.
    """
    for error, names in nodes_by_error.items():
        text = f"{joined_names(names)} did not complete the doctor's step '{step}': {error}"
        fix = (
            "look at these nodes with ray status; python -m pip install the same raydist on "
            "all nodes"
        )
        yield Finding("launch", "fail", tuple(names), text, fix)


def check_rendezvous(
    hosts: Sequence[Host], errors: Sequence[str | None], port: int
) -> Iterator[Finding]:
    """Find nodes that can't reach the store.

    `errors`: by node, empty if it reached the store, None if it gave no answer.
    """
    first = hosts[0]
    for why in sorted({why for why in errors if why}):
        bad = tuple(host.name for host, error in zip(hosts, errors, strict=True) if error == why)
        yield Finding(
            "rendezvous",
            "fail",
            bad,
            f"{joined_names(bad)} -> {first.name} ({first.address} port {port}): {why}",
            f"open all TCP ports of {first.name}, or choose another network: fabric.interface=NAME",
        )


def check_peers(hosts: Sequence[Host], trips: Sequence[Sequence[Trip] | None]) -> Iterator[Finding]:
    """Find pairs that don't connect, or lose long packets.

    `trips`: by caller, then by called; None: no answer.
    """
    bad: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for caller, row in enumerate(trips):
        for index, trip in enumerate(row or ()):
            if trip.kind != "fine":
                bad.setdefault((trip.kind, trip.words), set()).add((caller, index))
    for (kind, why), pairs in sorted(bad.items()):
        check = "mtu" if kind == "stalled" else "peers"
        lines = list(fold_pairs(pairs))
        for callers, called, both in lines[:LINES]:
            one, other = hosts[callers[0]], hosts[called[-1]]
            text = f"{peer_line(hosts, callers, called, both)}: {why}"
            ends = (one.name, one.address), (other.name, other.address)
            fix = peer_fix(kind, *ends, other.interface)
            yield Finding(check, "fail", suspects(hosts, callers, called), text, fix)
        if more := sum(len(callers) * len(called) for callers, called, _ in lines[LINES:]):
            yield Finding(check, "fail", (), f"and {more} more pairs: {why}", "see --json")


def fold_pairs(pairs: Pairs) -> Iterator[tuple[list[int], list[int], bool]]:
    """Fold pairs into few groups: (callers, called, whether the other direction is bad too).

    An isolated node, or two halves of a cluster that don't reach each other, become one group
    instead of hundreds of pairs. If no node of a set reaches another, the set is both callers and
    called.
    """
    left = set(pairs)
    while left:
        called_by: dict[tuple[int, bool], set[int]] = {}
        for caller, called in left:
            called_by.setdefault((caller, (called, caller) in left), set()).add(called)
        groups: dict[tuple[frozenset[int], bool], list[int]] = {}
        for (caller, both), nodes in called_by.items():
            groups.setdefault((frozenset(nodes), both), []).append(caller)
            groups.setdefault((frozenset(nodes | {caller}), both), []).append(caller)
        apart = [
            (nodes, both, callers)
            for (nodes, both), callers in groups.items()
            if nodes.isdisjoint(callers)
        ]
        among = [
            (nodes, both, callers)
            for (nodes, both), callers in groups.items()
            if nodes == {*callers} and len(callers) > 2
        ]
        all_called, both, callers = min([*apart, *among], key=_biggest_first)
        yield sorted(callers), sorted(all_called), both
        left -= {
            pair
            for a in callers
            for b in all_called
            for pair in ([(a, b), (b, a)] if both else [(a, b)])
        }


def _biggest_first(line: tuple[frozenset[int], bool, list[int]]) -> tuple[int, int, list[int]]:
    called, _, callers = line
    return -len(callers) * len(called), len(callers), sorted(callers)


def peer_line(
    hosts: Sequence[Host], callers: Sequence[int], called: Sequence[int], both: bool
) -> str:
    """Format a connection as `host1 (10.0.0.1) <-> host2 (10.0.0.2)`."""
    if callers == called:
        return (
            f"{'all nodes' if len(called) == len(hosts) else side(hosts, called)}, from each "
            "to any other"
        )
    return f"{side(hosts, callers)} {'<->' if both else '->'} {side(hosts, called)}"


def side(hosts: Sequence[Host], nodes: Sequence[int]) -> str:
    """Describe one end of a connection: a node with its address, or several nodes."""
    if len(nodes) == 1:
        return f"{hosts[nodes[0]].name} ({hosts[nodes[0]].address})"
    if len(nodes) == len(hosts) - 1 and len(nodes) > HOSTS_NAMED:
        return f"all {len(nodes)} others"
    return joined_names([hosts[node].name for node in nodes])


def suspects(
    hosts: Sequence[Host], callers: Sequence[int], called: Sequence[int]
) -> tuple[str, ...]:
    """Return the nodes that are probably at fault.

    They are the end with fewer nodes; both ends if they are equal.
    """
    ends = sorted((callers, called), key=len)
    nodes = ends[0] if len(ends[0]) < len(ends[1]) else sorted({*callers, *called})
    return tuple(hosts[node].name for node in nodes)


def check_latency(
    hosts: Sequence[Host], trips: Sequence[Sequence[Trip] | None]
) -> Iterator[Finding]:
    """Find pairs with a long round trip."""
    far = {
        (caller, called)
        for caller, row in enumerate(trips)
        for called, trip in enumerate(row or ())
        if trip.rtt_s > FAR_S
    }
    for callers, called, both in list(fold_pairs(far))[:LINES]:
        took = 1e3 * median(
            trip.rtt_s
            for one in callers
            for at, trip in enumerate(trips[one] or ())
            if at in called
        )
        yield Finding(
            "latency",
            "warn",
            suspects(hosts, callers, called),
            f"{peer_line(hosts, callers, called, both)}: a round trip takes {took:.0f} ms",
            "use nodes of one zone: scale.labels.KEY=VALUE; fewer, larger messages help: "
            "train.accumulate=8",
        )


def check_clocks(
    hosts: Sequence[Host], trips: Sequence[Sequence[Trip] | None]
) -> Iterator[Finding]:
    """Find nodes whose clock differs from the median, measured by the first node that answered."""
    row = next((row for row in trips if row), ())
    ahead = [trip.ahead_s for trip in row if trip.kind in ("fine", "stalled")]
    for host, trip in zip(hosts, row, strict=False):
        off = trip.ahead_s - median(ahead)
        if trip.kind in ("fine", "stalled") and abs(off) > SKEW_S + trip.rtt_s:
            yield clock_finding(host.name, off, "the median of all nodes")


def check_loaded_libraries(
    hosts: Sequence[Host],
    replies: Sequence[Mapping[str, Mapping[str, Any]] | None],
    addresses: Sequence[Sequence[str]],
) -> Iterator[Finding]:
    """Find nodes where gloo or NCCL can't start, or would use another interface or address.

    `replies`: by node, of node.dryrun. `addresses`: by node, all of its training interface.
    """
    beside: dict[str, list[tuple[Host, str]]] = {}
    for host, reply, known in zip(hosts, replies, addresses, strict=True):
        for name, answer in (reply or {}).items():
            variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[name]
            planned = f"env.{variable}={'=' * (name == 'nccl')}{host.interface}"
            fix = f"'{planned}'; raydist plan shows where {variable} comes from"
            if "error" in answer:
                yield Finding(
                    name, "fail", (host.name,), f"{name} can't start: {answer['error']}", fix
                )
            elif host.address in answer["addresses"]:
                continue
            elif own := [address for address in answer["addresses"] if address in known]:
                beside.setdefault(name, []).append((host, own[0]))
            else:
                where = ", ".join(answer["addresses"]) or "no address"
                loopback = all(
                    ipaddress.ip_address(address).is_loopback for address in answer["addresses"]
                )
                # Nodes differ in their addresses; the interface's name folds them into one finding.
                if not loopback:
                    where = answer.get("interface", "another interface")
                level = "fail" if loopback and len(hosts) > 1 else "warn"
                yield Finding(
                    name,
                    level,
                    (host.name,),
                    f"{name} would use {where}, not {host.interface}",
                    fix,
                )
    # One finding for all these nodes, although their addresses differ.
    for name, those in beside.items():
        host, own_address = those[0]
        of_one = f" on {host.name}" if len(those) > 1 else ""
        yield Finding(
            name,
            "warn",
            tuple(each.name for each, _ in those),
            f"{name} would use {own_address}{of_one}, not {host.address}: both are addresses of "
            f"{host.interface}",
            f"ray start --node-ip-address={own_address}{of_one}, or remove that address from "
            f"{host.interface}",
        )


def check_imports(
    hosts: Sequence[Host],
    errors: Sequence[Mapping[str, str]],
    packages: Mapping[str, Sequence[str]],
) -> Iterator[Finding]:
    """Find modules that a rank would fail to import.

    `errors`: by node, {module: error}. `packages`: by top-level module, the packages of this
    machine that provide it. The name of a module is often not that of its package, and may be
    somebody else's package.
    """
    for name in sorted({name for of_node in errors for name in of_node}):
        bad = tuple(
            host.name for host, of_node in zip(hosts, errors, strict=True) if name in of_node
        )
        why = next(of_node[name] for of_node in errors if name in of_node)
        where = "every node" if len(bad) == len(hosts) else joined_names(bad)
        missing = re.search(r"No module named '(\w+)", why)
        module = missing[1] if missing else re.split("[.:]", name)[0]
        brings = " ".join(sorted(set(packages.get(module, ()))))
        install = (
            f"python -m pip install {brings}"
            if brings
            else f"install the package that has the module {module}"
        )
        fix = f"on {where}: {install}"
        yield Finding("imports", "fail", bad, f"{where} can't import {name}: {why}", fix)


def check_shm(hosts: Sequence[Host], errors: Sequence[str | None]) -> Iterator[Finding]:
    """Find nodes whose /dev/shm can't be written. `errors`: by node, empty if it can."""
    fix = (
        "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory "
        "on /dev/shm)"
    )
    for host, why in zip(hosts, errors, strict=True):
        if why:
            yield Finding("shm", "fail", (host.name,), f"/dev/shm can't be written: {why}", fix)


def check_stacks(hosts: Sequence[Host], nodes: Sequence[Tracing | None]) -> Iterator[Finding]:
    """Find nodes where `raydist stacks --native` can't work. `nodes`: None if it gave no answer.

    It is a warning where py-spy is installed, so that somebody expects it to work.
    """
    for host, node in zip(hosts, nodes, strict=True):
        if node is not None and (obstacle := native_obstacle(node)) is not None:
            level = "warn" if node.py_spy else "note"
            yield Finding("stacks", level, (host.name,), ways_line(obstacle), obstacle.fix)


def check_hostnames(
    hosts: Sequence[Host], resolved: Sequence[Sequence[str] | None], by_name: bool = True
) -> Iterator[Finding]:
    """Find hosts whose own name resolves to no address that others reach.

    `resolved`: by node, the name's addresses. `by_name`: whether raydist gives gloo and Horovod the
    interface by its name, as always but with fabric=site.
    """
    for host, addresses in zip(hosts, resolved, strict=True):
        loopback = [
            address for address in addresses or () if ipaddress.ip_address(address).is_loopback
        ]
        if addresses is None or (addresses and not loopback):
            continue
        where = f"resolves to {loopback[0]}" if loopback else "does not resolve"
        text = (
            f"the host's own name {where}: by default gloo, Horovod and torchrun would listen "
            "there; "
        )
        fix = (
            "in each host's /etc/hosts: its own address before its own name, instead of a "
            "loopback address"
        )
        if by_name:
            text += "raydist gives them the interface by name, so this job is not affected"
        else:
            text += "fabric=site leaves the interface to them, unless the site names it"
            fix += "; or leave out fabric=site"
        yield Finding("hostname", "warn", (host.name,), text, fix)


def check_lookups(hosts: Sequence[Host], seconds: Sequence[float | None]) -> Iterator[Finding]:
    """Find nodes where looking up the name of another node's address takes long.

    `seconds`: by node; None if it did not reply.
    """
    slow = [
        (host.name, took)
        for host, took in zip(hosts, seconds, strict=True)
        if took is not None and took > SLOW_LOOKUP_S
    ]
    if slow:
        names = tuple(name for name, _ in slow)
        longest = max(took for _, took in slow)
        text = (
            f"{joined_names(names)}: a reverse look-up of another node's address takes "
            f"{longest:.0f} s; torch looks up "
            "the address of each connection, at each launch and restart"
        )
        fix = (
            "all nodes with their addresses in each node's /etc/hosts, or a name server that "
            "answers; "
            "without root: env.RES_OPTIONS='timeout:1 attempts:1'"
        )
        yield Finding("lookup", "warn", names, text, fix)


SAME = ("raydist", "torch", "ray", "python")
"""Packages whose versions must be equal on all nodes.

For Python only major and minor count, on which pickle depends.
"""


def compare_versions(
    hosts: Sequence[Host], versions: Sequence[Mapping[str, str]]
) -> Iterator[Finding]:
    """Find nodes with a version different from most. `versions`: by node, {name: version}."""
    for name in SAME:
        have = [of_node.get(name, "") for of_node in versions]
        installed = [version for version in have if version]
        if not installed:
            continue
        most = max(installed, key=installed.count)
        for other in sorted(set(have) - {most}):
            bad = tuple(
                host.name for host, version in zip(hosts, have, strict=True) if version == other
            )
            close = name == "python" and other.split(".")[:2] == most.split(".")[:2]
            verb = "has" if len(bad) == 1 else "have"
            text = (
                f"{joined_names(bad)} {verb} {f'{name} {other}' if other else f'no {name}'}, "
                f"the others {most}"
            )
            yield Finding(
                "versions", "note" if close else "fail", bad, text, _same_version(name, most, bad)
            )


def _same_version(name: str, version: str, nodes: Sequence[str]) -> str:
    """Return what to type on nodes that have another version of a package, or of Python."""
    public, _, build = version.partition("+")
    if name == "python":
        return f"the same image on every node, with Python {version}"
    if name == "raydist":
        return (
            f"on {joined_names(nodes)}: python -m pip install . in the folder of raydist {version}"
        )
    index = (
        f" --index-url https://download.pytorch.org/whl/{build}"
        if name == "torch" and build
        else ""
    )
    return f"on {joined_names(nodes)}: python -m pip install {name}=={public}{index}"


def check_storage_seen(
    hosts: Sequence[Host], errors: Sequence[Mapping[str, str] | None], storage: str
) -> Iterator[Finding]:
    """Find nodes that can't see the storage.

    `errors`: by node, empty if it can; None if it gave no answer.
    """
    for why in sorted({text for of_node in errors for text in (of_node or {}).values()}):
        bad = tuple(
            host.name
            for host, of_node in zip(hosts, errors, strict=True)
            if why in (of_node or {}).values()
        )
        text = f"{joined_names(bad)} can't see storage={storage}: {why}"
        fix = (
            "a folder that all nodes see, or a bucket: storage=s3://BUCKET/FOLDER, with its "
            "credentials in env_file="
        )
        yield Finding("storage", "fail", bad, text, fix)


def check_run_folder(
    hosts: Sequence[Host], sees: Sequence[bool | None], folder: str
) -> Iterator[Finding]:
    """Find nodes that don't see the run folder. `sees`: by node; None if it gave no answer."""
    without = tuple(host.name for host, seen in zip(hosts, sees, strict=True) if seen is False)
    if without:
        yield Finding(
            "run folder",
            "warn" if hosts[0].name in without else "note",
            without,
            f"{joined_names(without)} can't see {folder}: a rank there can't resume from a "
            "checkpoint of rank 0 on "
            f"{hosts[0].name}",
            "hydra.run.dir=<a folder that all nodes see>",
        )
