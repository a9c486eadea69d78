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
    if job.sweep.dir:
        return sweep_folder(job, Path(job.sweep.dir)) / here.name if job.storage else here
    name = job.name or here.parent.name
    return parse_path(job.storage) / name / here.name if job.storage else here


def sweep_folder(job: Job, sweep: Path) -> StoragePath:
    """Return the location of a sweep's records, below which those of its trials are.

    `sweep`: its folder on the driver's machine; `job`: that of any trial.
    """
    return parse_path(job.storage) / sweep.name if job.storage else sweep
