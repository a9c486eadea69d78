"""The command `raydist plan`: print where ranks would run and with which variables. (driver)

It starts nothing. `python -m raydist.tools.plan` is the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raydist.cluster import connect, drain, node_history, placement
from raydist.cluster.nodes import (
    UNLIMITED,
    Node,
    NodeType,
    ResourceRequest,
    amounts,
    fit_count,
    select_nodes,
    still_to_come,
)
from raydist.cluster.placement import Plan, Slot
from raydist.cluster.shortage import describe_shortage
from raydist.launch import inline
from raydist.network import levers as network_levers
from raydist.network import variables as network_variables
from raydist.network.facts import Facts
from raydist.network.levers import Lever
from raydist.network.names import EnvVar
from raydist.network.variables import Rendezvous
from raydist.node import mpi_install, probe
from raydist.recovery import policy
from raydist.reporting import wording
from raydist.settings import compose
from raydist.settings.config import Job, as_dict
from raydist.settings.mesh import MeshShape, divides, mesh_shape
from raydist.settings.secrets import MASK, masked
from raydist.shared import kinds
from raydist.shared.errors import ConfigError
from raydist.shared.rank_names import counted
from raydist.tools.command_line import ToolParser, run_tool

DESCRIPTION = """\
Prints where each rank would run, its environment variables with the reason for each, and each lever
of speed: on or off, and why. Starts nothing.
"""
NODES_SHOWN = 8


@dataclass(frozen=True)
class ClusterView:
    """The nodes that the plan assumes."""

    nodes: Sequence[Node]
    types: Sequence[NodeType]
    source: str
    """Where the nodes come from, as text."""
    address: str = ""
    """The address of the running Ray cluster; empty without one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. The exit code: 0, or that of `raydist.train` if it would refuse the job."""

    def plan() -> int:
        parser = ToolParser("plan", DESCRIPTION)
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        show_plan(compose.compose(arguments.overrides), as_json=arguments.json)
        return 0

    return run_tool(plan)


def show_plan(job: Job, as_json: bool) -> None:
    """Make the plan and print it."""
    job = connect.settle_group(job)
    view = view_cluster(job)
    request = placement.resources_for(job, view.nodes, view.types)
    offenders = node_history.offenders(job, request, view.nodes, view.address)
    avoided = [each.node for each in offenders if each.avoided]
    nodes = [node for node in view.nodes if node.id not in avoided]
    plan = placement.assign_ranks(request, place_request(request, nodes, view.types))
    job = policy.settle_job(job, plan)
    leads = {slot.node_rank: expected_facts(job, plan, slot) for slot in plan.leads}
    facts = [leads[slot.node_rank] for slot in plan.slots]
    rendezvous = expected_rendezvous(job, facts[0])
    variables = [
        mask_secrets(job, of_rank)
        for of_rank in network_variables.plan_variables(job, plan, facts, rendezvous)
    ]
    levers = list(network_levers.levers(job, plan, facts, variables[0]))
    memory = rank_memory(job, plan)
    shape = mesh_shape(job.parallel, plan.world_size, plan.slots[0].local_world_size)
    if as_json:
        data = plan_as_data(plan, variables, levers, view) | ({"memory": memory} if memory else {})
        data |= {"mesh": vars(shape)} if divides(job.parallel) else {}
        data |= {"offenders": [each._asdict() for each in offenders]} if offenders else {}
        print(json.dumps(data, indent=2))
    else:
        incidents = [f"node {each.text}" for each in offenders]
        print(
            "\n".join(
                [
                    *incidents,
                    *plan_as_text(plan, variables, levers, view),
                    *division(job, shape, memory),
                ]
            )
        )


def rank_memory(job: Job, plan: Plan) -> dict[str, int]:
    """Return the bytes on each rank for a model in shards that `model=` names, by purpose.

    Empty if that is unknown here. A separate process computes it: it needs torch, and the model's
    class. ConfigError: the model cannot be divided.
    """
    if not divides(job.parallel) or "_target_" not in job.model:
        return {}
    request = {
        "job": as_dict(job),
        "ranks": plan.world_size,
        "per_node": plan.slots[0].local_world_size,
    }
    command = [sys.executable, "-m", "raydist.training.memory"]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    if "refused" in found:
        raise ConfigError(**found["refused"])
    memory: dict[str, int] = found
    return memory


def division(job: Job, shape: MeshShape, memory: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines about the mesh and the memory of a rank.

    They are `mesh pp 2 x …`, and `memory parameters 1.00 + adamw 2.00 + … = 4.00 GiB at the peak on
    each rank`; MiB below 1 GiB.
    """
    if divides(job.parallel):
        sharded = f"replicate {shape.replicate} x shard {shape.shard} x tp {shape.tp}"
        yield f"mesh pp {shape.pp} x {sharded}"
    if memory:
        total = sum(memory.values())
        unit, bytes_ = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
        parts = " + ".join(f"{name} {size / bytes_:.2f}" for name, size in memory.items() if size)
        most = "each rank" if shape.pp == 1 else "each rank of the largest stage"
        more = "" if "activations" in memory else ", without the activations"
        peak = f"{'at most ' if shape.tp > 1 else ''}{total / bytes_:.2f} {unit}"
        yield f"memory {parts} = {peak} at the peak on {most}{more}"


