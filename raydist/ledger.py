"""Nodes and what they did to earlier runs: a small file, and which nodes the next run had better leave out. (driver)

    ~/.cache/raydist/nodes.json        or below XDG_CACHE_HOME, or the file that RAYDIST_LEDGER names

It holds host names, addresses, run folders and words of raydist's own; nothing of what a job said. A ledger that can't
be read or written is no reason for a run to fail: then nobody is avoided, or nothing noted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raydist.config import Job
from raydist.events import Events
from raydist.inventory import Ask, Node, matches, room, slots
from raydist.placement import Plan
from raydist.result import End
from raydist.straggler import Slow

KEEP_S = 30 * 86400.0
"""Seconds after which an offence is forgotten altogether."""
COUNT_S = 7 * 86400.0
"""Seconds for which it counts against the node: it may have been mended meanwhile."""
MOST = 500
"""Offences that are kept; the oldest give way."""
REPEATED = 2
"""Runs that a node must have hurt to be avoided: anything may happen once."""

NODE_DIED = re.compile(r"node\b.*(died|dead|terminated unexpectedly|was terminated$)|its seat is silent", re.IGNORECASE)
"""What Ray 2.60 and the vigil say of an actor that its node took along. A node that was drained is terminated
"expectedly"; an actor that the memory monitor killed is the job's doing."""
BROKEN_GPU = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|hardware stack error|GPU is lost|ECC error encountered"
)
"""What CUDA says of a broken GPU (cudaGetErrorString, nvidia-smi); other errors of CUDA's are mostly the program's."""
HOLD_S = 2
"""Longest wait for the CPUs of the nodes that are avoided."""
PLACE_S = 5
"""Longest wait for the gang's place beside them; after that it may have any."""
WORDS = {"lost": "lost", "gpu": "had a broken GPU", "slow": "slow"}


@dataclass(frozen=True)
class Offence:
    """What a node did to a run."""

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


def offences(cluster: str, run: str, plan: Plan, cause: End | None, slow: Sequence[Slow], now: float) -> list[Offence]:
    """What can be laid at the door of a node, of all that went wrong in an attempt. One of a kind for each node."""
    found = {}
    blamed = [(each.rank, "slow") for each in slow]
    if cause is not None and (what := kind(cause)):
        blamed.append((cause.rank, what))
    for rank, what in blamed:
        node = plan.seats[rank].node
        found[node.id, what] = Offence(cluster, node.host, node.ip, what, run, now)
    return list(found.values())


def kind(end: End) -> str:
    """lost or gpu, where the end of a rank is its node's fault; empty where it is not, or nobody can tell."""
    if end.how == "lost" and not end.preempted and NODE_DIED.search(end.message):
        return "lost"
    return "gpu" if end.how in ("raised", "killed") and BROKEN_GPU.search(end.message) else ""


def file() -> Path:
    """Where the ledger is."""
    if named := os.environ.get("RAYDIST_LEDGER"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raydist" / "nodes.json"


def read(path: Path) -> list[Offence]:
    """All that is noted; nothing where there is no ledger, or one that can't be read."""
    try:
        return [Offence(**{**plain, "at": float(plain["at"])}) for plain in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def note(path: Path, new: Sequence[Offence], now: float) -> None:
    """Add to the ledger, as one step for all who read it or add to it meanwhile; what is old goes."""
    if not new:
        return
    with contextlib.suppress(OSError), alone(path):
        kept = [each for each in [*read(path), *new] if now - each.at < KEEP_S][-MOST:]
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as beside:
            json.dump([asdict(each) for each in kept], beside, indent=1)
        os.replace(beside.name, path)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else writes this file meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def repeated(noted: Iterable[Offence], cluster: str, nodes: Iterable[Node], now: float) -> dict[str, list[Offence]]:
    """By node id: what counts against those nodes that hurt several runs, those that hurt most runs first."""
    found: dict[str, list[Offence]] = {}
    recent = [each for each in noted if each.cluster == cluster and now - each.at < COUNT_S]
    for node in nodes:
        own = [each for each in recent if (each.host, each.ip) == (node.host, node.ip)]
        if len({each.run for each in own}) >= REPEATED:
            found[node.id] = own
    return dict(sorted(found.items(), key=lambda item: -len({each.run for each in item[1]})))


def avoidable(ask: Ask, nodes: Sequence[Node], offenders: Sequence[str]) -> list[str]:
    """As many of the offenders, the worst first, as the job has room without: it is never made to wait for it."""
    fit = [node for node in nodes if matches(node.labels, ask.selector)]
    for count in range(len(offenders), 0, -1):
        rest = [node for node in fit if node.id not in offenders[:count]]
        if room(ask, [(slots(node.free, ask.bundles[0]), 1) for node in rest]) >= len(ask.bundles):
            return list(offenders[:count])
    return []


def text(node: Node, own: Sequence[Offence], avoided: bool) -> str:
    """`node-7 (10.0.0.7) is avoided: in the last 7 days it was lost in 2 runs, the last on 2026-11-20; …`."""
    parts = [
        f"{WORDS[what]} in {len(runs)} run{'' if len(runs) == 1 else 's'}"
        for what in WORDS
        if (runs := {each.run for each in own if each.what == what})
    ]
    last = time.strftime("%Y-%m-%d", time.localtime(max(each.at for each in own)))
    said = f"in the last {COUNT_S / 86400:g} days it was {', '.join(parts)}, the last on {last}"
    if avoided:
        return f"{node.host} ({node.ip}) is avoided: {said}; scale.avoid=false takes it all the same"
    return f"{node.host} ({node.ip}) may be used, there is no room without it: {said}"


def against(job: Job, cluster: str, node: Node, avoided: bool) -> str:
    """What counts against a node that a running job could grow onto, in words; empty if nothing does."""
    bad = repeated(read(file()), cluster, [node], time.time()) if job.scale.avoid else {}
    return text(node, bad[node.id], avoided) if bad else ""


@contextlib.contextmanager
def steered(job: Job, ask: Ask, nodes: Sequence[Node], cluster: str, events: Events) -> Iterator[bool]:
    """Inside, Ray finds no room on nodes with a bad record, where there is room without them; whether that is so.

    Their CPUs are held for this moment. A label selector of the gang itself (`ray.io/node-id: !in(...)`) would stay
    with it: after the loss of a node it would wait for another although an avoided one is free.
    """
    there = {node.id: node for node in nodes}
    bad = repeated(read(file()), cluster, nodes, time.time()) if job.scale.avoid and len(nodes) > 1 else {}
    chosen = avoidable(ask, nodes, list(bad))
    for one, own in bad.items():
        events.say("avoid", node=one, avoided=one in chosen, text=text(there[one], own, one in chosen))
    free = {one: math.floor(there[one].free.get("CPU", 0) * 1e4) / 1e4 for one in chosen}
    held = hold({one: cpus for one, cpus in free.items() if cpus})
    try:
        yield bool(chosen)
    finally:
        if held is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(held)


def hold(cpus: Mapping[str, float]) -> Any:
    """A placement group with so many CPUs of each of these nodes, by node id; None for none."""
    if not cpus:
        return None
    from ray.util.placement_group import placement_group

    where = [{"ray.io/node-id": one} for one in cpus]
    group = placement_group([{"CPU": each} for each in cpus.values()], strategy="SPREAD", bundle_label_selector=where)
    group.wait(HOLD_S)  # if somebody was quicker there is nothing left to hold
    return group
