"""Chooses the newest step of which the shards of all ranks are in memory. (pure)"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

Shard = tuple[int, int, int]
"""(rank, world size, step) of one rank's shards."""


@dataclass(frozen=True)
class WholeShards:
    """Which holder (a node or a rank) provides the shards of which ranks."""

    step: int
    world_size: int
    ranks: Mapping[int, tuple[int, ...]]
    """The ranks by holder."""


def newest_whole(
    own: Mapping[int, Set[Shard]], copies: Mapping[int, Set[Shard]]
) -> WholeShards | None:
    """Return the newest step of which the shards of all ranks exist; None if there is none.

    Each rank's shards come from its own holder if possible. `own`, `copies`: by holder.
    """
    kept = [(number, held) for each in (own, copies) for number, held in each.items()]
    steps = {(step, world_size) for _, held in kept for _, world_size, step in held}
    for step, world_size in sorted(steps, reverse=True):
        ranks: dict[int, tuple[int, ...]] = {}
        for rank in range(world_size):
            holder = next(
                (number for number, held in kept if (rank, world_size, step) in held), None
            )
            if holder is not None:
                ranks[holder] = (*ranks.get(holder, ()), rank)
        if sum(map(len, ranks.values())) == world_size:
            return WholeShards(step, world_size, ranks)
    return None
