"""A run's storage: reserved before the launch, read for the checkpoint to resume, given the records. (driver)"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from raydist.network.names import EnvVar
from raydist.settings.config import Job, as_saved
from raydist.settings.run_folder import run_folder
from raydist.shared import env_names
from raydist.shared.errors import ConfigError, RaydistError
from raydist.shared.events import Events
from raydist.state import checkpoint_files, object_store
from raydist.state.checkpoint_files import Saved
from raydist.state.object_store import CLAIM, Remote, StoragePath, environment

RECORDS = ("result.json", "events.jsonl", "blame-*", ".hydra/*", "logs/*", "track/*.json")
LOOK_S = 0.5
"""Seconds between two looks for a checkpoint."""
Warn = Callable[[str], None]


def reserve_run(job: Job) -> None:
    """Write the settings of the run to its storage, if it has one.

    ConfigError: the storage can't be written (no such bucket, no credentials, no network, a full disk).
    """
    if not job.storage:
        return
    object_store.check_url("storage", job.storage)
    file, text = run_folder(job) / CLAIM, json.dumps(as_saved(job), indent=1)
    try:
        with environment(job.env):
            if isinstance(file, Path):
                file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    except Exception as error:
        cause = f"it cannot be written ({object_store.reason(error)}); credentials belong into env_file="
        raise ConfigError.of("storage", job.storage, cause, "storage=FOLDER", "storage=s3://BUCKET/FOLDER") from error


def resume(job: Job, restarts: int, warn: Warn) -> list[EnvVar]:
    """RAYDIST_RESUME, the checkpoint to resume from: after a restart this run's own newest, if it has one.

    ConfigError: the storage can't be read. If a restart can't read it, the result is empty: without the variable a rank
    that has no snapshot looks for checkpoints itself.
    """
    folder = run_folder(job)
    try:
        with environment(job.env):
            own = _own(folder / "checkpoints", warn) if restarts else None
            path = own.path.absolute() if own else checkpoint_files.find_resume(job.resume, folder, warn)
    except RaydistError:
        raise
    except Exception as error:
        text = f"the checkpoints in {folder} can't be listed ({object_store.reason(error)})"
        if not restarts:
            raise ConfigError.of("resume", job.resume, text, "resume=none") from error
        warn(text)
        return []
    return [EnvVar(env_names.RESUME, str(path or ""), "the newest of this run" if own else f"resume={job.resume}")]


def own_newest(job: Job) -> str:
    """The newest complete checkpoint of this very run, to go on from; empty if there is none."""
    with environment(job.env):
        own = checkpoint_files.newest(run_folder(job) / "checkpoints")
    return str(own.path.absolute()) if own else ""


def _own(folder: StoragePath, warn: Warn) -> Saved | None:
    """The newest checkpoint of this run, for a restart: most find a newer state in memory, and read none of it.

    Ranks that need it read all of it, and then compare the checksum (worker.checkpoint.latest). Of a sharded one each
    rank reads only its part, so its checksums are compared here.
    """
    found = checkpoint_files.newest(folder, warn, hashed=False)
    return checkpoint_files.newest(folder, warn, at_most=found.step) if found and found.sharded else found


def report_saved(job: Job, events: Events, wait_s: float = 0.0, step: int | None = None) -> bool:
    """Add the event of this run's newest checkpoint if it is missing: a node that lost its driver saves on its own.

    `wait_s`: how long to wait for one of this step (None: of a step later than all that were reported), or of a later
    one. False: there is none.
    """
    folder = run_folder(job) / "checkpoints"
    reported = max((event["step"] for event in events.all("saved")), default=-1)
    try:
        with environment(job.env):
            until, wanted = time.monotonic() + wait_s, reported + 1 if step is None else step
            while (newest := checkpoint_files.newest_step(folder)) < wanted and time.monotonic() < until:
                time.sleep(LOOK_S)
            if newest > reported and (saved := checkpoint_files.newest(folder, hashed=False)) and saved.step > reported:
                events.say("saved", rank=0, step=saved.step, path=str(saved.path), s=0.0)
                reported = saved.step
            return reported >= wanted
    except Exception as error:  # the reported checkpoints exist all the same
        text = f"{folder} can't be searched for a newer checkpoint ({object_store.reason(error)})"
        events.say("warning", text=text)
    return False


def upload_records(job: Job, events: Events) -> None:
    """Copy the records in the run folder to the run's storage; a failure becomes a warning."""
    local, storage = Path(job.dir), run_folder(job)
    if not job.storage or storage == local:
        return
    try:
        with environment(job.env):
            for file in (file for pattern in RECORDS for file in sorted(local.glob(pattern))):
                _copy(file, storage / str(file.relative_to(local)))
    except Exception as error:
        text = f"the records of the run could not be copied to {storage} ({object_store.reason(error)})"
        events.say("warning", text=f"{text}; they are in {local}")


def _copy(file: Path, to: StoragePath) -> None:
    if isinstance(to, Remote):
        to.put(file)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
