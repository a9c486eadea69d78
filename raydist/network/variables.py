"""(settings, facts of all nodes) -> each rank's environment variables, with reasons. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from raydist.cluster.placement import Plan, Slot
from raydist.network import binding, levers, ras, rdma
from raydist.network import horovod as network_horovod
from raydist.network import mpi as network_mpi
from raydist.network.facts import Facts, version_numbers
from raydist.network.names import MALLOC, RANK_FOLDER, EnvVar
from raydist.settings.config import Job
from raydist.settings.run_folder import run_folder
from raydist.shared import env_names
from raydist.shared.errors import ConfigError

LATER = "<chosen when it starts>"
RECORDS_COLLECTIVES = (2, 14)
"""A torch version whose flight recorder is on by default; in 2.8 it is off."""
GLOO_RECORDS = 32
"""Collectives that torch's flight recorder keeps of gloo. Reports need the last 8 of each rank
(worker.stacks.LAST); a dump has all of them as JSON, and its thread holds the GIL meanwhile."""
SHARES_GPU = (2, 30)
"""The first NCCL version with NCCL_MULTI_RANK_GPU_ENABLE."""
NCCL_LOG = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of an attempt find each other."""

    address: str = ""
    """Numeric address, on rank 0's node."""
    port: int | None = None
    """Port of the store; None before it is open, and with init_method=file."""
    file: str | None = None
    """Path of the rendezvous file with init_method=file."""
    secret: str = field(default="", repr=False)
    """Key of Horovod's rendezvous server."""
    attempt: int = 0
    """Restarts so far."""
    pids: tuple[int, ...] = ()
    """The process of each rank that may stay: 0 for one that moves; empty before the first start,
    and if all are started anew."""
    kept: tuple[int, ...] = ()
    """Those of these ranks that were in an earlier attempt."""


def plan_variables(
    job: Job, plan: Plan, facts: Sequence[Facts], rendezvous: Rendezvous
) -> list[tuple[EnvVar, ...]]:
    """Return the variables of each rank.

    `facts`: for each rank, in order of rank, the facts of its node, with the rank's own GPUs.
    """
    if plan.request.backend == "horovod":
        network_horovod.check_process_sets(job.backend.horovod.process_sets, plan.world_size)
    shared = tuple(rendezvous_variables(job, rendezvous))
    of_node = {slot.node_rank: tuple(node_variables(job, plan, facts, slot)) for slot in plan.leads}
    ranks = []
    for slot in plan.slots:
        gpus = gpu_variables(plan, facts, slot)
        planned = [*slot_variables(plan, slot), *shared, *gpus, *of_node[slot.node_rank]]
        if plan.request.backend == "horovod":
            planned += horovod_variables(job, plan, slot, facts[slot.rank], rendezvous)
        planned += nccl_log_variables(job, plan, slot, facts[slot.rank])
        ranks.append(tuple(override_variables(job, planned)))
    return ranks


def slot_variables(plan: Plan, slot: Slot) -> Iterator[EnvVar]:
    """Yield torchrun's variables for a rank's number and position."""
    rank, world_size = str(slot.rank), str(plan.world_size)
    yield EnvVar("RANK", rank, "number of the rank")
    yield EnvVar("LOCAL_RANK", str(slot.local_rank), "number of the rank on its node")
    yield EnvVar("GROUP_RANK", str(slot.node_rank), "number of the node, in order of address")
    yield EnvVar("ROLE_RANK", rank, "as torchrun: all ranks have one role")
    yield EnvVar("ROLE_NAME", "default", "as torchrun: all ranks have one role")
    yield EnvVar("WORLD_SIZE", world_size, "number of ranks")
    yield EnvVar("LOCAL_WORLD_SIZE", str(slot.local_world_size), "number of ranks on the node")
    yield EnvVar("GROUP_WORLD_SIZE", str(len(plan.nodes)), "number of nodes")
    yield EnvVar("ROLE_WORLD_SIZE", world_size, "as torchrun: all ranks have one role")


def rendezvous_variables(job: Job, rendezvous: Rendezvous) -> Iterator[EnvVar]:
    """Yield variables for the rendezvous and for the identity of the run."""
    yield EnvVar(
        "MASTER_ADDR",
        rendezvous.address,
        "rank 0's node, numeric: a host name may resolve to 127.0.1.1",
    )
    if job.backend.name == "horovod":
        pass  # its ranks have their own rendezvous
    elif rendezvous.file is not None:
        yield EnvVar(
            env_names.RENDEZVOUS_FILE,
            rendezvous.file,
            "init_method=file: a new file for each attempt",
        )
    else:
        port = LATER if rendezvous.port is None else str(rendezvous.port)
        yield EnvVar(
            "MASTER_PORT",
            port,
            "port of the store on rank 0's node, which is open before ranks start",
        )
        yield EnvVar(
            "TORCHELASTIC_USE_AGENT_STORE",
            "True",
            "all ranks, rank 0 too, join that store as clients",
        )
    yield EnvVar(
        "TORCHELASTIC_RUN_ID",
        "_".join(filter(None, (job.name, PurePath(job.dir).name))),
        "name of the run",
    )
    yield EnvVar("TORCHELASTIC_RESTART_COUNT", str(rendezvous.attempt), "restarts so far")
    yield EnvVar("TORCHELASTIC_MAX_RESTARTS", str(job.restart.max), "restart.max")
    if job.dir:
        yield EnvVar(env_names.RUN_DIR, job.dir, "the run folder")
    if job.storage:
        yield EnvVar(
            env_names.CHECKPOINTS, f"{run_folder(job)}/checkpoints", f"storage={job.storage}"
        )


