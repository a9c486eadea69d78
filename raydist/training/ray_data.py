"""A ray.data.Dataset for raydist.fit: each rank reads its part of streaming_split. (rank side)

Ray is not imported here: a job that has created a ray.data.Dataset has imported Ray, and is
connected to it.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from raydist.worker import context
from raydist.worker.backends import Comm

NAMESPACE = "raydist"
"""The Ray namespace of the actor that holds the parts: each rank is a separate driver, with its own
default namespace."""


@dataclass
class RayBatches:
    """The batches of one part: a new pass over it for each epoch."""

    part: Any
    """A ray.data.DataIterator."""
    batch_size: int
    keeper: Any = None
    """The actor that holds the parts, on rank 0: it ends with its last handle."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.part.iter_torch_batches(batch_size=self.batch_size, drop_last=True))


def split_over_ray(
    dataset: Any, rank: int, world_size: int, batch_size: int, comm: Comm
) -> RayBatches:
    """Return this rank's part of a Dataset, with blocks of its own node first.

    All parts have equally many rows (`equal`): the remainder of an epoch is left out. A
    DataIterator is not split. A collective.
    """
    if not hasattr(dataset, "streaming_split"):
        return RayBatches(dataset, batch_size)
    ray = sys.modules["ray"]
    if rank == 0 and ray.available_resources().get("CPU", 0) < 1:
        text = (
            "Ray Data needs CPUs, and the ranks have all of them: scale.cpus=0.5 or "
            "scale.per_node=N leaves some"
        )
        context.warn(text)
    node = torch.frombuffer(
        bytearray.fromhex(ray.get_runtime_context().get_node_id()), dtype=torch.uint8
    )
    nodes = [bytes(each.tolist()).hex() for each in comm.gather(node)][
        :: context.rank().world_size // world_size
    ]
    token = secrets.randbits(62)
    name = f"{NAMESPACE}-{int(comm.gather(torch.tensor([token]))[0])}"
    keeper = None
    if rank == 0:
        keeper = (
            ray.remote(parts_class())
            .options(name=name, namespace=NAMESPACE, num_cpus=0)
            .remote(dataset, nodes)
        )
    comm.gather(torch.tensor([0]))  # the actor has its name from here on
    actor = ray.get_actor(name, namespace=NAMESPACE)
    return RayBatches(ray.get(actor.part.remote(rank)), batch_size, keeper)


def parts_class() -> type:
    """Return the class of the actor that holds the parts.

    A class defined in a function travels by value: a node needs no raydist for it.
    """

    class Parts:
        def __init__(self, dataset: Any, nodes: list[str]) -> None:
            self.parts = dataset.streaming_split(len(nodes), equal=True, locality_hints=nodes)

        def part(self, rank: int) -> Any:
            return self.parts[rank]

    return Parts
