"""A run's storage: reserved before the launch, read for checkpoints, given the records. (driver)"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from raydist.launch.changes import Changes
from raydist.network.names import EnvVar
from raydist.settings.config import Job, as_saved
from raydist.settings.run_folder import run_folder
from raydist.shared import env_names, kinds
from raydist.shared.errors import ConfigError, RaydistError
from raydist.shared.events import Events, parse_event, read_events, read_kind
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS, NOTE, RESULT
from raydist.shared.whole_file import replacing
from raydist.state import checkpoint_files, object_store, run_checkpoints
from raydist.state.checkpoint_files import Saved
from raydist.state.object_store import CLAIM, Remote, StoragePath, environment, parse_path
from raydist.state.write import CHECKPOINTS, place_in_run

RECORDS = (RESULT, EVENTS, "blame-*", NOTE, ".hydra/*", "logs/*", "track/*.json")
LOOK_S = 0.5
"""Seconds between two searches for a checkpoint."""
NAMED_S = 60.0
"""Seconds within which a run reserves its storage once it is named by the time."""
Warn = Callable[[str], None]


def reserve_run(job: Job) -> None:
    """Write the settings of the run to its storage, if it has one.

    Raises ConfigError if the storage can't be written (no such bucket, no credentials, no network,
    a full disk), or if a run of another machine has just taken the same folder.
    """
    if not job.storage:
        return
    object_store.check_url("storage", job.storage)
    file, text = run_folder(job) / CLAIM, json.dumps(as_saved(job), indent=1)
    try:
        with environment(job.env):
            if object_store.create_file(file, text):
                return
            if not job.sweep.dir and is_new(Path(job.dir)):
                cause = f"a run that began in the same second elsewhere has {file.parent}"
                raise ConfigError.of("storage", job.storage, cause, f"hydra.run.dir={job.dir}-2")
            file.write_text(text)
    except ConfigError:
        raise
    except Exception as error:
        cause = (
            f"it cannot be written ({object_store.reason(error)}); credentials belong into "
            "env_file="
        )
        raise ConfigError.of(
            "storage", job.storage, cause, "storage=FOLDER", "storage=s3://BUCKET/FOLDER"
        ) from error


def is_new(folder: Path) -> bool:
    """Report whether a run folder has just been named by the time, and this is its first run.

    Such a name is unique on this machine only; a folder that is used again has an older or typed
    name, or the events of an earlier run.
    """
    try:
        began = time.mktime(time.strptime(folder.name[:19], "%Y-%m-%d_%H-%M-%S"))
    except ValueError:
        return False
    runs = read_kind(kinds.Run, folder / EVENTS) if (folder / EVENTS).exists() else ()
    return abs(time.time() - began) < NAMED_S and len([*runs]) < 2


class RunCheckpoints:
    """The checkpoints of one training: where they go, and which one each attempt resumes from."""

    def __init__(self, job: Job) -> None:
        self.changes = Changes()
        """What an attempt that resumes from an earlier state has to repeat."""
        self._job = job
        self._folder = ""
        """Where they go, as text, so that no connection to a store is kept. Empty before the first
        attempt."""
        self._resumed: Saved | None = None
        """This training's checkpoint from which the next attempt resumes, if not from memory."""

    def variables(self, warn: Warn) -> list[EnvVar]:
        """Return the variables of the next attempt.

        They are RAYDIST_RESUME, where checkpoints go if not into the run folder, and the settings
        that were changed in the run.
        The attempt resumes from what `resume=` specifies; after a restart, from this training's
        newest checkpoint, if there is one. Raises ConfigError if the storage can't be read. If a
        restart can't read it, there is no RAYDIST_RESUME: a rank without a snapshot then looks for
        checkpoints itself.
        """
        return [*self._of_checkpoints(warn), *self.changes.begin_attempt()]

    def _of_checkpoints(self, warn: Warn) -> list[EnvVar]:
        try:
            with environment(self._job.env):
                return [*self._resume(warn), *self._place()]
        except RaydistError:
            raise
        except Exception as error:
            folder = run_folder(self._job)
            text = f"the checkpoints in {folder} can't be read ({object_store.reason(error)})"
            if not self._folder:
                raise ConfigError.of("resume", self._job.resume, text, "resume=none") from error
            warn(text)
            return self._place()

    def _resume(self, warn: Warn) -> list[EnvVar]:
        self._resumed = _own(parse_path(self._folder), warn) if self._folder else None
        if self._resumed is not None:
            path = str(self._resumed.path.absolute())
            return [EnvVar(env_names.RESUME, path, "the newest of this run")]
        run = run_folder(self._job)
        given = run_checkpoints.find_resume(self._job.resume, run, warn)
        if not self._folder:
            self._folder = str(run_checkpoints.folder_for(run, given))
            if self._folder != str(run / CHECKPOINTS):
                warn(
                    f"{run} has checkpoints of another training: those of this one go to "
                    f"{self._folder}"
                )
        return [EnvVar(env_names.RESUME, str(given or ""), f"resume={self._job.resume}")]

    def _place(self) -> list[EnvVar]:
        if self._folder in ("", str(run_folder(self._job) / CHECKPOINTS)):
            return []
        return [
            EnvVar(
                env_names.CHECKPOINTS,
                self._folder,
                "other trainings have checkpoints in the run folder",
            )
        ]

    def report_resumed(self, events: Events) -> None:
        """Report the checkpoint from which the next attempt resumes, if nobody has reported it.

        The node that saved it was lost before the driver had the event.
        """
        own = self._resumed
        if own is not None and own.step > max(_reported(events, own.path.parent)):
            events.add(kinds.Saved(rank=0, step=own.step, path=str(own.path), s=0.0))

    def report_saved(self, events: Events, wait_s: float = 0.0, step: int | None = None) -> bool:
        """Add the event of the newest checkpoint if it is missing.

        It is missing if a node that lost its driver saved by itself. `wait_s`: how long to wait for
        one of this step (None: of a step later than all that were reported), or of a later one.
        Returns False if there is none. Step -1 means that there is nothing to wait for.
        """
        folder = parse_path(self._folder) if self._folder else run_folder(self._job) / CHECKPOINTS
        try:
            with environment(self._job.env):
                until = time.monotonic() + wait_s
                folder = run_checkpoints.last_fit(folder)
                reported = _reported(events, folder)
                while (
                    (saved := _awaited(folder, reported, step)) is None
                    and step != -1
                    and time.monotonic() < until
                ):
                    time.sleep(LOOK_S)
                newest = saved or _unreported(folder, reported)
                if newest is not None and newest.step != reported[-1]:
                    events.add(kinds.Saved(rank=0, step=newest.step, path=str(newest.path), s=0.0))
                return step == -1 or saved is not None
        except Exception as error:  # the reported checkpoints exist nevertheless
            text = (
                f"{folder} can't be searched for a newer checkpoint ({object_store.reason(error)})"
            )
            events.warn(text)
        return False


