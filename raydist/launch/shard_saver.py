"""Has the sharded checkpoints written that the ranks request while they train. (driver)"""

from __future__ import annotations

import threading
from functools import partial

from raydist.cluster.placement import Plan
from raydist.launch import flush
from raydist.launch.flush import Description, Emit, FlushNode
from raydist.messages.request import Transport
from raydist.shared import kinds
from raydist.shared.errors import last_line
from raydist.state.shard_choice import WholeShards


class ShardSaver:
    """Has the nodes write, one after another, the checkpoints that an attempt's ranks request."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._thread: threading.Thread | None = None
        """The thread of the newest checkpoint."""
        self._needed = True
        """Whether the next attempt needs it, because it has the state nowhere else."""
        self._left = False
        """Whether its state was unlocked before it was on the disk."""

    @property
    def locks(self) -> bool:
        """Whether rank 0's state is locked, because a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive() and not self._left

    def start(self, plan: Plan, call: Transport, request: kinds.SaveShards) -> None:
        """Have the checkpoint written that rank 0 requested; the ranks train meanwhile.

        The previous one is on the disk, or belongs to an attempt that has ended.
        """
        nodes = [FlushNode(lead.node.host, partial(call, lead.rank)) for lead in plan.leads]
        shards = WholeShards(request.step, plan.world_size, ranks_of_nodes(plan))
        description = Description(
            request.keep, request.best, request.folder, request.metrics, request.reported
        )

        def write() -> None:
            def wanted() -> bool:
                return self._thread is thread

            try:
                flush.have_shards_written(nodes, shards, description, self._emit, None, wanted)
            except Exception as error:
                text = (
                    f"the checkpoint of step {shards.step} could not be written: {last_line(error)}"
                )
                self._emit(kinds.Warning(text=text))

        self._needed, self._left = not request.kept, False
        self._thread = thread = threading.Thread(target=write, name="raydist-save", daemon=True)
        thread.start()

    def leave(self) -> None:
        """Have the next attempt unlock the state, although it may still be written."""
        self._left = True

    def rest_if_needed(self, within_s: float) -> None:
        """Wait for the newest checkpoint, unless the next attempt does not need it."""
        if self._needed:
            self.rest(within_s)

    def rest(self, within_s: float) -> None:
        """Wait until the newest checkpoint is on the disk, or given up."""
        if self._thread is not None:
            self._thread.join(within_s)


def ranks_of_nodes(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each node, by the place of the node in the plan."""
    places = {lead.node_rank: place for place, lead in enumerate(plan.leads)}
    ranks: dict[int, tuple[int, ...]] = {}
    for slot in plan.slots:
        place = places[slot.node_rank]
        ranks[place] = (*ranks.get(place, ()), slot.rank)
    return ranks
