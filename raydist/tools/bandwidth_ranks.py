"""The part of tools.bandwidth in each rank: check each operation once, then time it. (rank side)"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raydist.settings.config import Job
from raydist.tools.bandwidth_figures import RankMeasurement, RankRow, elements, rounds
from raydist.worker import context

Call = Callable[[], torch.Tensor | None]
"""Runs one operation; returns the tensor with its result, None on a rank without a result."""
MISSING = (
    "does not support",
    "not supported",
    "not implemented",
    "no support",
    "unsupported",
    "not available",
)
"""Parts of the error texts of backends that lack an operation."""


@dataclass(frozen=True)
class Case:
    """One rank's part of one operation at one size."""

    rank: int
    ranks: int
    count: int
    """Number of elements of the whole message."""
    device: torch.device

    @property
    def share(self) -> int:
        return self.count // self.ranks

    def input_of(self, rank: int, count: int | None = None) -> torch.Tensor:
        """Return a rank's input: small whole numbers, so that sums are exact in float32.

        Shape (count,).
        """
        ramp = torch.arange(self.count if count is None else count, device=self.device) % 13
        return (ramp + rank + 1).float()

    def mine(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a whole message."""
        return numbers[self.rank * self.share : (self.rank + 1) * self.share]

    def empty(self, count: int) -> torch.Tensor:
        return torch.zeros(count, device=self.device)


def expected(op: str, case: Case) -> torch.Tensor | None:
    """Return the correct result on this rank; None if it gets none."""
    every = range(case.ranks)
    match op:
        case "sendrecv":
            return case.input_of((case.rank - 1) % case.ranks)
        case "broadcast":
            return case.input_of(0)
        case "all_reduce":
            return sum_of(case)
        case "reduce":
            return sum_of(case) if case.rank == 0 else None
        case "all_gather":
            return torch.cat([case.input_of(rank, case.share) for rank in every])
        case "gather":
            return (
                torch.cat([case.input_of(rank, case.share) for rank in every])
                if case.rank == 0
                else None
            )
        case "scatter":
            return case.mine(case.input_of(0))
        case "reduce_scatter":
            return case.mine(sum_of(case))
        case "all_to_all":
            return torch.cat([case.mine(case.input_of(rank)) for rank in every])
    return None


def sum_of(case: Case) -> torch.Tensor:
    """Return the sum of all ranks' inputs."""
    first = case.input_of(0)
    return first * case.ranks + case.ranks * (case.ranks - 1) / 2


def with_torch(op: str, case: Case) -> Call:
    """Return an operation of torch.distributed; its tensors are allocated here."""
    mine = case.input_of(case.rank, case.share if op in ("all_gather", "gather") else case.count)
    whole, part = case.empty(case.count), case.empty(case.share)
    root = case.rank == 0
    parts = list(whole.chunk(case.ranks)) if root and case.share else None
    gives = list(mine.chunk(case.ranks)) if root and case.share else None
    calls: dict[str, tuple[Callable[[], Any], torch.Tensor | None]] = {
        "sendrecv": (lambda: shift(case, mine, whole), whole),
        "broadcast": (lambda: dist.broadcast(mine, 0), mine),
        "all_reduce": (lambda: dist.all_reduce(mine), mine),
        "reduce": (lambda: dist.reduce(mine, 0), mine if root else None),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, mine), whole),
        "gather": (lambda: dist.gather(mine, parts, 0), whole if root else None),
        "scatter": (lambda: dist.scatter(part, gives, 0), part),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, mine), part),
        "all_to_all": (lambda: dist.all_to_all_single(whole, mine), whole),
        "barrier": (dist.barrier, None),
    }
    return _call(*calls[op])