def _awaited(folder: StoragePath, reported: Sequence[int], step: int | None) -> Saved | None:
    """Return the checkpoint that `report_saved` waits for, if it is there.

    A later one that was reported may be damaged: the training went on from before it.
    """
    if step is None or step < 0:
        return _unreported(folder, reported)
    return checkpoint_files.saved_from(folder, step)


def _unreported(folder: StoragePath, reported: Sequence[int]) -> Saved | None:
    """Return the newest checkpoint if it is later than all that were reported."""
    if checkpoint_files.newest_step(folder) <= max(reported):
        return None
    newest = checkpoint_files.newest(folder, hashed=False)
    return newest if newest is not None and newest.step > max(reported) else None


def _reported(events: Events, folder: StoragePath) -> list[int]:
    """Return -1 and the steps of the reported checkpoints in this folder, as they were reported.

    They are those of the raydist.fit that saves into the folder.
    """
    number = run_checkpoints.fit_of(folder / "any")
    saved = ((event.step, Path(event.path)) for event in events.all(kinds.Saved))
    return [-1, *(step for step, path in saved if run_checkpoints.fit_of(path) == number)]


def _own(folder: StoragePath, warn: Warn) -> Saved | None:
    """Return the newest checkpoint of this run, for a restart.

    Most ranks find a newer state in memory, and read none of it. Ranks that need it read all of it,
    and then compare the checksum (worker.checkpoint.latest). Of a sharded one each rank reads only
    its part, so its checksums are compared here.
    """
    found = run_checkpoints.newest_of_training(folder, warn, hashed=False)
    if found is None or not found.sharded:
        return found
    return checkpoint_files.newest(found.path.parent, warn, at_most=found.step)


def own_newest(job: Job) -> str:
    """Return the path of this very run's newest complete checkpoint, to resume from, or ""."""
    with environment(job.env):
        own = run_checkpoints.newest_of_run(run_folder(job))
    return str(own.path.absolute()) if own else ""


def events_of_checkpoint(checkpoint: str, job: Job) -> Iterator[Event]:
    """Yield the events in the run folder that a checkpoint is in; none if the folder has none."""
    path = parse_path(checkpoint)
    place = place_in_run(path)
    for _ in place:
        path = path.parent
    # The records of a run are copied to its storage once it has ended.
    local = Path(job.dir) if path == run_folder(job) else path
    if not place:
        return
    if isinstance(local, Path):
        if (local / EVENTS).exists():
            yield from read_events(local / EVENTS)
        return
    with environment(job.env):
        lines = (local / EVENTS).read_bytes() if (local / EVENTS).exists() else b""
    yield from filter(None, map(parse_event, lines.split(b"\n")))


def upload_records(job: Job, events: Events) -> None:
    """Copy the records in the run folder to the run's storage; a failure becomes a warning."""
    local, storage = Path(job.dir), run_folder(job)
    if not job.storage or storage == local:
        return
    try:
        copy_files(local, storage, RECORDS, job.env)
    except Exception as error:
        text = (
            f"the records of the run could not be copied to {storage} "
            f"({object_store.reason(error)})"
        )
        events.warn(f"{text}; they are in {local}")


def copy_files(
    local: Path, storage: StoragePath, patterns: Sequence[str], env: Mapping[str, str]
) -> None:
    """Copy the files of a folder whose names match. Each store has its own exceptions.

    `env`: variables with the credentials of the store.
    """
    with environment(env):
        for file in (file for pattern in patterns for file in sorted(local.glob(pattern))):
            _copy(file, storage / str(file.relative_to(local)))


def _copy(file: Path, to: StoragePath) -> None:
    """Copy a file; at any time a reader finds the whole file or the one before."""
    if isinstance(to, Remote):
        to.put(file)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    with replacing(to) as part:
        shutil.copyfile(file, part)