def view_cluster(job: Job) -> ClusterView:
    """Return the nodes of the running Ray cluster, else this machine as Ray would see it."""
    if job.group == "inline":
        return ClusterView([inline.inline_node(job)], [], "this machine, without Ray")
    if address := connect.running_address():
        with connected(job):
            nodes, drained = connect.alive_nodes(), drain.drain_deadlines()
            types = connect.node_types()
            if types is None:
                types = [
                    NodeType(f"like-{node.host}", node.total, UNLIMITED, node.labels)
                    for node in nodes[-1:]
                ]
            hosts = [node.host for node in nodes if node.id in drained]
            leaving = f"; Ray drains {', '.join(hosts)}" if hosts else ""
            source = f"the Ray cluster at {address} ({counted(len(nodes), 'node')}{leaving})"
            # Ray places nothing on a drained node: a job that counts on it waits for another one.
            usable = drain.usable_nodes(job, nodes)
            nodes = [replace(node, free={}) if node.id in drained else node for node in usable]
            return ClusterView(nodes, types, source, address)
    node = connect.local_node(job)
    if (n := (job.scale.nodes or 1) + job.scale.spares) == 1:
        return ClusterView(
            [node], [], "this machine; no Ray is running, the run would start its own"
        )
    others = [copy_node(node, f"node-{i}") for i in range(2, n + 1)]
    return ClusterView(
        [node, *others], [], f"no Ray is running: assuming {len(others) + 1} nodes like this one"
    )


@contextlib.contextmanager
def connected(job: Job) -> Iterator[None]:
    """Connect this process to the running Ray cluster while the block runs."""
    import ray

    connects = not ray.is_initialized()
    if connects:
        connect.start_or_join(job)
    try:
        yield
    finally:
        if connects:
            ray.shutdown()


def copy_node(node: Node, name: str) -> Node:
    """Return a node like this one that does not exist yet."""
    return replace(node, id=name, host=name, ip=f"<address of {name}>")


def place_request(
    request: ResourceRequest, nodes: Sequence[Node], types: Sequence[NodeType]
) -> list[Node]:
    """Return the node of each bundle, as Ray would choose.

    Free nodes come first, then busy nodes, then nodes yet to come.
    """
    need, n = request.bundles[0], len(request.bundles)
    chosen, kinds = select_nodes(nodes, types, request.selector)
    coming = [
        Node(
            id=f"{kind.name}-{i}",
            host=f"{kind.name}-{i}",
            ip=f"<address of {kind.name}-{i}>",
            free={},
            total=kind.resources,
        )
        for kind, more in still_to_come(kinds, chosen)
        for i in range(1, min(more, n) + 1)
    ]
    in_order = sorted(
        chosen,
        key=lambda node: (-fit_count(node.free, need), -fit_count(node.total, need), node.order),
    )
    room = [(node, fit_count(node.total, need)) for node in (*in_order, *coming)]
    match request.strategy:
        case "STRICT_SPREAD":
            return [node for node, fits in room if fits][:n]
        case "STRICT_PACK":
            return [next(node for node, fits in room if fits >= n)] * n
        case "SPREAD":
            turns = range(max(fits for _, fits in room))
            return [node for turn in turns for node, fits in room if turn < fits][:n]
    return [node for node, fits in room for _ in range(fits)][:n]


def expected_facts(job: Job, plan: Plan, lead: Slot) -> Facts:
    """Return the facts of a node, with placeholders for those that only the node knows.

    `lead`: its first slot.
    """
    node, gpus = lead.node, plan.request.rank_resources.get("GPU", 0) * lead.local_world_size
    ids = (
        [f"<the {counted(math.ceil(gpus), 'GPU')} that Ray assigns>"]
        if gpus and job.group == "ray"
        else None
    )
    if any(node.ip in addresses for addresses in probe.interfaces().values()):
        facts = probe.read_facts(node.ip, job.fabric.interface, ids)
        if job.backend.name != "mpi":
            return facts
        install = mpi_install.find_mpirun(job.backend.mpi.mpirun)
        return replace(facts, mpi=asdict(install))
    name = (
        job.fabric.interface
        or f"<interface of {node.host if node.ip.startswith('<') else node.ip}>"
    )
    address = f"<address of {name} on {node.host}>" if job.fabric.interface else node.ip
    return Facts(hostname=node.host, ip=node.ip, interface=name, address=address, gpus=ids)