def node_variables(job: Job, plan: Plan, facts: Sequence[Facts], lead: Slot) -> Iterator[EnvVar]:
    """Yield variables that all ranks of a node share. `lead`: the node's slot with local rank 0."""
    node, gpus = facts[lead.rank], bool(plan.request.rank_resources.get("GPU"))
    chosen = [
        *levers.thread_variables(
            job, node, binding.bind_node(job, plan, facts, lead), lead.local_world_size
        ),
        *(
            EnvVar(name, value, "keeps a step's freed memory for the next step")
            for name, value in MALLOC.items()
        ),
        *levers.compiler_variables(gpus),
        *levers.allocator_variables(job, node, gpus),
        *recorder_variables(job, node),
        *connection_variables(job, plan),
        *rdma.device_settings(job, node, len(plan.nodes)),
        *mig_variables(plan, facts, lead),
        *mpi_network(job, node),
        *ras.ras_variables(job, plan, node),
    ]
    yield from (unless_set(var, node) for var in chosen)


def recorder_variables(job: Job, node: Facts) -> Iterator[EnvVar]:
    """Yield the length of torch's flight recorder, for gloo or if it may be off by default."""
    if job.backend.name == "gloo":
        why = "raydist stacks reads all records: torch's 2000 keep a rank busy for 0.1 s"
        yield EnvVar("TORCH_FR_BUFFER_SIZE", str(GLOO_RECORDS), why)
        return
    version = version_numbers(node.versions.get("torch", ""))
    if version and version < RECORDS_COLLECTIVES:
        why = (
            f"torch {node.versions['torch']} may record no collectives by default; a hang "
            "report names them"
        )
        yield EnvVar("TORCH_FR_BUFFER_SIZE", "2000", why)


def connection_variables(job: Job, plan: Plan) -> Iterator[EnvVar]:
    """Yield the variable that makes init_process_group of gloo wait for all ranks."""
    if job.backend.name == "gloo" and plan.world_size > 1:
        why = "no rank ends while others still connect: gloo would take that for a failure"
        yield EnvVar("TORCH_DIST_INIT_BARRIER", "1", why)


def mpi_network(job: Job, node: Facts) -> Iterator[EnvVar]:
    """Yield variables that keep MPI on the chosen interface and HCAs, if the node has MPI."""
    if not node.mpi or job.fabric.kind == "site":
        return
    choice, fabric = rdma.choose_devices(job, node), job.fabric
    chosen = choice.hcas if choice.aside or fabric.hca else ()
    usable = [hca for hca in node.hcas if hca.active and hca.openable]
    ports = [f"{hca.name}:{hca.active[0].number}" for hca in chosen if hca in usable]
    tcp = ""
    if fabric.kind == "ethernet":
        tcp = rdma.TCP
    elif choice.none_fits:
        tcp = rdma.none_of_kind(job)
    elif fabric.hca and not ports:
        tcp = "no HCA of fabric.hca can be used"
    yield from network_mpi.network_options(
        node.mpi, node.interface, ports, tcp, fabric.strict, rdma=bool(usable)
    )


def nccl_log_variables(job: Job, plan: Plan, slot: Slot, node: Facts) -> Iterator[EnvVar]:
    """Yield variables that make NCCL log its network to a file.

    Without fabric.debug this applies only if the site sets none of them.
    """
    file = f"{RANK_FOLDER}/rank-{slot.rank}.nccl"
    if job.fabric.debug:
        why = "fabric.debug: NCCL logs which network it chose, and why"
        variables = (
            EnvVar("NCCL_DEBUG", "INFO", why),
            EnvVar("NCCL_DEBUG_SUBSYS", rdma.SUBSYSTEMS, why),
            EnvVar("NCCL_DEBUG_FILE", file, "becomes logs/rank-N.nccl, next to the rank's own log"),
        )
        yield from (unless_set(var, node) for var in variables)
        return
    set_already = {*job.env, *node.environment, *node.nccl_conf}
    needed = plan.request.rank_resources.get("GPU") and (len(plan.nodes) > 1 or job.fabric.strict)
    if not needed or set_already & NCCL_LOG:
        return
    why = (
        "fabric.strict reads this log"
        if job.fabric.strict
        else "for the summary's line about the network"
    )
    yield EnvVar("NCCL_DEBUG", "INFO", why)
    yield EnvVar("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV", why)
    yield EnvVar("NCCL_DEBUG_FILE", file, f"{why}; keeps it out of the rank's log")


