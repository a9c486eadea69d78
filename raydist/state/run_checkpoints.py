"""Groups a run folder's checkpoints by training, and finds the one for `resume=`. (either side)

    RUN_DIR/checkpoints/step-00000120                of its training
            checkpoints/fit-2/step-00000120          of the second raydist.fit in the same job
            checkpoints/finished-fits.json           where the first ended, if in an earlier run
            training-2/checkpoints/step-00000010     of another training in the same run folder

A training that starts anew in a folder with checkpoints, or from an older one of them, gets a
separate folder: steps order checkpoints only within one training, so otherwise one training would
delete the checkpoints of the other, or continue from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raydist.shared.errors import ConfigError
from raydist.shared.record_names import EVENTS, RESULT
from raydist.shared.whole_file import write_at_once
from raydist.state.checkpoint_files import Flaw, Saved, Warn, newest, verify
from raydist.state.object_store import Remote, StoragePath, parse_path
from raydist.state.write import CHECKPOINTS, FIT, META, STATE, TRAINING, place_in_run

FINISHED_FITS = "finished-fits.json"
TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""The beginning of the name of a run folder that nobody has named (conf/config.yaml)."""


def trainings(run: StoragePath) -> list[StoragePath]:
    """Return the checkpoint folders of the trainings in a run folder, newest training first."""
    later = (each / CHECKPOINTS for each in _numbered(run, TRAINING))
    return [*later, run / CHECKPOINTS]


def _numbered(folder: StoragePath, prefix: str) -> list[StoragePath]:
    """Return the folders `PREFIX2`, `PREFIX3`, … in this one, the last first."""
    found = {_number(path, prefix): path for path in folder.glob(f"{prefix}*")}
    return [found[number] for number in sorted(found, reverse=True) if number > 1]


def _number(path: StoragePath, prefix: str) -> int:
    digits = path.name.removeprefix(prefix)
    return int(digits) if digits.isdecimal() else 0


def of_fit(checkpoints: StoragePath, number: int) -> StoragePath:
    """Return the folder for a raydist.fit's checkpoints; the job's first fit is 1 (0: none)."""
    return checkpoints / f"{FIT}{number}" if number > 1 else checkpoints


def fit_of(checkpoint: StoragePath) -> int:
    """Return the number of the raydist.fit that saved a checkpoint, by its path."""
    return max(1, _number(checkpoint.parent, FIT)) if checkpoint.parent.name.startswith(FIT) else 1


def training_of(checkpoint: StoragePath) -> StoragePath:
    """Return the folder of the training that a checkpoint belongs to, as in `trainings`."""
    return checkpoint.parent.parent if fit_of(checkpoint) > 1 else checkpoint.parent


