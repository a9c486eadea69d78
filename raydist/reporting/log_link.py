"""Links the run folder into the folder of Ray's logs, so that Ray's dashboard can read its files.
(driver)

Ray's log API follows links out of its folder on purpose (log_agent.py `_resolve_filename`, Ray
2.60): for `tools.watch --job ID` no other port than the dashboard's must be open, and the dashboard
asks for the cluster's token.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from raydist.cluster import ray_private
from raydist.reporting.job_metadata import submission_id
from raydist.shared.events import Event

FOLDER = "raydist"
"""The folder of the links, below that of Ray's logs."""


class LogLink:
    """A reader of events. The link has the job's id as its name, outside of a job NAME_RUN of the
    run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def __call__(self, event: Event) -> None:
        # a Ray that this run has started has no dashboard
        if event["kind"] == "cluster" and event["address"] and not event["started"]:
            name = submission_id() or f"{self._folder.parent.name}_{self._folder.name}"
            link = ray_private.log_folder() / FOLDER / name
            with contextlib.suppress(
                OSError
            ):  # the Ray of another user: its page needs another way
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)  # of an earlier run of the same job
                link.symlink_to(self._folder)
