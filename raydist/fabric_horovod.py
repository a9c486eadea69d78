"""(settings, one rank's place) -> Horovod's variables, each with its reason. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raydist.config import Job
from raydist.errors import ConfigError
from raydist.placement import Plan, Seat

Line = tuple[str, str, str]
"""(name, value, reason)."""
WHERE = "where Horovod's ranks meet, on rank 0's node"


def place(plan: Plan, seat: Seat) -> Iterator[Line]:
    """A rank's place in Horovod's words: local is on its node, cross is over the nodes at its own local rank."""
    # A node with fewer ranks has none at the higher local ranks: it is not counted there.
    across = [other.node_rank for other in plan.seats if other.local_rank == seat.local_rank]
    told = {
        "HOSTNAME": f"node-{seat.node_rank}", "RANK": seat.rank, "SIZE": plan.world_size,
        "LOCAL_RANK": seat.local_rank, "LOCAL_SIZE": seat.local_world_size,
        "CROSS_RANK": across.index(seat.node_rank), "CROSS_SIZE": len(across),
    }  # fmt: skip
    for name, value in told.items():
        yield f"HOROVOD_{name}", str(value), "its place in the plan, in Horovod's words"


def meeting(address: str, port: str, secret: str) -> Iterator[Line]:
    """Where and how the ranks meet. Without a secret nowhere: there is only one."""
    if secret:
        yield "HOROVOD_GLOO_RENDEZVOUS_ADDR", f"{address}:{port}/{secret}", WHERE + ", with the secret that opens it"
        yield "HOROVOD_GLOO_RENDEZVOUS_PORT", port, WHERE
    # With MPI built in, that would be its own choice for both.
    yield "HOROVOD_CONTROLLER", "gloo", "ranks agree over gloo: no mpirun has started them"
    yield "HOROVOD_CPU_OPERATIONS", "gloo", "tensors of the CPU travel over gloo"


def settings(job: Job, interface: str) -> Iterator[Line]:
    """What the network and backend.horovod say, in Horovod's words. `interface`: that of the rank's node."""
    chosen, own = job.backend.horovod, "backend.horovod."
    if job.fabric.kind != "site":
        why = "that of the training address; else gloo goes where the host name points"
        yield "HOROVOD_GLOO_IFACE", interface, why
    yield "HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, round(job.backend.timeout_s))), "backend.timeout_s"
    # What is set is never tuned, so that Horovod's own choices are left unsaid.
    if chosen.fusion_mb is not None:
        yield "HOROVOD_FUSION_THRESHOLD", str(int(chosen.fusion_mb * 2**20)), own + "fusion_mb, in bytes"
    if chosen.cycle_ms is not None:
        yield "HOROVOD_CYCLE_TIME", f"{chosen.cycle_ms:g}", own + "cycle_ms"
    yield "HOROVOD_LOG_LEVEL", chosen.log_level, own + "log_level"
    if chosen.stall_warn_s:
        yield "HOROVOD_STALL_CHECK_TIME_SECONDS", str(chosen.stall_warn_s), own + "stall_warn_s"
        yield "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(chosen.stall_fail_s), own + "stall_fail_s"
    else:
        yield "HOROVOD_STALL_CHECK_DISABLE", "1", own + "stall_warn_s=0"
    if chosen.timeline:
        yield "HOROVOD_TIMELINE", f"{job.dir}/horovod-timeline.json", own + "timeline"
    if chosen.autotune:
        yield "HOROVOD_AUTOTUNE", "1", own + "autotune"
        yield "HOROVOD_AUTOTUNE_LOG", f"{job.dir}/horovod-autotune.csv", own + "autotune"


def check_settings(job: Job) -> None:
    """Refuse what Horovod can't do."""
    settings = job.backend.horovod
    if job.init_method != "env":
        raise ConfigError(f"init_method={job.init_method}: Horovod has a rendezvous of its own; say init_method=env")
    if 0 < settings.stall_fail_s <= settings.stall_warn_s:
        raise ConfigError(
            f"backend.horovod.stall_fail_s={settings.stall_fail_s}: must be more than stall_warn_s, or 0; "
            f"say backend.horovod.stall_fail_s={2 * settings.stall_warn_s}"
        )
    for ranks in settings.process_sets:
        if not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks):
            raise ConfigError(
                f"backend.horovod.process_sets: {ranks} is no set of ranks; "
                "say backend.horovod.process_sets=[[0,1],[2,3]]"
            )


def check_process_sets(sets: Sequence[Sequence[int]], world_size: int) -> None:
    """Refuse sets that this many ranks can't form."""
    for ranks in sets:
        if max(ranks) >= world_size:
            raise ConfigError(
                f"backend.horovod.process_sets: {list(ranks)} has rank {max(ranks)}, "
                f"and this job's ranks are 0 to {world_size - 1}"
            )
        if len(ranks) == world_size:
            raise ConfigError(
                f"backend.horovod.process_sets: {list(ranks)} is all ranks, and that one is there already: "
                "hvd.global_process_set; leave it out"
            )
