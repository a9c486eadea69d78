"""(scale.numa, NUMA nodes and GPUs of a machine) -> the CPUs to which its ranks are bound. (pure)

The modes are those of torchrun's --numa-binding (torch/numa/binding.py). torch 2.8 has no
torch.numa; in torch 2.15 only its options are public, it binds no rank without a GPU, and it needs
the program numactl. Memory needs no separate binding: Linux puts a page on the NUMA node of the CPU
that touches it first, and a rank is bound before it runs its own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raydist.cluster.placement import Plan, Slot
from raydist.network.facts import Facts, NumaNode
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError
from raydist.shared.rank_names import counted

Cpus = tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """The CPUs of each rank of one machine."""

    why: str
    mode: str = "none"
    cpus: tuple[Cpus, ...] = ()
    """By local rank; empty: no rank is bound."""
    cores: int = 0
    """Physical cores of each rank, divided by the number of ranks that share them.

    If the ranks differ, it is the figure of the rank with the fewest.
    """


def bind_all(job: Job, plan: Plan, facts: Sequence[Facts]) -> list[Cpus | None]:
    """Return the CPUs of every rank, by rank; None: not bound. `facts`: as for plan_variables."""
    of_node = {slot.node_rank: bind_node(job, plan, facts, slot) for slot in plan.leads}
    chosen = [(of_node[slot.node_rank].cpus, slot.local_rank) for slot in plan.slots]
    return [cpus[local_rank] if cpus else None for cpus, local_rank in chosen]


def bind_node(job: Job, plan: Plan, facts: Sequence[Facts], lead: Slot) -> Binding:
    """Return the binding of the ranks of one machine. `lead`: its slot with local rank 0.

    ConfigError: the mode that scale.numa names is not possible there.
    """
    mode = job.scale.numa
    node = facts[lead.rank]
    ranks = lead.local_world_size
    if mode == "none" or plan.request.backend == "mpi":
        return Binding("scale.numa=none" if mode == "none" else "mpirun binds its ranks itself")
    if not node.numa:
        return Binding(f"not known before {node.hostname} is probed")
    if len(node.numa) == 1 and mode == "auto":
        return Binding(f"{node.hostname} has one NUMA node")
    gpus = gpu_ids(plan, facts, lead)
    if any(gpu.startswith("<") for gpu in gpus):  # `raydist plan` does not know them
        return Binding("not known before Ray assigns the GPUs")
    homes = gpu_homes(node, gpus, ranks)
    if mode != "auto":
        near = "each GPU" if homes else "no GPU: the ranks are spread"
        return _bound(
            mode, f"scale.numa={mode}, {near}", node, homes or spread_ranks(node.numa, ranks)
        )
    if homes is None:
        return Binding(
            "no GPU whose NUMA node is known; scale.numa=node spreads the ranks over the NUMA nodes"
        )
    total = sum(len(each.cpus) for each in node.numa)
    for mode in ("node", "socket"):
        binding = _bound(
            mode, f"{counted(len(node.numa), 'NUMA node')}, with GPUs at each {mode}", node, homes
        )
        if len({cpu for cpus in binding.cpus for cpu in cpus}) == total:
            return binding
    return Binding(
        "the job's GPUs are not at every socket, so CPUs would be left out; scale.numa=node "
        "binds all the same"
    )


def gpu_ids(plan: Plan, facts: Sequence[Facts], lead: Slot) -> list[str]:
    """Return the GPUs of the job on one machine, in the order in which its ranks take them."""
    ids = assigned_gpus(facts, lead)
    if not ids and plan.request.rank_resources.get("GPU"):  # without Ray: the visible GPUs
        visible = facts[lead.rank].environment.get("CUDA_VISIBLE_DEVICES")
        return (
            visible.split(",")
            if visible
            else [str(i) for i in range(len(facts[lead.rank].devices))]
        )
    return ids


def assigned_gpus(facts: Sequence[Facts], slot: Slot) -> list[str]:
    """Return the GPUs that Ray assigned to the ranks of a slot's node.

    They are in order of number, then the others by name. If each rank has several, neighbours
    belong to one rank, and the first ones of all ranks come first: a program that takes the GPU of
    its LOCAL_RANK, as torch does by default, then gets the first of its own GPUs.
    """
    first, ranks = slot.rank - slot.local_rank, slot.local_world_size
    found = {gpu for rank in range(first, first + ranks) for gpu in facts[rank].gpus or ()}
    ids = sorted(found, key=lambda gpu: (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu))
    each = len(ids) // ranks if len(ids) % ranks == 0 else 1
    return (
        [ids[rank * each + place] for place in range(each) for rank in range(ranks)]
        if each > 1
        else ids
    )


def gpu_homes(node: Facts, ids: Sequence[str], ranks: int) -> list[int] | None:
    """Return the NUMA node of each rank's GPU, by local rank; None if that of any GPU is unknown.

    The number of a GPU is its position in PCI order, which is CUDA's order for GPUs of one
    model.
    """
    named = {gpu.uuid: gpu.numa for gpu in node.devices} | {
        str(i): gpu.numa for i, gpu in enumerate(node.devices)
    }
    known = {each.number for each in node.numa}
    homes = [named.get(ids[i % len(ids)], -1) for i in range(ranks)] if ids else []
    return homes if homes and known.issuperset(homes) else None


def spread_ranks(nodes: Sequence[NumaNode], ranks: int) -> list[int]:
    """Assign NUMA nodes to ranks without GPUs: equal numbers on each, neighbours together."""
    return [nodes[i * len(nodes) // ranks].number for i in range(ranks)]


def _bound(mode: str, why: str, node: Facts, homes: Sequence[int]) -> Binding:
    chosen = list(_cpus(mode, node, homes))
    cores = {cpu: core for each in node.numa for core in each.cores for cpu in core}
    shares = [len({cores[cpu] for cpu in cpus}) // chosen.count(cpus) for cpus in chosen]
    return Binding(why, mode, tuple(chosen), min(shares))


def _cpus(mode: str, node: Facts, homes: Sequence[int]) -> Iterator[Cpus]:
    by_number = {each.number: each for each in node.numa}
    for rank, home in enumerate(homes):
        own = by_number[home]
        place = homes[:rank].count(home)
        ranks = homes.count(home)
        match mode:
            case "node":
                yield own.cpus
            case "socket":
                yield tuple(
                    sorted(
                        cpu for each in node.numa if each.socket == own.socket for cpu in each.cpus
                    )
                )
            case "exclusive":
                if ranks > len(own.cores):
                    cause = (
                        f"NUMA node {home} of {node.hostname} has {len(own.cores)} cores for "
                        f"{ranks} ranks"
                    )
                    raise ConfigError.of("scale.numa", mode, cause, "scale.numa=node")
                each, more = divmod(len(own.cores), ranks)
                first = place * each + min(place, more)
                share = own.cores[first : first + each + (place < more)]
                yield tuple(sorted(cpu for core in share for cpu in core))
            case _:
                widest = sorted(own.caches, key=lambda cache: (-len(cache), cache))
                yield widest[place % len(widest)]
