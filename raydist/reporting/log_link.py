"""Link the run folder into Ray's log folder, where Ray's dashboard can read its files. (driver)

Ray's log API follows links out of its folder on purpose (log_agent.py `_resolve_filename`, Ray
2.60). For `tools.watch --job ID` only the dashboard's port must be open, and the dashboard requires
the cluster's token. A trial has two links: to its run folder, and to the folder of its sweep.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from raydist.cluster import ray_private
from raydist.shared import kinds
from raydist.shared.kinds import Event

FOLDER = "raydist"
"""The folder of the links, below Ray's log folder."""
SWEEP = ".sweep"
"""What the name of a link to the folder of a sweep ends with."""


class LogLink:
    """A reader of events that creates the links.

    The link's name is the job's id; outside of a job it is the NAME_RUN of the run folder.
    """

    def __init__(self, folder: Path, sweep: str = "") -> None:
        """Link a run folder. `sweep`: the folder of the sweep of which the run is a trial."""
        self._folder = folder.absolute()
        self._sweep = Path(sweep).absolute() if sweep else None

    def __call__(self, event: Event) -> None:
        # A Ray that this run started has no dashboard.
        if isinstance(event, kinds.Cluster) and event.address and not event.started:
            name = event.job or f"{self._folder.parent.name}_{self._folder.name}"
            links = ray_private.log_folder() / FOLDER
            # The Ray may belong to another user: its page needs another way.
            with contextlib.suppress(OSError):
                links.mkdir(exist_ok=True)
                set_link(links / f"{name}{SWEEP}", self._sweep)
                set_link(links / name, self._folder)


def set_link(link: Path, to: Path | None) -> None:
    """Have a link lead there (None: remove it). An earlier run of the same job may have made it."""
    if to is not None and link.is_symlink() and link.readlink() == to:
        return  # trials share the link to their sweep, and a reader must find it at any time
    link.unlink(missing_ok=True)
    if to is not None:
        link.symlink_to(to)
