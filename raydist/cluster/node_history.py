"""A file of nodes that failed or slowed earlier runs, which later runs avoid if they can. (driver)

    ~/.cache/raydist/nodes.json     or below XDG_CACHE_HOME, or the file that RAYDIST_LEDGER names

It contains host names, addresses, run folders and raydist's own terms, but no output of a job. A
run does not fail if the file can't be read or written: it then avoids no node, or records no
incident.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from raydist.cluster.nodes import Node, ResourceRequest, fit_count, matches, plain_name, room
from raydist.cluster.placement import Plan
from raydist.settings.config import Job
from raydist.shared import env_names, home, kinds
from raydist.shared.events import Events
from raydist.shared.outcome import BROKEN_GPU, End, Slow
from raydist.shared.rank_names import counted
from raydist.shared.whole_file import write_at_once

KEEP_S = 30 * 86400.0
"""Seconds after which an incident is deleted."""
COUNT_S = 7 * 86400.0
"""Seconds for which an incident counts: after that the node may have been repaired."""
MAX_INCIDENTS = 500
"""Maximum number of incidents in the file: the newest are kept."""
REPEATED = 2
"""A node is avoided after incidents in this many runs; a single one may be an accident."""

NODE_DIED = re.compile(
    r"node\b.*(died|dead|terminated unexpectedly|was terminated$)", re.IGNORECASE
)
"""Ray 2.60's text for an actor whose node died.

It terminates a drained node "expectedly"; an actor that the memory monitor killed is the job's
fault.
"""
KINDS = {"lost": "lost", "gpu": "had a broken GPU", "slow": "slow"}


@dataclass(frozen=True)
class NodeIncident:
    """A failure or slowdown of a run that a node caused."""

    cluster: str
    """Ray's address."""
    host: str
    ip: str
    what: str
    """lost, gpu or slow."""
    run: str
    """The run's folder."""
    at: float
    """Seconds since the epoch."""


def incidents(
    cluster: str, run: str, plan: Plan, cause: End | None, slow: Sequence[Slow], now: float
) -> list[NodeIncident]:
    """Return the incidents of an attempt, at most one of each kind per node.

    `cause`: the root cause.
    """
    by_node = {}
    kinds = [(each.rank, "slow") for each in slow]
    if cause is not None and (what := incident_kind(cause)):
        kinds.append((cause.rank, what))
    for rank, what in kinds:
        node = plan.slots[rank].node
        by_node[node.id, what] = NodeIncident(cluster, node.host, node.ip, what, run, now)
    return list(by_node.values())


def incident_kind(end: End) -> str:
    """Return lost or gpu if the node is at fault for the end of a rank.

    Empty if it is not, or if that is unknown.
    """
    by_node = end.silent or end.stuck or NODE_DIED.search(end.message)
    if end.how == "lost" and not end.preempted and by_node:
        return "lost"
    return "gpu" if end.how in ("raised", "killed") and BROKEN_GPU.search(end.message) else ""


def history_file() -> Path | None:
    """Return the path of the file; None for a user without a home, where nothing is recorded."""
    if named := os.environ.get(env_names.LEDGER):
        return Path(named)
    cache = home.user_cache()
    return cache / "raydist" / "nodes.json" if cache else None


