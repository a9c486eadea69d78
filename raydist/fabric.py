"""(settings, facts of all nodes) -> each rank's environment variables, each with its reason. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from raydist import fabric_horovod, fabric_mpi, fabric_network
from raydist.config import Job
from raydist.node.facts import Facts
from raydist.node.wire import HERE, MALLOC
from raydist.placement import Plan, Seat
from raydist.storage import run_folder

LATER = "<chosen when it starts>"
NCCL_LOG = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}


@dataclass(frozen=True)
class Var:
    """One environment variable of a rank, and why it has this value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Meet:
    """Where the ranks meet."""

    address: str = ""
    """Numeric, on rank 0's node."""
    port: int | None = None
    """That of the store; None before it is open, and where ranks meet in a file."""
    file: str | None = None
    secret: str = field(default="", repr=False)
    """What opens Horovod's rendezvous."""
    attempt: int = 0
    """Restarts so far."""


def variables(job: Job, plan: Plan, facts: Sequence[Facts], meet: Meet) -> list[tuple[Var, ...]]:
    """The variables of each rank. `facts`: of each rank's node, each with the rank's own GPUs, in order of rank."""
    nodes = {seat.node_rank: tuple(on_node(job, plan, facts, seat)) for seat in plan.seats if seat.local_rank == 0}
    shared = tuple(meeting(job, meet))
    own: list[tuple[Var, ...]] = [()] * plan.world_size
    if plan.ask.backend == "horovod":
        fabric_horovod.check_process_sets(job.backend.horovod.process_sets, plan.world_size)
        own = [tuple(horovod(job, plan, seat, facts[seat.rank], meet)) for seat in plan.seats]
    logs = [tuple(nccl_log(job, plan, seat, facts[seat.rank])) for seat in plan.seats]
    return [
        tuple(typed(job, (*place(plan, seat), *shared, *nodes[seat.node_rank], *own[seat.rank], *logs[seat.rank])))
        for seat in plan.seats
    ]


def place(plan: Plan, seat: Seat) -> Iterator[Var]:
    """torchrun's variables that say who a rank is."""
    mine, world = str(seat.rank), str(plan.world_size)
    yield Var("RANK", mine, "this rank among all")
    yield Var("LOCAL_RANK", str(seat.local_rank), "this rank on its node")
    yield Var("GROUP_RANK", str(seat.node_rank), "its node among the nodes, in order of address")
    yield Var("ROLE_RANK", mine, "torchrun's: all ranks have one role")
    yield Var("ROLE_NAME", "default", "torchrun's: all ranks have one role")
    yield Var("WORLD_SIZE", world, "ranks in all")
    yield Var("LOCAL_WORLD_SIZE", str(seat.local_world_size), "ranks on its node")
    yield Var("GROUP_WORLD_SIZE", str(len(plan.nodes)), "nodes")
    yield Var("ROLE_WORLD_SIZE", world, "torchrun's: all ranks have one role")


def meeting(job: Job, meet: Meet) -> Iterator[Var]:
    """What says where the ranks meet, and which run this is."""
    yield Var("MASTER_ADDR", meet.address, "rank 0's node, numeric: a host name may resolve to 127.0.1.1")
    if job.backend.name == "horovod":
        pass  # its ranks have a rendezvous of their own
    elif meet.file is not None:
        yield Var("RAYDIST_RENDEZVOUS_FILE", meet.file, "init_method=file: a new file for each attempt")
    else:
        port = LATER if meet.port is None else str(meet.port)
        yield Var("MASTER_PORT", port, "the store's port, open already on rank 0's node")
        yield Var("TORCHELASTIC_USE_AGENT_STORE", "True", "every rank joins that store as a client, rank 0 too")
    yield Var("TORCHELASTIC_RUN_ID", "_".join(filter(None, (job.name, PurePath(job.dir).name))), "name of the run")
    yield Var("TORCHELASTIC_RESTART_COUNT", str(meet.attempt), "restarts so far")
    yield Var("TORCHELASTIC_MAX_RESTARTS", str(job.restart.max), "restart.max")
    if job.dir:
        yield Var("RAYDIST_RUN_DIR", job.dir, "the run folder")
    if job.storage:
        yield Var("RAYDIST_CHECKPOINTS", f"{run_folder(job)}/checkpoints", f"storage={job.storage}")


