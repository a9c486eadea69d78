"""Link the run folder into Ray's log folder, where Ray's dashboard can read its files. (driver)

Ray's log API follows links out of its folder on purpose (log_agent.py `_resolve_filename`, Ray
2.60). For `tools.watch --job ID` only the dashboard's port must be open, and the dashboard requires
the cluster's token.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from raydist.cluster import ray_private
from raydist.shared import kinds
from raydist.shared.kinds import Event

FOLDER = "raydist"
"""The folder of the links, below Ray's log folder."""


class LogLink:
    """A reader of events that creates the link.

    The link's name is the job's id; outside of a job it is the NAME_RUN of the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def __call__(self, event: Event) -> None:
        # A Ray that this run started has no dashboard.
        if isinstance(event, kinds.Cluster) and event.address and not event.started:
            name = event.job or f"{self._folder.parent.name}_{self._folder.name}"
            link = ray_private.log_folder() / FOLDER / name
            # The Ray may belong to another user: its page needs another way.
            with contextlib.suppress(OSError):
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)  # the link of an earlier run of the same job
                link.symlink_to(self._folder)
