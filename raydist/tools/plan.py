"""`python -m raydist.tools.plan`, with the words of train: what would run where, and why; starts nothing. (driver)"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raydist import cluster, fabric, inline, placement, restart
from raydist.config import SECRET, Job
from raydist.errors import ConfigError, RaydistError, suggest
from raydist.fabric import Meet, Var
from raydist.inventory import UNLIMITED, amounts, count, select, slots, still_to_come
from raydist.node import probe
from raydist.node.facts import Facts
from raydist.placement import Ask, Node, NodeType, Plan, Seat
from raydist.train import tell
from raydist.watch import wording
from raydist.words import compose

USAGE = """\
usage: python -m raydist.tools.plan [--json] [words]

Prints who would sit where, and each rank's environment variables with the reason of each; starts nothing.
The words are those of python -m raydist.train: backend=nccl scale=2x8 job=resnet ...
"""
FLAGS = ("--json", "--help", "-h")
NODES_SHOWN = 8


@dataclass(frozen=True)
class Picture:
    """The nodes that the plan is drawn on."""

    nodes: Sequence[Node]
    types: Sequence[NodeType]
    source: str
    """Where they come from, for a person."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. The exit code: 0, or what `train` would end with before it starts anything."""
    typed = sys.argv[1:] if argv is None else argv
    try:
        flags = [word for word in typed if word.startswith("-")]
        if wrong := [flag for flag in flags if flag not in FLAGS]:
            raise ConfigError(f"{wrong[0]}: there is no such flag; {suggest(wrong[0], FLAGS)}")
        if flags and flags != ["--json"]:
            print(USAGE, end="")
            return 0
        job = compose.compose([word for word in typed if word not in flags])
        show(job, as_json=bool(flags))
    except RaydistError as error:
        return tell(error)
    return 0


def show(job: Job, as_json: bool) -> None:
    """Draw up the plan and print it."""
    picture = look_around(job)
    asked = placement.ask(job, picture.nodes, picture.types)
    plan = placement.seat(asked, lay_out(asked, picture.nodes, picture.types))
    job = replace(job, backend=replace(job.backend, name=asked.backend), restart=restart.rule(job))
    leads = {seat.node_rank: foresee(job, plan, seat) for seat in plan.seats if seat.local_rank == 0}
    facts = [leads[seat.node_rank] for seat in plan.seats]
    variables = [hidden(own) for own in fabric.variables(job, plan, facts, foreseen_meeting(job, facts[0]))]
    if as_json:
        print(json.dumps(as_data(plan, variables, picture), indent=2))
    else:
        print("\n".join(as_text(plan, variables, picture)))


def look_around(job: Job) -> Picture:
    """The nodes of the Ray cluster that is there; without one this machine, as Ray would see it."""
    if job.group == "inline":
        return Picture([inline.this_machine(job)], [], "this machine, without Ray")
    if address := cluster.running():
        with reading(job):
            found = cluster.nodes()
            types = cluster.node_types()
            if types is None:
                types = [NodeType(f"like-{node.host}", node.total, UNLIMITED, node.labels) for node in found[-1:]]
            return Picture(found, types, f"the Ray cluster at {address} ({count(len(found), 'node')})")
    node = cluster.this_machine(job)
    if (n := (job.scale.nodes or 1) + job.scale.spares) == 1:
        return Picture([node], [], "this machine; no Ray is running, the run would start its own")
    others = [like(node, f"node-{i}") for i in range(2, n + 1)]
    return Picture([node, *others], [], f"no Ray is running: assuming {len(others) + 1} nodes like this one")


@contextlib.contextmanager
def reading(job: Job) -> Iterator[None]:
    """Be connected to the Ray cluster that is there, to read."""
    import ray

    ours = not ray.is_initialized()
    if ours:
        cluster.start_or_join(job)
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def like(node: Node, name: str) -> Node:
    """A node that is not there yet."""
    return replace(node, id=name, host=name, ip=f"<address of {name}>")


def lay_out(asked: Ask, nodes: Sequence[Node], types: Sequence[NodeType]) -> list[Node]:
    """The node of each bundle as Ray would choose: what is free first, then what has to become free or to come."""
    need, n = asked.bundles[0], len(asked.bundles)
    chosen, kinds = select(nodes, types, asked.selector)
    coming = [
        Node(id=f"{kind.name}-{i}", host=f"{kind.name}-{i}", ip=f"<address of {kind.name}-{i}>", free={},
             total=kind.resources)
        for kind, more in still_to_come(kinds, chosen) for i in range(1, min(more, n) + 1)
    ]  # fmt: skip
    there = sorted(chosen, key=lambda node: (-slots(node.free, need), -slots(node.total, need), node.order))
    room = [(node, slots(node.total, need)) for node in (*there, *coming)]
    match asked.strategy:
        case "STRICT_SPREAD":
            return [node for node, fits in room if fits][:n]
        case "STRICT_PACK":
            return [next(node for node, fits in room if fits >= n)] * n
        case "SPREAD":
            turns = range(max(fits for _, fits in room))
            return [node for turn in turns for node, fits in room if turn < fits][:n]
    return [node for node, fits in room for _ in range(fits)][:n]