def on_node(job: Job, plan: Plan, facts: Sequence[Facts], lead: Seat) -> Iterator[Var]:
    """What all ranks of a node share. `lead`: the first seat there."""
    here = facts[lead.rank]
    yield from gpus(plan, facts, lead)
    chosen = [
        Var("OMP_NUM_THREADS", str(max(1, int(job.scale.cpus))), f"scale.cpus={job.scale.cpus:g}"),
        *(Var(name, value, "memory freed in a step is kept for the next") for name, value in MALLOC.items()),
        *(Var(*line) for line in fabric_network.settings(job, here, len(plan.nodes))),
        *(Var(*line) for line in mpi(job, here)),
    ]
    for var in chosen:
        yield unless_set(var, here)


def mpi(job: Job, here: Facts) -> Iterator[tuple[str, str, str]]:
    """What MPI is told of the interface and the HCAs, where the node has an MPI to be told."""
    if not here.mpi or job.fabric.kind == "site":
        return
    choice, fabric = fabric_network.choose(job, here), job.fabric
    chosen = choice.hcas if choice.aside or fabric.hca else ()
    ports = [f"{hca.name}:{hca.active[0].number}" for hca in chosen if hca.active]
    yield from fabric_mpi.network(here.mpi, here.interface, ports, fabric.kind == "ethernet", fabric.strict)


def nccl_log(job: Job, plan: Plan, seat: Seat, here: Facts) -> Iterator[Var]:
    """Let NCCL write down which network it takes; unasked not where somebody has other plans for it."""
    file = Var("NCCL_DEBUG_FILE", f"{HERE}/rank-{seat.rank}.nccl", "logs/rank-N.nccl, apart from the rank's own output")
    if job.fabric.debug:
        why = "fabric.debug: what shows the network that NCCL chose"
        wanted = (Var("NCCL_DEBUG", "INFO", why), Var("NCCL_DEBUG_SUBSYS", fabric_network.SUBSYSTEMS, why), file)
        yield from (unless_set(var, here) for var in wanted)
        return
    set_already = {*job.env, *here.environment, *here.nccl_conf}
    needed = plan.ask.rank_resources.get("GPU") and (len(plan.nodes) > 1 or job.fabric.strict)
    if not needed or set_already & NCCL_LOG:
        return
    why = "fabric.strict looks into it" if job.fabric.strict else "for the summary's line about the network"
    yield Var("NCCL_DEBUG", "INFO", why)
    yield Var("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV", why)
    yield replace(file, reason=f"{why}; not into the rank's log")


def horovod(job: Job, plan: Plan, seat: Seat, here: Facts, meet: Meet) -> Iterator[Var]:
    """A rank's place in Horovod's words, and what its rendezvous and its network need."""
    yield from (Var(*line) for line in fabric_horovod.place(plan, seat))
    port = LATER if meet.port is None else str(meet.port)
    yield from (Var(*line) for line in fabric_horovod.meeting(meet.address, port, meet.secret))
    for line in fabric_horovod.settings(job, here.interface):
        yield unless_set(Var(*line), here)


def gpus(plan: Plan, facts: Sequence[Facts], lead: Seat) -> Iterator[Var]:
    """All GPUs of the job on this node, in one order for all its ranks, so that they reach each other directly."""
    if not plan.ask.rank_resources.get("GPU"):
        yield Var("CUDA_VISIBLE_DEVICES", "", "this job asked for no GPU")
        return
    held = [facts[lead.rank + i].gpus for i in range(lead.local_world_size)]
    ids = {one for own in held if own is not None for one in own}
    if ids:
        listed = ",".join(sorted(ids, key=lambda one: (not one.isdigit(), int(one) if one.isdigit() else 0, one)))
        yield Var("CUDA_VISIBLE_DEVICES", listed, "all GPUs of this job on the node; LOCAL_RANK picks")


def unless_set(var: Var, here: Facts) -> Var:
    """The variable, or what the site has set already: it is never overruled, and NCCL's own file counts as well."""
    instead = f"; raydist would say {var.value}, and env.{var.name}={var.value} makes it so"
    if var.name in here.environment:
        found = here.environment[var.name]
        # Ray itself sets OMP_NUM_THREADS, to the same
        return var if found == var.value else Var(var.name, found, f"set on {here.hostname} already{instead}")
    if var.name in here.nccl_conf:
        value, file = here.nccl_conf[var.name]
        return Var(var.name, value, f"set in {file} on {here.hostname}" + ("" if value == var.value else instead))
    return var


def typed(job: Job, planned: Sequence[Var]) -> Iterator[Var]:
    """What is planned, overruled and completed by job.env."""
    for var in planned:
        yield _typed(var.name, job.env) if var.name in job.env else var
    known = {var.name for var in planned}
    yield from (_typed(name, job.env) for name in job.env if name not in known)


def _typed(name: str, env: Mapping[str, str]) -> Var:
    return Var(name, str(env[name]), f"env.{name}")
