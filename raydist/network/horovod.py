"""(settings, slot of a rank) -> Horovod's variables, each with its reason. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raydist.cluster.placement import Plan, Slot
from raydist.network.names import EnvVar
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError

SERVER = "Horovod's rendezvous server on rank 0's node"


def slot_lines(plan: Plan, slot: Slot) -> Iterator[EnvVar]:
    """Yield Horovod's names for a slot.

    "local" counts ranks on the node, "cross" counts nodes that have this local rank.
    """
    nodes = [other.node_rank for other in plan.slots if other.local_rank == slot.local_rank]
    values = {
        "HOSTNAME": f"node-{slot.node_rank}",
        "RANK": slot.rank,
        "SIZE": plan.world_size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_world_size,
        "CROSS_RANK": nodes.index(slot.node_rank),
        "CROSS_SIZE": len(nodes),
    }
    for name, value in values.items():
        yield EnvVar(
            f"HOROVOD_{name}", str(value), "the rank's slot in the plan, in Horovod's terms"
        )


def rendezvous_lines(address: str, port: str, secret: str) -> Iterator[EnvVar]:
    """Yield the variables of Horovod's rendezvous.

    `secret`: key of its server; empty for a job of one rank, which needs no server.
    """
    if secret:
        yield EnvVar(
            "HOROVOD_GLOO_RENDEZVOUS_ADDR", f"{address}:{port}/{secret}", SERVER + ", with its key"
        )
        yield EnvVar("HOROVOD_GLOO_RENDEZVOUS_PORT", port, SERVER)
    # A Horovod built with MPI would choose MPI for both.
    yield EnvVar(
        "HOROVOD_CONTROLLER", "gloo", "ranks negotiate over gloo: mpirun did not start them"
    )
    yield EnvVar("HOROVOD_CPU_OPERATIONS", "gloo", "CPU tensors go over gloo")


def horovod_settings(job: Job, interface: str) -> Iterator[EnvVar]:
    """Yield the variables of the network and of the settings below backend.horovod.

    `interface`: the chosen interface of the rank's node.
    """
    horovod, key = job.backend.horovod, "backend.horovod."
    if job.fabric.kind != "site":
        why = "the training network; by default gloo takes the interface of the host name's address"
        yield EnvVar("HOROVOD_GLOO_IFACE", interface, why)
    yield EnvVar(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        str(max(1, round(job.backend.timeout_s))),
        "backend.timeout_s",
    )
    # Horovod's autotune does not touch values that are set: its own defaults must stay unset.
    if horovod.fusion_mb is not None:
        yield EnvVar(
            "HOROVOD_FUSION_THRESHOLD",
            str(int(horovod.fusion_mb * 2**20)),
            key + "fusion_mb, in bytes",
        )
    if horovod.cycle_ms is not None:
        yield EnvVar("HOROVOD_CYCLE_TIME", f"{horovod.cycle_ms:g}", key + "cycle_ms")
    yield EnvVar("HOROVOD_LOG_LEVEL", horovod.log_level, key + "log_level")
    if horovod.stall_warn_s:
        yield EnvVar(
            "HOROVOD_STALL_CHECK_TIME_SECONDS", str(horovod.stall_warn_s), key + "stall_warn_s"
        )
        yield EnvVar(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(horovod.stall_fail_s), key + "stall_fail_s"
        )
    else:
        yield EnvVar("HOROVOD_STALL_CHECK_DISABLE", "1", key + "stall_warn_s=0")
    if horovod.timeline:
        yield EnvVar("HOROVOD_TIMELINE", f"{job.dir}/horovod-timeline.json", key + "timeline")
    if horovod.autotune:
        yield EnvVar("HOROVOD_AUTOTUNE", "1", key + "autotune")
        yield EnvVar("HOROVOD_AUTOTUNE_LOG", f"{job.dir}/horovod-autotune.csv", key + "autotune")


def check_process_sets(sets: Sequence[Sequence[int]], world_size: int) -> None:
    """Raise ConfigError for a process set that this world size can't have."""
    for ranks in sets:
        if max(ranks) >= world_size:
            cause = (
                f"{list(ranks)} has rank {max(ranks)}, and the ranks of this job are 0 to "
                f"{world_size - 1}"
            )
            raise ConfigError.of("backend.horovod.process_sets", [*map(list, sets)], cause)
        if len(ranks) == world_size:
            cause = (
                f"{list(ranks)} is all ranks, which hvd.global_process_set is already; leave it out"
            )
            raise ConfigError.of("backend.horovod.process_sets", [*map(list, sets)], cause)