def shift(case: Case, mine: torch.Tensor, got: torch.Tensor) -> None:
    """Send to the next rank, and receive from the previous one."""
    exchange((case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks, mine, got)


def exchange(to: int, source: int, mine: torch.Tensor, got: torch.Tensor) -> None:
    """Send and receive at the same time."""
    if to == dist.get_rank():
        got.copy_(mine)
        return
    both = [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, got, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def with_horovod(op: str, case: Case) -> Call:
    """Return an operation of Horovod; NotImplementedError if it lacks the operation."""
    import horovod.torch as hvd

    mine = case.input_of(case.rank, case.share if op == "all_gather" else case.count)
    calls: dict[str, Call] = {
        "broadcast": lambda: hvd.broadcast_(mine, root_rank=0, name=op),
        "all_reduce": lambda: hvd.allreduce_(mine, op=hvd.Sum, name=op),
        "all_gather": lambda: hvd.allgather(mine, name=op),
        "reduce_scatter": lambda: hvd.reducescatter(mine, op=hvd.Sum, name=op),
        "all_to_all": lambda: hvd.alltoall(mine, name=op),
        "barrier": hvd.barrier,
    }
    if op not in calls:
        raise NotImplementedError(f"Horovod has no {op}")
    return calls[op]


def _call(act: Callable[[], Any], out: torch.Tensor | None) -> Call:
    def call() -> torch.Tensor | None:
        act()
        return out

    return call


def measure_operations(
    config: Job,
    ops: Sequence[str],
    sizes: Sequence[int],
    iters: int,
    warmup: int,
    pairs: bool = False,
) -> RankMeasurement:
    """Measure all operations at all sizes on this rank, and with `pairs` its pairs.

    `sizes`: in bytes.
    """
    me, barrier = context.rank(), _barrier(config)
    rows: list[RankRow] = []
    for op in ops:
        for size in [0] if op == "barrier" else sizes:
            count = elements(op, size, me.world_size)
            case = Case(me.rank, me.world_size, count, me.device)
            try:
                call = (with_horovod if config.backend.name == "horovod" else with_torch)(op, case)
                wrong = check_operation(op, case, call)
            except (RuntimeError, NotImplementedError) as error:
                if not is_missing(error):
                    raise
                rows.append({"op": op, "size": 0, "seconds": None, "wrong": 0})
                break
            seconds = timed(call, iters, warmup, barrier, me.device)
            rows.append(
                {
                    "op": op,
                    "size": 0 if op == "barrier" else 4 * count,
                    "seconds": seconds,
                    "wrong": wrong,
                }
            )
            context.report(step=len(rows))  # for the hang monitor
    return {"rows": rows, "pairs": measure_pairs(max(sizes), iters, warmup) if pairs else []}


def is_missing(error: Exception) -> bool:
    """Report whether this error means that the backend lacks the operation."""
    return isinstance(error, NotImplementedError) or any(
        text in str(error).lower() for text in MISSING
    )


def check_operation(op: str, case: Case, call: Call) -> int:
    """Run the operation once; return the number of wrong elements.

    The result is zeroed: repeated sums would overflow.
    """
    got, right = call(), expected(op, case)
    if got is None or right is None:
        return 0
    wrong = int((got.reshape(-1) != right).sum()) if got.numel() == right.numel() else right.numel()
    got.zero_()
    return wrong


def timed(
    call: Call, iters: int, warmup: int, barrier: Callable[[], Any], device: torch.device
) -> float:
    """Return the mean seconds of one call on this rank.

    On a GPU CUDA events measure it, because NCCL's calls are asynchronous.
    """
    for _ in range(warmup):
        call()
    barrier()
    if device.type == "cuda":
        return _timed_on_gpu(call, iters)
    began = time.perf_counter()
    for _ in range(iters):
        call()
    return (time.perf_counter() - began) / iters


def _timed_on_gpu(call: Call, iters: int) -> float:
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(iters):
        call()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / iters


def _barrier(job: Job) -> Callable[[], Any]:
    if job.backend.name != "horovod":
        return dist.barrier
    import horovod.torch as hvd

    barrier: Callable[[], Any] = hvd.barrier
    return barrier


def pair_ranks() -> list[int]:
    """Return the ranks that measure pairs: the first of each node; with a single node, all."""
    me = context.rank()
    every = [torch.zeros(1, device=me.device) for _ in range(me.world_size)]
    dist.all_gather(every, torch.tensor([float(me.node_rank)], device=me.device))
    nodes = [int(node) for node in every]
    leads = [rank for rank in range(me.world_size) if nodes[rank] not in nodes[:rank]]
    return leads if len(leads) > 1 else list(range(me.world_size))


def measure_pairs(size: int, iters: int, warmup: int) -> list[tuple[int, int, float]]:
    """Return (rank, rank, GB/s in each direction) of this rank's pairs.

    The pairs of a round run at the same time.
    """
    me, ranks = context.rank(), pair_ranks()
    mine, got = torch.zeros(size // 4, device=me.device), torch.zeros(size // 4, device=me.device)
    speeds = []
    for pairs in rounds(len(ranks)):
        own = [(ranks[a], ranks[b]) for a, b in pairs if me.rank in (ranks[a], ranks[b])]
        for first, second in own:
            peer = second if me.rank == first else first
            call = _call(lambda peer=peer: exchange(peer, peer, mine, got), None)  # type: ignore[misc]
            seconds = timed(call, iters, max(1, warmup), lambda: None, me.device)
            speeds.append((first, second, mine.nbytes / seconds / 1e9))
        dist.barrier()
    return speeds