def finished_fits(checkpoints: StoragePath) -> dict[str, str]:
    """Return the last states of the fits that a training found done, by their number as text.

    An earlier run has done them, so this training has saved nothing of them.
    """
    try:
        return {**json.loads((checkpoints / FINISHED_FITS).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError):
        return {}


def note_finished_fit(checkpoints: StoragePath, number: int, state: StoragePath) -> None:
    """Note in a training's folder where a fit ended that an earlier run has done.

    OSError, or an error of the store: it cannot be written.
    """
    known, found = finished_fits(checkpoints), {str(number): str(state.absolute())}
    if known | found == known:
        return
    path, text = checkpoints / FINISHED_FITS, json.dumps(known | found)
    if isinstance(path, Remote):
        path.write_text(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(path, text.encode())


def last_fit(checkpoints: StoragePath) -> StoragePath:
    """Return the folder of the last raydist.fit of a training that has one."""
    return next(iter(_numbered(checkpoints, FIT)), checkpoints)


def newest_of_training(
    checkpoints: StoragePath, warn: Warn = lambda text: None, *, hashed: bool = True
) -> Saved | None:
    """Return the newest complete checkpoint of a training.

    It belongs to the last raydist.fit of its job that has one.
    """
    folders = (*_numbered(checkpoints, FIT), checkpoints)
    return next((found for each in folders if (found := newest(each, warn, hashed=hashed))), None)


def newest_of_run(
    run: StoragePath, warn: Warn = lambda text: None, *, hashed: bool = True
) -> Saved | None:
    """Return the newest complete checkpoint of the last training in a run folder that has one."""
    return next(
        (
            found
            for each in trainings(run)
            if (found := newest_of_training(each, warn, hashed=hashed))
        ),
        None,
    )


def folder_for(run: StoragePath, start: StoragePath | None) -> StoragePath:
    """Return the folder for the checkpoints of a training that begins with `start`.

    `start`: None for a new start. The folder is that of the previous training if this one continues
    it, or if it has saved nothing.
    """
    last, *_ = trainings(run)
    before = newest_of_training(last, hashed=False)
    if before is None or before.path.absolute() == start:
        return last
    if start is not None and training_of(start) == last.absolute():
        whole = newest_of_training(last)  # the later checkpoints may be damaged
        if whole is not None and whole.path.absolute() == start:
            return last
    return run / f"{TRAINING}{max(1, _number(last.parent, TRAINING)) + 1}" / CHECKPOINTS


def find_resume(
    resume: str, run_dir: StoragePath, warn: Warn = lambda text: None
) -> StoragePath | None:
    """Return the checkpoint that `resume=` means for a run in `run_dir`; None: a new start.

    auto: the newest complete one of this run folder, otherwise, if the folder is named by the time,
    of the newest such folder next to it that has one; but none if that run has finished. A path or
    URL: a checkpoint, or a run folder; ConfigError if nothing complete is there.
    """
    if resume == "none":
        return None
    if resume != "auto":
        return _named(parse_path(resume, "resume"), warn)
    for run in run_and_earlier(run_dir):
        skipped: list[str] = []
        if (seen := newest_of_run(run, skipped.append, hashed=False)) is None:
            for text in skipped:
                warn(text)
            continue
        if finished(run, seen.path):
            warn(
                f"resume=auto: {run} has finished, so this is a new start; resume={run} "
                "continues that run"
            )
            return None
        if found := newest_of_run(run, warn):
            return found.path.absolute()
    return None


def run_and_earlier(run_dir: StoragePath) -> Iterator[StoragePath]:
    """Yield this run folder, then the earlier runs of its name, newest first.

    Those are next to it, in folders that are named by the time. A folder that a person has named
    (`hydra.run.dir=exp/lr-0.1`) is next to other experiments.
    """
    yield run_dir
    if TIME.match(run_dir.name):
        others = (run for run in run_dir.parent.glob("*") if run != run_dir)
        named = [run for run in others if TIME.match(run.name)]
        yield from sorted(named, key=lambda run: run.name, reverse=True)


def finished(run: StoragePath, checkpoint: StoragePath) -> bool:
    """Report whether the training that saved this newest checkpoint of a run folder has finished.

    If a later training in the same folder was killed before it wrote its result, it has saved
    another checkpoint than the result names. If a later one failed before it saved anything, the
    result of the one before is among the events only.
    """
    try:
        result = json.loads((run / RESULT).read_text(encoding="utf-8"))
        if result["status"] == "finished" or result["checkpoint"]:
            return _finished_at(result, checkpoint)
        lines = (run / EVENTS).read_text(encoding="utf-8").splitlines()
        results = [json.loads(line) for line in lines if '"kind": "result"' in line]
        return any(each.get("checkpoint") and _finished_at(each, checkpoint) for each in results)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _finished_at(result: Mapping[str, Any], checkpoint: StoragePath) -> bool:
    done, saved = result["status"] == "finished", result["checkpoint"]
    return done and (not saved or place_in_run(parse_path(saved)) == place_in_run(checkpoint))


def _named(path: StoragePath, warn: Warn) -> StoragePath:
    if (path / META).exists() or (path / STATE).exists():
        try:
            return verify(path).path
        except Flaw as why:
            found = newest(path.parent, warn)
            others = [f"resume={found.path}"] if found else []
            raise ConfigError.of(
                "resume", str(path), f"this checkpoint is not complete: {why}", *others
            ) from why
    if found := newest_of_run(path, warn) or newest_of_training(path, warn):
        return found.path
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
    seen = (
        f"it holds {', '.join(there[:8]) or 'nothing'}"
        if there is not None
        else "there is no such folder"
    )
    cause = f"no complete checkpoint is there ({seen})"
    raise ConfigError.of(
        "resume",
        str(path),
        cause,
        "resume=auto",
        "resume=none",
        "resume=RUN_FOLDER",
        "resume=RUN_FOLDER/checkpoints/step-…",
    )
