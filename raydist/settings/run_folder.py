"""The location of a run's checkpoints and records. (either side)"""

from __future__ import annotations

from pathlib import Path

from raydist.settings.config import Job
from raydist.state.object_store import StoragePath, parse_path


def run_folder(job: Job) -> StoragePath:
    """Return the location of a run's checkpoints and records.

    It is the run folder, or NAME/RUN in `storage=`; for a trial SWEEP/RUN.
    """
    here = Path(job.dir)
    name = Path(job.sweep.dir).name if job.sweep.dir else job.name or here.parent.name
    return parse_path(job.storage) / name / here.name if job.storage else here