def expected_rendezvous(job: Job, first: Facts) -> Rendezvous:
    """Return the rendezvous without the port, which the run chooses.

    `first`: facts of rank 0's node.
    """
    file = f"{job.dir}/rendezvous" if job.init_method == "file" else None
    secret = network_variables.LATER if job.backend.name == "horovod" else ""
    return Rendezvous(first.address, None, file, secret)


def mask_secrets(job: Job, variables: Iterable[EnvVar]) -> tuple[EnvVar, ...]:
    """Return the variables with *** as the value of secrets.

    If there is an env_file, all variables of the job are secrets.
    """
    hidden = job.env if job.env_file else {}
    return tuple(
        var._replace(value=MASK if var.name in hidden else masked(var.value, var.name))
        for var in variables
    )


def plan_as_data(
    plan: Plan, variables: Sequence[Sequence[EnvVar]], levers: Sequence[Lever], view: ClusterView
) -> dict[str, Any]:
    """Return the plan for --json."""
    return {
        **plan.as_event(),
        "nodes": view.source,
        "placement": plan.request.strategy,
        "bundles": [dict(bundle) for bundle in plan.request.bundles],
        "labels": dict(plan.request.selector),
        "variables": [[var._asdict() for var in of_rank] for of_rank in variables],
        "levers": [lever._asdict() for lever in levers],
    }


def plan_as_text(
    plan: Plan, variables: Sequence[Sequence[EnvVar]], levers: Sequence[Lever], view: ClusterView
) -> Iterator[str]:
    """Yield the plan as lines.

    They are the slots; the variables of all ranks, of each node, and of each rank; what makes it
    fast.
    """
    request = plan.request
    labels = "".join(f", label {key}={pattern}" for key, pattern in request.selector.items())
    yield f"nodes {view.source}"
    yield wording.plan_line(kinds.Plan(**plan.as_event()))
    bundles = f"{counted(len(request.bundles), 'bundle')} of {amounts(request.bundles[0])}"
    where = " on each node" if len(plan.nodes) > 1 else ""
    yield f"group one placement group{where}, {request.strategy}: {bundles}{labels}"
    yield from wording.table(wording.slot_rows(plan.as_event()["slots"]))
    if any(fit_count(node.free, request.bundles[0]) == 0 for node in plan.nodes):
        yield f"waits {describe_shortage(request, view.nodes).removeprefix('waiting ')}"
    of_all = shared_variables(variables)
    yield from section("every rank", of_all)
    for ranks in by_node(plan)[:NODES_SHOWN]:
        of_node = [
            var
            for var in shared_variables([variables[rank] for rank in ranks])
            if var not in of_all
        ]
        node = plan.slots[ranks[0]].node
        yield from section(f"every rank on {node.host} ({node.ip})", of_node)
    yield from more(len(plan.nodes) - NODES_SHOWN, "node")
    yield from each_rank(plan, variables)
    yield f"\nspeed, for the ranks on {plan.slots[0].node.host}"
    yield from wording.table(
        [[lever.name, "on" if lever.on else "off", lever.why] for lever in levers]
    )


def by_node(plan: Plan) -> list[list[int]]:
    """Return the ranks of each node."""
    return [
        [slot.rank for slot in plan.slots if slot.node_rank == node_rank]
        for node_rank in range(len(plan.nodes))
    ]


def shared_variables(variables: Sequence[Sequence[EnvVar]]) -> list[EnvVar]:
    """Return the variables that are the same for all of these ranks."""
    return [var for var in variables[0] if all(var in of_rank for of_rank in variables[1:])]


def section(title: str, variables: Sequence[EnvVar]) -> Iterator[str]:
    """Yield a heading and one line for each variable."""
    if variables:
        yield f"\n{title}"
        yield from wording.table([[var.name, var.value or '""', var.reason] for var in variables])


def each_rank(plan: Plan, variables: Sequence[Sequence[EnvVar]]) -> Iterator[str]:
    """Yield the variables that differ between ranks of a node.

    Each has a column, and the reasons are below.
    """
    of_nodes = {
        var.name
        for ranks in by_node(plan)
        for var in shared_variables([variables[rank] for rank in ranks])
    }
    differing = [var for var in variables[0] if var.name not in of_nodes]
    if not differing:
        return
    yield "\neach rank"
    values = [{var.name: var.value for var in of_rank} for of_rank in variables]
    rows = [[of_rank.get(var.name, "") for var in differing] for of_rank in values]
    yield from wording.table([[var.name for var in differing], *rows[: wording.RANKS_SHOWN]])
    yield from more(len(rows) - wording.RANKS_SHOWN, "rank")
    yield from wording.table([[var.name, var.reason] for var in differing])


def more(n: int, noun: str) -> Iterator[str]:
    """Yield a line with the number of rows that are not shown."""
    if n > 0:
        yield f"  ... and {counted(n, f'more {noun}')}: --json has all"


if __name__ == "__main__":
    sys.exit(main())