def read_incidents(path: Path | None) -> list[NodeIncident]:
    """Return all recorded incidents; none if the file does not exist or can't be read."""
    if path is None:
        return []
    try:
        return [
            NodeIncident(**{**plain, "at": float(plain["at"])})
            for plain in json.loads(path.read_text("utf-8"))
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def note_incidents(path: Path | None, new: Sequence[NodeIncident], now: float) -> None:
    """Add incidents to the file, and delete old ones.

    This is atomic: other runs may read or write the file at the same time.
    """
    if not new or path is None:
        return
    with contextlib.suppress(OSError), _locked(path):
        kept = [
            incident for incident in [*read_incidents(path), *new] if now - incident.at < KEEP_S
        ][-MAX_INCIDENTS:]
        write_at_once(path, json.dumps([asdict(incident) for incident in kept], indent=1).encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing this file while the block runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def repeat_offenders(
    noted: Iterable[NodeIncident], cluster: str, nodes: Iterable[Node], now: float
) -> dict[str, list[NodeIncident]]:
    """Return node id -> recent incidents, for nodes with incidents in several runs.

    Nodes with incidents in the most runs come first.
    """
    offenders: dict[str, list[NodeIncident]] = {}
    recent = [each for each in noted if each.cluster == cluster and now - each.at < COUNT_S]
    for node in nodes:
        name = plain_name(node.host, node.ip)
        of_node = [
            each for each in recent if each.ip == node.ip and plain_name(each.host, each.ip) == name
        ]
        if len({each.run for each in of_node}) >= REPEATED:
            offenders[node.id] = of_node
    return dict(sorted(offenders.items(), key=lambda item: -len({each.run for each in item[1]})))


def avoidable(
    request: ResourceRequest, nodes: Sequence[Node], offenders: Sequence[str]
) -> list[str]:
    """Return the first offenders, up to the number that the job can currently do without.

    Avoiding a node never makes a job wait. `offenders`: node ids, the worst first.
    """
    selected = [node for node in nodes if matches(node.labels, request.selector)]
    for count in range(len(offenders), 0, -1):
        rest = [node for node in selected if node.id not in offenders[:count]]
        if room(request, [(fit_count(node.free, request.bundles[0]), 1) for node in rest]) >= len(
            request.bundles
        ):
            return list(offenders[:count])
    return []


def incident_text(node: Node, of_node: Sequence[NodeIncident], avoided: bool) -> str:
    """Describe the incidents of a node.

    Example: `node-7 (10.0.0.7) is avoided: in the last 7 days it was lost in 2 runs, the last on
    2026-11-20; ...`.
    """
    parts = [
        f"{text} in {counted(len(runs), 'run')}"
        for what, text in KINDS.items()
        if (runs := {each.run for each in of_node if each.what == what})
    ]
    last = time.strftime("%Y-%m-%d", time.localtime(max(each.at for each in of_node)))
    history = f"in the last {COUNT_S / 86400:g} days it was {', '.join(parts)}, the last on {last}"
    if avoided:
        return (
            f"{node.host} ({node.ip}) is avoided: {history}; scale.avoid=false uses it nevertheless"
        )
    return f"{node.host} ({node.ip}) may be used, because there is no room without it: {history}"


def reason_to_avoid(job: Job, cluster: str, node: Node, avoided: bool) -> str:
    """Describe the incidents of a node onto which a running job could grow.

    Empty if the node need not be avoided.
    """
    bad = (
        repeat_offenders(read_incidents(history_file()), cluster, [node], time.time())
        if job.scale.avoid
        else {}
    )
    return incident_text(node, bad[node.id], avoided) if bad else ""


class Offender(NamedTuple):
    """A node with incidents in several runs."""

    node: str
    """Ray's node id."""
    avoided: bool
    """Whether the job has room without the node."""
    text: str


def offenders(
    job: Job, request: ResourceRequest, nodes: Sequence[Node], cluster: str
) -> list[Offender]:
    """Return the nodes with incidents in several runs, those that the job avoids first.

    None with scale.avoid=false.
    """
    if not job.scale.avoid or len(nodes) < 2:
        return []
    by_id = {node.id: node for node in nodes}
    bad = repeat_offenders(read_incidents(history_file()), cluster, nodes, time.time())
    avoided = avoidable(request, nodes, list(bad))
    return [
        Offender(id, id in avoided, incident_text(by_id[id], of_node, id in avoided))
        for id, of_node in bad.items()
    ]


def avoided_nodes(
    job: Job, request: ResourceRequest, nodes: Sequence[Node], cluster: str, events: Events
) -> set[str]:
    """Return the ids of the nodes with incidents that the job can do without; report both kinds."""
    found = offenders(job, request, nodes, cluster)
    for each in found:
        events.add(kinds.Avoid(node=each.node, avoided=each.avoided, text=each.text))
    return {each.node for each in found if each.avoided}
