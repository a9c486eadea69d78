"""Find, verify, load, write and prune checkpoints; none runs code when it is loaded. (either side)

    RUN_DIR/checkpoints/step-00000120/state.pt     torch.save of the state
                                      meta.json    step, world size, metrics, checksum of each file
                                      __3_0.distcp, .metadata    in place of state.pt

A checkpoint is complete when its meta.json can be read and all files in it exist, with that size
and that checksum. With `storage=` they are below a folder or a URL. On object stores meta.json is
uploaded last and deleted first, so its presence marks a complete checkpoint, and checksums are
compared when a node fetches a file. Nothing here is a collective, and only `write_and_prune` and
`load` need torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

from xxhash import xxh3_128_hexdigest

from raydist.shared import env_names
from raydist.shared.errors import RaydistError
from raydist.state import object_store
from raydist.state.object_store import Remote, StoragePath
from raydist.state.snapshot_layout import State
from raydist.state.write import (
    CHECKSUM,
    DROPPED,
    META,
    REPLACED,
    STATE,
    WRITER_SILENT_S,
    Meta,
    SaveRequest,
    abandoned,
    drop,
    file_sizes,
    put_back,
    replaced_in,
    write,
)

PAUSES_S = (1.0,)
"""Seconds between attempts to write to a store that can't be reached; its driver retries several
times within each."""
QUIET_S = 60.0
"""Seconds after a failure during which a store is not tried again: an attempt takes half a
minute."""
LISTINGS = 10
"""Attempts to list a folder while another process writes to it; in a read-only folder all of them
fail."""
Warn = Callable[[str], None]


class Retention(Protocol):
    """Which checkpoints to keep; config.Checkpoint and SaveRequest implement it."""

    @property
    def keep(self) -> int:
        """How many of the newest checkpoints to keep."""

    @property
    def best(self) -> str | None:
        """`max:METRIC` or `min:METRIC`; None: keep only the newest."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete."""

    path: StoragePath
    meta: Meta

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.meta.step

    @property
    def sharded(self) -> bool:
        """Whether it holds a sharded state, which `raydist.sharded.load` loads."""
        return self.meta.sharded

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were given to `save`."""
        return dict(self.meta.metrics)

    @property
    def reported(self) -> Mapping[str, Any]:
        """The last value of each name that rank 0 had reported when it was saved."""
        return self.meta.reported

    @cached_property
    def state(self) -> State:
        """The state that was saved, with all tensors on the CPU; read on first access.

        RaydistError if it is a sharded state: `raydist.sharded.load` reads that.
        """
        if self.sharded:
            raise RaydistError(
                f"{self.path} holds a sharded state: load it with raydist.sharded.load(state), "
                "or with "
                "torch.distributed.checkpoint"
            )
        return read_state(self.path)


def load(path: StoragePath) -> State:
    """Return the state of a checkpoint. All tensors are on the CPU.

    - `path`: the folder of the checkpoint, as in `latest().path`, or a `pathlib.Path`.

    It is `torch.load(weights_only=True)`: a file that would run code is refused with
    pickle.UnpicklingError. FileNotFoundError: there is no such file. At a URL the file is fetched,
    and its checksum is checked.
    """
    return read_state(path)


def read_state(path: StoragePath, *, mapped: bool = False, of_all: bool = True) -> State:
    """Read a state as `load` does.

    `mapped`: map the file, and read it as it is used. `of_all`: as for `local_copy`.
    """
    import torch

    with local_copy(path, STATE, of_all) as file:
        state: State = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    return state


@contextmanager
def local_copy(path: StoragePath, name: str, of_all: bool = True) -> Iterator[Path]:
    """Yield a file of a checkpoint; for a URL, a local copy.

    The ranks of a node share one copy if they have a common folder. It is removed when each of them
    has read it. Without `of_all`, it is removed when no rank is reading it: others may not need it,
    as a file of shards; those that do fetch it again.
    """
    if isinstance(path, Path):
        yield path / name
        return
    checksum = Meta.read(path).files[name].xxh3_128
    if shared := os.environ.get(env_names.SCRATCH):
        copy = Path(shared) / f"{checksum}.pt"
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{copy}.readers", "a+") as readers:
            fcntl.flock(readers, fcntl.LOCK_SH)
            yield (path / name).fetch(copy, checksum)
            _remove_if_read(copy, readers, of_all)
        return
    with tempfile.TemporaryDirectory(prefix="raydist-") as own:
        yield (path / name).fetch(Path(own) / name, checksum)


def _remove_if_read(copy: Path, readers: IO[str], of_all: bool) -> None:
    """Note that this rank has read the copy, and remove it after the last rank that will.

    `readers`: a locked file.
    """
    readers.write(f"{os.environ.get('LOCAL_RANK', '0')}\n")
    readers.flush()
    with suppress(BlockingIOError):  # another rank is reading it
        fcntl.flock(readers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        readers.seek(0)
        if not of_all or len(set(readers)) >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            copy.unlink(missing_ok=True)
            readers.truncate(0)


def saved_at(path: StoragePath) -> Saved:
    """Return the checkpoint at this path, which must be complete."""
    return Saved(path, Meta.read(path))


def newest_step(folder: StoragePath) -> int:
    """Return the step of the newest checkpoint in a folder, complete or not; -1 for none."""
    return max(map(step_of, _paths(folder)), default=-1)


def is_saved(folder: StoragePath, step: int) -> bool:
    """Report whether the checkpoint of this step, or of a later one, is complete.

    If so, a state of this step need not be written. If the folder can't be read, it is not: writing
    the state finds out why, and may have another place for it.
    """
    try:
        return saved_from(folder, step) is not None
    except Exception:  # each store has its own
        return False


def saved_from(folder: StoragePath, step: int) -> Saved | None:
    """Return the newest complete checkpoint if it is of this step or of a later one.

    A later one is read and hashed: a training that continued from before a damaged one has not
    reached its step again.
    """
    found = newest(folder, hashed=False)
    if found is not None and found.step > step:
        found = newest(folder)
    return found if found is not None and found.step >= step else None


def step_of(path: StoragePath) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(path.name[5:])


def newest(
    folder: StoragePath,
    warn: Warn = lambda text: None,
    *,
    hashed: bool = True,
    at_most: int | None = None,
) -> Saved | None:
    """Return the newest complete checkpoint in a folder; warn for each newer incomplete one.

    `hashed`: as for `verify`. `at_most`: of this step, or of an earlier one.
    """
    for path in reversed(_paths(folder)):
        if at_most is not None and step_of(path) > at_most:
            continue
        try:
            return verify(path, hashed)
        except Flaw as why:
            warn(f"checkpoint {path} is skipped: {why}")
    return None


class Flaw(Exception):
    """A checkpoint is not complete; the message states why."""


def verify(path: StoragePath, hashed: bool = True) -> Saved:
    """Return a checkpoint after reading all of it. Flaw: it is not complete.

    At a URL, or without `hashed`, only the sizes are checked. A URL that can't be read says nothing
    about the checkpoint, and raises the store's own error.
    """
    while True:
        before = _identity(path)
        try:
            return _examine(path, hashed)
        except Flaw:
            if (
                isinstance(path, Path)
                and not path.exists()
                and path.name in replaced_in(path.parent)
            ):
                put_back(path.parent)  # a writer is between its two renames, or was killed there
            elif _identity(path) == before:
                raise
            # another writer has replaced the checkpoint meanwhile: some files were read from each


def _identity(path: StoragePath) -> tuple[int, int]:
    """Return what identifies a folder, so that a replaced one is recognised.

    Zeros: there is none, or it is at a URL. A file system may give the inode of a deleted folder to
    a new one at once, so the time of the last change is needed too.
    """
    try:
        found = path.stat() if isinstance(path, Path) else None
    except OSError:
        found = None
    return (found.st_ino, found.st_ctime_ns) if found else (0, 0)


def _examine(path: StoragePath, hashed: bool) -> Saved:
    try:
        meta = Meta.read(path)
    except (OSError, ValueError) as error:
        if isinstance(path, Remote) and not isinstance(error, ValueError | FileNotFoundError):
            raise  # the store gives nothing now, as when it can't be listed
        raise Flaw(f"{META} can't be read ({type(error).__name__}: {error})") from error
    there = file_sizes(path)
    for name, facts in meta.files.items():
        if name not in there:
            raise Flaw(f"{name} is missing")
        if there[name] != facts.bytes:
            raise Flaw(f"{name} has {there[name]} bytes instead of {facts.bytes}")
        if hashed and isinstance(path, Path) and _hashed(path / name) != facts.xxh3_128:
            raise Flaw(f"{name} has another checksum than when it was written")
    return Saved(path, meta)


def _hashed(file: Path) -> str:
    try:
        return _hashed_once(file)
    except OSError as error:
        raise Flaw(f"{file.name} can't be read ({type(error).__name__}: {error})") from error


def _hashed_once(file: Path) -> str:
    """Return the checksum of a file; the first rank of a node to ask computes and notes it.

    It does so in each attempt. OSError: the file can't be read.
    """
    shared = os.environ.get(env_names.SCRATCH)
    if not shared:
        return object_store.checksum_of(file)
    known = file.stat()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"{attempt} {file} {known.st_ino} {known.st_size} {known.st_mtime_ns}"
    path = Path(shared) / f"checksum-{xxh3_128_hexdigest(key.encode())}"
    checksum = ""
    with suppress(OSError):  # without room for the note, each rank computes it
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", buffering=0) as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            noted = note.read().decode()
            if CHECKSUM.fullmatch(noted):  # not cut off by a full disk
                return noted
            checksum = object_store.checksum_of(file)
            note.write(checksum.encode())
    return checksum or object_store.checksum_of(file)


def write_and_prune(request: SaveRequest) -> tuple[StoragePath, str]:
    """Write a checkpoint and prune; return its path, and a warning or "".

    A store that can't be reached is tried again; then the checkpoint goes to the run folder on this
    machine.
    """
    folder = request.folder
    if isinstance(folder, Path):
        write(request)
    elif why := _try_store(request):
        path, _ = write_and_prune(request.local)
        return path, (
            f"the checkpoint of step {request.step} could not be written to {folder} ({why}): it "
            f"is in {path} on "
            f"{socket.gethostname()}, and what was saved there before is unchanged"
        )
    return request.path, try_prune(folder, request, request.step)


def _try_store(request: SaveRequest) -> str:
    """Write to a store; return an empty text, or why that failed.

    After a failure a file in the run folder records it.
    """
    failed = Path(request.run_dir) / ".storage-failed"
    if failed.exists() and 0 <= time.time() - failed.stat().st_mtime < QUIET_S:
        return failed.read_text()
    for pause in (*PAUSES_S, 0.0):
        try:
            write(request)
        except TypeError:
            raise  # no network would mend that
        except Exception as error:
            why = object_store.reason(error)
            time.sleep(pause)
        else:
            failed.unlink(missing_ok=True)
            return ""
    failed.parent.mkdir(parents=True, exist_ok=True)
    failed.write_text(why)
    return why


def try_prune(folder: StoragePath, settings: Retention, step: int) -> str:
    """Prune, and return a warning if that failed, or "": the new checkpoint is complete."""
    try:
        prune(folder, settings, step)
    except Exception as error:
        return f"old checkpoints in {folder} could not be removed: {object_store.reason(error)}"
    return ""


def prune(folder: StoragePath, settings: Retention, step: int) -> None:
    """Delete all but the newest `keep` and the best one, and the leftovers of killed writers.

    `step`: the step of the checkpoint that was just saved. Those of later steps stay, and do not
    count: they are damaged, or the training would have continued from them.
    """
    paths = [path for path in _paths(folder) if step_of(path) <= step]
    kept = {*paths[-settings.keep :], best(folder, settings.best)}
    if isinstance(folder, Remote):
        for old in set(paths) - kept:
            drop(old / META)  # first, because a reader must never find half a checkpoint
            drop(old)
        for half in half_uploaded(folder):
            drop(half)
        return
    for path in paths:
        if path not in kept and isinstance(path, Path):
            with suppress(FileNotFoundError):  # another writer has just dropped it
                # Renamed first, because a reader must never find half a checkpoint.
                shutil.rmtree(path.rename(folder / f"{DROPPED}{path.name}"), ignore_errors=True)
    for left in folder.glob(".*"):
        with suppress(FileNotFoundError):  # another writer has just completed it, or deletes it too
            if left.name.startswith((DROPPED, REPLACED)) or abandoned(left):
                shutil.rmtree(left, ignore_errors=True)


def half_uploaded(folder: Remote) -> list[Remote]:
    """Return the checkpoints without a meta.json whose writers were silent for an hour.

    Other writers may be uploading theirs.
    """
    files: dict[str, list[str]] = {}
    for name in folder.sizes():
        step, _, file = name.partition("/")
        if step.startswith("step-") and file:
            files.setdefault(step, []).append(file)
    now = time.time()
    return [
        folder / step
        for step, names in files.items()
        if META not in names
        and now - max((folder / step / name).changed() for name in names) > WRITER_SILENT_S
    ]


def best(folder: StoragePath, rule: str | None) -> StoragePath | None:
    """Return the checkpoint with the best value by `max:METRIC` or `min:METRIC`.

    Of equal ones it is the newest. OSError: one can't be read now, and may be the best.
    """
    if rule is None:
        return None
    mode, _, metric = rule.partition(":")
    sign = 1 if mode == "max" else -1
    scored = [
        (sign * value, path.name)
        for path in _paths(folder)
        if (value := _metric(path, metric)) is not None
    ]
    return folder / max(scored)[1] if scored else None


def _metric(path: StoragePath, name: str) -> float | None:
    try:
        value = Meta.read(path).metrics.get(name)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, int | float) and value == value else None


def _paths(folder: StoragePath) -> list[StoragePath]:
    """Return all checkpoints in a folder, oldest first.

    At a URL, only those with a meta.json: others are being uploaded.
    """
    if isinstance(folder, Remote):
        files = (file.split("/") for file in folder.sizes())
        found: list[StoragePath] = [folder / parts[0] for parts in files if parts[1:] == [META]]
    else:
        found = listed(folder)
    steps = (path for path in found if path.name.startswith("step-") and path.name[5:].isdigit())
    return sorted(steps, key=step_of)


def listed(folder: Path) -> list[StoragePath]:
    """Return the folders of checkpoints; list again if a writer was replacing one meanwhile."""
    found: list[StoragePath] = []
    for _ in range(LISTINGS):
        put_back(folder)
        found = list(folder.glob("step-*"))
        if replaced_in(folder).keys() <= {path.name for path in found}:
            break
    return found
