"""Copy the records of a sweep to `storage=`, next to its trials, while it runs. (driver)

No other sweep may be there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from raydist.launch import run_storage
from raydist.settings.compose import fresh, was_begun
from raydist.settings.config import Job
from raydist.settings.run_folder import sweep_folder
from raydist.shared.errors import ConfigError
from raydist.shared.record_names import NOTE
from raydist.state import object_store
from raydist.watch.web.sweep import SUMMARY

RECORDS = (SUMMARY, "sweep.csv", "sweep.jsonl", "multirun.yaml", NOTE)
EVERY_S = 10.0
"""Seconds between two checks for changed records."""


def reserve_stored_sweep(job: Job, folder: Path, record: Mapping[str, Any]) -> None:
    """Write the first sweep.json of a new sweep to its `storage=`, if it has one.

    ConfigError: a sweep of its name is there already, or it can't be written. The trials of the
    other would pass for those of this one. `job`: that of any trial. `folder`: that of the new
    sweep. `record`: what sweep.json has besides the trials.
    """
    if not job.storage:
        return
    object_store.check_url("storage", job.storage)
    summary = sweep_folder(job, folder) / SUMMARY
    text = json.dumps({**record, "trials": []}, indent=1, default=str)
    try:
        with object_store.environment(job.env):
            made = object_store.create_file(summary, text)
            begun = not made and was_begun(summary)
            if not made and not begun:  # of a sweep that was refused
                summary.write_text(text)
    except Exception as error:  # each store has its own
        cause = (
            f"it cannot be written ({object_store.reason(error)}); credentials belong into "
            "env_file="
        )
        raise ConfigError.of("storage", job.storage, cause) from error
    if begun:
        cause = f"another sweep is in {summary.parent} already"
        way = f"hydra.sweep.dir={fresh(str(folder))}"
        raise ConfigError.of("storage", job.storage, cause, way)


class SweepUpload(AbstractContextManager["SweepUpload"]):
    """A thread that copies the records whenever they have changed, and at the end of the block.

    A store that is slow or fails delays no trial: what it lacks is in the folder of the sweep.
    """

    def __init__(self, folder: Path, job: Job, warn: Callable[[str], None]) -> None:
        """Prepare it. `job`: that of any trial; without its `storage` nothing is done."""
        self._folder = folder
        self._to = sweep_folder(job, folder)
        self._env = job.env
        self._warn = warn
        self._copied_at = 0.0
        """The time of the summary that was last copied, in seconds since the epoch."""
        self._failed = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raydist-upload", daemon=True)

    def __enter__(self) -> SweepUpload:
        if self._to != self._folder:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._end.wait(EVERY_S)
            try:
                self._copy_changed(ended)
                self._failed = False
            except Exception as error:  # each store has its own
                if not self._failed:
                    why = object_store.reason(error)
                    text = f"the records of the sweep could not be copied to {self._to} ({why})"
                    self._warn(f"{text}; they are in {self._folder}")
                self._failed = True

    def _copy_changed(self, ended: bool) -> None:
        changed = (self._folder / SUMMARY).stat().st_mtime
        if changed == self._copied_at and not ended:
            return
        run_storage.copy_files(self._folder, self._to, RECORDS, self._env)
        self._copied_at = changed
