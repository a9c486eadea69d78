"""Has the sharded checkpoints written that the ranks request while they train. (driver)"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from raydist.launch import flush
from raydist.launch.flush import Description, Emit, FlushNode
from raydist.shared import kinds
from raydist.shared.errors import last_line
from raydist.state.shard_choice import WholeShards


class ShardSaver:
    """Has the nodes write, one after another, the checkpoints that an attempt's ranks request.

    The ranks of a later attempt do not wait for them.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._thread: threading.Thread | None = None
        """The thread of the newest checkpoint."""

    def start(
        self, nodes: Sequence[FlushNode], shards: WholeShards, description: Description
    ) -> None:
        """Have this checkpoint written.

        The previous one is on the disk, or belongs to an attempt that has ended.
        """

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

        self._thread = thread = threading.Thread(target=write, name="raydist-save", daemon=True)
        thread.start()

    def rest(self, within_s: float) -> None:
        """Wait until the newest checkpoint is on the disk, or given up."""
        if self._thread is not None:
            self._thread.join(within_s)
