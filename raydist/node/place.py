"""The actor of one rank: holds its place in Ray; the first on a node hosts the seats of all ranks there. (actor)"""

from __future__ import annotations

from typing import Any

from raydist.node.mpi_seat import MpiSeat
from raydist.node.seat import Seat


def make_seat(backend: str) -> Seat:
    """An empty seat, of the kind that the backend's ranks need."""
    return MpiSeat() if backend == "mpi" else Seat()


class Place:
    """One actor per rank, as Ray counts. Only the first of a node is on the way of a launch: it speaks for all.

    A Ray worker costs half a second of CPU to start: sixteen ranks that each waited for their own would wait for eight.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._seats: dict[int, Seat] = {}

    async def ask(self, local_rank: int, method: str, *args: Any) -> Any:
        """A call to the seat of a rank of this node."""
        if local_rank not in self._seats:
            self._seats[local_rank] = make_seat(self._backend)
        return await getattr(self._seats[local_rank], method)(*args)

    async def gpus(self) -> tuple[str, ...]:
        """The GPUs that Ray gave to this actor. Ray's mask on the actor is of no matter: it never touches CUDA."""
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