def horovod_variables(
    job: Job, plan: Plan, slot: Slot, node: Facts, rendezvous: Rendezvous
) -> Iterator[EnvVar]:
    """Yield Horovod's variables: the rank's slot, the rendezvous, the network."""
    port = LATER if rendezvous.port is None else str(rendezvous.port)
    yield from network_horovod.slot_lines(plan, slot)
    yield from network_horovod.rendezvous_lines(rendezvous.address, port, rendezvous.secret)
    yield from (
        unless_set(var, node) for var in network_horovod.horovod_settings(job, node.interface)
    )


def gpu_variables(plan: Plan, facts: Sequence[Facts], slot: Slot) -> Iterator[EnvVar]:
    """Yield the GPUs that a rank sees.

    They are all GPUs of the job on its node, in the same order for all its ranks, as peer access
    needs. Without Ray a rank inherits those that this process sees.
    """
    node, ids = facts[slot.rank], binding.gpu_ids(plan, facts, slot)
    why = "all GPUs of this job on the node; a rank takes its LOCAL_RANK's"
    if not plan.request.rank_resources.get("GPU"):
        ids, why = [], "the job requests no GPU"
    elif any(gpu.startswith("MIG-") for gpu in node.gpus or ids):
        place = slot.local_rank
        ids = [gpu for gpu in ids if gpu in node.gpus] if node.gpus else ids[place : place + 1]
        why = "the MIG instance of this rank: CUDA would use the first one of a list only"
    elif not binding.assigned_gpus(facts, slot):
        return
    listed = ",".join(ids)
    yield EnvVar("CUDA_VISIBLE_DEVICES", listed, why)
    # Ray sets HIP_VISIBLE_DEVICES to the GPUs of the actor, which are those of one rank.
    if "rocm" in node.versions.get("torch", ""):
        yield EnvVar("HIP_VISIBLE_DEVICES", listed, why)
    if ids:
        order = EnvVar(
            "CUDA_DEVICE_ORDER",
            "PCI_BUS_ID",
            "Ray counts GPUs in this order, CUDA the fastest first",
        )
        yield unless_set(order, node)


def mig_variables(plan: Plan, facts: Sequence[Facts], lead: Slot) -> Iterator[EnvVar]:
    """Yield the variable that makes NCCL accept ranks with MIG instances of the same GPU.

    ConfigError: this NCCL has no such variable.
    """
    node = facts[lead.rank]
    parent = {instance: gpu.uuid for gpu in node.devices for instance in gpu.instances}
    held = [gpu for gpu in binding.gpu_ids(plan, facts, lead) if gpu.startswith("MIG-")]
    gpus = [parent.get(instance, "") for instance in held]
    if (
        plan.request.backend != "nccl"
        or len(held) < 2
        or ("" not in gpus and len({*gpus}) == len(gpus))
    ):
        return
    version = version_numbers(node.versions.get("nccl", ""))
    if not version or version >= SHARES_GPU:
        why = (
            "ranks may have MIG instances of one GPU, for which NCCL takes them all; without "
            "it NCCL refuses them"
        )
        yield EnvVar("NCCL_MULTI_RANK_GPU_ENABLE", "1", why)
    elif "" not in gpus:
        cause = (
            f"ranks on {node.hostname} have MIG instances of one GPU, which NCCL "
            f"{node.versions['nccl']} refuses "
            "(2.30 does not)"
        )
        raise ConfigError.of("backend", "nccl", cause, "backend=gloo")


def unless_set(var: EnvVar, node: Facts) -> EnvVar:
    """Return the variable, or the site's value.

    raydist overrides neither the node's environment nor NCCL's own files.
    """
    hint = f"; raydist's own choice: env.{var.name}={var.value}"
    if var.name in node.environment:
        value = node.environment[var.name]
        return (
            var
            if value == var.value
            else EnvVar(var.name, value, f"already set on {node.hostname}{hint}")
        )
    if var.name in node.nccl_conf:
        value, file = node.nccl_conf[var.name]
        return EnvVar(
            var.name,
            value,
            f"set in {file} on {node.hostname}" + ("" if value == var.value else hint),
        )
    return var


def override_variables(job: Job, planned: Sequence[EnvVar]) -> Iterator[EnvVar]:
    """Yield the planned variables, with the values and the additional variables of job.env."""
    for var in planned:
        yield _from_job(var.name, job.env) if var.name in job.env else var
    names = {var.name for var in planned}
    yield from (_from_job(name, job.env) for name in job.env if name not in names)


def _from_job(name: str, env: Mapping[str, str]) -> EnvVar:
    return EnvVar(name, str(env[name]), f"env.{name}")