def foresee(job: Job, plan: Plan, lead: Seat) -> Facts:
    """The facts of a node as far as they can be known from here. `lead`: its first seat."""
    node, gpus = lead.node, plan.ask.rank_resources.get("GPU", 0) * lead.local_world_size
    given = [f"<the {count(math.ceil(gpus), 'GPU')} that Ray gives>"] if gpus and job.group == "ray" else None
    if any(node.ip in own for own in probe.interfaces().values()):
        return probe.look(node.ip, job.fabric.interface, given)
    name = job.fabric.interface or f"<interface of {node.host if node.ip.startswith('<') else node.ip}>"
    address = f"<address of {name} on {node.host}>" if job.fabric.interface else node.ip
    return Facts(hostname=node.host, ip=node.ip, interface=name, address=address, gpus=given)


def foreseen_meeting(job: Job, first: Facts) -> Meet:
    """Where the ranks will meet; the port comes later."""
    file = f"{job.dir}/rendezvous" if job.init_method == "file" else None
    return Meet(first.address, None, file, secret=fabric.LATER if job.backend.name == "horovod" else "")


def hidden(own: Iterable[Var]) -> tuple[Var, ...]:
    """The variables, without the values that are nobody's business."""
    return tuple(replace(var, value="***") if SECRET.search(var.name) else var for var in own)


def as_data(plan: Plan, variables: Sequence[Sequence[Var]], picture: Picture) -> dict[str, Any]:
    """The plan as JSON-able data."""
    return {
        **plan.as_event(),
        "nodes": picture.source,
        "placement": plan.ask.strategy,
        "bundles": [dict(one) for one in plan.ask.bundles],
        "labels": dict(plan.ask.selector),
        "variables": [[asdict(var) for var in own] for own in variables],
    }


def as_text(plan: Plan, variables: Sequence[Sequence[Var]], picture: Picture) -> Iterator[str]:
    """The plan for a person: who sits where, then the variables, each where it belongs: to all, a node, a rank."""
    facts, asked = plan.as_event(), plan.ask
    labels = "".join(f", label {key}={words}" for key, words in asked.selector.items())
    yield f"nodes {picture.source}"
    yield wording.plan(facts)
    bundles = f"{count(len(asked.bundles), 'bundle')} of {amounts(asked.bundles[0])}"
    yield f"asks  Ray for one placement group, {asked.strategy}: {bundles}{labels}"
    yield from wording.table(wording.seats(facts))
    if any(slots(node.free, asked.bundles[0]) == 0 for node in plan.nodes):
        yield f"waits {placement.missing(asked, picture.nodes).removeprefix('waiting ')}"
    of_all = shared(variables)
    yield from section("every rank", of_all)
    for own in by_node(plan)[:NODES_SHOWN]:
        rest = [var for var in shared([variables[rank] for rank in own]) if var not in of_all]
        node = plan.seats[own[0]].node
        yield from section(f"every rank on {node.host} ({node.ip})", rest)
    yield from more(len(plan.nodes) - NODES_SHOWN, "node")
    yield from each_rank(plan, variables)


def by_node(plan: Plan) -> list[list[int]]:
    """The ranks of each node."""
    return [[seat.rank for seat in plan.seats if seat.node_rank == node_rank] for node_rank in range(len(plan.nodes))]


def shared(variables: Sequence[Sequence[Var]]) -> list[Var]:
    """The variables that are the same for all of these ranks."""
    return [var for var in variables[0] if all(var in own for own in variables[1:])]


def section(title: str, variables: Sequence[Var]) -> Iterator[str]:
    """A heading and one line for each variable."""
    if variables:
        yield f"\n{title}"
        yield from wording.table([[var.name, var.value or '""', var.reason] for var in variables])


def each_rank(plan: Plan, variables: Sequence[Sequence[Var]]) -> Iterator[str]:
    """What differs from rank to rank on a node: a column each, and the reasons below."""
    once = {var.name for own in by_node(plan) for var in shared([variables[rank] for rank in own])}
    differing = [var for var in variables[0] if var.name not in once]
    if not differing:
        return
    yield "\neach rank"
    rows = [[next(var.value for var in own if var.name == one.name) for one in differing] for own in variables]
    yield from wording.table([[one.name for one in differing], *rows[: wording.SEATS_SHOWN]])
    yield from more(len(rows) - wording.SEATS_SHOWN, "rank")
    yield from wording.table([[one.name, one.reason] for one in differing])


def more(n: int, what: str) -> Iterator[str]:
    """A line for those that are left out."""
    if n > 0:
        yield f"  ... and {count(n, f'more {what}')}: --json tells of all"


if __name__ == "__main__":
    sys.exit(main())
