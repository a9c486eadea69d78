"""A run at its storage: claimed before anything starts, gone on from, and its records there at the end. (driver)"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from raydist import checkpoint, storage
from raydist.config import Job, as_saved
from raydist.errors import ConfigError, RaydistError
from raydist.events import Events
from raydist.fabric import Var
from raydist.storage import CLAIM, Place, Remote, environment, run_folder

RECORDS = ("result.json", "events.jsonl", ".hydra/*", "logs/*")
Warn = Callable[[str], None]


def claim(job: Job) -> None:
    """Write the settings of the run to its storage, where it has one.

    A ConfigError says why that can't be done: no bucket of that name, no credentials, no network, a full disk.
    """
    if not job.storage:
        return
    storage.check("storage", job.storage)
    file, text = run_folder(job) / CLAIM, json.dumps(as_saved(job), indent=1)
    try:
        with environment(job.env):
            if isinstance(file, Path):
                file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    except Exception as error:
        raise ConfigError(
            f"storage={job.storage}: nothing can be written there ({storage.reason(error)}); say storage=FOLDER or "
            "storage=s3://BUCKET/FOLDER, with its credentials in the environment of this machine and of all nodes, "
            "or in env_file="
        ) from error


def resume(job: Job, restarts: int, ranks: int, warn: Warn) -> list[Var]:
    """RAYDIST_RESUME: the checkpoint to go on from; in a restart this run's own, if it has one by now.

    A sharded state of another number of ranks is refused, and in a restart, where there may be fewer, passed over.
    A store that can't be asked in a restart ends nothing: without the variable a rank that has no snapshot looks there.
    """
    folder = run_folder(job)
    try:
        with environment(job.env):
            own = checkpoint.newest(folder / "checkpoints", warn, ranks) if restarts else None
            found = own.path.absolute() if own else checkpoint.find(job.resume, folder, warn)
            if found and not own and (why := checkpoint.saved_at(found).unlike(ranks)):
                if not restarts:
                    raise ConfigError(f"resume={found}: {why}; say a scale= of that many ranks, or resume=none")
                warn(f"checkpoint {found} is passed over: {why}")
                found = None
    except RaydistError:
        raise
    except Exception as error:
        text = f"{folder} can't be asked for its checkpoints ({storage.reason(error)})"
        if not restarts:
            raise ConfigError(f"resume={job.resume}: {text}; say resume=none, or mend that") from error
        warn(text)
        return []
    return [Var("RAYDIST_RESUME", str(found or ""), "the newest of this run" if own else f"resume={job.resume}")]


def tell_saved(job: Job, events: Events) -> None:
    """Tell of this run's newest checkpoint, if nobody has: a node that hears no more from the run saves by itself."""
    folder = run_folder(job) / "checkpoints"
    told = max((happened["step"] for happened in events.all() if happened["kind"] == "saved"), default=-1)
    with contextlib.suppress(Exception), environment(job.env):  # a store that can't be asked: what was told is true
        if checkpoint.newest_step(folder) > told and (found := checkpoint.newest(folder)) and found.step > told:
            events.say("saved", rank=0, step=found.step, path=str(found.path), s=0.0)


def gather(job: Job, events: Events) -> None:
    """Copy what the run folder tells of the run to its storage; a warning where that could not be done."""
    here, there = Path(job.dir), run_folder(job)
    if not job.storage or there == here:
        return
    try:
        with environment(job.env):
            for file in (file for pattern in RECORDS for file in sorted(here.glob(pattern))):
                _copy(file, there / str(file.relative_to(here)))
    except Exception as error:
        reason = storage.reason(error)
        events.say(
            "warning", text=f"the records of the run could not be copied to {there} ({reason}); they are in {here}"
        )


def _copy(file: Path, to: Place) -> None:
    if isinstance(to, Remote):
        to.put(file)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(file.read_bytes())
